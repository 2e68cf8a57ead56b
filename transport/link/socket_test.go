package link

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"agentctl/manifest"
)

// socketServer is a relay on 127.0.0.1; fn gets each upgraded link.
func socketServer(t *testing.T, secure bool, fn func(Conn)) (srv *httptest.Server, roots *tls.Config) {
	t.Helper()
	up := NewUpgrader(func(r *http.Request) bool { return r.Header.Get("Origin") == "" })
	srv = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, err := Upgrade(up, w, r); err == nil {
			fn(conn)
		}
	}))
	srv.Config.ErrorLog = stdlog.New(io.Discard, "", 0) // failed TLS handshakes
	roots = &tls.Config{}
	if secure {
		srv.StartTLS()
		roots.RootCAs = x509.NewCertPool()
		roots.RootCAs.AddCert(srv.Certificate())
	} else {
		srv.Start()
	}
	t.Cleanup(srv.Close)
	return srv, roots
}

func dial(t *testing.T, url string, tc *tls.Config) *deviceConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := Dial(ctx, url, DialOptions{TLS: tc})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(CloseNormal, "normal") })
	return c.(*deviceConn)
}

// socketPair is a relay on 127.0.0.1 and a device that is linked to it.
type socketPair struct {
	*recorder            // what the device sent
	session   *Session   // the relay's end
	ended     chan error // gets the result of Session.Run
	stop      func()     // ends the device
}

// startSocketPair returns when the link is ready.
func startSocketPair(t *testing.T, secure bool, h Handler) *socketPair {
	t.Helper()
	p := &socketPair{recorder: &recorder{known: true}, ended: make(chan error, 1)}
	sessions, ready := make(chan *Session, 1), make(chan AuthOK, 1)
	srv, roots := socketServer(t, secure, func(c Conn) {
		wantUserTimeout(t, "relay", c)
		s, m, err := Accept(t.Context(), c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
		if err != nil {
			t.Error(err)
			return
		}
		p.OnAnnounce(m)
		sessions <- s
		p.ended <- s.Run(t.Context(), p.recorder)
	})
	client := NewClient(ClientOptions{
		Dial: func(ctx context.Context) (Conn, error) {
			c, err := Dial(ctx, srv.URL, DialOptions{TLS: roots})
			if err == nil {
				wantUserTimeout(t, "device", c)
			}
			return c, err
		},
		Token:      func() (string, error) { return "good", nil },
		InstanceID: testInstance,
		OnReady:    func(ok AuthOK) { ready <- ok },
		Handler:    h,
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	p.stop = func() { cancel(); <-done }
	<-ready
	p.session = <-sessions
	return p
}

// wantUserTimeout checks that the kernel ends the connection when its peer is dead.
func wantUserTimeout(t *testing.T, end string, c Conn) {
	if !hasUserTimeout(c) {
		t.Errorf("TCP_USER_TIMEOUT is not set on the side of the %s", end)
	}
}

// echoAndTicks answers system.echo with its arguments, and a subscription with a frame at once.
func echoAndTicks(ctx context.Context, n manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
	if n.Verb == manifest.VerbSubscribe {
		return ticks(time.Hour)(ctx, n, args)
	}
	return args, nil, nil
}

// TestSocketLink runs a link over TCP and over TLS: handshake, command, stream, cancel, end.
func TestSocketLink(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls=%v", secure), func(t *testing.T) {
			p := startSocketPair(t, secure, &testHandler{caps: []manifest.Capability{manifest.Echo(), manifest.Metrics()}, call: echoAndTicks})
			cmd, sub := NewID(), NewID()
			long := strings.Repeat("x", 10_000) // more than one fragment of the WebSocket library
			_ = p.session.Send(AppendCmd(nil, cmd, echoTool, []byte(`{"message":"`+long+`"}`), 0, "", Expiry{}))
			waitFor(t, func() bool { return strings.Contains(p.all(), "acked "+cmd+" true") && strings.Contains(p.all(), long) })

			_ = p.session.Send(AppendCmd(nil, sub, testSub, []byte(`{}`), 0, "", Expiry{}))
			waitFor(t, func() bool { return strings.Contains(p.all(), "metered") })
			_ = p.session.Send(Encode(TypeCmdCancel, NewID(), sub, nil))
			waitFor(t, func() bool { return strings.Contains(p.all(), "ended cancelled") })

			p.stop()
			if err := <-p.ended; CloseCode(err) != CloseNormal {
				t.Errorf("the session ended with %v, want %d", err, CloseNormal)
			}
		})
	}
}

