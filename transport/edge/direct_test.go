package edge

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

// startDirect serves h twice: with direct requests and by net/http alone.
func startDirect(t *testing.T, h http.HandlerFunc) (direct *Server, addrs [2]string) {
	t.Helper()
	for i := range addrs {
		s := NewServer(h, log.New(io.Discard, "", 0))
		if i == 0 {
			s.Direct = func(path string) bool { return path != "/elsewhere" }
			direct = s
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addrs[i] = ln.Addr().String()
		done := make(chan error, 1)
		go func() { done <- s.Serve(ln) }()
		t.Cleanup(func() { _ = s.Close(); <-done })
	}
	return direct, addrs
}

func dialDirect(t *testing.T, addr string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { _ = c.Close() })
	return c, bufio.NewReader(c)
}

// isDirect reports whether a request is served without net/http.
func isDirect(w http.ResponseWriter) bool { _, ok := w.(*directWriter); return ok }

func post(path, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
}

// TestDirectResponses: a client gets the same bytes from a direct request as from net/http.
func TestDirectResponses(t *testing.T) {
	large := strings.Repeat("0123456789abcdef", 10_000)
	handlers := map[string]http.HandlerFunc{
		"nothing":   func(http.ResponseWriter, *http.Request) {},
		"echo":      func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) },
		"status":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) },
		"noContent": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
		"headers": func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h["Content-Type"], h["X-B"], h["X-A"], h["Bad Name"] = []string{"application/json"}, []string{" 1\r\nX-Evil: 1", "2"}, []string{""}, []string{"x"}
			h.Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
			w.WriteHeader(http.StatusTeapot)
			h.Set("X-Late", "1")
			w.WriteHeader(http.StatusOK)
			_, _ = io.WriteString(w, r.RemoteAddr[:9]+r.Host+r.RequestURI+r.Proto+r.Header.Get("Content-Length"))
		},
		"noType": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, "<html>")
		},
		"declared": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "3")
			_, _ = io.WriteString(w, "abc")
			if _, err := io.WriteString(w, "d"); !errors.Is(err, http.ErrContentLength) {
				t.Errorf("one byte more: %v", err)
			}
		},
		"stream": func(w http.ResponseWriter, _ *http.Request) {
			rc := http.NewResponseController(w)
			_ = rc.SetWriteDeadline(time.Now().Add(time.Second))
			for _, part := range []string{"one", "two"} {
				_, _ = io.WriteString(w, part)
				if err := rc.Flush(); err != nil {
					t.Error(err)
				}
			}
		},
		"large": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, large)
			_, _ = io.WriteString(w, large)
			if d, ok := w.(*directWriter); ok && cap(d.body)+cap(d.out) > 4*maxBuffered {
				t.Errorf("a response of %d bytes holds %d", 2*len(large), cap(d.body)+cap(d.out))
			}
		},
		"close": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			_, _ = io.WriteString(w, "bye")
		},
		"short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "10")
			_, _ = io.WriteString(w, "abc")
		},
		"panic": func(http.ResponseWriter, *http.Request) { panic("handler") },
	}
	served := make(chan bool, 1)
	_, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			served <- isDirect(w)
		}
		w.Header().Set("Date", "Fri, 02 Jan 1970 00:00:00 GMT") // the same for both
		handlers[r.URL.Path[1:]](w, r)
	})
	for name := range handlers {
		var got [2]string
		for i, addr := range addrs {
			c, in := dialDirect(t, addr)
			_, _ = io.WriteString(c, post("/"+name, `{"a":1}`)+"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			if direct := <-served; direct != (i == 0) {
				t.Errorf("%s: direct %v on server %d", name, direct, i)
			}
			b, err := io.ReadAll(in)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if name == "large" { // cut into other chunks
				res, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), nil)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(res.Body)
				b = fmt.Appendf(nil, "%v %v %v %d %v", res.Status, res.Header, res.TransferEncoding, len(body), err)
			}
			got[i] = string(b)
		}
		if got[0] != got[1] {
			t.Errorf("%s: direct\n%q\nnet/http\n%q", name, got[0], got[1])
		}
	}
}

