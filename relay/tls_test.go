package relay

import (
	"crypto/tls"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"agentctl/transport/pin"
)

func TestServerNames(t *testing.T) {
	tests := []struct {
		listen, public string
		want, without  []string
	}{
		{"127.0.0.1:0", "", []string{"127.0.0.1", "::1", "localhost"}, nil},
		{"192.0.2.7:8460", "https://relay.example/base", []string{"192.0.2.7", "relay.example"}, nil},
		{"[fe80::1%eth0]:1", "https://[2001:db8::5]:9", []string{"fe80::1", "2001:db8::5"}, []string{"fe80::1%eth0"}},
		{"my_host.lan:1", "https://b\u00fcro.example", []string{"my_host.lan"}, []string{"b\u00fcro.example"}},
	}
	for _, tt := range tests {
		r := &Relay{opt: Options{Listen: tt.listen}}
		if tt.public != "" {
			r.public, _ = url.Parse(tt.public)
		}
		got := r.serverNames()
		for _, name := range tt.want {
			if !slices.Contains(got, name) {
				t.Errorf("%s, %s: no %s in %v", tt.listen, tt.public, name, got)
			}
		}
		for _, name := range tt.without {
			if slices.Contains(got, name) {
				t.Errorf("%s, %s: %s in %v", tt.listen, tt.public, name, got)
			}
		}
	}
	// On every address: at least those of outboundAddresses, in the URL too.
	r := &Relay{opt: Options{Listen: ":0"}}
	for _, a := range outboundAddresses() {
		if !slices.Contains(r.serverNames(), a) {
			t.Errorf("no %s in %v", a, r.serverNames())
		}
	}
	for addr, want := range map[string]string{"192.0.2.7:1": "https://192.0.2.7:1", "[::1]:1": "https://[::1]:1"} {
		if got := listenURL(addr, true); got != want {
			t.Errorf("URL of %s: %s", addr, got)
		}
	}
	if u := listenURL("[::]:8460", true); strings.Contains(u, "[::]") || !strings.HasSuffix(u, ":8460") {
		t.Errorf("URL of every address: %s", u)
	}
}

// TestOwnAuthority opens a relay twice: a client with the pin of the first is served by the
// second, at the stored URL.
func TestOwnAuthority(t *testing.T) {
	dir := t.TempDir()
	hash := ""
	for range 2 {
		r, err := Open(Options{StateDir: dir, Listen: "127.0.0.1:0", TLS: TLSOwn})
		if err != nil {
			t.Fatal(err)
		}
		if hash == "" {
			hash = r.CASHA256()
		}
		e, err := r.Store().Endpoint()
		if err != nil || e.URL != r.URL() || e.CASHA256 != hash || !strings.HasPrefix(e.URL, "https://") {
			t.Errorf("stored %+v, %v; serves %s", e, err, r.URL())
		}
		srv := &http.Server{Handler: http.NotFoundHandler()}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = srv.Serve(tls.NewListener(r.listener, r.tls))
		}()
		cfg, err := pin.ClientConfig(hash)
		if err != nil {
			t.Fatal(err)
		}
		c, err := tls.Dial("tcp", r.listener.Addr().String(), cfg)
		if err != nil {
			t.Error(err)
		} else {
			_ = c.Close()
		}
		_ = srv.Close()
		<-done
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
