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

// dropHandler records what a Shard reports.
type dropHandler struct {
	Stream
	dropped chan uint64
	end     chan error
}

// addDrop hands w over to a shard. The stream is closed at its end.
func addDrop(s *Shard, w *Writer) (*dropHandler, error) {
	h := &dropHandler{Stream: Stream{Writer: w}, dropped: make(chan uint64, 64), end: make(chan error, 1)}
	h.Handler = h
	return h, s.Add(&h.Stream)
}

func (h *dropHandler) OnReady(dropped uint64) error {
	if dropped > 0 {
		h.dropped <- dropped
	}
	return nil
}

func (h *dropHandler) OnEnd(err error) {
	h.Close(0)
	h.end <- err
}

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

// dropEngine is an Engine with one shard, and what its Run returns.
type dropEngine struct {
	*Shard
	stop  context.CancelFunc
	ended chan error
}

// startDropEngine runs an engine until stop.
func startDropEngine() *dropEngine {
	ctx, cancel := context.WithCancel(context.Background())
	e := NewEngine()
	d := &dropEngine{e.AddShard(nil), cancel, make(chan error, 1)}
	go func() { d.ended <- e.Run(ctx) }()
	return d
}

// fill sends events of 32 KiB to a client that reads nothing, until so many were dropped. It returns
// the bytes of the others.
func fill(t *testing.T, w *Writer, wantDropped int) (taken []byte) {
	t.Helper()
	const enough = 64 << 20 // no socket buffers this much
	for i, dropped := 0, 0; dropped < wantDropped; i++ {
		event := fmt.Appendf(nil, "data: %d %s\n\n", i, strings.Repeat("x", 32<<10))
		begin := time.Now()
		ok, err := w.Send(event, 1)
		if took := time.Since(begin); err != nil || took > time.Second {
			t.Fatalf("event %d: %v after %s, want no error and no wait", i, err, took)
		}
		if !ok {
			dropped++
		} else if taken = append(taken, event...); len(taken) > enough {
			t.Fatal("the kernel takes everything")
		}
	}
	return taken
}

// TestDrop: events for a client that does not read wait in the queue, up to its bound, and further
// ones are dropped. Once the client reads, what was taken arrives whole and in order, and the number
// of dropped events is reported.
func TestDrop(t *testing.T) {
	const maxQueued, dropped = 100 << 10, 5
	var streams Streams
	budget := NewBudget(0, NewBudget(1<<20, nil))
	w, conn := openDrop(t, &streams, Options{MaxQueued: maxQueued, Budget: budget})
	taken := fill(t, w, dropped)
	if n := budget.Used(); n < maxQueued-33<<10 || n > maxQueued+33<<10 { // one event more or less
		t.Errorf("%d bytes wait, want about %d", n, maxQueued)
	}
	if ok, err := w.Send([]byte(": heartbeat\n\n"), 0); ok || err != nil {
		t.Errorf("a heartbeat behind queued events: taken %v, %v; want it dropped", ok, err)
	}
	if n, err := w.Flush(); n != 0 || err != nil || !w.Blocked() {
		t.Errorf("flush to a full connection: reports %d dropped, %v, blocked %v; want it blocked", n, err, w.Blocked())
	}

	received := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(conn)
		received <- b
	}()
	e := startDropEngine()
	h, _ := addDrop(e.Shard, w)
	if n := <-h.dropped; n != dropped {
		t.Errorf("%d events reported as dropped, want %d", n, dropped)
	}
	_ = conn.(*net.TCPConn).CloseWrite()
	if err := <-h.end; !errors.Is(err, ErrPeerClosed) {
		t.Errorf("the stream ended with %v, want ErrPeerClosed", err)
	}
	head, body, _ := bytes.Cut(<-received, []byte("\r\n\r\n"))
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 OK\r\n")) || !bytes.Contains(head, []byte("X-Extra: kept")) {
		t.Errorf("the head is %s, want 200 with the handler's X-Extra", head)
	}
	if !bytes.Equal(body, taken) {
		t.Errorf("%d bytes arrived, want the %d that were taken", len(body), len(taken))
	}
	if st := streams.Stats(); st.Bytes != uint64(len(taken)) || st.Dropped != dropped || st.Open != 0 || st.Closes[0] != 1 {
		t.Errorf("stats %+v, want %d bytes, %d dropped and one close", st, len(taken), dropped)
	}
	if n := budget.Used(); n != 0 {
		t.Errorf("%d bytes stay reserved", n)
	}
	e.stop()
	<-e.ended
}

// TestDropEndOfConnection: Send fails once the client has gone, and once the writer is closed.
func TestDropEndOfConnection(t *testing.T) {
	w, conn := openDrop(t, new(Streams), Options{})
	_ = conn.Close()
	if !eventually(testTimeout, func() bool { return errors.Is(send(w, metricFrame(1)), ErrPeerClosed) }) {
		t.Error("a send to a client that has gone succeeds, want ErrPeerClosed")
	}
	w.Close(0)
	if err := send(w, metricFrame(1)); !errors.Is(err, ErrClosed) {
		t.Errorf("a send after Close: %v, want ErrClosed", err)
	}
}

// TestDropEngineEnds: the end of an engine ends its streams, and it accepts no other ones.
func TestDropEngineEnds(t *testing.T) {
	e := startDropEngine()
	w, _ := openDrop(t, new(Streams), Options{})
	h, _ := addDrop(e.Shard, w)
	e.stop()
	if err := <-e.ended; err != nil {
		t.Errorf("Run returned %v, want nil", err)
	}
	if err := <-h.end; !errors.Is(err, ErrDraining) {
		t.Errorf("the open stream ended with %v, want ErrDraining", err)
	}
	if _, err := addDrop(e.Shard, w); !errors.Is(err, ErrDraining) {
		t.Errorf("a stream that was added after the end: %v, want ErrDraining", err)
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
		ctx, cancel := context.WithCancel(t.Context())
		e, ended := NewEngine(), make(chan error)
		shard := e.AddShard(nil)
		go func() { ended <- e.Run(ctx) }()
		begin := time.Now()
		_, err := w.Send([]byte("data: 1\n\n"), 1)
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
		h, _ := addDrop(shard, w)
		time.Sleep(time.Second)
		if _, err := io.ReadFull(here, make([]byte, 18)); err != nil {
			t.Errorf("the rest is not tried again: %v", err)
		}
		_ = here.Close()
		if err := <-h.end; !errors.Is(err, ErrPeerClosed) {
			t.Errorf("the client closed: %v", err)
		}
		_, other := net.Pipe() // is still open when the Engine ends
		h, _ = addDrop(shard, pipeWriter(other))
		cancel()
		<-ended
		if err := <-h.end; !errors.Is(err, ErrDraining) {
			t.Errorf("a stream that was open at the end: %v", err)
		}
	})
}
