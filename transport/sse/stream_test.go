//go:build linux

package sse

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// clock is a time that moves when add is called.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// server is an http.Server whose handler opens a stream and hands it to the test.
type server struct {
	t       *testing.T
	addr    string
	tls     *tls.Config // client side, nil: plain
	streams *Streams
	opened  chan *Writer  // from the handler to the test
	release chan struct{} // lets all handlers return
}

// serve starts a server; run, if any, is what the handler does with its stream
// before it is closed with the code run returns. Without run the test has it.
func serve(t *testing.T, secure bool, o Options, run func(context.Context, *Writer) Code) *server {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, addr: ln.Addr().String(), streams: new(Streams), opened: make(chan *Writer, 64), release: make(chan struct{})}
	ln = NewListener(ln)
	if secure {
		s.tls = clientTLS()
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{testCert()}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	srv := &http.Server{
		BaseContext: func(net.Listener) context.Context { return ctx },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("X-Trace", "abc")
			w.Header().Set("Content-Encoding", "gzip")
			wr, err := s.streams.Open(w, r, o)
			if err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			s.opened <- wr
			if run != nil {
				wr.Close(run(r.Context(), wr))
				return
			}
			<-s.release
			wr.Close(0)
		}),
	}
	served := make(chan struct{})
	go func() { srv.Serve(ln); close(served) }()
	t.Cleanup(func() {
		close(s.release)
		cancel()
		drain, stop := context.WithTimeout(context.Background(), testTimeout)
		defer stop()
		if err := s.streams.Drain(drain); err != nil {
			t.Errorf("streams left open: %+v", s.streams.Stats())
		}
		srv.Close()
		<-served
	})
	return s
}

// client is one raw connection that has sent its request.
type client struct {
	net.Conn
	tcp *net.TCPConn
	t   *testing.T
	br  *bufio.Reader
}

// dial connects and sends the request; rcvbuf > 0 makes the receive buffer small.
func (s *server) dial(rcvbuf int) *client {
	s.t.Helper()
	d := net.Dialer{Timeout: testTimeout, Control: func(_, _ string, raw syscall.RawConn) error {
		if rcvbuf > 0 {
			raw.Control(func(fd uintptr) { syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, rcvbuf) })
		}
		return nil
	}}
	conn, err := d.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	c := &client{Conn: conn, tcp: conn.(*net.TCPConn), t: s.t}
	s.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(4 * testTimeout))
	if s.tls != nil {
		c.Conn = tls.Client(conn, s.tls)
	}
	c.br = bufio.NewReader(c.Conn)
	if _, err := io.WriteString(c, "POST /mcp/tools/call HTTP/1.1\r\nHost: relay.test\r\nAccept-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
		s.t.Fatal(err)
	}
	return c
}

// open dials and waits for the stream; the head of the response is read.
func (s *server) open(rcvbuf int) (*client, *Writer) {
	s.t.Helper()
	c := s.dial(rcvbuf)
	c.head()
	return c, <-s.opened
}

func (c *client) head() string {
	c.t.Helper()
	var head strings.Builder
	for {
		line, err := c.br.ReadString('\n')
		if err != nil {
			c.t.Fatalf("head: %v after %q", err, head.String())
		}
		if line == "\r\n" {
			return head.String()
		}
		head.WriteString(line)
	}
}

// events reads to the end.
func (c *client) events() ([]Event, error) {
	return readAll(NewReader(c.br, ReaderOptions{MaxLine: 1 << 20, MaxEvent: 1 << 20}))
}

// ackAtOnce and late make the client's kernel acknowledge at once, or 40 ms later.
func (c *client) ackAtOnce() { c.quickack(1) }
func (c *client) ackLate()   { c.quickack(0) }

func (c *client) quickack(on int) {
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		c.t.Fatal(err)
	}
	quickack(raw, on)
}

// waitAcked waits until the client's kernel has acknowledged all that it will.
func (c *client) waitAcked(w *Writer) bool {
	return eventually(50*time.Millisecond, func() bool {
		c.ackAtOnce()
		return w.raw.unacked() == 0
	})
}

