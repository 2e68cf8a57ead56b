package gateway

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"
)

func serverTLS(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{"h2", "http/1.1"}},
		&tls.Config{RootCAs: roots, ServerName: "127.0.0.1", NextProtos: []string{"h2", "http/1.1"}}
}

// TestTLS: a stream under TLS, also to a client that stalls and comes back.
func TestTLS(t *testing.T) {
	server, client := serverTLS(t)
	g := start(t, Options{TLS: server, Ring: 2000})
	dial := func() net.Conn {
		conn, err := tls.Dial("tcp", strings.TrimPrefix(g.url, "http://"), client)
		if err != nil {
			t.Fatal(err)
		}
		if p := conn.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
			t.Fatalf("speaks %s", p)
		}
		return conn
	}
	slow, live := subscribe(t, dial(), ""), subscribe(t, dial(), "")
	data := strings.Repeat("x", 60<<10)
	n := 0
	for ; g.Stats().Dropped == 0; n++ {
		g.Emit("", "big", data)
		live.want("big", `"`+data+`"`)
		if n > 1500 {
			t.Fatal("nothing is dropped")
		}
	}
	for range n - int(g.Stats().Dropped) {
		slow.want("big", `"`+data+`"`)
	}
	if ev := slow.next(); ev.Type != "gateway/reset" {
		t.Errorf("event %s", ev.Type)
	}
	g.Emit("", "a", 1)
	slow.want("a", "1")
	live.want("a", "1")
	_ = live.conn.Close()
	eventually(t, "the stream of the closed client ends", func() bool { return g.Stats().Subscribers == 1 })
}