// waitFor polls ok until it holds, at most 20 s: the kernel acts in real time.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("timed out")
		}
	}
}

func TestUpgradeRefused(t *testing.T) {
	srv, _ := socketServer(t, false, func(c Conn) { _ = c.Close(CloseNormal, "normal") })
	url := "ws" + strings.TrimPrefix(srv.URL, "http")

	_, resp, err := websocket.DefaultDialer.Dial(url, http.Header{"Origin": {"https://evil.example"}, "Sec-Websocket-Protocol": {Subprotocol}})
	if err == nil || resp == nil || resp.StatusCode != http.StatusForbidden {
		t.Errorf("a foreign Origin: %v, %v, want 403", resp, err)
	}

	ws, _, err := websocket.DefaultDialer.Dial(url, nil) // offers no subprotocol
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.Close() }()
	if _, _, err = ws.NextReader(); !websocket.IsCloseError(err, CloseUpgradeRequired) {
		t.Errorf("without the subprotocol: %v, want 4426", err)
	}

	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		up := websocket.Upgrader{}
		if c, err := up.Upgrade(w, r, nil); err == nil {
			_ = c.Close()
		}
	}))
	defer other.Close()
	if c, err := Dial(t.Context(), other.URL, DialOptions{}); err == nil || !strings.Contains(err.Error(), "does not speak") {
		t.Errorf("a server of another protocol: %v, %v", c, err)
	}
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	if _, err := Dial(t.Context(), plain.URL, DialOptions{}); err == nil || !strings.Contains(err.Error(), "HTTP 404") {
		t.Errorf("no relay: %v", err)
	}
}

// TestNoCompression: permessage-deflate is neither offered nor accepted, because it would
// defeat the size limits.
func TestNoCompression(t *testing.T) {
	offered := make(chan string, 1)
	up := NewUpgrader(nil)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		offered <- r.Header.Get("Sec-Websocket-Extensions")
		if c, err := Upgrade(up, w, r); err == nil {
			_ = c.Close(CloseNormal, "normal")
		}
	}))
	defer srv.Close()
	dial(t, srv.URL, nil)
	if got := <-offered; got != "" {
		t.Errorf("the device offers %q", got)
	}
	d := websocket.Dialer{EnableCompression: true, Subprotocols: []string{Subprotocol}}
	ws, resp, err := d.Dial("ws"+strings.TrimPrefix(srv.URL, "http"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.Close() }()
	if o, a := <-offered, resp.Header.Get("Sec-Websocket-Extensions"); !strings.Contains(o, "permessage-deflate") || a != "" {
		t.Errorf("offered %q, the relay accepts %q", o, a)
	}
}

// maskedFrame is one frame of a WebSocket client; head is its first byte.
func maskedFrame(head byte, payload string) []byte {
	b := []byte{head}
	switch n := len(payload); {
	case n < 126:
		b = append(b, 0x80|byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 0x80|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 0x80|127), uint64(n))
	}
	b = append(b, 0, 0, 0, 0) // the mask
	return append(b, payload...)
}

// TestSocketFrames: errors at the level of WebSocket frames, and the close code for each.
func TestSocketFrames(t *testing.T) {
	const fin, text, bin, cont, rsv1 = 0x80, 1, 2, 0, 0x40
	frames := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	auth := string(Encode(TypeAuth, NewID(), "", goodAuth()))
	tests := []struct {
		name string
		raw  []byte
		code int
	}{
		{"binary", maskedFrame(fin|bin, auth), CloseBadFrame},
		{"compressed", maskedFrame(fin|text|rsv1, auth), websocket.CloseProtocolError},
		{"not masked", append([]byte{fin | text, byte(2)}, "{}"...), websocket.CloseProtocolError},
		{"64 KiB and one in a frame", maskedFrame(fin|text, strings.Repeat(" ", MaxFrame+1)), CloseTooLarge},
		{"a length of 2^62", append([]byte{fin | text, 0x80 | 127, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 1<<20)...), CloseTooLarge},
		{"a length over 2^63", []byte{fin | text, 0x80 | 127, 0x80, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}, CloseTooLarge},
		{"64 KiB and one in fragments", frames(maskedFrame(text, strings.Repeat(" ", MaxFrame)), maskedFrame(cont, " "), maskedFrame(fin|cont, "")), CloseTooLarge},
		{"auth in fragments with a ping between", frames(maskedFrame(text, auth[:10]), maskedFrame(fin|9, "x"), maskedFrame(cont, ""), maskedFrame(fin|cont, auth[10:]),
			maskedFrame(fin|text, string(Encode(TypeAnnounce, NewID(), "", Announce{})))), CloseManifestInvalid},
		{"bad UTF-8", maskedFrame(fin|text, "\xff"), CloseBadFrame},
		{"close frame", maskedFrame(fin|8, "\x03\xe8so long"), CloseNormal},
		{"close frame with half a code", maskedFrame(fin|8, "\x03"), websocket.CloseProtocolError},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ended := make(chan error, 1)
			srv, _ := socketServer(t, false, func(c Conn) {
				_, _, err := Accept(t.Context(), c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
				ended <- err
			})
			c := dial(t, srv.URL, nil)
			go func() { _, _ = c.ws.NetConn().Write(tt.raw) }()
			var err error
			for err == nil {
				err = c.Read(func([]byte) error { return nil })
			}
			if CloseCode(err) != tt.code {
				t.Errorf("the device got %v, want %d", err, tt.code)
			}
			_ = c.Close(CloseNormal, "normal")
			if err := <-ended; err == nil {
				t.Error("the relay accepted the link")
			}
		})
	}
}

