package history

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/prober"
)

// bench runs a real Prober on a simulated board in a bubble, and a Store that records
// it. The bubble's clock does not advance while the disk works.
type bench struct {
	*Store
	prober *prober.Prober
	start  time.Time
	ended  chan error // of Record
	cancel context.CancelFunc
}

func startBench(t *testing.T, o Options) *bench {
	t.Helper()
	time.Sleep(time.Until(time.UnixMilli(epoch))) // the bubble begins in 2000
	b := &bench{start: time.Now(), ended: make(chan error, 1)}
	if o.Path == "" {
		o.Path = filepath.Join(quickDir(t), "history.db")
	}
	begin := b.start
	o.Mono = func() time.Duration { return time.Since(begin) }
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	b.Store = s
	b.prober = prober.New(prober.Options{Source: prober.NewMockSource(1), Interval: time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	b.cancel = cancel
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		b.prober.Run(ctx)
	}()
	go func() { b.ended <- s.Record(ctx, b.prober) }()
	t.Cleanup(func() {
		cancel()
		<-stopped
		s.Close()
	})
	return b
}

// stop ends Record and checks that it says why.
func (b *bench) stop(t *testing.T) {
	t.Helper()
	b.cancel()
	if err := <-b.ended; !errors.Is(err, context.Canceled) && !errors.Is(err, prober.ErrStopped) {
		t.Errorf("Record returned %v, want canceled, or that the prober stopped first", err)
	}
}

func TestRecordFlushesInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := startBench(t, Options{Flush: 60 * time.Second})
		time.Sleep(openDelay + time.Millisecond)
		synctest.Wait()
		if st := b.Stats(); st.Rows < 2 || st.State != "ok" || st.Bytes == 0 {
			t.Errorf("soon after the start: %+v, want the file made and looked at", st)
		}
		time.Sleep(59 * time.Second)
		synctest.Wait()
		if st := b.Stats(); st.Rows > 3 || st.Rows+int64(st.Unsaved) != 62 {
			t.Errorf("after a minute: %+v, want 59 samples unsaved", st)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if st := b.Stats(); st.Rows < 62 || st.Unsaved > 1 { // one may come with the flush
			t.Errorf("after the interval: %+v, want 62 or 63 rows", st)
		}

		if err := b.SetFlush(10 * time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if st := b.Stats(); st.Rows < 72 || st.Unsaved > 1 {
			t.Errorf("after a shorter interval: %+v, want 72 or 73 rows", st)
		}

		time.Sleep(5 * time.Second)
		synctest.Wait()
		b.stop(t)
		if st := b.Stats(); st.Rows != 78 || st.Unsaved != 0 || st.Dropped != 0 || st.Repeated != 0 {
			t.Errorf("after the stop: %+v, want all 78 samples in the file", st)
		}
	})
}

func TestRecordFollowsTheCadence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := startBench(t, Options{})
		time.Sleep(10 * time.Second)
		if err := b.prober.SetInterval(200 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10*time.Second + time.Millisecond)
		b.SetRecording(false)
		time.Sleep(10 * time.Second)
		b.SetRecording(true)
		time.Sleep(time.Second)
		b.stop(t)
		var gaps []time.Duration
		var last int64
		for _, r := range query(t, b.Store, Query{FromMS: epoch}) {
			if gap := time.Duration(r.TSMS-last) * time.Millisecond; last != 0 && (len(gaps) == 0 || gaps[len(gaps)-1] != gap) {
				gaps = append(gaps, gap)
			}
			last = r.TSMS
		}
		if want := []time.Duration{time.Second, 200 * time.Millisecond}; !slices.Equal(gaps[:2], want) {
			t.Errorf("samples %v apart, want %v", gaps, want)
		}
		if !slices.ContainsFunc(gaps, func(d time.Duration) bool { return d > 9*time.Second }) {
			t.Errorf("samples %v apart, want a gap of 10 s where recording was off", gaps)
		}
	})
}

// TestRecordMuch checks that a fast cadence with a long flush interval loses no samples.
func TestRecordMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := startBench(t, Options{Flush: MaxFlush})
		if err := b.prober.SetInterval(100 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		st := b.Stats()
		if st.Dropped != 0 || st.Rows < flushAtSamples || st.Unsaved > flushAtSamples {
			t.Errorf("stats %+v, want a commit before its time and nothing dropped", st)
		}
		b.stop(t)
	})
}