// TestDirectConnection: direct requests in any segments, and what comes after them.
func TestDirectConnection(t *testing.T) {
	served := make(chan string, 10)
	_, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		served <- fmt.Sprintf("%v %s %s", isDirect(w), r.URL.Path, body)
		_, _ = w.Write(body)
	})
	chunked := "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
	head, body, _ := strings.Cut(post("/split", "{ }"), "{")
	for _, tt := range []struct {
		name     string
		segments []string // a pause after each
		want     string
	}{
		{"pipelined", []string{post("/1", "a") + post("/2", "b") + post("/3", "c")}, "true /1 a|true /2 b|true /3 c"},
		{"head and body", []string{head, "{" + body, post("/2", "b")}, "true /split { }|true /2 b"},
		{"in three", []string{post("/1", "abc")[:9], post("/1", "abc")[9:60], post("/1", "abc")[60:]}, "true /1 abc"},
		{"cut in the next", []string{post("/1", "a") + post("/2", "b")[:30], post("/2", "b")[30:]}, "true /1 a|true /2 b"},
		{"another kind first", []string{chunked + post("/2", "b")}, "false /c ab|false /2 b"},
		{"another kind later", []string{post("/1", "a"), chunked, post("/2", "b")}, "true /1 a|false /c ab|false /2 b"},
		{"another kind behind", []string{post("/1", "a") + chunked + post("/2", "b")}, "true /1 a|false /c ab|false /2 b"},
		{"not taken", []string{post("/elsewhere", "a") + post("/2", "b")}, "false /elsewhere a|false /2 b"},
		{"large", []string{post("/1", strings.Repeat("x", 5000)), post("/2", "b")}, "false /1 " + strings.Repeat("x", 5000) + "|false /2 b"},
		{"an empty line behind", []string{post("/1", "a") + "\r\n" + post("/2", "b"), "\r", "\n", chunked}, "true /1 a|true /2 b|false /c ab"},
		{"late", []string{"POST /1 HTT", "late", "P/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"}, "false /1 a"},
		{"late body", []string{head, "late", "{", "late", body + post("/2", "b")}, "false /split { }|false /2 b"},
		{"late, another kind", []string{"P", "UT /1 HTT", "late", "P/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"}, "false /1 a"},
		{"both lengths", []string{"POST /1 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"}, ""},
		{"a length twice", []string{"POST /1 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"}, ""},
	} {
		c, in := dialDirect(t, addrs[0])
		go func() {
			for _, s := range tt.segments {
				if s == "late" {
					time.Sleep(restTimeout)
				} else {
					_, _ = io.WriteString(c, s)
				}
				time.Sleep(time.Millisecond)
			}
		}()
		for want := range strings.SplitSeq(tt.want, "|") {
			res, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			switch {
			case want == "" && res.StatusCode != http.StatusBadRequest:
				t.Errorf("%s: %s", tt.name, res.Status)
			case want != "":
				if got := <-served; got != want {
					t.Errorf("%s: %.80s, want %.80s", tt.name, got, want)
				}
			}
		}
	}
}

// TestDirectClientLeaves: a client that closes its connection cancels its request, also with one
// half of it.
func TestDirectClientLeaves(t *testing.T) {
	entered, left := make(chan bool), make(chan error)
	_, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		entered <- isDirect(w)
		<-r.Context().Done()
		left <- context.Cause(r.Context())
	})
	for _, leave := range []func(net.Conn) error{net.Conn.Close, func(c net.Conn) error { return c.(*net.TCPConn).CloseWrite() }} {
		c, _ := dialDirect(t, addrs[0])
		_, _ = io.WriteString(c, post("/", "a"))
		if !<-entered {
			t.Error("the request is not direct")
		}
		if err := leave(c); err != nil {
			t.Fatal(err)
		}
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// TestDirectHijack: a handler takes a connection over, which neither its return nor a shutdown ends.
func TestDirectHijack(t *testing.T) {
	taken, release := make(chan net.Conn, 1), make(chan bool)
	direct, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		if !isDirect(w) {
			t.Error("the request is not direct")
		}
		if r.URL.Path == "/late" {
			_, _ = io.WriteString(w, "late")
			if _, _, err := http.NewResponseController(w).Hijack(); err == nil {
				t.Error("hijacked after a write")
			}
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		if _, _, err := http.NewResponseController(w).Hijack(); !errors.Is(err, http.ErrHijacked) {
			t.Errorf("hijacked twice: %v", err)
		}
		w.WriteHeader(http.StatusTeapot)
		if _, err := io.WriteString(w, "x"); !errors.Is(err, http.ErrHijacked) {
			t.Errorf("written after the hijack: %v", err)
		}
		taken <- c
		<-release
	})
	client, in := dialDirect(t, addrs[0])
	_, _ = io.WriteString(client, post("/late", "a"))
	if res, err := http.ReadResponse(in, nil); err != nil || res.ContentLength != 4 {
		t.Fatalf("%v, %v", res, err)
	}
	if _, err := in.Discard(4); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(client, post("/", "a"))
	c := <-taken
	close(release)
	if err := direct.Shutdown(t.Context()); err != nil { // waits for net/http's goroutine
		t.Error(err)
	}
	go func() { _, _ = io.WriteString(c, "hello") }()
	if b, err := in.Peek(5); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	_, _ = io.WriteString(client, "hi")
	b := make([]byte, 2)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hi" {
		t.Errorf("%q, %v", b, err)
	}
	_ = c.Close()
	if _, err := in.Discard(6); err != io.EOF {
		t.Errorf("after the close: %v", err)
	}
}