// readHello reads the relay's first message, which comes before any other input.
func readHello(t *testing.T, c *deviceConn) {
	t.Helper()
	if err := c.Read(func([]byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
}

// TestCloseFrameArrives: the close frame arrives although the device is writing a long
// message that the relay no longer reads.
func TestCloseFrameArrives(t *testing.T) {
	for range 20 {
		srv, _ := socketServer(t, false, func(c Conn) {
			_, _, _ = Accept(t.Context(), c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
		})
		c := dial(t, srv.URL, nil)
		readHello(t, c)
		go func() { _ = c.Write([]byte(strings.Repeat("x", 600<<10))) }()
		awaitInput(t, c) // the close frame; the relay reads no more
		var err error
		for err == nil {
			err = c.Read(func([]byte) error { return nil })
		}
		if CloseCode(err) != CloseTooLarge {
			t.Fatalf("the device got %v, want 4413", err)
		}
		srv.Close()
	}
}

// TestBrokenFraming: a device that violates RFC 6455 and goes on writing can read the close
// frame with 1002 before the connection is reset.
func TestBrokenFraming(t *testing.T) {
	srv, _ := socketServer(t, false, func(c Conn) {
		_, _, _ = Accept(t.Context(), c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
	})
	c := dial(t, srv.URL, nil)
	readHello(t, c)
	ping := maskedFrame(0x80|9, strings.Repeat("p", 126)) // one byte too long
	for range 3 {
		if _, err := c.ws.NetConn().Write(ping); err != nil {
			t.Error(err)
		}
		awaitInput(t, c) // the close frame
	}
	var err error
	for err == nil {
		err = c.Read(func([]byte) error { return nil })
	}
	if CloseCode(err) != websocket.CloseProtocolError {
		t.Errorf("the device got %v, want 1002", err)
	}
	_ = c.Close(CloseNormal, "normal")
}

// TestCloseBounded: Close waits for a peer that does not answer, for a bounded time; a link
// that was cut has no close code.
func TestCloseBounded(t *testing.T) {
	took := make(chan time.Duration, 1)
	srv, _ := socketServer(t, false, func(c Conn) {
		start := time.Now()
		_ = c.Close(CloseSuperseded, "superseded")
		_ = c.Close(CloseNormal, "normal")
		took <- time.Since(start)
	})
	c := dial(t, srv.URL, nil)
	start := time.Now()
	if err := c.Read(func([]byte) error { return nil }); CloseCode(err) != CloseSuperseded {
		t.Errorf("got %v, want 4409", err)
	}
	// The relay sends FIN at once, for a device that waits for it.
	if n, err := c.ws.NetConn().Read(make([]byte, 1)); n != 0 || err != io.EOF || time.Since(start) > lingerTimeout/2 {
		t.Errorf("after the close frame: %d bytes, %v after %v, want EOF at once", n, err, time.Since(start))
	}
	if d := <-took; d < lingerTimeout || d > 3*lingerTimeout { // the device does not close
		t.Errorf("Close took %v", d)
	}

	cut, _ := socketServer(t, false, func(c Conn) { _ = c.(*relayConn).conn.Close() })
	c = dial(t, cut.URL, nil)
	if err := c.Read(func([]byte) error { return nil }); err == nil || CloseCode(err) != 0 {
		t.Errorf("a cut link: %v", err)
	}
	_ = c.Close(CloseNormal, "normal") // returns; its error does not matter

	rude, _ := socketServer(t, false, func(c Conn) { _ = c.Close(4999, "\x1b[31mred") })
	c = dial(t, rude.URL, nil)
	if err := c.Read(func([]byte) error { return nil }); CloseCode(err) != 4999 || strings.ContainsRune(err.Error(), '\x1b') {
		t.Errorf("got %q", err)
	}
}

func TestIsUntrustedCertificate(t *testing.T) {
	srv, roots := socketServer(t, true, func(c Conn) { _ = c.Close(CloseNormal, "normal") })
	dial(t, srv.URL, roots)
	named := roots.Clone()
	named.ServerName = "another.example.org"
	old := roots.Clone()
	old.Time = func() time.Time { return time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC) }
	tests := []struct {
		name, url string
		tls       *tls.Config
		want      bool
	}{
		{"unknown authority", srv.URL, &tls.Config{RootCAs: x509.NewCertPool()}, true},
		{"another name", srv.URL, named, true},
		{"expired", srv.URL, old, true},
		{"connection refused", "https://127.0.0.1:1", roots, false},
	}
	for _, tt := range tests {
		_, err := Dial(t.Context(), tt.url, DialOptions{TLS: tt.tls})
		if err == nil || IsUntrustedCertificate(err) != tt.want {
			t.Errorf("%s: %v, untrusted %v, want %v", tt.name, err, IsUntrustedCertificate(err), tt.want)
		}
	}
}

func TestNormalizeRelayURL(t *testing.T) {
	tests := []struct{ in, want string }{ // "" is refused
		{"wss://relay.example", "wss://relay.example/v1/device/ws"},
		{"https://relay.example/", "wss://relay.example/v1/device/ws"},
		{"https://relay.example:8460", "wss://relay.example:8460/v1/device/ws"},
		{"https://relay.example/fleet", "wss://relay.example/fleet/v1/device/ws"},
		{"https://relay.example/fleet/", "wss://relay.example/fleet/v1/device/ws"},
		{"wss://relay.example/v1/device/ws", "wss://relay.example/v1/device/ws"},
		{"HTTPS://relay.example", "wss://relay.example/v1/device/ws"},
		{"http://127.0.0.1:8460", "ws://127.0.0.1:8460/v1/device/ws"},
		{"ws://127.8.9.10", "ws://127.8.9.10/v1/device/ws"},
		{"ws://localhost:8460/", "ws://localhost:8460/v1/device/ws"},
		{"http://[::1]:8460", "ws://[::1]:8460/v1/device/ws"},
		{"ws://[::ffff:127.0.0.1]", "ws://[::ffff:127.0.0.1]/v1/device/ws"},

		{"ws://relay.example", ""},
		{"http://10.0.0.1", ""},
		{"http://0.0.0.0:8460", ""},
		{"ws://[::]:8460", ""},
		{"ws://127.0.0.1.example", ""},
		{"ws://localhost.example", ""},
		{"ws://127.1", ""},
		{"ws://2130706433", ""},
		{"relay.example", ""},
		{"127.0.0.1:8460", ""},
		{"localhost:8460", ""},
		{"", ""},
		{"wss://", ""},
		{"wss://:8460", ""},
		{"ftp://relay.example", ""},
		{"wss://user:secret@relay.example", ""},
		{"ws://user:secret@relay.example", ""},
		{"ftp://user:secret@relay.example", ""},
		{"https://relay.example?token=secret", ""},
		{"https://relay.example#secret", ""},
		{"https://relay.example:port", ""},
		{"https://user:secret@relay example", ""},
	}
	for _, tt := range tests {
		got, err := NormalizeRelayURL(tt.in)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("NormalizeRelayURL(%q) = %q, %v, want %q", tt.in, got, err, tt.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("NormalizeRelayURL(%q) quotes the secret: %v", tt.in, err)
		}
	}
	if _, err := NormalizeRelayURL("ws://relay.example"); !errors.Is(err, ErrInsecure) {
		t.Errorf("got %v, want ErrInsecure", err)
	}
}

// TestProxy: the device link goes through HTTPS_PROXY. Go reads the variable once per
// process, so a child process dials.
func TestProxy(t *testing.T) {
	if target := os.Getenv("LINK_TEST_DIAL"); target != "" {
		_, err := Dial(t.Context(), target, DialOptions{TLS: &tls.Config{InsecureSkipVerify: true}}) // 127.0.0.1's certificate
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	srv, _ := socketServer(t, true, func(c Conn) { _ = c.Close(CloseNormal, "normal") })
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	asked := make(chan string, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		br := bufio.NewReader(c)
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		asked <- req.Method + " " + req.Host
		up, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			return
		}
		defer func() { _ = up.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(up, br) }()
		_, _ = io.Copy(c, up)
	}()
	cmd := exec.Command(os.Args[0], "-test.run=^TestProxy$", "-test.timeout=20s")
	cmd.Env = append(os.Environ(), "LINK_TEST_DIAL=https://relay.example", "HTTPS_PROXY=http://"+ln.Addr().String(), "NO_PROXY=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := <-asked; got != "CONNECT relay.example:443" {
		t.Errorf("the proxy was asked for %q", got)
	}
}

// TestNegotiation: both ends speak v2.1 when both know it, whatever the order of the offer, and
// v2 otherwise.
func TestNegotiation(t *testing.T) {
	relays := map[string][]string{"v2": {Subprotocol}, "v2.1": {Subprotocol21, Subprotocol}}
	for _, tt := range []struct {
		relay string
		offer []string
		want  string
	}{
		{"v2.1", nil, Subprotocol21},
		{"v2.1", []string{Subprotocol}, Subprotocol},
		{"v2.1", []string{Subprotocol, Subprotocol21}, Subprotocol21},
		{"v2", nil, Subprotocol},
		{"v2", []string{Subprotocol21}, ""},
	} {
		t.Run(fmt.Sprint(tt.relay, tt.offer), func(t *testing.T) {
			chosen := make(chan string, 1)
			up := NewUpgrader(nil)
			up.Subprotocols = relays[tt.relay]
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				conn, err := Upgrade(up, w, r)
				if err != nil {
					chosen <- ""
					return
				}
				chosen <- conn.Subprotocol()
				_ = conn.Close(CloseNormal, "normal")
			}))
			defer srv.Close()
			conn, err := Dial(t.Context(), srv.URL, DialOptions{Subprotocols: tt.offer})
			got := ""
			if err == nil {
				got = conn.Subprotocol()
				_ = conn.Close(CloseNormal, "normal")
			}
			if relay := <-chosen; got != tt.want || relay != tt.want {
				t.Errorf("the device speaks %q (%v), the relay %q, want %q", got, err, relay, tt.want)
			}
		})
	}
}

