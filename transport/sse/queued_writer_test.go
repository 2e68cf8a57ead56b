package sse

import (
	"context"
	"fmt"
	"net/http"
	"sync"
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

// fixedSize returns the i-th write, of size bytes.
func fixedSize(i, size int) []byte { return fmt.Appendf(nil, "%0*d", size, i) }

// TestQueuedWriter: Write does not wait for the reader, and everything arrives, with a prompt reader and
// with a slow one.
func TestQueuedWriter(t *testing.T) {
	for _, tt := range []struct {
		name   string
		pace   time.Duration // of the reader, for one write
		every  time.Duration // between two writes
		writes int
	}{
		{"prompt reader", time.Millisecond, 20 * time.Millisecond, 500},
		{"slow reader", 10 * time.Second, 0, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &slowResponseWriter{header: http.Header{}, pace: tt.pace}
				q := NewQueuedWriter(w, queueOptions(func() { t.Error("the stream was cut") }))
				for i := range tt.writes {
					start := time.Now()
					if _, err := q.Write(fixedSize(i, 100)); err != nil || time.Since(start) > 0 {
						t.Fatalf("write %d: %v after %v, want no error and no wait", i, err, time.Since(start))
					}
					time.Sleep(tt.every)
				}
				time.Sleep(time.Duration(tt.writes) * tt.pace * 2)
				q.Close()
				if len(w.got) != tt.writes {
					t.Errorf("%d writes arrived, want %d", len(w.got), tt.writes)
				}
				wantClosed(t, q, w)
			})
		})
	}
}

// TestQueuedWriterCut: a stream is cut once, when its queue exceeds a bound or when a write takes longer
// than WriteTimeout.
func TestQueuedWriterCut(t *testing.T) {
	for _, tt := range []struct {
		name   string
		writes int
		size   int
		within time.Duration // until the cut
	}{
		{"few bytes: a write takes too long", 3, 100, 15 * time.Second},
		{"more than MaxWrites", 1024 + 2, 10, 0},
		{"more than MaxBytes", 10, (256 << 10) / 8, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &slowResponseWriter{header: http.Header{}} // takes nothing
				cut := make(chan struct{}, tt.writes)
				q := NewQueuedWriter(w, queueOptions(func() { cut <- struct{}{} }))
				start := time.Now()
				for i := range tt.writes {
					_, _ = q.Write(fixedSize(i, tt.size))
				}
				if time.Since(start) > 0 {
					t.Errorf("the writes took %v, want no wait", time.Since(start))
				}
				<-cut
				if got := time.Since(start); got > tt.within+time.Second {
					t.Errorf("cut after %v, want %v", got, tt.within)
				}
				q.Close()
				if len(cut) != 0 {
					t.Errorf("OnCut was called %d more times, want once", len(cut))
				}
				wantClosed(t, q, w)
			})
		})
	}
}

// wantClosed checks that a closed stream takes nothing more, and that its connection may serve another
// request.
func wantClosed(t *testing.T, q *QueuedWriter, w *slowResponseWriter) {
	t.Helper()
	if _, err := q.Write([]byte("x")); err == nil {
		t.Error("a write after Close succeeded")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.deadline.IsZero() {
		t.Error("the connection keeps a write deadline")
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
