package auth

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/transport/pin"
)

// testNames are the names of the relay in these tests.
func testNames() []string {
	return []string{"Relay.example", "192.0.2.7", "::1", "relay.example"}
}

func openAuthority(t *testing.T, s *Store) *Authority {
	t.Helper()
	a, err := s.Authority(AuthorityOptions{Names: testNames})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// chain is what a handshake would send.
func chain(t *testing.T, a *Authority) []*x509.Certificate {
	t.Helper()
	c, err := a.GetCertificate(&tls.ClientHelloInfo{})
	if err != nil {
		t.Fatal(err)
	}
	var list []*x509.Certificate
	for _, der := range c.Certificate {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, cert)
	}
	return list
}

// TestAuthority checks what clients see: those with a pin, and those that trust the file.
func TestAuthority(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Options{StateDir: dir})
	a := openAuthority(t, s)
	sent := chain(t, a)
	p, err := pin.Parse(a.SHA256())
	if err == nil {
		err = p.Verify(sent)
	}
	if err != nil {
		t.Error(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(a.PEM())) {
		t.Fatal("PEM is no certificate")
	}
	for _, name := range []string{"relay.example", "192.0.2.7", "::1"} {
		// Valid at the time of the build, for a client whose clock is there.
		for _, at := range []time.Time{firstBuild, time.Now()} {
			if _, err := sent[0].Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: at}); err != nil {
				t.Errorf("%s at %s: %v", name, at, err)
			}
		}
	}
	if sent[0].VerifyHostname("other.example") == nil {
		t.Error("the certificate is for other names too")
	}
	for _, f := range []string{authorityFile, serverFile} {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, st, err)
		}
	}
	again := openAuthority(t, openStore(t, Options{StateDir: dir}))
	if again.SHA256() != a.SHA256() || !chain(t, again)[0].Equal(sent[0]) {
		t.Error("another process has other certificates")
	}
}

