package link

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"agentctl/manifest"
	"agentctl/transport/sse"
)

// inputConn is a connection with fixed input, read in chunks of a given size.
type inputConn struct {
	net.Conn
	in    []byte
	piece int
	out   bytes.Buffer
}

func (c *inputConn) Read(b []byte) (int, error) {
	if len(c.in) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), c.piece)], c.in)
	c.in = c.in[n:]
	return n, nil
}

func (c *inputConn) Write(b []byte) (int, error)      { return c.out.Write(b) }
func (c *inputConn) Close() error                     { return nil }
func (c *inputConn) SetDeadline(time.Time) error      { return nil }
func (c *inputConn) SetReadDeadline(time.Time) error  { return nil }
func (c *inputConn) SetWriteDeadline(time.Time) error { return nil }

// hijacked lets the library upgrade an inputConn.
type hijacked struct {
	http.ResponseWriter
	conn net.Conn
}

func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return h.conn, bufio.NewReadWriter(bufio.NewReader(h.conn), bufio.NewWriter(h.conn)), nil
}

// observed is what a Conn reported while it read an input.
type observed struct {
	msgs  []string
	pings int
	code  int // of the peer's close frame
}

func readAll(c Conn) (h observed, err error) {
	c.OnPing(func(bool, []byte) { h.pings++ })
	for err == nil {
		err = c.Read(func(msg []byte) error { h.msgs = append(h.msgs, string(msg)); return nil })
	}
	h.code = CloseCode(err)
	return h, err
}

// FuzzRelayConn: for any input, in chunks of any size, relayConn reports the same messages,
// pings and close codes as the library, and writes the same answers.
func FuzzRelayConn(f *testing.F) {
	const fin, text = 0x80, 1
	for _, b := range [][]byte{
		maskedFrame(fin|text, "hello"),
		append(maskedFrame(text, "a"), append(maskedFrame(fin|9, "ping"), maskedFrame(fin, "b")...)...),
		append(maskedFrame(fin|10, ""), maskedFrame(fin|8, "\x03\xe8bye")...),
		{fin | text, 0x85, 1, 2, 3, 4, 'h' ^ 1, 'e' ^ 2, 'l' ^ 3, 'l' ^ 4, 'o' ^ 1},
		maskedFrame(fin|text, strings.Repeat("x", 70000)),
		maskedFrame(fin|text, strings.Repeat("y", 300)),
		{fin | text, 2, '{', '}'}, {fin | text | 0x40, 0x80, 0, 0, 0, 0}, {fin | 3, 0x80, 0, 0, 0, 0},
		maskedFrame(fin|8, "\x03\xed"), maskedFrame(fin|8, "\x03\xe8\xff"), maskedFrame(fin|8, "\x03\xf5"), maskedFrame(fin|8, "\x03\xf6"), maskedFrame(fin|8, "x"), maskedFrame(fin|8, ""), maskedFrame(8, ""),
		maskedFrame(fin, "x"), append(maskedFrame(text, "a"), maskedFrame(text, "b")...),
	} {
		f.Add(b, byte(0))
		f.Add(b, byte(1))
	}
	f.Fuzz(func(t *testing.T, raw []byte, piece byte) {
		size := int(piece)
		if size == 0 {
			size = 1 << 20
		}
		ours := &inputConn{in: slices.Clone(raw), piece: size}
		got, err := readAll(newRelayConn(ours))
		if err == nil {
			t.Fatal("Read at the end of the input returned no error")
		}

		theirs := &inputConn{in: slices.Clone(raw), piece: size}
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		for k, v := range map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-Websocket-Version": "13", "Sec-Websocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="} {
			req.Header.Set(k, v)
		}
		ws, upErr := (&websocket.Upgrader{ReadBufferSize: 512}).Upgrade(hijacked{httptest.NewRecorder(), theirs}, req, nil)
		if upErr != nil {
			t.Fatal(upErr)
		}
		theirs.out.Reset()
		want, wantErr := readAll(newDeviceConn(ws))
		if errors.Is(err, ErrTooLarge) && !errors.Is(wantErr, ErrTooLarge) {
			return // relayConn checks a length before the payload has arrived
		}
		if err == protocolError("half a close code") {
			if end := ours.out.Bytes(); !bytes.Contains(end, []byte("\x03\xeahalf a close code")) || want.code != websocket.CloseNoStatusReceived {
				t.Fatalf("answered %q", end)
			}
			return // the library treats it as no code
		}
		if errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(wantErr, io.ErrUnexpectedEOF) {
			err, wantErr = nil, nil // relayConn parses a header when it is complete
			ours.out.Reset()
			theirs.out.Reset()
		}
		if !slices.Equal(got.msgs, want.msgs) || got.pings != want.pings || got.code != want.code {
			t.Fatalf("got %+v (%v), the library %+v (%v)", got, err, want, wantErr)
		}
		for _, e := range []error{ErrNotText, ErrTooLarge, io.ErrUnexpectedEOF} {
			if errors.Is(err, e) != errors.Is(wantErr, e) {
				t.Fatalf("ended with %v, the library with %v", err, wantErr)
			}
		}
		mine, lib := ours.out.Bytes(), theirs.out.Bytes()
		var v protocolError
		if errors.As(err, &v) { // the texts differ
			mine, lib = mine[:min(len(mine), 4)], lib[:min(len(lib), 4)]
			if i := bytes.LastIndex(mine, []byte{0x88}); i >= 0 && i+1 < len(mine) {
				mine, lib = mine[:i+1], lib[:min(len(lib), i+1)]
			}
		}
		if !bytes.Equal(mine, lib) {
			t.Fatalf("answered %q, the library %q", ours.out.Bytes(), theirs.out.Bytes())
		}
	})
}

