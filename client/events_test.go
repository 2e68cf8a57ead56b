package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/gateway"
)

func newGateway(t *testing.T, o Options, path string) *Gateway {
	t.Helper()
	g, err := NewGateway(o, path)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// The paths and the port are the gateway's own.
func TestGatewayAddress(t *testing.T) {
	e, err := gateway.FromEnv(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	if StreamPath != gateway.StreamPath || IngestPath != gateway.IngestPath || "http://127.0.0.1:"+GatewayPort+IngestPath != e.IngestURL {
		t.Errorf("the client knows %s, %s and %s", StreamPath, IngestPath, GatewayPort)
	}
	for in, want := range map[string]string{"http://h:1": StreamPath, "http://h:1/": StreamPath, "http://h:1/own": "/own"} {
		if g := newGateway(t, Options{URL: in}, StreamPath); g.url.Path != want {
			t.Errorf("%s: path %s, want %s", in, g.url.Path, want)
		}
	}
}

// The silence that a tail accepts follows from the gateway's own heartbeats.
func TestHeartbeat(t *testing.T) {
	var tl tail
	for _, b := range []string{`{"ts":1000}`, `no`, `{"ts":1000}`} {
		tl.heartbeat([]byte(b))
	}
	if tl.maxSilence != 0 {
		t.Errorf("after one heartbeat it is %s", tl.maxSilence)
	}
	tl.heartbeat([]byte(`{"ts":16000}`))
	if tl.maxSilence != 50*time.Second {
		t.Errorf("got %s, want 50s", tl.maxSilence)
	}
	if tl.heartbeat([]byte(`{"ts":5}`)); tl.maxSilence != 50*time.Second {
		t.Errorf("a clock set back changes it to %s", tl.maxSilence)
	}
}

// Tail returns nil when ctx ends after an answer, and ctx's error before one.
func TestTailContext(t *testing.T) {
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hung" {
			<-release
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, ": stream start id=8\n\nid: 9\nevent: a\ndata: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	defer srv.Close()
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := newGateway(t, Options{URL: srv.URL + "/hung"}, StreamPath).Tail(ctx, TailOptions{}); err != context.DeadlineExceeded {
		t.Errorf("/hung: got %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	onEvent := func(Event) error { cancel(); return nil }
	if err := newGateway(t, Options{URL: srv.URL + "/open"}, StreamPath).Tail(ctx, TailOptions{OnEvent: onEvent}); err != nil || ctx.Err() != context.Canceled {
		t.Errorf("/open: got %v, %v", err, ctx.Err())
	}
}

func TestPublish(t *testing.T) {
	status, body := http.StatusAccepted, `{"id":7}`
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	defer srv.Close()
	g := newGateway(t, Options{URL: srv.URL}, IngestPath)
	if id, err := g.Publish(t.Context(), "a", []byte("1")); err != nil || id != "7" {
		t.Errorf("got %s, %v", id, err)
	}
	status = http.StatusOK
	var broken *ProtocolError
	if _, err := g.Publish(t.Context(), "a", []byte("1")); !errors.As(err, &broken) {
		t.Errorf("got %v", err)
	}
	status = http.StatusTooManyRequests
	var busy *Error
	if _, err := g.Publish(t.Context(), "a", []byte("1")); !errors.As(err, &busy) || busy.Status != status {
		t.Errorf("got %v", err)
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("15 s without %s", what)
		}
	}
}

// A tail that did not read for so long that the gateway dropped events asks for them again:
// in the end it has each event once, in order.
func TestTailCatchesUp(t *testing.T) {
	const events = 800 // of 8 KiB: more than the sockets and the gateway's queue hold
	server, err := gateway.New(gateway.Options{Listen: "127.0.0.1:0", Ring: 2 * events, Shards: 1})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan string, 1)
	server.OnReady(func(addr string) { ready <- addr })
	wg.Go(func() { _ = server.Run(ctx) })
	defer wg.Wait()
	defer cancel()

	g := newGateway(t, Options{URL: "http://" + <-ready}, StreamPath)
	small := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { setReceiveBuffer(fd, 16<<10) })
	}}
	g.http.Transport.(*http.Transport).DialContext = small.DialContext
	open := make(chan struct{})
	var ids []string
	var notices strings.Builder
	var tailErr error
	var tailing sync.WaitGroup
	tailing.Go(func() {
		tailErr = g.Tail(t.Context(), TailOptions{
			OnNotice: func(n string) { fmt.Fprintln(&notices, n) },
			OnEvent: func(e Event) error {
				<-open
				if ids = append(ids, e.ID); len(ids) == events {
					return ErrStop
				}
				return nil
			},
		})
	})
	waitFor(t, "the tail", func() bool { return server.Stats().Subscribers == 1 })
	first := server.Stats().LastID + 1
	for n := range uint64(events) {
		server.Emit("default", "t", strings.Repeat("x", 8<<10))
		waitFor(t, "free queue space", func() bool { st := server.Stats(); return st.EmitLost == 0 && st.Delivered+st.Dropped+16 >= n })
	}
	waitFor(t, "a loss", func() bool { return server.Stats().Dropped > 0 })
	close(open)
	tailing.Wait()
	if tailErr != nil || !strings.Contains(notices.String(), "asking for them again") {
		t.Errorf("%v, notices %q", tailErr, notices.String())
	}
	if len(ids) != events {
		t.Fatalf("%d events, want %d", len(ids), events)
	}
	for i, id := range ids {
		if want := strconv.FormatUint(first+uint64(i), 10); id != want {
			t.Fatalf("event %d has the id %s, want %s", i+1, id, want)
		}
	}
}
