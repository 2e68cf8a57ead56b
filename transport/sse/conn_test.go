//go:build linux

package sse

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"agentctl/transport/fanout"
	"agentctl/transport/netpoll"
)

// largeFrame is a frame that a kernel does not take many of.
func largeFrame(n int) []byte {
	b, err := AppendEvent(nil, "metric", fmt.Appendf(nil, `{"n":%d,"pad":"%s"}`, n, strings.Repeat("x", 20_000)))
	if err != nil {
		panic(err)
	}
	return b
}

// fillBuffers fills every buffer between a stream and its client with whole frames, up to
// the one that is refused, and returns how many went in.
func fillBuffers(t *testing.T, w *Writer) int {
	t.Helper()
	shrinkSendBuffer(t, w.raw)
	for n := 0; n < 60; n++ {
		switch err := send(w, largeFrame(n+1)); {
		case errors.Is(err, ErrBackpressure):
			if len(w.raw.pending) == 0 || len(w.raw.pending) > maxPending {
				t.Errorf("%d bytes rest, want some and at most %d", len(w.raw.pending), maxPending)
			}
			return n
		case err != nil:
			t.Fatal(err)
		}
	}
	t.Fatal("60 frames of 20 kB went into small buffers")
	return 0
}

// A peer that takes nothing does not hold a write forever that has no deadline.
func TestUserTimeout(t *testing.T) {
	t.Parallel()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	ln := NewListener(tcp)
	ln.userTimeout = 300 * time.Millisecond
	client, err := net.Dial("tcp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(10*time.Second, func() { t.Error("the write still waits"); conn.Close() })
	defer late.Stop()
	for b := make([]byte, 64<<10); err == nil; {
		_, err = conn.Write(b)
	}
	conn.Close()
}

// A frame the kernel takes only in part is never torn: the remainder is sent first when
// there is space, also through TLS, also when the stream closes.
func TestPartialFrame(t *testing.T) {
	t.Parallel()
	plainAndTLS(t, func(t *testing.T, secure bool) {
		s := serve(t, secure, Options{}, nil)
		t.Run("then close", func(t *testing.T) {
			c, w := s.open(4096)
			n := fillBuffers(t, w)
			if err := w.Ping(); err != nil || s.streams.Stats().Pings != 0 {
				t.Errorf("ping to a full connection: %v, %d written", err, s.streams.Stats().Pings)
			}
			read := make(chan struct{})
			go func() {
				defer close(read)
				c.tcp.SetReadBuffer(1 << 20) // a window of 4096 bytes crawls
				got, err := c.events()
				wantStream(t, got, err, n, Backpressure)
			}()
			w.Close(Backpressure)
			<-read
		})
		t.Run("then go on", func(t *testing.T) {
			c, w := s.open(4096)
			n := fillBuffers(t, w)
			read := make(chan struct{})
			go func() {
				defer close(read)
				c.tcp.SetReadBuffer(1 << 20) // a window of 4096 bytes crawls
				got, err := c.events()
				wantStream(t, got, err, n+1, Normal)
			}()
			if !eventually(testTimeout, func() bool { return w.Check() == nil && !w.hasPending }) {
				t.Error("Check does not send the rest")
			}
			if err := send(w, largeFrame(n+1)); err != nil {
				t.Error(err)
			}
			w.Close(Normal)
			<-read
		})
		t.Run("and nobody reads", func(t *testing.T) {
			c, w := s.open(4096)
			fillBuffers(t, w)
			w.Close(Backpressure)
			if !eventually(testTimeout, func() bool { return s.streams.Stats().Open == 0 }) {
				t.Error("the stream is not given up")
			}
			got, err := c.events()
			if len(got) == 0 || got[len(got)-1].Type != "metric" || errors.Is(err, io.EOF) {
				t.Errorf("%d events, then %v: a torn stream must not look like a whole one", len(got), err)
			}
		})
	})
}

// Unexpected input must not make the end of a stream a reset, with Run
// watching the client before or without.
func TestUnreadInput(t *testing.T) {
	ended, goOn := make(chan struct{}), make(chan struct{})
	runs := map[string]func(context.Context, *Writer) Code{
		"after Run": func(ctx context.Context, w *Writer) Code {
			var topic fanout.Topic[[]byte]
			sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{})
			topic.Publish(metricFrame(1))
			topic.Close(nil)
			if err := runStream(ctx, w, sub); !errors.Is(err, fanout.ErrClosed) {
				t.Error(err)
			}
			ended <- struct{}{}
			<-goOn
			return Normal
		},
		"without Run": func(ctx context.Context, w *Writer) Code {
			if err := send(w, metricFrame(1)); err != nil {
				t.Error(err)
			}
			ended <- struct{}{}
			<-goOn
			return Normal
		},
	}
	for name, run := range runs {
		t.Run(name, func(t *testing.T) {
			s := serve(t, false, Options{}, run)
			c, _ := s.open(0)
			<-ended
			if _, err := c.Write(make([]byte, 5000)); err != nil {
				t.Fatal(err)
			}
			goOn <- struct{}{}
			got, err := c.events()
			wantStream(t, got, err, 1, Normal)
		})
	}
}

