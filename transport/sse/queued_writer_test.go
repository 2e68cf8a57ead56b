package sse

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// queueOptions are those of an MCP stream.
func queueOptions(onCut func()) QueueOptions {
	return QueueOptions{
		MaxWrites: 1024, MaxBytes: 256 << 10, WriteTimeout: 15 * time.Second, DrainTimeout: time.Second,
		PingInterval: 25 * time.Second, OnCut: onCut,
	}
}

// slowResponseWriter is a connection whose reader is slow, or never reads.
type slowResponseWriter struct {
	header   http.Header
	pace     time.Duration // for one write; 0: never done before the deadline
	mu       sync.Mutex
	deadline time.Time
	got      []string
	flushes  int
}

func (s *slowResponseWriter) Header() http.Header { return s.header }
func (s *slowResponseWriter) WriteHeader(int)     {}
func (s *slowResponseWriter) Flush()              { s.flushes++ }

func (s *slowResponseWriter) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deadline = t
	return nil
}

func (s *slowResponseWriter) Write(b []byte) (int, error) {
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

func TestQueuedWriter(t *testing.T) {
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
		{"stalled reader, few bytes", 0, 3, 100, true, 15 * time.Second},
		{"stalled reader, many events", 0, 1024 + 2, 10, true, 0},
		{"stalled reader, many bytes", 0, 10, (256 << 10) / 8, true, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &slowResponseWriter{header: http.Header{}, pace: tt.pace}
				ctx, cancel := context.WithCancel(t.Context())
				var cuts atomic.Int64
				q := NewQueuedWriter(w, queueOptions(func() { cuts.Add(1); cancel() }))
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
				q.Close()
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

func TestQueuedWriterPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &slowResponseWriter{header: http.Header{}, pace: time.Nanosecond}
		q := NewQueuedWriter(w, queueOptions(func() {}))
		for range 100 { // 100 s of sweeps
			time.Sleep(time.Second)
			q.Ping(time.Now())
			synctest.Wait()
		}
		q.Close()
		if len(w.got) != 4 && len(w.got) != 3 {
			t.Errorf("%d pings in 100 s, want one in 25 s", len(w.got))
		}
	})
}
