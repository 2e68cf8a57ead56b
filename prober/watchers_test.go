package prober

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// watch collects the instants of a watcher until ctx ends.
func watch(t *testing.T, ctx context.Context, p *Prober, every time.Duration, got *[]time.Duration) {
	begin := time.Now()
	go func() {
		err := p.Watch(ctx, every, func(Sample) error {
			*got = append(*got, time.Since(begin))
			return nil
		})
		if err != ctx.Err() {
			t.Errorf("Watch(%v) returned %v, want %v", every, err, ctx.Err())
		}
	}()
}

func TestWatchersShareReadings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &fake{}
		p, stop := start(t, Options{Source: src, Interval: 5 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		intervals := []time.Duration{time.Second, time.Second, 5 * time.Second, 60 * time.Second}
		got := make([][]time.Duration, len(intervals))
		for i, every := range intervals {
			watch(t, ctx, p, every, &got[i])
		}
		synctest.Wait()
		if n := p.Stats().Watchers; n != len(intervals) {
			t.Errorf("%d watchers, want %d", n, len(intervals))
		}
		time.Sleep(120*time.Second + time.Millisecond)
		cancel()
		synctest.Wait()
		for i, every := range intervals {
			want := int(120*time.Second/every) + 1 // at once, then each interval
			if len(got[i]) != want {
				t.Errorf("watcher of %v: %d calls, want %d", every, len(got[i]), want)
			}
			for k, at := range got[i] {
				if at != time.Duration(k)*every {
					t.Fatalf("watcher of %v: call %d at %v", every, k, at)
				}
			}
		}
		if n := src.n.Load(); n != 121 {
			t.Errorf("%d readings, want 121: whoever wants an instant shares its reading", n)
		}
		if s := p.Stats(); s.Watchers != 0 || s.Missed != 0 || s.Slips != 0 {
			t.Errorf("stats %+v, want no watchers left, nothing missed", s)
		}
		stop()
	})
}

func TestWatchJoinsARecentSample(t *testing.T) {
	tests := []struct {
		name  string
		delay time.Duration // after the base sample
		every time.Duration
		want  []time.Duration // calls after joining
		fresh int64           // readings taken for them
	}{
		{"soon after, falls in step", 80 * time.Millisecond, time.Second,
			[]time.Duration{0, 920 * time.Millisecond, 1920 * time.Millisecond}, 2},
		{"too late for that, own row", 300 * time.Millisecond, time.Second,
			[]time.Duration{0, time.Second, 2 * time.Second}, 3},
		{"a second old is too old for any", 1100 * time.Millisecond, 60 * time.Second,
			[]time.Duration{0}, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := &fake{}
				p, stop := start(t, Options{Source: src, Interval: time.Minute})
				time.Sleep(tt.delay)
				before := src.n.Load()
				ctx, cancel := context.WithCancel(t.Context())
				var got []time.Duration
				watch(t, ctx, p, tt.every, &got)
				time.Sleep(2*time.Second + 500*time.Millisecond)
				cancel()
				synctest.Wait()
				if !slices.Equal(got, tt.want) {
					t.Errorf("calls at %v, want %v", got, tt.want)
				}
				if fresh := src.n.Load() - before; fresh != tt.fresh {
					t.Errorf("%d new readings, want %d", fresh, tt.fresh)
				}
				stop()
			})
		})
	}
}

func TestSlowWatcherHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &fake{}
		p, stop := start(t, Options{Source: src, Interval: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		var quick []time.Duration
		watch(t, ctx, p, time.Second, &quick)
		var slow []time.Duration
		go p.Watch(ctx, time.Second, func(s Sample) error {
			slow = append(slow, s.Mono)
			time.Sleep(4300 * time.Millisecond)
			return nil
		})
		time.Sleep(20*time.Second + time.Millisecond)
		cancel()
		synctest.Wait()
		if len(quick) != 21 || quick[20] != 20*time.Second {
			t.Errorf("the quick watcher was called at %v, want every second", quick)
		}
		// 0, then the newest at 4.3, 8.6, 12.9 and 17.2 s.
		want := []time.Duration{0, 4e9, 8e9, 12e9, 17e9}
		if !slices.Equal(slow, want) {
			t.Errorf("the slow watcher got samples of %v, want %v", slow, want)
		}
		// Of 21 instants it got five, and the last still waits for it.
		if m := p.Stats().Missed; m != 15 {
			t.Errorf("%d missed, want 15", m)
		}
		time.Sleep(5 * time.Second) // until the slow fn is back
		stop()
	})
}

func TestWatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, stop := start(t, Options{Source: &fake{}, Interval: time.Second})
		enough := errors.New("enough")
		n := 0
		err := p.Watch(t.Context(), time.Second, func(Sample) error {
			if n++; n == 3 {
				return enough
			}
			return nil
		})
		if err != enough || n != 3 {
			t.Errorf("Watch returned %v after %d calls, want fn's error after 3", err, n)
		}
		for _, d := range []time.Duration{0, -1, 99 * time.Millisecond, time.Minute + 1} {
			if err := p.Watch(t.Context(), d, nil); err == nil || !strings.Contains(err.Error(), "100ms..1m0s") {
				t.Errorf("Watch(%v) returned %v, want the bounds", d, err)
			}
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.Watch(gone, time.Second, func(Sample) error { return nil }); !errors.Is(err, context.Canceled) {
			t.Errorf("Watch with a dead context returned %v", err)
		}
		left := make(chan error, 1)
		go func() { left <- p.Watch(t.Context(), time.Minute, func(Sample) error { return nil }) }()
		synctest.Wait()
		stop()
		if err := <-left; err != ErrStopped {
			t.Errorf("Watch of a stopped Prober returned %v, want ErrStopped", err)
		}
		if err := p.Watch(t.Context(), time.Second, nil); err != ErrStopped {
			t.Errorf("Watch after the stop returned %v, want ErrStopped", err)
		}
		if _, err := p.Now(t.Context()); err != nil {
			t.Errorf("Now with a fresh sample left: %v", err)
		}
		time.Sleep(time.Minute)
		if _, err := p.Now(t.Context()); err != ErrStopped {
			t.Errorf("Now returned %v, want ErrStopped", err)
		}
		if _, err := p.Latest(); !errors.Is(err, ErrStopped) {
			t.Errorf("Latest returned %v, want ErrStopped", err)
		}
		if n := p.Stats().Watchers; n != 0 {
			t.Errorf("%d watchers left", n)
		}
	})
}

func TestWatchBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(Options{Source: &fake{}})
		ctx, cancel := context.WithCancel(t.Context())
		var got []time.Duration
		watch(t, ctx, p, time.Second, &got)
		time.Sleep(3 * time.Second)
		go p.Run(ctx)
		time.Sleep(1500 * time.Millisecond)
		cancel()
		synctest.Wait()
		if want := []time.Duration{3e9, 4e9}; !slices.Equal(got, want) {
			t.Errorf("calls at %v, want %v", got, want)
		}
		if err := p.Run(t.Context()); err == nil {
			t.Error("a second Run was accepted")
		}
	})
}

func TestWatchersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, stop := start(t, Options{Source: &fake{}})
		ctx, cancel := context.WithCancel(t.Context())
		got := make([][]time.Duration, maxWaiters)
		for i := range maxWaiters {
			watch(t, ctx, p, time.Second, &got[i])
		}
		synctest.Wait()
		if err := p.Watch(ctx, time.Second, nil); err != ErrBusy {
			t.Errorf("one watcher too many: %v, want ErrBusy", err)
		}
		cancel()
		synctest.Wait()
		stop()
	})
}

// TestCPUMeanPerWatcher checks that each watcher gets the mean over its interval,
// whatever other watchers there are.
func TestCPUMeanPerWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var meter cpuMeter
		begin := time.Now()
		src := &fake{read: func(n int, s *Sample) error {
			// Busy in the last second of each four, idle otherwise; 100 ticks a second.
			ticks := uint64(time.Since(begin) / (10 * time.Millisecond))
			busy := ticks/400*100 + max(ticks%400, 300) - 300
			s.CPUPct, s.cpu = meter.add(cpuTimes{busy: 50 + busy, idle: 50 + ticks - busy})
			return nil
		}}
		p, stop := start(t, Options{Source: src, Interval: 700 * time.Millisecond})
		ctx, cancel := context.WithCancel(t.Context())
		var fast, slow []float64
		go p.Watch(ctx, time.Second, func(s Sample) error { fast = append(fast, s.CPUPct); return nil })
		go p.Watch(ctx, 4*time.Second, func(s Sample) error { slow = append(slow, s.CPUPct); return nil })
		time.Sleep(12*time.Second + time.Millisecond)
		cancel()
		synctest.Wait()
		stop()
		if want := []float64{50, 0, 0, 0, 100, 0, 0, 0, 100, 0, 0, 0, 100}; !slices.Equal(fast, want) {
			t.Errorf("each second: %v, want %v", fast, want)
		}
		if want := []float64{50, 25, 25, 25}; !slices.Equal(slow, want) {
			t.Errorf("each four seconds: %v, want %v", slow, want)
		}
	})
}
