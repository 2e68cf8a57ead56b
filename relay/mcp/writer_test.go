package mcp

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

// slowWriter is a connection whose reader takes a while, or for ever.
type slowWriter struct {
	header   http.Header
	pace     time.Duration // for one write; 0: never done before the deadline
	mu       sync.Mutex
	deadline time.Time
	got      []string
	flushes  int
}

func (s *slowWriter) Header() http.Header { return s.header }
func (s *slowWriter) WriteHeader(int)     {}
func (s *slowWriter) Flush()              { s.flushes++ }

func (s *slowWriter) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deadline = t
	return nil
}

func (s *slowWriter) Write(b []byte) (int, error) {
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if s.pace > 0 && time.Since(start) >= s.pace {
			s.got = append(s.got, string(b))
			return len(b), nil
		}
		s.mu.Lock()
		over := !s.deadline.IsZero() && !time.Now().Before(s.deadline)
		s.mu.Unlock()
		if over {
			return 0, context.DeadlineExceeded
		}
	}
}

func TestQueued(t *testing.T) {
	tests := []struct {
		name   string
		pace   time.Duration
		writes int
		size   int
		cut    bool
		within time.Duration // until the cut
	}{
		{"prompt reader", time.Millisecond, 500, 100, false, 0},
		{"slow reader", 10 * time.Second, 5, 100, false, 0},
		{"stalled reader, few bytes", 0, 3, 100, true, writeWait},
		{"stalled reader, many events", 0, maxQueued + 2, 10, true, 0},
		{"stalled reader, many bytes", 0, 10, maxQueuedBytes / 8, true, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &slowWriter{header: http.Header{}, pace: tt.pace}
				ctx, cancel := context.WithCancel(t.Context())
				var cuts atomic.Int64
				q := &queued{w: w, rc: http.NewResponseController(w), cut: cancel, lost: func() { cuts.Add(1) }, last: time.Now()}
				start := time.Now()
				for i := range tt.writes {
					_, err := q.Write([]byte(fmt.Sprintf("%0*d", tt.size, i)))
					if err != nil && !tt.cut {
						t.Fatal(err)
					}
					if time.Since(start) > 0 {
						t.Fatal("Write waited for the reader")
					}
					if tt.pace == time.Millisecond {
						synctest.Wait()
						time.Sleep(20 * time.Millisecond)
						start = time.Now()
					}
				}
				if tt.cut {
					<-ctx.Done()
					if got := time.Since(start); got > tt.within+time.Second {
						t.Errorf("cut after %v, want %v", got, tt.within)
					}
				} else {
					time.Sleep(time.Duration(tt.writes) * tt.pace * 2)
					synctest.Wait()
				}
				q.close()
				if n := cuts.Load(); (n == 1) != tt.cut {
					t.Errorf("%d cuts, want cut %v", n, tt.cut)
				}
				if !tt.cut && len(w.got) != tt.writes {
					t.Errorf("%d of %d writes arrived", len(w.got), tt.writes)
				}
				if _, err := q.Write([]byte("x")); err == nil {
					t.Error("wrote to a closed stream")
				}
				w.mu.Lock()
				defer w.mu.Unlock()
				if !w.deadline.IsZero() {
					t.Error("the connection keeps a deadline")
				}
			})
		})
	}
}

func TestPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &slowWriter{header: http.Header{}, pace: time.Nanosecond}
		q := &queued{w: w, rc: http.NewResponseController(w), cut: func() {}, lost: func() {}, last: time.Now()}
		for range 100 { // 100 s of sweeps
			time.Sleep(time.Second)
			q.ping(time.Now())
			synctest.Wait()
		}
		q.close()
		if len(w.got) != 4 && len(w.got) != 3 {
			t.Errorf("%d pings in 100 s, want one in 25 s", len(w.got))
		}
	})
}

// TestStalledReader: of fifty readers in both eras one never reads. The others get every
// notification, and the stalled one is cut.
func TestStalledReader(t *testing.T) {
	e := newEnv(t, Options{}, func(e *env) {
		e.conn = func(ctx context.Context, c net.Conn) context.Context {
			_ = c.(*net.TCPConn).SetWriteBuffer(4096) // so that a stall is soon felt
			return ctx
		}
	})
	e.load(newBoard("default", nodeA))
	addr := e.srv.Listener.Addr().String()
	const readers = 50
	var streams []<-chan map[string]any
	listen := `{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{` + modernMeta + `,"notifications":{"toolsListChanged":true,"resourcesListChanged":true}}}`
	for i := range readers {
		c := dial(t, addr)
		if i == 0 {
			_ = c.c.(*net.TCPConn).SetReadBuffer(4096)
			id := e.initialize("")
			if _, err := fmt.Fprintf(c.c, "GET /mcp HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\nMcp-Protocol-Version: 2025-11-25\r\nMcp-Session-Id: %s\r\n\r\n", addr, id); err != nil {
				t.Fatal(err)
			}
			continue // and never reads
		}
		if i%2 == 0 {
			streams = append(streams, c.get("default/anybody", e.initialize("")))
			continue
		}
		s := c.stream("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\n", listen)
		wait(t, "acknowledgement", s)
		streams = append(streams, s)
	}
	until(t, "all streams", func() bool { return e.listeners("default") == readers })
	e.h.mu.RLock()
	ten := e.h.tenants["default"]
	e.h.mu.RUnlock()
	var slowest time.Duration
	rounds := 0
	for ; e.h.Stats().StalledStreams == 0; rounds++ {
		if rounds > 5000 {
			t.Fatal("the stalled reader is never cut")
		}
		start := time.Now()
		ten.notify(t.Context(), kernel.Change{Tools: true, Resources: true}, nil)
		for i, s := range streams {
			for range 2 {
				if m := wait(t, fmt.Sprintf("notification of reader %d in round %d", i, rounds), s); m["method"] == nil {
					t.Fatalf("reader %d got %v", i, m)
				}
			}
		}
		slowest = max(slowest, time.Since(start))
	}
	until(t, "end of the stalled stream", func() bool { return e.h.Stats().Streams == readers-1 })
	if s := e.h.Stats(); s.StalledStreams != 1 {
		t.Errorf("stats %+v, want one cut", s)
	}
	t.Logf("cut after %d rounds; the slowest round of the others took %v", rounds, slowest)
}
