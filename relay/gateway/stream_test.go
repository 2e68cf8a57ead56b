package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/transport/sse"
)

// pipeListener is an in-memory listener for synctest.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func newPipeListener() *pipeListener { return &pipeListener{make(chan net.Conn), make(chan struct{})} }

func (p *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipeListener) Close() error {
	select {
	case <-p.done:
	default:
		close(p.done)
	}
	return nil
}
func (p *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }
func (p *pipeListener) dial() net.Conn {
	here, there := net.Pipe()
	p.conns <- there
	return here
}

// runSynctest runs f with a served gateway in a synctest bubble.
func runSynctest(t *testing.T, o Options, f func(t *testing.T, g *Gateway, ln *pipeListener)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		ln := newPipeListener()
		go func() { ended <- g.Serve(ctx, ln) }()
		synctest.Wait()
		f(t, g, ln)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// subscribeFor opens a stream and reads for d; it returns what came.
func subscribeFor(t *testing.T, ln *pipeListener, query string, d time.Duration, while func()) []sse.Event {
	t.Helper()
	conn := ln.dial()
	s := subscribe(t, conn, query)
	_ = conn.SetDeadline(time.Now().Add(d))
	var got []sse.Event
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			ev, err := s.read.Next()
			if err != nil {
				return
			}
			got = append(got, ev)
		}
	}()
	if while != nil {
		while()
	}
	<-ended
	_ = conn.Close()
	return got
}

func TestHeartbeat(t *testing.T) {
	tests := []struct {
		every time.Duration
		d     time.Duration
		want  int
	}{{0, 35 * time.Second, 2}, {200 * time.Millisecond, 1100 * time.Millisecond, 5}}
	for _, tt := range tests {
		runSynctest(t, Options{Heartbeat: tt.every}, func(t *testing.T, g *Gateway, ln *pipeListener) {
			time.Sleep(7 * time.Second) // heartbeats count from the opening of the stream
			got := subscribeFor(t, ln, "?topics=nothing", tt.d, func() { g.Emit("", "other", 1) })
			if len(got) != tt.want {
				t.Errorf("every %s: %d events in %s, want %d heartbeats", tt.every, len(got), tt.d, tt.want)
			}
			for _, ev := range got {
				if ev.Type != "heartbeat" || ev.LastEventID != "" || !bytes.HasPrefix(ev.Data, []byte(`{"ts":`)) {
					t.Errorf("event %+v", ev)
				}
			}
			if st := g.Stats(); st.RingEvents != 1 || st.Ingested != 1 || st.Delivered != 0 {
				t.Errorf("heartbeats are counted or kept: %+v", st)
			}
		})
	}
}

// TestIdentityEnds: a stream is cut when its identity ends, within 5 s.
func TestIdentityEnds(t *testing.T) {
	var over atomic.Bool
	who := authFunc(func(*http.Request) (Identity, error) {
		return Identity{Tenant: "t", Scopes: scopes{ScopeSubscribe}, Active: func() error {
			if over.Load() {
				return errors.New("revoked")
			}
			return nil
		}}, nil
	})
	runSynctest(t, Options{Identities: who}, func(t *testing.T, g *Gateway, ln *pipeListener) {
		s := subscribe(t, ln.dial(), "", "Authorization", "Bearer x")
		_ = s.conn.SetDeadline(time.Now().Add(time.Hour))
		time.AfterFunc(10*time.Second, func() { over.Store(true) })
		begin := time.Now()
		if ev, err := s.read.Next(); err == nil {
			t.Errorf("event %+v", ev)
		}
		if took := time.Since(begin); took < 10*time.Second || took > 15*time.Second {
			t.Errorf("cut after %s", took)
		}
		synctest.Wait()
		if n := g.Stats().Subscribers; n != 0 {
			t.Errorf("%d clients", n)
		}
	})
}

