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

// newTLSRelay starts a relay with a certificate of an authority that its clients trust.
func newTLSRelay(t *testing.T) *testRelay {
	t.Helper()
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
	r.tls = &tls.Config{RootCAs: x509.NewCertPool()}
	r.tls.RootCAs.AppendCertsFromPEM(ca)
	r.http.Transport.(*http.Transport).TLSClientConfig = r.tls.Clone()
	return r
}

// dialTLS connects as a client that offers HTTP/2 and HTTP/1.1, after edit has changed its configuration.
func (r *testRelay) dialTLS(edit func(c *tls.Config)) (*tls.Conn, error) {
	c := r.tls.Clone()
	c.NextProtos = []string{"h2", "http/1.1"}
	edit(c)
	return tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", r.addr, c)
}

// The relay over TLS: HTTP/1.1 only, TLS 1.2 at least, and a stream whose close event
// comes before the end of TLS, both when the reader and when the relay ends it.
func TestTLS(t *testing.T) {
	t.Parallel()
	r := newTLSRelay(t)
	t.Run("protocols", func(t *testing.T) { checkTLSProtocols(t, r) })
	m := r.device(mockOptions{})
	t.Run("a stream that its reader ends", func(t *testing.T) {
		checkTLSStreamEnd(t, m, func(conn *tls.Conn) error { return conn.CloseWrite() })
	})
	t.Run("a stream that the relay ends", func(t *testing.T) {
		checkTLSStreamEnd(t, m, func(*tls.Conn) error { return r.stop() })
	})
}

func checkTLSProtocols(t *testing.T, r *testRelay) {
	conn, err := r.dialTLS(func(*tls.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	if p := conn.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("negotiated %q, want http/1.1", p)
	}
	_ = conn.Close()
	for name, edit := range map[string]func(c *tls.Config){
		"TLS 1.1":      func(c *tls.Config) { c.MaxVersion = tls.VersionTLS11 },
		"HTTP/2 alone": func(c *tls.Config) { c.NextProtos = []string{"h2"} },
	} {
		if conn, err := r.dialTLS(edit); err == nil {
			_ = conn.Close()
			t.Errorf("%s was accepted", name)
		}
	}
	plain, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintf(plain, "GET /healthz HTTP/1.1\r\nHost: %s\r\n\r\n", r.addr)
	if b, _ := io.ReadAll(plain); !strings.HasPrefix(string(b), "HTTP/1.0 400") {
		t.Errorf("plain HTTP got %q, want status 400", b)
	}
	_ = plain.Close()
}

// checkTLSStreamEnd opens a metric stream of a board, ends it, and reads it to its end.
func checkTLSStreamEnd(t *testing.T, m *mockDevice, end func(*tls.Conn) error) {
	conn, err := m.r.dialTLS(func(*tls.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	body := `{"tool":"` + m.subscribeTool() + `","arguments":{"interval_ms":1000}}`
	_, _ = fmt.Fprintf(conn, "POST /mcp/tools/call HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: %d\r\n\r\n%s",
		m.r.addr, m.r.agent, len(body), body)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodPost})
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v %v", resp, err)
	}
	stream := bufio.NewReader(resp.Body)
	line, err := stream.ReadString('\n')
	if err != nil || line != "event: metric\n" {
		t.Fatalf("%q %v, want a metric", line, err)
	}
	if err := end(conn); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.HasSuffix(string(rest), "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n") {
		t.Errorf("%q %v, want a normal close event at the end", rest, err)
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
