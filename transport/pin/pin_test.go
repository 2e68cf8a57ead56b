package pin_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/transport/pin"
)

// authority is a certificate authority of a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// sign makes a certificate for key; a nil parent signs itself.
func sign(t *testing.T, tmpl *x509.Certificate, parent *authority, key *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	tmpl.SerialNumber = big.NewInt(1)
	signer, by := key, tmpl
	if parent != nil {
		signer, by = parent.key, parent.cert
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, by, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func caTemplate() *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{CommonName: "agentctl relay"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
}

func leafTemplate() *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{CommonName: "relay"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"relay.example"},
	}
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key := newKey(t)
	return &authority{sign(t, caTemplate(), nil, key), key}
}

func TestParse(t *testing.T) {
	good := strings.Repeat("0aF", 21) + "9"
	p, err := pin.Parse(good)
	if err != nil || p.String() != strings.ToLower(good) {
		t.Errorf("Parse(%q) = %v, %v", good, p, err)
	}
	for _, bad := range []string{"", "x", good[1:], good + "0", good + "00", "g" + good[1:], strings.Repeat("a", 1<<20)} {
		if _, err := pin.Parse(bad); err == nil || len(err.Error()) > 300 {
			t.Errorf("Parse(%.70q): %v", bad, err)
		}
		if _, err := pin.ClientConfig(bad); err == nil {
			t.Errorf("ClientConfig(%.70q) takes it", bad)
		}
	}
}

// connect makes a TLS connection to a server with this chain, over which the client sends a
// secret once the handshake is done. received is what the server could read.
func connect(t *testing.T, cfg *tls.Config, key *ecdsa.PrivateKey, chain ...*x509.Certificate) (received string, err error) {
	t.Helper()
	cert := tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var got bytes.Buffer
	var wg sync.WaitGroup
	wg.Go(func() {
		if c, err := l.Accept(); err == nil {
			_, _ = got.ReadFrom(c) // does the handshake
			_ = c.Close()
		}
	})
	conn, err := tls.Dial("tcp", l.Addr().String(), cfg)
	if err == nil {
		_, err = conn.Write([]byte("the code"))
		_ = conn.Close()
	}
	wg.Wait()
	return got.String(), err
}

func TestVerify(t *testing.T) {
	own, other := newAuthority(t), newAuthority(t)
	leafKey := newKey(t)
	good := sign(t, leafTemplate(), own, leafKey)
	with := func(change func(*x509.Certificate)) *x509.Certificate {
		tmpl := leafTemplate()
		change(tmpl)
		return sign(t, tmpl, own, leafKey)
	}
	expired := with(func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Unix(0, 0), time.Unix(1, 0)
	})
	// The pinned key in a certificate that is no authority: only the holder of the key can make it.
	notCA := caTemplate()
	notCA.IsCA, notCA.KeyUsage = false, x509.KeyUsageDigitalSignature
	noSign := caTemplate()
	noSign.KeyUsage = x509.KeyUsageCRLSign
	// An intermediate authority, which the pinned one signed.
	middle := &authority{key: newKey(t)}
	middle.cert = sign(t, caTemplate(), own, middle.key)

	tests := []struct {
		name  string
		key   *ecdsa.PrivateKey
		chain []*x509.Certificate
		want  string // in the error; "" for none
	}{
		{"leaf and authority", leafKey, []*x509.Certificate{good, own.cert}, ""},
		{"other certificates between", leafKey, []*x509.Certificate{good, other.cert, own.cert}, ""},
		{"expired, and no name of the relay", leafKey, []*x509.Certificate{expired, own.cert}, ""},
		{"no authority sent", leafKey, []*x509.Certificate{good}, "no private authority"},
		{"another authority of the same name", leafKey, []*x509.Certificate{sign(t, leafTemplate(), other, leafKey), other.cert}, "another authority (" + pin.Of(other.cert).String()},
		{"leaf of another authority", leafKey, []*x509.Certificate{sign(t, leafTemplate(), other, leafKey), own.cert, other.cert}, "not one of that authority"},
		{"self-signed leaf", leafKey, []*x509.Certificate{sign(t, leafTemplate(), nil, leafKey), own.cert}, "not one of that authority"},
		{"the authority's key serves", own.key, []*x509.Certificate{own.cert}, "own key serves"},
		{"the authority's key serves, twice", own.key, []*x509.Certificate{own.cert, own.cert}, "own key serves"},
		{"pinned key in no authority", leafKey, []*x509.Certificate{good, sign(t, notCA, nil, own.key)}, "not one of that authority"},
		{"authority that may not sign", leafKey, []*x509.Certificate{good, sign(t, noSign, nil, own.key)}, "not one of that authority"},
		{"intermediate", leafKey, []*x509.Certificate{sign(t, leafTemplate(), middle, leafKey), middle.cert, own.cert}, "not one of that authority"},
		{"leaf that is an authority", middle.key, []*x509.Certificate{middle.cert, own.cert}, "an authority itself"},
		{"leaf for clients", leafKey, []*x509.Certificate{with(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }), own.cert}, "not for a server"},
		{"leaf for encipherment", leafKey, []*x509.Certificate{with(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }), own.cert}, "not for a server"},
		{"critical extension", leafKey, []*x509.Certificate{with(func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}}}
		}), own.cert}, "critical extension"},
	}
	cfg, err := pin.ClientConfig(pin.Of(own.cert).String())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			received, err := connect(t, cfg, tt.key, tt.chain...)
			if tt.want == "" {
				if err != nil || received != "the code" {
					t.Errorf("received %q, error %v", received, err)
				}
				return
			}
			var mismatch *pin.MismatchError
			if !errors.As(err, &mismatch) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want a mismatch with %q", err, tt.want)
			}
			if received != "" {
				t.Errorf("the server received %q", received)
			}
		})
	}
}

// A resumed session sends no certificates: the check uses those of the first one.
func TestResumption(t *testing.T) {
	own := newAuthority(t)
	key := newKey(t)
	leaf := sign(t, leafTemplate(), own, key)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw, own.cert.Raw}, PrivateKey: key}}})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { _ = l.Close() }()
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("x")) // carries the session ticket
			_ = c.Close()
		}
	})
	cache := tls.NewLRUClientSessionCache(1)
	dial := func(authority *x509.Certificate) (resumed bool, err error) {
		cfg, err := pin.ClientConfig(pin.Of(authority).String())
		if err != nil {
			t.Fatal(err)
		}
		cfg.ClientSessionCache = cache
		c, err := tls.Dial("tcp", l.Addr().String(), cfg)
		if err != nil {
			return false, err
		}
		defer func() { _ = c.Close() }()
		_, err = c.Read(make([]byte, 1))
		return c.ConnectionState().DidResume, err
	}
	if resumed, err := dial(own.cert); resumed || err != nil {
		t.Fatalf("first connection: resumed %t, error %v", resumed, err)
	}
	if resumed, err := dial(own.cert); !resumed || err != nil {
		t.Errorf("second connection: resumed %t, error %v", resumed, err)
	}
	// A client with another pin that shares the cache is refused in the resumed session.
	var mismatch *pin.MismatchError
	if _, err := dial(newAuthority(t).cert); !errors.As(err, &mismatch) {
		t.Errorf("another pin: %v", err)
	}
}