// TestSocketPings: over TCP and TLS, and through a Poller, the relay's pings carry the session
// time, and the device's pongs repeat it.
func TestSocketPings(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls=%v", secure), func(t *testing.T) {
			p, err := NewPoller()
			if err != nil {
				t.Skip(err)
			}
			pollCtx, stopPoller := context.WithCancel(t.Context())
			polled := make(chan error, 1)
			go func() { polled <- p.Run(pollCtx) }()
			owner := &endRecorder{recorder: &recorder{known: true}, closed: make(chan error, 1)}
			sessions := make(chan *Session, 1)
			srv, roots := socketServer(t, secure, func(c Conn) {
				s, _, err := Accept(t.Context(), c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
				if err != nil {
					t.Error(err)
					return
				}
				s.Start(p, owner)
				sessions <- s
			})
			c := NewClient(ClientOptions{Dial: func(ctx context.Context) (Conn, error) { return Dial(ctx, srv.URL, DialOptions{TLS: roots}) },
				Token: func() (string, error) { return "good", nil }, InstanceID: testInstance,
				Handler: &testHandler{caps: []manifest.Capability{manifest.Echo()}, call: echoArgs}})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			s := <-sessions
			measured := func() uint32 { s.mu.Lock(); defer s.mu.Unlock(); return s.pings.measured }
			waitFor(t, func() bool { return measured() == 2 }) // auth_ok, and the ping after it
			for range 3 {
				n := measured()
				s.CheckLiveness()
				waitFor(t, func() bool { return measured() == n+1 })
			}
			if err := s.Probe(ctx); err != nil || measured() != 6 {
				t.Errorf("Probe: %v, %d round trips", err, measured())
			}
			cancel()
			<-done
			<-owner.closed
			stopPoller()
			<-polled
		})
	}
}

// endRecorder is a SessionOwner that records its calls.
type endRecorder struct {
	*recorder
	closed chan error
}

func (r *endRecorder) OnClosed(err error) { r.closed <- err }