// TestSlowClient: a client that does not read loses events, which are counted, gets a reset
// when it reads again, and can resume; others lose nothing.
func TestSlowClient(t *testing.T) {
	g := start(t, Options{Ring: 2000})
	slow, live := g.open(""), g.open("?topics=big")
	slow.limitReceiveBuffer()
	data := `"` + strings.Repeat("x", 32<<10) + `"`
	n := 0
	for ; g.Stats().Dropped < 50; n++ {
		g.post("big", data)
		live.want("big", data)
		if n > 1500 {
			t.Fatal("nothing is dropped")
		}
	}
	eventually(t, "all is given or dropped", func() bool { st := g.Stats(); return st.Delivered+st.Dropped == 2*uint64(n) })
	if st := g.Stats(); st.Ingested != uint64(n) || st.Subscribers != 2 {
		t.Errorf("stats %+v, %d posted", st, n)
	}
	// It reads again: what was kept for it, then the reset, then live events.
	given := n - int(g.Stats().Dropped)
	for range given {
		slow.want("big", data)
	}
	last := slow.read.LastEventID()
	reset := slow.next()
	want := fmt.Sprintf(`{"requested":%s,"oldest":%d,"dropped":%d}`, last, g.Stats().LastID+1, n-given)
	if reset.Type != "gateway/reset" || string(reset.Data) != want {
		t.Fatalf("after the gap: %s %s, want %s", reset.Type, reset.Data, want)
	}
	g.post("after", "1")
	slow.want("after", "1")
	// It resumes where its gap began.
	again := g.open("", "Last-Event-ID", last)
	for range n - given {
		again.want("big", data)
	}
	again.want("after", "1")
	if g.post("after", "2"); true {
		again.want("after", "2")
		slow.want("after", "2")
	}
	if st := g.Stats(); st.Dropped != uint64(n-given) {
		t.Errorf("%d dropped, want %d", st.Dropped, n-given)
	}
}

// TestStallTimeout: a client that takes nothing for five minutes is cut.
func TestStallTimeout(t *testing.T) {
	runSynctest(t, Options{}, func(t *testing.T, g *Gateway, ln *pipeListener) {
		s := subscribe(t, ln.dial(), "")
		g.Emit("", "a", 1) // a pipe has no buffer: already this write rests
		time.Sleep(4 * time.Minute)
		if n := g.Stats().Subscribers; n != 1 {
			t.Fatalf("%d clients after 4 minutes", n)
		}
		time.Sleep(90 * time.Second)
		if n := g.Stats().Subscribers; n != 0 {
			t.Errorf("%d clients after 5.5 minutes", n)
		}
		_ = s.conn.Close()
	})
}

// TestServeAgain: stopping the gateway ends the streams with FIN, and it can serve again.
func TestServeAgain(t *testing.T) {
	g := start(t, Options{})
	id := g.post("a", "1")
	s := g.open("")
	if err := g.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.read.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v, want EOF", err)
	}
	if st := g.Stats(); st.Subscribers != 0 {
		t.Errorf("%d clients", st.Subscribers)
	}
	again := serve(t, g.Gateway)
	if next := again.post("a", "2"); next != id+1 {
		t.Errorf("id %d after %d", next, id)
	}
	again.open("", "Last-Event-ID", fmt.Sprint(id)).want("a", "2")
	// A new gateway has higher ids, and resets a client with an old one.
	other := start(t, Options{})
	if first := other.post("b", "1"); first <= id+1 {
		t.Errorf("id %d of a new life after %d", first, id)
	}
	other.open("", "Last-Event-ID", fmt.Sprint(id)).want("gateway/reset", fmt.Sprintf(`{"requested":%d,"oldest":%d}`, id, other.Stats().LastID), "b", "1")
}

func TestListen(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	_, err = Listen(Options{Listen: ln.Addr().String()})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "MCP_SSE_PORT") {
		t.Errorf("a taken port: %v", err)
	}
	tests := []struct {
		o    Options
		want string // the address, or "" for an error
	}{
		{Options{}, "127.0.0.1:39300"},
		{Options{Listen: ":40000"}, "127.0.0.1:40000"},
		{Options{SubscribeToken: "t"}, ":39300"},
		{Options{IngestToken: "t"}, "127.0.0.1:39300"},
		{Options{Listen: "127.0.0.1:1", SubscribeToken: "t"}, "127.0.0.1:1"},
		{Options{Listen: "[::1]:1"}, "[::1]:1"},
		{Options{Listen: "0.0.0.0:1"}, ""},
		{Options{Listen: "0.0.0.0:1", IngestToken: "t"}, ""},
		{Options{Listen: "0.0.0.0:1", Insecure: true}, "0.0.0.0:1"},
		{Options{Listen: "nonsense"}, ""},
	}
	for _, tt := range tests {
		g, err := New(tt.o)
		if (err != nil) != (tt.want == "") || (err == nil && g.opts.Listen != tt.want) {
			t.Errorf("%+v: %v, want %q", tt.o, err, tt.want)
		}
	}
}