// recorder keeps a copy of what is read.
type recorder struct {
	net.Conn
	in bytes.Buffer
}

func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	r.in.Write(b[:n])
	return n, err
}

// A TLS stream ends with close_notify, so that a truncated stream is recognized.
func TestTLSEndMark(t *testing.T) {
	s := serve(t, true, Options{}, nil)
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	rec := &recorder{Conn: conn}
	cfg := clientTLS()
	cfg.MaxVersion = tls.VersionTLS12 // shows the type of a record
	c := tls.Client(rec, cfg)
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: relay.test\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	(<-s.opened).Close(Normal)
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Fatal(err)
	}
	last := byte(0)
	for b := rec.in.Bytes(); len(b) >= 5; b = b[min(len(b), 5+int(b[3])<<8+int(b[4])):] {
		last = b[0]
	}
	if last != 21 {
		t.Errorf("the last record has type %d, want 21 (alert)", last)
	}
}

func TestFrameDoesNotAllocate(t *testing.T) {
	s := serve(t, false, Options{}, nil)
	c, w := s.open(0)
	go io.Copy(io.Discard, c)
	frame := metricFrame(1)
	w.acks.frames = make([]frameMark, 0, 64) // grows to this and stays
	if n := testing.AllocsPerRun(30, func() {
		if err := send(w, frame); err != nil {
			t.Fatal(err)
		}
	}); n != 0 && !raceEnabled { // with it, pools forget
		t.Errorf("%v allocations a frame, want 0", n)
	}
}

func TestListenerCounts(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := NewListener(tcp)
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	conn := rawConn(tls.Server(accepted, &tls.Config{}))
	if conn == nil || conn != accepted || rawConn(c) != nil {
		t.Fatalf("rawConn gives %v", conn)
	}
	if _, ok := conn.NetConn().(*net.TCPConn); !ok {
		t.Errorf("NetConn is %T", conn.NetConn())
	}
	io.WriteString(conn, "12345")
	if conn.Written() != 5 {
		t.Errorf("written %d, want 5", conn.Written())
	}
	if !eventually(testTimeout, func() bool { n, err := netpoll.NewSocket(conn.Conn).Unacked(); return n == 0 && err == nil }) {
		t.Error("5 bytes are not acknowledged")
	}
	// What is read by nobody fills the client's window and then stays.
	lots := make([]byte, 16<<20)
	conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := conn.Write(lots); err == nil || conn.Written() != int64(n)+5 {
		t.Errorf("wrote %d, %v; written %d", n, err, conn.Written())
	}
	if n, err := netpoll.NewSocket(conn.Conn).Unacked(); n == 0 || err != nil {
		t.Errorf("unacked %d, %v; written %d", n, err, conn.Written())
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if netpoll.NewSocket(a) != nil {
		t.Error("a pipe has a socket")
	}
}

// noHijack is a ResponseWriter that cannot give its connection away, as HTTP/2's.
type noHijack struct{ http.ResponseWriter }

func TestOpenRefused(t *testing.T) {
	var s Streams
	r := httptest.NewRequest("POST", "/", nil)
	r2 := r.Clone(context.Background())
	r2.Proto, r2.ProtoMajor, r2.ProtoMinor = "HTTP/2.0", 2, 0
	tests := []struct {
		name string
		r    *http.Request
		o    Options
		want error
	}{
		{"no connection", r, Options{}, http.ErrNotSupported},
		{"HTTP/2", r2, Options{}, errors.ErrUnsupported},
	}
	for _, tt := range tests {
		rec := httptest.NewRecorder()
		if _, err := s.Open(noHijack{rec}, tt.r, tt.o); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if rec.Body.Len() > 0 || len(rec.Header()) > 0 {
			t.Errorf("%s: something was answered", tt.name)
		}
	}
	if st := s.Stats(); st.Open != 0 || st.Opened != 0 {
		t.Errorf("stats %+v", st)
	}
}

// TLS that does not run on a Listener cannot be counted: that is a mistake of the
// server's author, said at the first stream.
func TestTLSWithoutListener(t *testing.T) {
	var s Streams
	failed := make(chan error, 1)
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := s.Open(w, r, Options{})
		failed <- err
	}))
	defer srv.Close()
	if _, err := srv.Client().Get(srv.URL); err == nil {
		t.Error("got an answer")
	}
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "sse.NewListener") {
		t.Errorf("got %v", err)
	}
	if st := s.Stats(); st.Open != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestHeadCannotBeSplit(t *testing.T) {
	got := responseHead(http.Header{"X-A": {"1\r\nX-B: 2"}, "Content-Length": {"5"}, "Transfer-Encoding": {"chunked"}, "Connection": {"keep-alive"}})
	if bytes.Contains(got, []byte("\nX-B")) || bytes.Contains(got, []byte("chunked")) || bytes.Contains(got, []byte("Content-Length")) || bytes.Contains(got, []byte("keep-alive")) {
		t.Errorf("head is %q", got)
	}
	if !bytes.HasSuffix(got, []byte("\r\n\r\n")) || bytes.Count(got, []byte("\r\n\r\n")) != 1 {
		t.Errorf("head is %q", got)
	}
}