// ownerRecorder is a SessionOwner that records its calls.
type ownerRecorder struct {
	recorder
	closedWith chan error
}

func (k *ownerRecorder) OnClosed(err error) { k.closedWith <- err }

// startedLink is a device's raw connection to a relay that has started its session.
type startedLink struct {
	conn  net.Conn // the device's, through TLS if there is any
	tcp   *net.TCPConn
	s     *Session
	owner *ownerRecorder
}

// startLinks serves links with a Poller, on a listener like the relay's.
func startLinks(t *testing.T, secure bool) (open func() *startedLink) {
	t.Helper()
	p, err := NewPoller()
	if err != nil {
		t.Skipf("no poller here: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	polled := make(chan error, 1)
	go func() { polled <- p.Run(ctx) }()

	sessions := make(chan *startedLink)
	up := NewUpgrader(nil)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := Upgrade(up, w, r)
		if err != nil {
			return
		}
		s, m, err := Accept(ctx, c, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 1000 }})
		if err != nil {
			t.Error(err)
			return
		}
		k := &ownerRecorder{recorder: recorder{known: true}, closedWith: make(chan error, 2)}
		k.OnAnnounce(m)
		s.Start(p, k)
		sessions <- &startedLink{s: s, owner: k}
	}))
	srv.Listener = sse.NewListener(srv.Listener)
	if secure {
		srv.StartTLS()
	} else {
		srv.Start()
	}
	t.Cleanup(func() {
		cancel()
		<-polled
		srv.Close()
	})
	return func() *startedLink {
		tcp, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tcp.Close() })
		conn := tcp
		if secure {
			conn = tls.Client(tcp, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // a test's certificate
		}
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		caps := encodeJSON([]manifest.Capability{manifest.Echo(), manifest.Metrics()})
		hello := "GET " + Path + " HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" +
			"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: " + Subprotocol + "\r\n\r\n"
		if _, err := io.WriteString(conn, hello); err != nil {
			t.Fatal(err)
		}
		br := bufio.NewReader(conn)
		if res, err := http.ReadResponse(br, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatal(res, err)
		}
		_, _ = conn.Write(maskedFrame(0x81, string(Encode(TypeAuth, NewID(), "", goodAuth()))))
		_, _ = conn.Write(maskedFrame(0x81, string(Encode(TypeAnnounce, NewID(), "", Announce{ManifestVersion: manifest.Version, ManifestSHA256: manifest.Hash(caps), Capabilities: caps}))))
		l := <-sessions
		l.conn, l.tcp = conn, tcp.(*net.TCPConn)
		for range 3 { // hello, auth_ok, announce_ack
			readFrame(t, br)
		}
		return l
	}
}

// readFrame reads one unmasked frame.
func readFrame(t *testing.T, r io.Reader) (op byte, payload []byte) {
	t.Helper()
	var head [4]byte
	if _, err := io.ReadFull(r, head[:2]); err != nil {
		t.Fatal(err)
	}
	n := int(head[1])
	if n == 126 {
		if _, err := io.ReadFull(r, head[2:]); err != nil {
			t.Fatal(err)
		}
		n = int(head[2])<<8 | int(head[3])
	}
	payload = make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		t.Fatal(err)
	}
	return head[0] & 0x0f, payload
}

func plainAndTLS(t *testing.T, fn func(t *testing.T, secure bool)) {
	t.Run("plain", func(t *testing.T) { fn(t, false) })
	t.Run("TLS", func(t *testing.T) { fn(t, true) })
}

// isIdle reports whether no goroutine reads a polled link.
func isIdle(s *Session) bool { return s.readerState.Load()&(polled|reading) == polled }

// write sends bytes to the relay as they are.
func (l *startedLink) write(t *testing.T, b []byte) {
	t.Helper()
	if _, err := l.conn.Write(b); err != nil {
		t.Fatal(err)
	}
}

// close ends the link from the relay's side, and checks that the device gets the reason.
func (l *startedLink) close(t *testing.T) {
	t.Helper()
	l.s.Close(CloseDraining, "draining")
	if op, p := readFrame(t, l.conn); op != opClose || string(p[2:]) != "draining" {
		t.Errorf("the device got opcode %d %q, want a close frame with the reason", op, p)
	}
	_ = l.tcp.Close()
	if err := <-l.owner.closedWith; CloseCode(err) != CloseDraining {
		t.Errorf("OnClosed got %v, want %d", err, CloseDraining)
	}
}

