package prober

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// fake is a Source whose readings a test decides; n counts from 1.
type fake struct {
	read   func(n int, s *Sample) error
	n      atomic.Int64
	closed atomic.Int64
}

func (f *fake) Read(s *Sample) error {
	n := int(f.n.Add(1))
	s.CPUPct, s.MemBytes, s.MemTotalBytes, s.DiskPct = 10, 1, 2, 30
	if f.read != nil {
		return f.read(n, s)
	}
	return nil
}

func (f *fake) Close() error { f.closed.Add(1); return nil }

// start runs a Prober in the bubble until the test is over and checks that Run
// says why it ended.
func start(t *testing.T, o Options) (p *Prober, stop func()) {
	t.Helper()
	p = New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	synctest.Wait()
	return p, func() {
		t.Helper()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) || errors.Is(err, ErrHung) {
			t.Errorf("Run returned %v, want context canceled", err)
		}
	}
}

func TestCadenceDoesNotDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		src := &fake{read: func(int, *Sample) error {
			at = append(at, time.Since(begin))
			time.Sleep(300 * time.Millisecond) // a reading may take its time
			return nil
		}}
		p, stop := start(t, Options{Source: src, Interval: time.Second})
		time.Sleep(10*time.Second + 500*time.Millisecond)
		stop()
		var want []time.Duration
		for i := range 11 {
			want = append(want, time.Duration(i)*time.Second)
		}
		if !slices.Equal(at, want) {
			t.Errorf("readings at %v, want %v", at, want)
		}
		if s := p.Stats(); s.Samples != 11 || s.Slips != 0 || s.Errors != 0 {
			t.Errorf("stats %+v, want 11 samples and no slips", s)
		}
		if src.closed.Load() != 1 {
			t.Errorf("source closed %d times, want 1", src.closed.Load())
		}
	})
}

func TestMissedInstantsAreSkippedAndCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		src := &fake{read: func(n int, s *Sample) error {
			at = append(at, time.Since(begin))
			if n == 3 { // as if the process had been stopped at 2 s
				time.Sleep(7400 * time.Millisecond)
			}
			return nil
		}}
		p, stop := start(t, Options{Source: src, Interval: time.Second})
		time.Sleep(12*time.Second + 100*time.Millisecond)
		stop()
		// 3 to 8 are gone, 9 is served late, then the old row goes on.
		want := []time.Duration{0, 1e9, 2e9, 9.4e9, 10e9, 11e9, 12e9}
		if !slices.Equal(at, want) {
			t.Errorf("readings at %v, want %v", at, want)
		}
		if got := p.Stats().Slips; got != 6 {
			t.Errorf("slips %d, want 6", got)
		}
	})
}

func TestFailedReadingIsNeverAFrame(t *testing.T) {
	good := Sample{CPUPct: 1, MemBytes: 1, MemTotalBytes: 2, DiskPct: 3}
	tests := []struct {
		name string
		spit func(*Sample) error
	}{
		{"error", func(*Sample) error { return errors.New("no reading") }},
		{"all zero", func(s *Sample) error { *s = Sample{}; return nil }},
		{"cpu NaN", func(s *Sample) error { s.CPUPct = math.NaN(); return nil }},
		{"cpu above 100", func(s *Sample) error { s.CPUPct = 100.01; return nil }},
		{"cpu negative", func(s *Sample) error { s.CPUPct = -0.01; return nil }},
		{"disk Inf", func(s *Sample) error { s.DiskPct = math.Inf(1); return nil }},
		{"load NaN", func(s *Sample) error { s.Load15 = math.NaN(); return nil }},
		{"load Inf", func(s *Sample) error { s.Load5 = math.Inf(1); return nil }},
		{"load negative", func(s *Sample) error { s.Load1 = -1; return nil }},
		{"more memory used than there is", func(s *Sample) error { s.MemBytes = 3; return nil }},
		{"memory above 2^53", func(s *Sample) error { s.MemTotalBytes = 1<<53 + 1; return nil }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := &fake{read: func(n int, s *Sample) error {
					*s = good
					if n >= 3 && n <= 5 {
						return tt.spit(s)
					}
					return nil
				}}
				p, stop := start(t, Options{Source: src, Interval: time.Second,
					Now: func() int64 { return MinTSMS + 7 }})
				ctx, cancel := context.WithCancel(t.Context())
				var frames int
				go p.Watch(ctx, time.Second, func(s Sample) error {
					frames++
					return s.Check()
				})
				time.Sleep(3 * time.Second)
				synctest.Wait()
				if s, err := p.Latest(); err == nil || s != (Sample{}) {
					t.Errorf("Latest while it fails: %+v, %v", s, err)
				}
				if _, err := p.Now(ctx); err == nil {
					t.Error("Now while it fails: no error")
				}
				time.Sleep(3*time.Second + time.Millisecond)
				synctest.Wait()
				if s, err := p.Latest(); err != nil || s.CPUPct != 1 {
					t.Errorf("Latest after it works again: %+v, %v", s, err)
				}
				st := p.Stats()
				if st.Errors != 3 || st.LastError == "" || st.LastErrorAt != MinTSMS+7 {
					t.Errorf("stats %+v, want 3 errors, with text and time", st)
				}
				if frames != int(st.Samples) || frames < 4 {
					t.Errorf("%d frames of %d good readings", frames, st.Samples)
				}
				cancel()
				synctest.Wait()
				stop()
			})
		})
	}
}

func TestNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &fake{}
		p, stop := start(t, Options{Source: src, Interval: time.Minute})
		time.Sleep(999 * time.Millisecond)
		if s, err := p.Now(t.Context()); err != nil || s.Mono != 0 || src.n.Load() != 1 {
			t.Errorf("Now at 0.999 s: %v, %v, %d readings; want the first sample", s.Mono, err, src.n.Load())
		}
		time.Sleep(time.Second)
		for range 5 {
			go func() {
				if s, err := p.Now(t.Context()); err != nil || s.Mono != 1999*time.Millisecond {
					t.Errorf("Now at 1.999 s: %v, %v", s.Mono, err)
				}
			}()
		}
		synctest.Wait()
		if n := src.n.Load(); n != 2 {
			t.Errorf("%d readings, want 2: who asks together shares one", n)
		}
		if w := p.Stats().Watchers; w != 0 {
			t.Errorf("%d watchers", w)
		}
		stop()
	})
}

func TestHungReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		src := &fake{read: func(n int, s *Sample) error {
			if n == 2 {
				<-hang
			}
			return nil
		}}
		p := New(Options{Source: src, Interval: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(2500 * time.Millisecond)

		began := time.Now()
		if _, err := p.Now(t.Context()); !errors.Is(err, ErrHung) || time.Since(began) != answerTimeout {
			t.Errorf("Now: %v after %v, want ErrHung after %v", err, time.Since(began), answerTimeout)
		}
		short, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer stop()
		began = time.Now()
		if _, err := p.Now(short); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 200*time.Millisecond {
			t.Errorf("Now: %v after %v, want the context's end", err, time.Since(began))
		}
		if err := p.Watch(short, time.Second, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Watch: %v, want the context's end", err)
		}
		if _, err := p.Latest(); !errors.Is(err, ErrHung) {
			t.Errorf("Latest: %v, want ErrHung: the sample is older than three intervals", err)
		}

		cancel()
		began = time.Now()
		if err := <-done; !errors.Is(err, ErrHung) || !errors.Is(err, context.Canceled) || time.Since(began) != answerTimeout {
			t.Errorf("Run: %v after %v, want ErrHung and the cancel", err, time.Since(began))
		}
		if src.closed.Load() != 0 {
			t.Error("the source was closed under a reading")
		}
		close(hang)
		synctest.Wait()
		if src.closed.Load() != 1 {
			t.Error("the source was not closed when the reading was over")
		}
	})
}

func TestSetInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		src := &fake{read: func(int, *Sample) error { at = append(at, time.Since(begin)); return nil }}
		p, stop := start(t, Options{Source: src, Interval: 10 * time.Second})
		set := func(d time.Duration) {
			t.Helper()
			if err := p.SetInterval(d); err != nil || p.Interval() != d {
				t.Errorf("SetInterval(%v): %v, now %v", d, err, p.Interval())
			}
		}
		time.Sleep(4 * time.Second)
		set(500 * time.Millisecond) // due long ago: at once
		time.Sleep(1200 * time.Millisecond)
		set(3 * time.Second) // 3 s after the one at 5 s
		time.Sleep(3 * time.Second)
		stop()
		if want := []time.Duration{0, 4e9, 4.5e9, 5e9, 8e9}; !slices.Equal(at, want) {
			t.Errorf("readings at %v, want %v", at, want)
		}
		for _, d := range []time.Duration{0, 99 * time.Millisecond, 61 * time.Second} {
			if err := p.SetInterval(d); err == nil {
				t.Errorf("SetInterval(%v) was accepted", d)
			}
		}
		if s := p.Stats(); s.Slips != 0 {
			t.Errorf("slips %d, want 0", s.Slips)
		}
	})
	for in, want := range map[time.Duration]time.Duration{
		0: DefaultInterval, 1: MinInterval, time.Hour: MaxInterval, time.Second: time.Second,
	} {
		if got := New(Options{Interval: in}).Interval(); got != want {
			t.Errorf("New with interval %v uses %v, want %v", in, got, want)
		}
	}
}

func TestLatestBeforeRun(t *testing.T) {
	p := New(Options{})
	if _, err := p.Latest(); err != ErrNoSample {
		t.Errorf("Latest: %v, want ErrNoSample", err)
	}
}
