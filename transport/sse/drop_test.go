package sse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pollEvents records what a Poller reports.
type pollEvents struct{ writable, closed chan struct{} }

func newPollEvents() pollEvents {
	return pollEvents{make(chan struct{}, 64), make(chan struct{}, 64)}
}

func (e pollEvents) OnWritable() { e.writable <- struct{}{} }
func (e pollEvents) OnClosed()   { e.closed <- struct{}{} }

// openDrop serves one stream of policy Drop and returns it with the client's connection.
func openDrop(t *testing.T, streams *Streams, o Options) (*Writer, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Policy = Drop
	opened := make(chan *Writer, 1)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Extra", "kept")
		wr, err := streams.Open(w, r, o)
		if err != nil {
			t.Error(err)
		}
		opened <- wr
	})}
	go func() { _ = srv.Serve(NewListener(ln)) }()
	t.Cleanup(func() { _ = srv.Close() })
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testTimeout))
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return <-opened, conn
}

// flushUntilOpen flushes whenever the poller reports space, until nothing waits.
func flushUntilOpen(t *testing.T, w *Writer, writable <-chan struct{}) (dropped uint64) {
	t.Helper()
	for w.Blocked() {
		select {
		case <-writable:
		case <-time.After(testTimeout):
			t.Fatal("the poller does not report space")
		}
		n, err := w.Flush()
		if err != nil {
			t.Fatal(err)
		}
		dropped += n
	}
	return dropped
}

// TestDrop: Send never waits; what does not fit is written once there is space; the bytes
// arrive whole and in order; what exceeds the queue is dropped and counted.
func TestDrop(t *testing.T) {
	p, err := NewPoller()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()

	var streams Streams
	budget := NewBudget(0, NewBudget(1<<20, nil))
	w, conn := openDrop(t, &streams, Options{MaxQueued: 100 << 10, Budget: budget})
	poll := newPollEvents()
	polled, err := p.Add(w, poll)
	if err != nil || !polled {
		t.Skipf("no poller here: %v", err)
	}
	var sent bytes.Buffer
	dropped := 0
	for i := 0; dropped < 5; i++ {
		b := fmt.Appendf(nil, "data: %d %s\n\n", i, strings.Repeat("x", 32<<10))
		begin := time.Now()
		taken, err := w.Send(b, 1)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("a send took %s", took)
		}
		if taken {
			sent.Write(b)
		} else {
			dropped++
		}
		if sent.Len() > 64<<20 {
			t.Fatal("the kernel takes everything")
		}
	}
	if taken, err := w.Send([]byte(": heartbeat\n\n"), 0); taken || err != nil {
		t.Errorf("a heartbeat behind queued events: %v %v", taken, err)
	}
	if n, err := w.Flush(); n != 0 || err != nil || !w.Blocked() {
		t.Errorf("flush to a full connection: %d dropped, %v, blocked %v", n, err, w.Blocked())
	}
	if n := budget.Used(); n < 100<<10-33<<10 || n > 100<<10+33<<10 {
		t.Errorf("%d bytes wait", n)
	}
	for len(poll.writable) > 0 {
		<-poll.writable // from before it was full
	}
	received := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(conn)
		received <- b
	}()
	if n := flushUntilOpen(t, w, poll.writable); n != 5 {
		t.Errorf("%d events reported as dropped, want 5", n)
	}
	p.Remove(w)
	w.Close(0)
	head, body, _ := bytes.Cut(<-received, []byte("\r\n\r\n"))
	if !bytes.Equal(body, sent.Bytes()) {
		t.Errorf("%d bytes arrived, %d were sent", len(body), sent.Len())
	}
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 OK\r\n")) || !bytes.Contains(head, []byte("X-Extra: kept")) {
		t.Errorf("head %s", head)
	}
	if st := streams.Stats(); st.Bytes != uint64(sent.Len()) || st.Dropped != 5 || st.Open != 0 || st.Closes[0] != 1 {
		t.Errorf("stats %+v", st)
	}

	w, conn = openDrop(t, &streams, Options{Budget: budget})
	poll = newPollEvents()
	if _, err := p.Add(w, poll); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	select {
	case <-poll.closed:
	case <-time.After(testTimeout):
		t.Error("the client closed and the poller does not report it")
	}
	_ = conn.Close()
	if !eventually(testTimeout, func() bool { _, err := w.Send([]byte("data: x\n\n"), 1); return errors.Is(err, ErrPeerClosed) }) {
		t.Error("send to a closed connection succeeds")
	}
	p.Remove(w)
	w.Close(0)
	if _, err := w.Send([]byte("data: x\n\n"), 1); !errors.Is(err, ErrClosed) {
		t.Errorf("send to a closed writer: %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
	if _, err := p.Add(w, poll); !errors.Is(err, ErrClosed) {
		t.Errorf("Add after the end: %v", err)
	}
	if n := budget.Used(); n != 0 {
		t.Errorf("%d bytes stay reserved", n)
	}
}

// TestDropExhaustedBudget: a stream for which nothing may wait any more ends.
func TestDropExhaustedBudget(t *testing.T) {
	shared := NewBudget(64<<10, nil)
	w, _ := openDrop(t, new(Streams), Options{Budget: NewBudget(0, shared)})
	if w.Preload(make([]byte, 65<<10), 1) {
		t.Error("more is queued than the budget has")
	}
	if !w.Preload(make([]byte, 60<<10), 1) {
		t.Error("less than the budget is refused")
	}
	other := NewBudget(10<<10, shared)
	if other.reserve(5<<10) || shared.Used() != 60<<10+QueueOverhead {
		t.Errorf("a part exceeds the whole: %d bytes", shared.Used())
	}
	w.Close(0)
	if shared.Used() != 0 || other.Used() != 0 {
		t.Errorf("%d and %d bytes stay reserved", shared.Used(), other.Used())
	}
}

// TestDropDoesNotAllocate: an event to a subscriber that keeps up costs no garbage.
func TestDropDoesNotAllocate(t *testing.T) {
	w, conn := openDrop(t, new(Streams), Options{})
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	event := metricFrame(1)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := w.Send(event, 1); err != nil {
			t.Fatal(err)
		}
	}); n != 0 && !raceEnabled { // with it, pools forget
		t.Errorf("%v allocations an event, want 0", n)
	}
	w.Close(0)
}

