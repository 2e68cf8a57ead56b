package relay

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/stages"
)

// TestOptions checks that bad options are refused before the state directory is made.
func TestOptions(t *testing.T) {
	tests := []struct {
		name string
		opt  Options
		want string // "" is good
	}{
		{"loopback", Options{Listen: "127.0.0.1:0"}, ""},
		{"loopback, IPv6 and names", Options{Listen: "localhost:0"}, ""},
		{"behind a proxy", Options{Listen: "0.0.0.0:0", Insecure: true}, ""},
		{"anonymous on loopback", Options{Listen: "127.0.0.1:0", Anonymous: true}, ""},
		{"public", Options{Listen: "127.0.0.1:0", Public: "https://relay.example/base/"}, ""},
		{"beyond loopback", Options{Listen: "0.0.0.0:0"}, ""},
		{"own authority on loopback", Options{Listen: "127.0.0.1:0", TLS: TLSOwn}, ""},
		{"plain beyond loopback", Options{Listen: "0.0.0.0:0", TLS: TLSOff}, "in the clear"},
		{"plain on every address", Options{Listen: ":0", TLS: TLSOff}, "in the clear"},
		{"unknown TLS mode", Options{Listen: "127.0.0.1:0", TLS: "on"}, "own, files or off"},
		{"files without files", Options{Listen: "127.0.0.1:0", TLS: TLSFiles}, "needs a certificate"},
		{"own with files", Options{Listen: "127.0.0.1:0", TLS: TLSOwn, TLSCert: "x", TLSKey: "y"}, "no use for a certificate"},
		{"off with files", Options{Listen: "127.0.0.1:0", TLS: TLSOff, TLSCert: "x", TLSKey: "y"}, "no use for a certificate"},
		{"own and plain", Options{Listen: "0.0.0.0:0", TLS: TLSOwn, Insecure: true}, "choose one"},
		{"own with a plain public URL", Options{Listen: "127.0.0.1:0", TLS: TLSOwn, Public: "http://relay.example"}, "use https"},
		{"anonymous beyond loopback", Options{Listen: "0.0.0.0:0", Insecure: true, Anonymous: true}, "for loopback only"},
		{"a certificate alone", Options{Listen: "127.0.0.1:0", TLSCert: "x"}, "go together"},
		{"a key alone", Options{Listen: "127.0.0.1:0", TLSKey: "x"}, "go together"},
		{"no port", Options{Listen: "127.0.0.1"}, "HOST:PORT"},
		{"public without a scheme", Options{Listen: "127.0.0.1:0", Public: "relay.example"}, "http or https"},
		{"public by another scheme", Options{Listen: "127.0.0.1:0", Public: "ftp://relay.example"}, "http or https"},
		{"an origin with a path", Options{Listen: "127.0.0.1:0", AllowOrigin: []string{"https://x.example/"}}, "https://HOST[:PORT]"},
		{"any origin", Options{Listen: "127.0.0.1:0", AllowOrigin: []string{"*"}}, "https://HOST[:PORT]"},
	}
	for _, tt := range tests {
		tt.opt.StateDir = filepath.Join(t.TempDir(), "state")
		r, err := Open(tt.opt)
		if tt.want == "" {
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			} else if err := errors.Join(r.Close(), r.Close()); err != nil {
				t.Errorf("%s: close: %v", tt.name, err)
			}
			continue
		}
		if !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want ... %s", tt.name, err, tt.want)
		}
		if _, err := os.Stat(tt.opt.StateDir); err == nil {
			t.Errorf("%s: the state directory was made", tt.name)
		}
	}
}

// TestCertificateReloads checks that a certificate which was replaced on disk is
// served within seconds, and that a half-written one is not.
func TestCertificateReloads(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write := func(serial int64, at time.Time) {
		t.Helper()
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "x"}}
		der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		keyDER, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string][]byte{certFile: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
			keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})} {
			if err := errors.Join(os.WriteFile(name, b, 0o600), os.Chtimes(name, at, at)); err != nil {
				t.Fatal(err)
			}
		}
	}
	synctest.Test(t, func(t *testing.T) {
		write(1, time.Now())
		pair, err := LoadCertificate(certFile, keyFile)
		if err != nil {
			t.Fatal(err)
		}
		c := pair.ServerTLS()
		serves := func(want int64) {
			t.Helper()
			got, err := c.GetCertificate(nil)
			if err != nil || got.Leaf.SerialNumber.Int64() != want {
				t.Errorf("serves %v, %v; want %d", got.Leaf.SerialNumber, err, want)
			}
		}
		serves(1)
		time.Sleep(time.Minute)
		write(2, time.Now())
		serves(2)
		time.Sleep(time.Second)
		write(3, time.Now())
		serves(2) // checked a second ago
		if err := pair.Reload(); err != nil {
			t.Error(err)
		}
		serves(3)
		time.Sleep(time.Second)
		write(4, time.Now())
		time.Sleep(certificateCheckInterval + time.Second)
		serves(4)
		if err := os.WriteFile(certFile, []byte("-----BEGIN CERT"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		serves(4)
		if err := pair.Reload(); err == nil {
			t.Error("a half-written certificate was loaded")
		}
		serves(4)
		if err := os.Remove(keyFile); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		serves(4)
	})
	if _, err := LoadCertificate(certFile, keyFile); err == nil {
		t.Error("a missing key was loaded")
	}
}

// TestHistogram checks that buckets are cumulative.
func TestHistogram(t *testing.T) {
	h := stages.Histogram{Bounds: []float64{.5, 1}, Counts: []uint64{2, 1, 3}, Sum: 66.5}
	text := string(appendHistograms(nil, "x", "help.", []stages.ClassStats{{Class: "a", Latency: h}, {Class: "b"}},
		func(c *stages.ClassStats) *stages.Histogram { return &c.Latency }))
	for _, want := range []string{"# HELP x help.\n# TYPE x histogram\n", `x_bucket{class="a",le="0.5"} 2` + "\n", `x_bucket{class="a",le="1"} 3` + "\n",
		`x_bucket{class="a",le="+Inf"} 6` + "\n", `x_count{class="a"} 6` + "\n", `x_sum{class="a"} 66.5` + "\n", `x_count{class="b"} 0` + "\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
