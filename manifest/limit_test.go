package manifest

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestLimitIsExact checks that at most N calls start in any window, at most M are in
// flight, and that none is refused without need.
func TestLimitIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Constraints{RateLimitRPS: rapid.IntRange(1, 12).Draw(t, "rps"), MaxConcurrency: rapid.IntRange(1, 6).Draw(t, "concurrency")}
		window := rapid.SampledFrom([]time.Duration{RelayWindow, DeviceWindow}).Draw(t, "window")
		l := NewLimit(c, window)
		now := time.Unix(1_750_000_000, 0)
		var starts []time.Time
		busy := 0
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.SampledFrom([]int{0, 0, 1, 10, 99, 100, 101, 900, 1000}).Draw(t, "ms")) * time.Millisecond)
			if busy > 0 && rapid.Bool().Draw(t, "release") {
				l.Release()
				busy--
			}
			recent := 0
			for _, s := range starts {
				if now.Sub(s) < window {
					recent++
				}
			}
			err := l.Acquire(now)
			if want := busy < c.MaxConcurrency && recent < c.RateLimitRPS; want != (err == nil) {
				t.Fatalf("%d of %d in the window, %d of %d in flight: got %v", recent, c.RateLimitRPS, busy, c.MaxConcurrency, err)
			}
			if err == nil {
				starts = append(starts, now)
				busy++
				continue
			}
			var e *Error
			if !errors.As(err, &e) || e.Code != RateLimited {
				t.Fatalf("got %v, want E_RATE_LIMITED", err)
			}
			if e.Reason != "rate" {
				continue
			}
			// RetryAfterMS is exact: a call is admitted then, and refused a moment before.
			oldest := starts[len(starts)-c.RateLimitRPS]
			if wait := window - now.Sub(oldest); e.RetryAfterMS != max(1, wait.Milliseconds()) {
				t.Fatalf("retry after %d ms, want %v", e.RetryAfterMS, wait)
			}
		}
	})
}

// The eleventh call of one second is refused, and the first one after it is not.
func TestEleventhCall(t *testing.T) {
	l := NewLimit(DefaultConstraints, RelayWindow)
	start := time.Unix(1_750_000_000, 0)
	for i := range 10 {
		if err := l.Acquire(start.Add(time.Duration(i) * time.Millisecond)); err != nil {
			t.Fatalf("call %d: %v", i+1, err)
		}
		l.Release()
	}
	if err := l.Acquire(start.Add(999 * time.Millisecond)); AsError(err).Reason != "rate" || AsError(err).RetryAfterMS != 1 {
		t.Errorf("the eleventh call: %v", err)
	}
	if err := l.Acquire(start.Add(time.Second)); err != nil {
		t.Errorf("after a second: %v", err)
	}
}

func TestFifthConcurrentCall(t *testing.T) {
	l := NewLimit(DefaultConstraints, RelayWindow)
	now := time.Unix(1_750_000_000, 0)
	for range 4 {
		if err := l.Acquire(now); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Acquire(now); AsError(err).Reason != "concurrency" || AsError(err).RetryAfterMS != 0 {
		t.Errorf("the fifth: %v", err)
	}
	l.Release()
	if err := l.Acquire(now); err != nil {
		t.Errorf("after a release: %v", err)
	}
	// A refusal for concurrency costs no rate: six starts so far leave four.
	for range 5 {
		l.Release()
		if err := l.Acquire(now); err != nil {
			t.Fatal(err)
		}
	}
	l.Release()
	if err := l.Acquire(now); AsError(err).Reason != "rate" {
		t.Errorf("the eleventh start: %v", err)
	}
}

// Extra releases do not raise the limit.
func TestReleaseIsBounded(t *testing.T) {
	l := NewLimit(Constraints{RateLimitRPS: 100, MaxConcurrency: 1}, RelayWindow)
	l.Release()
	l.Release()
	now := time.Unix(1_750_000_000, 0)
	if err := l.Acquire(now); err != nil {
		t.Fatal(err)
	}
	if err := l.Acquire(now); err == nil {
		t.Error("a spare release admitted a second call")
	}
}

// Under contention as many are admitted as the limit says, in flight never more.
func TestLimitConcurrently(t *testing.T) {
	l := NewLimit(Constraints{RateLimitRPS: 50, MaxConcurrency: 7}, time.Hour)
	var busy, admitted atomic.Int64
	var tooMany atomic.Bool
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 200 {
				if l.Acquire(time.Now()) != nil {
					continue
				}
				admitted.Add(1)
				if busy.Add(1) > 7 {
					tooMany.Store(true)
				}
				busy.Add(-1)
				l.Release()
			}
		})
	}
	wg.Wait()
	if admitted.Load() != 50 {
		t.Errorf("%d admitted, want 50", admitted.Load())
	}
	if tooMany.Load() {
		t.Error("more than 7 were in flight")
	}
}