// pipeWriter is a Writer of policy Drop over one end of a net.Pipe.
func pipeWriter(conn net.Conn) *Writer {
	raw := &Conn{Conn: conn}
	o := Options{Policy: Drop}
	o.setDefaults()
	s := new(Streams)
	_ = s.add()
	return newWriter(s, raw, raw, &o)
}

// TestDropWithoutSocket: Send waits a moment at most, and the end is reported all the
// same.
func TestDropWithoutSocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		w := pipeWriter(there)
		p, err := NewPoller()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Run(ctx) }()
		poll := newPollEvents()
		if polled, err := p.Add(w, poll); polled || err != nil {
			t.Errorf("polled %v, %v", polled, err)
		}
		begin := time.Now()
		_, err = w.Send([]byte("data: 1\n\n"), 1)
		if took := time.Since(begin); !w.Blocked() || err != nil || took > 10*time.Millisecond {
			t.Errorf("a send that nobody takes: blocked %v, %v after %s", w.Blocked(), err, took)
		}
		if err := w.SendWait(ctx, []byte("data: 2\n\n"), 1, 5*time.Second); !errors.Is(err, ErrIdle) {
			t.Errorf("a send that waits for a stalled reader: %v", err)
		}
		time.Sleep(time.Second)
		if err := w.Check(); err != nil {
			t.Errorf("check: %v", err)
		}
		time.Sleep(90 * time.Second)
		if err := w.Check(); !errors.Is(err, ErrIdle) {
			t.Errorf("check after 90 s without progress: %v", err)
		}
		go func() { _, _ = io.ReadFull(here, make([]byte, 9)) }()
		if err := w.flushUnsent(time.Second); w.unsent > 0 || err != nil {
			t.Errorf("flush: %d unsent, %v", w.unsent, err)
		}
		_ = here.Close()
		<-poll.closed
		p.Remove(w)
		w.Close(0)
		// One that is still watched when the Poller ends is let go of.
		_, other := net.Pipe()
		if _, err := p.Add(pipeWriter(other), newPollEvents()); err != nil {
			t.Error(err)
		}
		cancel()
		<-ended
	})
}
