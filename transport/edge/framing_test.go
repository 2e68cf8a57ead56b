package edge

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// serveEcho serves the method and the body, in plain or over TLS.
func serveEcho(t *testing.T, cfg *tls.Config) string {
	t.Helper()
	s := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(w, r.Method+" "+string(b))
	}), log.New(io.Discard, "", 0))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	if cfg != nil {
		ln = tls.NewListener(ln, cfg)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return addr
}

// TestFraming: a request with both lengths gets 400 and the connection is closed, after the answers
// to the requests before it; everything else is served, however it is cut into segments.
func TestFraming(t *testing.T) {
	const (
		length  = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
		chunked = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{ }\r\n0\r\n\r\n"
		get     = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	)
	tests := []struct {
		name, in, want string // an answer each
	}{
		{"length", length, "POST{}"},
		{"chunked", chunked, "POST{ }"},
		{"pipelined", length + chunked + get + length + chunked, "POST{}|POST{ }|GET|POST{}|POST{ }"},
		{"in folded and longer headers", "GET / HTTP/1.1\r\nHost: x\r\nContent-Length-X: 1\r\nX: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + get, "GET|GET"},
		{"names in a body", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 21\r\n\r\n[\n\"Content-Length:1\"]" + chunked, "POST[\n\"Content-Length:1\"]|POST{ }"},
		{"names in chunks", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n11\r\nTransfer-Encoding\r\n0\r\n\r\n" + length, "POSTTransfer-Encoding|POST{}"},
		{"both", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + get, "400"},
		{"both, the other way round, in any case", "POST / HTTP/1.1\r\ntransfer-ENCODING: chunked\r\nX: y\r\ncontent-length:2\r\nHost: x\r\n\r\n0\r\n\r\n" + get, "400"},
		{"both, without CR", "POST / HTTP/1.1\nHost: x\nContent-Length: 2\nTransfer-Encoding: chunked\n\n0\n\n", "400"},
		{"both, after others", get + length + "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n" + get, "GET|POST{}|400"},
		{"both, after a body without a line end", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{}\rPOST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "POST{}\r|400"},
	}
	certs := httptest.NewUnstartedServer(nil)
	certs.StartTLS()
	defer certs.Close()
	plain, encrypted := serveEcho(t, nil), serveEcho(t, &tls.Config{Certificates: certs.TLS.Certificates})
	for _, tt := range tests {
		for _, segment := range []int{1, 7, len(tt.in)} {
			for _, overTLS := range []bool{false, true} {
				var c net.Conn
				var err error
				if overTLS {
					c, err = tls.Dial("tcp", encrypted, &tls.Config{InsecureSkipVerify: true})
				} else {
					c, err = net.Dial("tcp", plain)
				}
				if err != nil {
					t.Fatal(err)
				}
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				go func() {
					for in := []byte(tt.in); len(in) > 0; {
						n := min(segment, len(in))
						if _, err := c.Write(in[:n]); err != nil {
							return
						}
						in = in[n:]
					}
				}()
				var got []string
				r := bufio.NewReader(c)
				for range strings.Split(tt.want, "|") {
					resp, err := http.ReadResponse(r, nil)
					if err != nil {
						got = append(got, err.Error())
						break
					}
					b, _ := io.ReadAll(resp.Body)
					if resp.StatusCode == 400 {
						got = append(got, "400")
						if _, err := r.ReadByte(); err == nil {
							t.Errorf("%s: the connection stays open", tt.name)
						}
						break
					}
					got = append(got, strings.Replace(string(b), " ", "", 1))
				}
				if s := strings.Join(got, "|"); s != tt.want {
					t.Errorf("%s, segments of %d, TLS %v: got %q, want %q", tt.name, segment, overTLS, s, tt.want)
				}
				_ = c.Close()
			}
		}
	}
}

// TestPlainOnTLS: a client that speaks HTTP to a TLS listener gets an answer that says so.
func TestPlainOnTLS(t *testing.T) {
	certs := httptest.NewUnstartedServer(nil)
	certs.StartTLS()
	defer certs.Close()
	addr := serveEcho(t, &tls.Config{Certificates: certs.TLS.Certificates})
	resp, err := http.Get("http://" + addr + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 400 || !bytes.Contains(b, []byte("HTTPS server")) {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}

// FuzzFraming compares the scanner with a reader of whole heads.
func FuzzFraming(f *testing.F) {
	f.Add("GET / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 3)
	f.Add("\n\r\nTransfer-encoding:\ncontent-Length:\r\n\r\r\n", 1)
	f.Fuzz(func(t *testing.T, in string, cut int) {
		var want bool
		seen := 0
		for line := range strings.Lines("x\n" + in) {
			l := strings.ToLower(line)
			switch {
			case line == "\n" || line == "\r\n":
				seen = 0
			case strings.HasPrefix(l, lengthName):
				seen |= 1
			case strings.HasPrefix(l, encodingName):
				seen |= 2
			}
			want = want || seen == 3
		}
		if strings.ContainsFunc(in, func(r rune) bool { return r > 0x7e }) {
			t.Skip("ToLower folds more than ASCII")
		}
		b := []byte(in)
		c := &framingConn{}
		at := max(0, min(cut, len(b)))
		c.scan(b[:at])
		c.scan(b[at:])
		if got := !bytes.Equal(b, []byte(in)); got != want {
			t.Errorf("%q cut at %d: spoiled %v, want %v", in, at, got, want)
		}
	})
}

// BenchmarkFraming is what a request pays.
func BenchmarkFraming(b *testing.B) {
	head := []byte("POST /mcp/tools/call HTTP/1.1\r\nHost: 127.0.0.1:8460\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 85\r\nAuthorization: Bearer " +
		strings.Repeat("x", 500) + "\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n" + strings.Repeat("x", 85))
	c := &framingConn{}
	b.ReportAllocs()
	for b.Loop() {
		c.scan(head)
	}
}
