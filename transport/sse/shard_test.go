//go:build linux

package sse

import (
	"context"
	"errors"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/transport/fanout"
)

// TestStreamsHaveNoGoroutine: an Engine serves many streams of one topic from its shards alone,
// ends those whose identity has ended, and all others when it stops.
func TestStreamsHaveNoGoroutine(t *testing.T) {
	const readers = 40
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	e := NewEngine()
	e.AddShard(nil)
	e.AddShard(nil)
	ended := make(chan error)
	go func() { ended <- e.Run(ctx) }()
	var topic fanout.Topic[[]byte]
	var streams Streams
	var opened atomic.Int64
	var revoked atomic.Bool
	ends := make(chan error, readers)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wr, err := streams.Open(w, r, Options{})
		if err != nil {
			t.Error(err)
			return
		}
		h := &sourceHandler{Stream: Stream{Writer: wr}, src: topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 64}), end: ends}
		h.Handler = h
		if opened.Add(1) == 1 {
			h.Active = func() error {
				if revoked.Load() {
					return errors.New("revoked")
				}
				return nil
			}
		}
		if err := e.Next().Add(&h.Stream); err != nil {
			t.Error(err)
		}
		h.src.Notify(h.Wake)
	})}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(NewListener(ln))
	defer srv.Close()

	before := runtime.NumGoroutine()
	var clients []*client
	for range readers {
		c := (&server{t: t, addr: ln.Addr().String()}).dial(0)
		c.head()
		clients = append(clients, c)
	}
	if !eventually(testTimeout, func() bool { return opened.Load() == readers && runtime.NumGoroutine() < before+5 }) {
		t.Errorf("%d goroutines, %d before %d streams", runtime.NumGoroutine(), before, readers)
	}
	topic.Publish(metricFrame(1))
	topic.Publish(metricFrame(2))
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			r := NewReader(c.br, ReaderOptions{})
			for range 2 {
				if ev, err := r.Next(); err != nil || ev.Type != "metric" {
					t.Errorf("got %q, %v", ev.Type, err)
				}
			}
		})
	}
	wg.Wait()
	revoked.Store(true)
	select {
	case err := <-ends:
		if CodeOf(err) != Normal {
			t.Errorf("revoked: %v", err)
		}
	case <-time.After(testTimeout):
		t.Error("the stream of a revoked identity goes on")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for range readers - 1 {
		if err := <-ends; !errors.Is(err, ErrDraining) {
			t.Errorf("at the end: %v", err)
		}
	}
}