// TestRecordResumes checks that samples taken while the disk failed are saved when it recovers.
func TestRecordResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file where the directory should be
			t.Fatal(err)
		}
		b := startBench(t, Options{Path: filepath.Join(dir, "history.db")})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if st := b.Stats(); st.State != "degraded:io" || st.Unsaved != 121 {
			t.Errorf("stats %+v, want degraded:io and 121 unsaved", st)
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(retryInterval + time.Millisecond)
		synctest.Wait()
		if st := b.Stats(); st.State != "ok" || st.Rows < 121 {
			t.Errorf("stats %+v, want ok and all rows", st)
		}
		b.stop(t)
	})
}

// TestRecordWhenTheTimeComes checks that undated samples are saved with their time as soon as
// it is known.
func TestRecordWhenTheTimeComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var known atomic.Bool
		o := Options{Now: func() (int64, bool) { return time.Now().UnixMilli(), known.Load() }}
		b := startBench(t, o)
		b.cancel() // its prober believes the clock
		<-b.ended
		for i := range 20 {
			b.Add(sampleAt(0, i))
			time.Sleep(time.Second)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go b.runFlusher(ctx)
		time.Sleep(openDelay)
		synctest.Wait()
		if st := b.Stats(); st.Unsaved != 0 || st.Rows < 20 {
			t.Errorf("stats %+v, want 20 rows that wait for their time", st)
		}
		known.Store(true)
		b.Add(sampleAt(time.Now().UnixMilli(), 20))
		synctest.Wait()
		if st := b.Stats(); st.Unsaved != 0 {
			t.Errorf("stats %+v, want a flush at once", st)
		}
		if n := sqlite3Shell(t, b.path, "SELECT count(*) FROM samples WHERE ts < 0"); n != "0" {
			t.Errorf("%s rows in the file have no time", n)
		}
	})
}

// TestRecordEndsWithTheProber checks that Record returns when the prober stops.
func TestRecordEndsWithTheProber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.UnixMilli(epoch)))
		s, err := Open(Options{Path: filepath.Join(quickDir(t), "history.db")})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		p := prober.New(prober.Options{Source: prober.NewMockSource(1), Interval: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		go p.Run(ctx)
		ended := make(chan error, 1)
		go func() { ended <- s.Record(t.Context(), p) }()
		time.Sleep(5*time.Second + 500*time.Millisecond)
		cancel()
		if err := <-ended; !errors.Is(err, prober.ErrStopped) {
			t.Errorf("Record returned %v, want ErrStopped", err)
		}
		if st := s.Stats(); st.Rows != 6 || st.Unsaved != 0 {
			t.Errorf("stats %+v, want 6 rows", st)
		}
	})
}

// TestWaitIsBounded checks that a query waits ten seconds for a disk that hangs and then
// returns the rows in memory.
func TestWaitIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.UnixMilli(epoch)))
		s, err := Open(Options{Path: filepath.Join(quickDir(t), "history.db")})
		if err != nil {
			t.Fatal(err)
		}
		s.Add(sampleAt(epoch, 1))
		if err := s.lock(t.Context()); err != nil { // what a flush that hangs does
			t.Fatal(err)
		}
		begin := time.Now()
		if rows := query(t, s, Query{FromMS: 1}); len(rows) != 1 || time.Since(begin) != diskTimeout {
			t.Errorf("%d rows after %v, want 1 after %v", len(rows), time.Since(begin), diskTimeout)
		}
		begin = time.Now()
		if err := s.Flush(t.Context()); !errors.Is(err, ErrBusy) || time.Since(begin) != 0 {
			t.Errorf("Flush: %v after %v, want ErrBusy at once: it was waited for", err, time.Since(begin))
		}
		if st := s.Stats(); st.State != "degraded:busy" {
			t.Errorf("stats %+v, want degraded:busy", st)
		}
		p := prober.New(prober.Options{Source: prober.NewMockSource(1), Interval: time.Second})
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		go p.Run(ctx)
		begin = time.Now()
		if err := s.Record(ctx, p); !errors.Is(err, ErrBusy) || time.Since(begin) > 90*time.Second+diskTimeout {
			t.Errorf("Record: %v after %v, want ErrBusy after %v", err, time.Since(begin), 90*time.Second+diskTimeout)
		}
		if n := s.Stats().Unsaved; n < 90 {
			t.Errorf("%d unsaved, want the samples of 90 s", n)
		}
		if err := s.Close(); !errors.Is(err, ErrBusy) && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close: %v, want that the disk does not answer", err)
		}
		s.unlock()
		if st := s.Stats(); st.State != "ok" {
			t.Errorf("stats %+v, want ok", st)
		}
	})
}