// TestDirectBuffersAreSeparate: responses of many connections share a pool of buffers, and each gets its
// own bytes, also after a connection was taken over.
func TestDirectBuffersAreSeparate(t *testing.T) {
	_, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/hijack" {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = c.Write(b)
			_ = c.Close()
			return
		}
		w.Header().Set("X-Test", string(b[:8]))
		_, _ = w.Write(bytes.Repeat(b, len(b)))
	})
	var wg sync.WaitGroup
	for g := range 8 {
		client, in := dialDirect(t, addrs[0])
		other, _ := dialDirect(t, addrs[0])
		wg.Go(func() {
			for n := range 100 {
				body := fmt.Sprintf("%04d%04d", g, n) + strings.Repeat(string(rune('a'+g)), 1+7*n%90)
				if n == 50 {
					_, _ = io.WriteString(other, post("/hijack", body))
					if b, err := io.ReadAll(other); err != nil || string(b) != body {
						t.Errorf("hijacked: %q, %v", b, err)
					}
				}
				_, _ = io.WriteString(client, post("/", body))
				res, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Error(err)
					return
				}
				b, err := io.ReadAll(res.Body)
				if err != nil || res.Header.Get("X-Test") != body[:8] || string(b) != strings.Repeat(body, len(body)) {
					t.Errorf("%v: %q has %q, %.60q", err, body, res.Header.Get("X-Test"), b)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestDirectShutdown: Shutdown lets requests finish, says so to their clients, and does not wait for
// connections without a request.
func TestDirectShutdown(t *testing.T) {
	entered, release := make(chan bool, 2), make(chan bool)
	direct, addrs := startDirect(t, func(w http.ResponseWriter, r *http.Request) {
		entered <- isDirect(w)
		if r.URL.Path == "/wait" {
			<-release
		}
	})
	idle, inIdle := dialDirect(t, addrs[0])
	_, _ = io.WriteString(idle, post("/", "a"))
	if res, err := http.ReadResponse(inIdle, nil); err != nil || res.Close || !<-entered {
		t.Fatalf("%v, %v", res, err)
	}
	busy, inBusy := dialDirect(t, addrs[0])
	_, _ = io.WriteString(busy, post("/wait", "a"))
	<-entered
	done := make(chan error)
	go func() { done <- direct.Shutdown(t.Context()) }()
	if _, err := inIdle.ReadByte(); err != io.EOF {
		t.Errorf("the idle connection: %v", err)
	}
	_, inNew := dialDirect(t, addrs[0])
	if _, err := inNew.ReadByte(); err != io.EOF {
		t.Errorf("a new connection: %v", err)
	}
	select {
	case err := <-done:
		t.Fatalf("Shutdown has not waited: %v", err)
	default:
	}
	close(release)
	if res, err := http.ReadResponse(inBusy, nil); err != nil || !res.Close {
		t.Errorf("%v, %v", res, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestDirectAllocates bounds what a direct request costs.
func TestDirectAllocates(t *testing.T) {
	in := []byte("POST /mcp/tools/call HTTP/1.1\r\nHost: 127.0.0.1:8443\r\nContent-Type: application/json\r\nAccept: application/json\r\n" +
		"Authorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}")
	if n := testing.AllocsPerRun(100, func() {
		if ok, _ := parseDirect(new(http.Request), in); !ok {
			t.Fatal("not direct")
		}
	}); n > 8 {
		t.Errorf("parsing makes %.0f allocations", n)
	}
}

// FuzzDirect: what parseDirect takes, net/http reads in the same way, to the same end.
func FuzzDirect(f *testing.F) {
	for _, s := range []string{
		post("/mcp", "{}"), post("/a", "1") + post("/b", "22"), "POST / HTTP/1.1\r\nHost: [::1]:1\r\nConnection: Keep-Alive\r\nX: a\r\nx:\tb \r\ncontent-length: 01\r\n\r\na",
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "POST /a/../b HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nX: a\r\n b\r\n\r\na",
		"POST //x/ HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", "POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nTransfer-Encoding : chunked\r\n\r\na",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := new(http.Request)
		ok, size := parseDirect(got, b)
		if !ok {
			return
		}
		in := bufio.NewReaderSize(bytes.NewReader(b), len(b)+16)
		want, err := http.ReadRequest(in)
		if err != nil {
			t.Fatalf("net/http refuses it: %v", err)
		}
		gotBody, _ := io.ReadAll(got.Body)
		wantBody, err := io.ReadAll(want.Body)
		if err != nil || !bytes.Equal(gotBody, wantBody) || in.Buffered() != len(b)-size {
			t.Errorf("body %q, want %q, %v; %d bytes left, want %d", gotBody, wantBody, err, len(b)-size, in.Buffered())
		}
		if want.Close {
			t.Error("net/http would close the connection")
		}
		got.Body, want.Body = nil, nil
		if fmt.Sprint(got.URL) != fmt.Sprint(want.URL) || got.URL.Path != want.URL.Path {
			t.Errorf("URL %v, want %v", got.URL, want.URL)
		}
		got.URL, want.URL = nil, nil
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %#v\nwant %#v", got, want)
		}
	})
}
