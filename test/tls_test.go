package test

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/relay"
)

// The relay over TLS: HTTP/1.1 only, TLS 1.2 at least, and a stream whose close event
// comes before the end of TLS, both when the reader and when the relay ends it.
func TestTLS(t *testing.T) {
	t.Parallel()
	ca, cert, key, err := certificates("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for name, b := range map[string][]byte{certFile: cert, keyFile: key} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := newTestRelay(t, func(o *relay.Options) { o.TLSCert, o.TLSKey = certFile, keyFile })
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	dial := func(edit func(c *tls.Config)) (*tls.Conn, error) {
		c := &tls.Config{RootCAs: pool, NextProtos: []string{"h2", "http/1.1"}}
		edit(c)
		return tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", r.addr, c)
	}
	conn, err := dial(func(*tls.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	if p := conn.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("negotiated %q", p)
	}
	_ = conn.Close()
	if conn, err := dial(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS11 }); err == nil {
		_ = conn.Close()
		t.Error("TLS 1.1 was spoken")
	}
	if conn, err := dial(func(c *tls.Config) { c.NextProtos = []string{"h2"} }); err == nil {
		_ = conn.Close()
		t.Error("HTTP/2 alone was accepted")
	}
	plain, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintf(plain, "GET /healthz HTTP/1.1\r\nHost: %s\r\n\r\n", r.addr)
	if b, _ := io.ReadAll(plain); !strings.HasPrefix(string(b), "HTTP/1.0 400") {
		t.Errorf("plain HTTP got %q", b)
	}
	_ = plain.Close()

	r.tls = &tls.Config{RootCAs: pool}
	r.http.Transport.(*http.Transport).TLSClientConfig = r.tls.Clone()
	m := r.device(mockOptions{})
	for _, byReader := range []bool{true, false} {
		conn, err := dial(func(*tls.Config) {})
		if err != nil {
			t.Fatal(err)
		}
		body := `{"tool":"` + m.subscribeTool() + `","arguments":{"interval_ms":1000}}`
		_, _ = fmt.Fprintf(conn, "POST /mcp/tools/call HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: %d\r\n\r\n%s",
			r.addr, r.agent, len(body), body)
		resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodPost})
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v %v", resp, err)
		}
		stream := bufio.NewReader(resp.Body)
		line, err := stream.ReadString('\n')
		if err != nil || line != "event: metric\n" {
			t.Fatalf("%q %v", line, err)
		}
		if byReader {
			_ = conn.CloseWrite()
		} else if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		rest, err := io.ReadAll(stream)
		if err != nil || !strings.HasSuffix(string(rest), "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n") {
			t.Errorf("by the reader %v: %q %v", byReader, rest, err)
		}
		_ = conn.Close()
	}
}

// HTTP/2 with prior knowledge is not spoken, nor is an upgrade to it.
func TestHTTP1Only(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	conn, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	if b, _ := io.ReadAll(conn); !strings.HasPrefix(string(b), "HTTP/1.1 ") || strings.HasPrefix(string(b), "HTTP/1.1 2") {
		t.Errorf("prior knowledge got %q", b)
	}
	a := r.do(http.MethodGet, "/healthz", "", map[string]string{"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"})
	if a.status != http.StatusOK || a.header.Get("Upgrade") != "" {
		t.Errorf("an upgrade got %d %v", a.status, a.header)
	}
}