func TestHeadAndBytes(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		s := serve(t, secure, Options{}, nil)
		c := s.dial(0)
		head := c.head()
		w := <-s.opened
		for _, want := range []string{
			"HTTP/1.1 200 OK\r\n", "Content-Type: text/event-stream; charset=utf-8\r\n", "Cache-Control: no-store\r\n",
			"X-Accel-Buffering: no\r\n", "Connection: close\r\n", "X-Trace: abc\r\n", "Date: ",
		} {
			if !strings.Contains(head, want) {
				t.Errorf("head lacks %q:\n%s", want, head)
			}
		}
		for _, bad := range []string{"Content-Encoding", "Transfer-Encoding", "Content-Length"} {
			if strings.Contains(head, bad) {
				t.Errorf("head has %s:\n%s", bad, head)
			}
		}
		want := string(metricFrame(1)) + "event: ping\ndata: {}\n\n" + string(metricFrame(2)) + "event: close\ndata: {\"code\":4503,\"reason\":\"device_offline\"}\n\n"
		for _, err := range []error{send(w, metricFrame(1)), w.Ping(), send(w, metricFrame(2)), w.Close(DeviceOffline)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		got, err := io.ReadAll(c.br)
		if string(got) != want || err != nil {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
		if err := send(w, metricFrame(3)); !errors.Is(err, ErrClosed) {
			t.Errorf("frame after close: %v", err)
		}
		if err := w.Ping(); !errors.Is(err, ErrClosed) {
			t.Errorf("ping after close: %v", err)
		}
		if err := w.Check(); !errors.Is(err, ErrClosed) {
			t.Errorf("check after close: %v", err)
		}
		st := s.streams.Stats()
		if st.Open != 0 || st.Opened != 1 || st.Frames != 2 || st.Pings != 1 || st.Bytes != uint64(len(want)) || st.Closes[DeviceOffline] != 1 || st.Closes[Normal] != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

func TestFrameIsWhole(t *testing.T) {
	s := serve(t, false, Options{}, nil)
	_, w := s.open(0)
	for _, b := range []string{"", "\n", "event: x\ndata: 1\n", "data: 1"} {
		if err := send(w, []byte(b)); !errors.Is(err, ErrFrame) {
			t.Errorf("%q: %v, want ErrFrame", b, err)
		}
	}
	if st := s.streams.Stats(); st.Frames != 0 {
		t.Errorf("stats %+v", st)
	}
}

// RFC-0009 §6: a reader that stops is cut when its kernel took no more and three
// frames wait; what it finds when it comes back ends with the close event.
func TestStalledReader(t *testing.T) {
	t.Parallel()
	plainAndTLS(t, func(t *testing.T, secure bool) {
		now := newClock()
		s := serve(t, secure, Options{Now: now.Now}, nil)
		c, w := s.open(2304)
		n := 0
		for ; n < 300; now.add(time.Second) {
			c.waitAcked(w)
			if err := send(w, metricFrame(n+1)); err != nil {
				if !errors.Is(err, ErrBackpressure) {
					t.Fatal(err)
				}
				break
			}
			n++
		}
		t.Logf("cut after %d frames", n)
		if n <= 4 || n > 60 {
			t.Errorf("cut after %d frames: a buffer of 2304 bytes should take about 10, and 3 wait", n)
		}
		if len(w.acks.frames) != 3 {
			t.Errorf("%d frames wait, want 3", len(w.acks.frames))
		}
		w.Close(CodeOf(ErrBackpressure))
		if st := s.streams.Stats(); st.Lingering != 1 || st.Closes[Backpressure] != 1 {
			t.Errorf("stats %+v", st)
		}
		got, err := c.events()
		wantStream(t, got, err, n, Backpressure)
		c.Close()
		if !eventually(testTimeout, func() bool { return s.streams.Stats().Lingering == 0 }) {
			t.Error("the socket still lingers although everything was fetched")
		}
	})
}

// RFC-0009 §7, fixture 2: at 60 s a frame the 90 s rule is the first to fire, whatever
// pings do.
func TestIdleReader(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		now := newClock()
		s := serve(t, secure, Options{Now: now.Now, MaxBurst: 1000, UnackedGrace: time.Hour}, nil)
		c, w := s.open(2304)
		n := 0
		for ; n < 40; n++ { // four times what fits
			if err := send(w, metricFrame(n+1)); err != nil {
				t.Fatal(err)
			}
		}
		if c.waitAcked(w) {
			t.Fatal("the window is not full")
		}
		w.refresh(w.now())
		w.acks.grace = time.Second
		w.acks.frames = w.acks.frames[:0] // the fill is not what is tried
		start := now.Now()
		for now.Now().Sub(start) < 300*time.Second {
			now.add(time.Second)
			if now.Now().Sub(start)%(60*time.Second) == 0 {
				n++
				if err := send(w, metricFrame(n)); err != nil {
					t.Fatalf("after %v: %v", now.Now().Sub(start), err)
				}
			}
			if err := w.Check(); err != nil {
				if !errors.Is(err, ErrIdle) {
					t.Fatal(err)
				}
				break
			}
		}
		if after := now.Now().Sub(start); after < 85*time.Second || after > 95*time.Second {
			t.Errorf("idle after %v, want 90 s", after)
		}
		if st := s.streams.Stats(); st.Pings != 1 {
			t.Errorf("%d pings written to a stalled reader, want 1 pending", st.Pings)
		}
		w.Close(CodeOf(ErrIdle))
		got, err := c.events()
		wantStream(t, got, err, n, IdleTimeout)
	})
}

// An acknowledged ping is progress; a reader of a silent stream is never idle.
func TestPingIsProgress(t *testing.T) {
	now := newClock()
	s := serve(t, false, Options{Now: now.Now}, nil)
	c, w := s.open(0)
	for range 300 {
		now.add(time.Second)
		if err := w.Check(); err != nil {
			t.Fatal(err)
		}
		if !eventually(testTimeout, func() bool { return c.waitAcked(w) }) {
			t.Fatal("a prompt kernel does not acknowledge")
		}
	}
	if st := s.streams.Stats(); st.Pings != 12 {
		t.Errorf("%d pings in 300 s, want 12", st.Pings)
	}
	w.Close(Normal)
	got, err := c.events()
	wantStream(t, got, err, 0, Normal)
}
