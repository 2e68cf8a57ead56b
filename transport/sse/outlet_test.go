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

// told records what a Poller says.
type told struct{ writable, gone chan struct{} }

func newTold() told { return told{make(chan struct{}, 64), make(chan struct{}, 64)} }

func (w told) OnWritable() { w.writable <- struct{}{} }
func (w told) OnClosed()   { w.gone <- struct{}{} }

// detached serves one stream as an Outlet and returns it with the client's connection.
func detached(t *testing.T, wrap func(net.Listener) net.Listener) (*Outlet, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	out := make(chan *Outlet, 1)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Extra", "kept")
		o, err := Detach(w, r)
		if err != nil {
			t.Error(err)
		}
		out <- o
	})}
	go func() { _ = srv.Serve(wrap(ln)) }()
	t.Cleanup(func() { _ = srv.Close() })
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patient))
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return <-out, conn
}

// TestOutlet: offers never wait, what does not fit is written once there is room, the
// bytes arrive whole and in order, and the peer's end is told.
func TestOutlet(t *testing.T) {
	o, conn := detached(t, func(ln net.Listener) net.Listener { return NewListener(ln) })
	p, err := NewPoller()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	w := newTold()
	tells, err := p.Add(o, w)
	if err != nil || !tells {
		t.Skipf("no poller here: %v", err)
	}
	var sent bytes.Buffer
	full := false
	for i := 0; !full; i++ {
		b := fmt.Appendf(nil, "data: %d %s\n\n", i, strings.Repeat("x", 32<<10))
		begin := time.Now()
		if full, err = o.Offer(b); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("an offer took %s", took)
		}
		sent.Write(b)
		if sent.Len() > 64<<20 {
			t.Fatal("the kernel takes everything")
		}
	}
	if full, err := o.Flush(0); err != nil || !full {
		t.Errorf("flush of a full outlet: %v %v", full, err)
	}
	for len(w.writable) > 0 {
		<-w.writable // from before it was full
	}
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(conn)
		got <- b
	}()
	for full {
		select {
		case <-w.writable:
		case <-time.After(patient):
			t.Fatal("nobody tells that there is room")
		}
		if full, err = o.Flush(0); err != nil {
			t.Fatal(err)
		}
	}
	p.Remove(o)
	o.Close()
	head, body, _ := bytes.Cut(<-got, []byte("\r\n\r\n"))
	if !bytes.Equal(body, sent.Bytes()) {
		t.Errorf("%d bytes arrived, %d were sent", len(body), sent.Len())
	}
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 OK\r\n")) || !bytes.Contains(head, []byte("X-Extra: kept")) {
		t.Errorf("head %s", head)
	}

	o, conn = detached(t, func(ln net.Listener) net.Listener { return NewListener(ln) })
	w = newTold()
	if _, err := p.Add(o, w); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	select {
	case <-w.gone:
	case <-time.After(patient):
		t.Error("the client went and nobody tells")
	}
	p.Remove(o)
	o.Close()
	if _, err := o.Offer([]byte("data: x\n\n")); !errors.Is(err, ErrPeerClosed) {
		t.Errorf("offer to a closed outlet: %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
	if _, err := p.Add(o, w); !errors.Is(err, ErrClosed) {
		t.Errorf("Add after the end: %v", err)
	}
}

// TestOutletPipe: without a socket an offer waits a moment at most, and the end is told
// all the same.
func TestOutletPipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		raw := &Conn{Conn: there}
		raw.takeOver(0)
		o := &Outlet{conn: raw, raw: raw}
		p, err := NewPoller()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Run(ctx) }()
		w := newTold()
		if told, err := p.Add(o, w); told || err != nil {
			t.Errorf("told %v, %v", told, err)
		}
		begin := time.Now()
		full, err := o.Offer([]byte("data: 1\n\n"))
		if took := time.Since(begin); !full || err != nil || took > 10*time.Millisecond {
			t.Errorf("an offer that nobody takes: %v %v after %s", full, err, took)
		}
		go func() { _, _ = io.ReadFull(here, make([]byte, 9)) }()
		if full, err := o.Flush(time.Second); full || err != nil {
			t.Errorf("flush: %v %v", full, err)
		}
		_ = here.Close()
		<-w.gone
		p.Remove(o)
		o.Close()
		// One that is still watched when the Poller ends is let go of.
		_, other := net.Pipe()
		raw = &Conn{Conn: other}
		raw.takeOver(0)
		if _, err := p.Add(&Outlet{conn: raw, raw: raw}, newTold()); err != nil {
			t.Error(err)
		}
		cancel()
		<-ended
	})
}