// TestAuthorityRenews: the certificate changes in a relay that runs, the authority does not.
func TestAuthorityRenews(t *testing.T) {
	now := time.Now()
	names := []string{"a.example"}
	s := openStore(t, Options{StateDir: t.TempDir(), Now: func() time.Time { return now }})
	a, err := s.Authority(AuthorityOptions{Names: func() []string { return names }, BuildTime: now.Add(-time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	before := chain(t, a)[0]
	changed := func(step string, want bool) {
		t.Helper()
		if fits := a.fits(a.server.Load().pair); fits == want {
			t.Errorf("%s: fits is %t", step, fits)
		}
		if want {
			if err := s.withFiles(a.renew); err != nil {
				t.Fatal(err)
			}
		}
		after := chain(t, a)[0]
		if after.Equal(before) == want {
			t.Errorf("%s: changed is %t", step, !want)
		}
		before = after
		if !slices.Equal(before.DNSNames, names) || before.NotAfter.Sub(now) < renewBefore {
			t.Errorf("%s: names %v, until %s", step, before.DNSNames, before.NotAfter)
		}
	}
	changed("nothing", false)
	names = []string{"b.example", "c.example"}
	changed("names", true)
	names = []string{"c.example", "B.example", "b.example"}
	if !a.fits(a.server.Load().pair) {
		t.Error("the order of the names matters")
	}
	names = []string{"b.example", "c.example"}
	now = now.Add(serverLifetime / 2)
	changed("half its life", false)
	now = now.Add(serverLifetime / 3)
	changed("shortly before its end", true)
	now = time.Unix(0, 0)
	changed("a clock in 1970", false)
	for i := range 500 {
		names = append(names, strings.Repeat("x", i%50+1)+".example")
	}
	if n := len(a.names()); n > maxServerNames {
		t.Errorf("%d names", n)
	}
}

// TestAuthorityDamaged: a server certificate is repaired, an authority never replaced.
func TestAuthorityDamaged(t *testing.T) {
	var other []byte
	{
		dir := t.TempDir()
		openAuthority(t, openStore(t, Options{StateDir: dir}))
		other, _ = os.ReadFile(filepath.Join(dir, authorityFile))
	}
	tests := []struct {
		name   string
		damage func(authority, server string)
		want   string // in the error; "": it works, with the same authority
	}{
		{"server gone", func(_, server string) { os.Remove(server) }, ""},
		{"server empty", func(_, server string) { os.WriteFile(server, nil, 0o600) }, ""},
		{"server torn", func(_, server string) { os.Truncate(server, 300) }, ""},
		{"server of another authority", func(_, server string) { os.WriteFile(server, other, 0o600) }, ""},
		{"server open to all", func(_, server string) { os.Chmod(server, 0o644) }, ""},
		{"left over by a crash", func(authority, server string) {
			os.WriteFile(authority+".new", other[:100], 0o600)
			os.Remove(server)
			os.WriteFile(server+".new", nil, 0o600)
		}, ""},
		{"authority gone", func(authority, _ string) { os.Remove(authority) }, "is missing"},
		{"authority empty", func(authority, _ string) { os.WriteFile(authority, nil, 0o600) }, "is damaged"},
		{"authority torn", func(authority, _ string) { os.Truncate(authority, 300) }, "is damaged"},
		{"authority with another's key", func(authority, _ string) {
			b, _ := os.ReadFile(authority)
			_, cert, _ := strings.Cut(string(b), "-----END PRIVATE KEY-----\n")
			key, _, _ := strings.Cut(string(other), "-----BEGIN CERT")
			os.WriteFile(authority, []byte(key+cert), 0o600)
		}, "is damaged"},
		{"authority is a server", func(authority, server string) { b, _ := os.ReadFile(server); os.WriteFile(authority, b, 0o600) }, "is damaged"},
		{"authority is a link", func(authority, server string) {
			os.Rename(authority, authority+"x")
			os.Symlink(authority+"x", authority)
		}, "is damaged"},
		{"both gone", func(authority, server string) { os.Remove(authority); os.Remove(server) }, "new"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStore(t, Options{StateDir: dir})
			before := openAuthority(t, s).SHA256()
			tt.damage(filepath.Join(dir, authorityFile), filepath.Join(dir, serverFile))
			a, err := s.Authority(AuthorityOptions{Names: testNames})
			switch tt.want {
			case "":
				if err != nil || a.SHA256() != before || chain(t, a)[0].CheckSignatureFrom(a.cert) != nil {
					t.Errorf("authority %v, %v", a, err)
				}
				if st, err := os.Stat(filepath.Join(dir, serverFile)); err != nil || st.Mode().Perm() != 0o600 {
					t.Errorf("%v, %v", st.Mode(), err)
				}
			case "new": // an operator removed both: this is how a new authority is asked for
				if err != nil || a.SHA256() == before {
					t.Errorf("authority %v, %v", a, err)
				}
			default:
				if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "backup") || !strings.Contains(err.Error(), dir) {
					t.Errorf("got %v, want %q", err, tt.want)
				}
			}
		})
	}
}

// TestAuthorityMadeOnce: several that make one at the same time agree.
func TestAuthorityMadeOnce(t *testing.T) {
	dir := t.TempDir()
	sums := make([]string, 4)
	var wg sync.WaitGroup
	for i := range sums {
		wg.Go(func() {
			s, err := Open(Options{StateDir: dir})
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if a, err := s.Authority(AuthorityOptions{Names: testNames}); err != nil {
				t.Error(err)
			} else {
				sums[i] = a.SHA256()
			}
		})
	}
	wg.Wait()
	if len(slices.Compact(sums)) != 1 {
		t.Errorf("authorities %v", sums)
	}
}

func TestEndpoint(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Options{StateDir: dir})
	if e, err := s.Endpoint(); e != (Endpoint{}) || err != nil {
		t.Errorf("at first: %v, %v", e, err)
	}
	want := Endpoint{URL: "https://192.0.2.7:8460", CASHA256: "ab"}
	if err := s.SaveEndpoint(want); err != nil {
		t.Fatal(err)
	}
	if e, err := openStore(t, Options{StateDir: dir}).Endpoint(); e != want || err != nil {
		t.Errorf("got %v, %v", e, err)
	}
	os.WriteFile(filepath.Join(dir, endpointFile), []byte("{"), 0o600)
	if e, err := s.Endpoint(); e != (Endpoint{}) || err != nil {
		t.Errorf("torn: %v, %v", e, err)
	}
}