// TestIdleLinkHasNoGoroutine: 20 more links need no goroutine more once they are silent.
func TestIdleLinkHasNoGoroutine(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		open := startLinks(t, secure)
		var links []*startedLink
		for range 5 { // until what is made once has been made
			links = append(links, open())
		}
		for _, l := range links {
			waitFor(t, func() bool { return isIdle(l.s) })
		}
		before := runtime.NumGoroutine()
		for range 20 {
			links = append(links, open())
		}
		waitFor(t, func() bool { return runtime.NumGoroutine() <= before+5 }) // 5: of the HTTP server, for a moment
		for _, l := range links {
			l.close(t)
		}
	})
}

// TestPolledLinkReadsPieces: a message is read whether it arrives byte by byte or with 39 others at once,
// and the link is idle again afterwards.
func TestPolledLinkReadsPieces(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		id := NewID()
		ack := maskedFrame(0x81, string(Encode(TypeCmdAck, NewID(), id, CmdAck{OK: true, Result: []byte(`{"x":1}`)})))
		for _, b := range ack {
			l.write(t, []byte{b})
		}
		waitFor(t, func() bool { return strings.Count(l.owner.all(), id) == 1 && isIdle(l.s) })
		l.write(t, slices.Repeat(ack, 40))
		waitFor(t, func() bool { return strings.Count(l.owner.all(), id) == 41 && isIdle(l.s) })
		l.close(t)
	})
}

// TestPolledLinkPings: the relay pings although the deadline of an earlier write has passed.
func TestPolledLinkPings(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		for range 2 {
			_ = l.s.conn.(*relayConn).conn.SetWriteDeadline(time.Now().Add(-time.Second))
			for range 2 {
				l.s.CheckLiveness()
				if op, _ := readFrame(t, l.conn); op != opPing {
					t.Fatalf("CheckLiveness wrote opcode %d, want a ping", op)
				}
			}
		}
		l.close(t)
	})
}

// TestPolledLinkAnswersPings: a ping gets its pong, and a pong shows that the device is alive.
func TestPolledLinkAnswersPings(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		l.write(t, maskedFrame(0x80|opPing, "are you there"))
		if op, p := readFrame(t, l.conn); op != opPong || string(p) != "are you there" {
			t.Errorf("a ping is answered with opcode %d %q, want a pong with the same payload", op, p)
		}
		lastRead := l.s.lastReadAt.Load()
		l.write(t, maskedFrame(0x80|opPong, ""))
		waitFor(t, func() bool { return l.s.lastReadAt.Load() > lastRead })
		l.close(t)
	})
}

// TestPolledLinkEndsOnce: OnClosed is called once, however a device leaves an idle link. With
// AGENTCTL_SLOW=1 each way is tried 50 times.
func TestPolledLinkEndsOnce(t *testing.T) {
	times := 4
	if slow() {
		times = 50
	}
	plainAndTLS(t, func(t *testing.T, secure bool) {
		open := startLinks(t, secure)
		tests := []struct {
			name  string
			leave func(l *startedLink)
			code  int
		}{
			{"a close frame", func(l *startedLink) { _, _ = l.conn.Write(maskedFrame(0x88, "\x03\xe8bye")) }, CloseNormal},
			{"FIN", func(l *startedLink) { _ = l.tcp.CloseWrite() }, 0},
			{"RST", func(l *startedLink) { _ = l.tcp.SetLinger(0); _ = l.tcp.Close() }, 0},
			{"a message, then FIN at once", func(l *startedLink) {
				_, _ = l.conn.Write(maskedFrame(0x81, string(Encode(TypeCmdAck, NewID(), NewID(), CmdAck{OK: true, Result: []byte(`{"last":1}`)}))))
				_ = l.tcp.CloseWrite()
			}, 0},
			{"half a frame, then FIN", func(l *startedLink) { _, _ = l.conn.Write([]byte{0x81}); _ = l.tcp.CloseWrite() }, 0},
			{"a bad frame", func(l *startedLink) { _, _ = l.conn.Write(maskedFrame(0x81, "{")); _ = l.tcp.CloseWrite() }, CloseBadFrame},
			{"closed from here", func(l *startedLink) { l.s.Close(CloseSuperseded, "superseded"); _ = l.tcp.CloseWrite() }, CloseSuperseded},
		}
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				for i := range times {
					l := open()
					if i%2 == 0 {
						waitFor(t, func() bool { return isIdle(l.s) })
					}
					tt.leave(l)
					select {
					case err := <-l.owner.closedWith:
						if CloseCode(err) != tt.code {
							t.Errorf("closed with %v, want %d", err, tt.code)
						}
					case <-time.After(10 * time.Second):
						t.Fatal("OnClosed was not called")
					}
					if tt.name == "a message, then FIN at once" && !strings.Contains(l.owner.all(), "acked") {
						t.Error("the message was not read")
					}
					_ = l.tcp.Close()
					l.s.scheduleRead(0)
					if len(l.owner.closedWith) > 0 {
						t.Error("OnClosed was called twice")
					}
				}
			})
		}
	})
}
