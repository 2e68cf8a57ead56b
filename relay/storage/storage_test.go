package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/manifest"
)

// worst returns the worst problem of a store, "" for none.
func worst(w *Watch) Kind {
	if p := w.Problems(); len(p) > 0 {
		return p[0].Kind
	}
	return ""
}

func do(w *Watch, name string, took time.Duration, err error) {
	op := w.Begin(name)
	time.Sleep(took)
	op.End(err)
}

func TestFaultsOfOperations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch("events.db")
		do(w, "commit", 10*time.Millisecond, nil)
		if p := w.Problems(); p != nil {
			t.Fatalf("after a good commit: %v", p)
		}
		failed := time.Now()
		do(w, "commit", 0, fmt.Errorf("write: %w", syscall.ENOSPC))
		time.Sleep(time.Minute)
		do(w, "commit", 0, syscall.ENOSPC)
		do(w, "read", 0, nil) // shows nothing about commits
		do(w, "commit", 0, context.Canceled)
		if p := w.Problems(); len(p) != 1 || p[0].Kind != Full || p[0].Operation != "commit" || !p[0].Since.Equal(failed) {
			t.Fatalf("a full disk shows as %+v, since %v", p, failed)
		}
		var e *Error
		if !errors.As(w.Err(), &e) || e.Store != "events.db" || e.Kind != Full {
			t.Fatalf("Err is %v", w.Err())
		}
		do(w, "commit", 2*time.Second, nil)
		if worst(w) != Slow {
			t.Fatalf("a commit of 2 s shows as %v", w.Problems())
		}
		do(w, "commit", 0, nil)
		if p := w.Problems(); p != nil {
			t.Fatalf("after a good commit again: %v", p)
		}
		if s := w.Stats(); s.Operations != 7 || s.Failed != 2 || s.Slow != 1 || s.InFlight != 0 {
			t.Fatalf("stats: %+v", s)
		}
	})
}

func TestHungOperationShowsBeforeItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch("relay.db")
		began := time.Now()
		op := w.Begin("commit")
		other := w.Begin("read")
		time.Sleep(SlowAfter + 1)
		if worst(w) != Slow {
			t.Fatalf("after 1 s: %v", w.Problems())
		}
		time.Sleep(HungAfter)
		if p := w.Problems(); len(p) != 1 || p[0].Kind != Hung || p[0].Operation != "commit" || !p[0].Since.Equal(began) {
			t.Fatalf("after 6 s: %+v", p)
		}
		if s := w.Stats(); s.Oldest < HungAfter || s.InFlight != 2 {
			t.Fatalf("stats: %+v", s)
		}
		op.End(nil)
		other.End(nil)
		do(w, "commit", 0, nil)
		do(w, "read", 0, nil)
		if p := w.Problems(); p != nil {
			t.Fatalf("after the end: %v", p)
		}
	})
}

func TestDamageStays(t *testing.T) {
	w := NewWatch("events.db")
	do(w, "commit", 0, &Error{"events.db", Damaged, nil})
	do(w, "commit", 0, nil)
	w.Report("verify", Problem{Kind: Lost, Warning: true})
	if p := w.Problems(); len(p) != 2 || p[0].Kind != Damaged || p[1].Since.IsZero() {
		t.Fatalf("problems: %+v", p)
	}
	w.Resolve("operation")
	if w.Err() != nil {
		t.Fatalf("a warning is no error: %v", w.Err())
	}
}

// testProbe is a store's probe, whose result the test sets.
type testProbe struct {
	t  *testing.T
	mu sync.Mutex // protects the fields below

	err     error         // that it returns
	hang    chan struct{} // it does not return before this is closed; nil: it returns at once
	calls   int
	running int
}

func (p *testProbe) run(context.Context) error {
	p.mu.Lock()
	p.calls++
	if p.running++; p.running > 1 {
		p.t.Error("two probes run at once")
	}
	err, hang := p.err, p.hang
	p.mu.Unlock()
	if hang != nil {
		<-hang
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	return err
}

// set sets what the next probes do, and returns how many there were since the last call.
func (p *testProbe) set(err error, hang chan struct{}) (calls int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls, p.calls = p.calls, 0
	p.err, p.hang = err, hang
	return calls
}

// runMonitor runs a Monitor with one store until stop, which returns how long Run took to end.
func runMonitor(t *testing.T, probe *testProbe) (m *Monitor, w *Watch, stop func() time.Duration) {
	m = New(Options{})
	w = m.Watch("events.db")
	w.SetProbe(probe.run)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()
	return m, w, func() time.Duration {
		cancel()
		began := time.Now()
		<-ended
		return time.Since(began)
	}
}

// While a fault lasts the monitor probes, and the fault is over within 10 s after its end. A store without
// a fault is never probed.
func TestProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		probe := &testProbe{t: t}
		m, w, stop := runMonitor(t, probe)
		time.Sleep(time.Hour)
		if n := probe.set(syscall.EIO, nil); n != 0 {
			t.Errorf("a store without a fault was probed %d times, want none", n)
		}
		do(w, "commit", 0, syscall.EIO)
		time.Sleep(time.Minute)
		if h := m.Health(); h[0].OK() {
			t.Errorf("while the disk fails the health is %+v, want a problem", h)
		}
		if n := probe.set(nil, nil); n < 6 || n > 25 {
			t.Errorf("%d probes in a minute, want about %d", n, time.Minute/probeInterval)
		}
		time.Sleep(10 * time.Second)
		if h := m.Health(); !h[0].OK() {
			t.Errorf("10 s after the fault the health is %+v, want no problem", h)
		}
		stop()
	})
}

// A probe that hangs is the only one, shows as a hung disk, and does not keep Run from ending.
func TestHungProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		probe := &testProbe{t: t}
		_, w, stop := runMonitor(t, probe)
		hang := make(chan struct{})
		probe.set(nil, hang)
		do(w, "commit", 0, syscall.EIO)
		time.Sleep(time.Minute)
		if got := worst(w); got != Hung {
			t.Errorf("the worst problem is %q, want %q", got, Hung)
		}
		if n := probe.set(nil, hang); n != 1 {
			t.Errorf("%d probes, want only the one that hangs", n)
		}
		if took := stop(); took > 2*probeGrace {
			t.Errorf("Run ended after %v, want %v", took, probeGrace)
		}
		close(hang)
	})
}

// A store has one Watch, whoever asks for it.
func TestMonitorWatch(t *testing.T) {
	m := New(Options{})
	first := m.Watch("events.db")
	if again := m.Watch("events.db"); again != first {
		t.Error("two calls returned different Watches")
	}
}

// A fault that comes and goes each second writes at most 20 lines a minute, and the last line
// says how it ended.
func TestLogIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		m := New(Options{Logger: zap.New(core)})
		w, v := m.Watch("relay.db"), m.Watch("events.db")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- m.Run(ctx) }()
		for range 60 {
			for _, w := range []*Watch{w, v} {
				do(w, "commit", 0, syscall.EIO)
			}
			time.Sleep(time.Second)
			for _, w := range []*Watch{w, v} {
				do(w, "commit", 0, nil)
			}
			time.Sleep(time.Second)
		}
		if n := logs.FilterMessageSnippet("db").Len(); n < 6 || n > 40 {
			t.Fatalf("%d lines in two minutes", n)
		}
		time.Sleep(time.Minute)
		all := logs.All()
		if last := all[len(all)-1].Message; !strings.HasSuffix(last, "works again") {
			t.Fatalf("the last line is %q", last)
		}
		cancel()
		<-ended
	})
}

func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		err       error
		kind      Kind
		retryable bool
	}{
		{syscall.ENOSPC, Full, true},
		{&fs.PathError{Op: "write", Err: syscall.EROFS}, ReadOnly, false},
		{syscall.EIO, Failing, true},
		{&Error{"events.db", Damaged, errors.New("page 7")}, Damaged, false},
		{&Error{"events.db", Missing, nil}, Missing, false},
		{TimedOut("events.db", context.DeadlineExceeded), Hung, true},
	} {
		err := fmt.Errorf("append: %w", Wrap(t.TempDir(), "events.db", c.err))
		if k := Classify(err); k != c.kind {
			t.Errorf("Classify(%v) = %q, not %q", err, k, c.kind)
		}
		e := manifest.AsError(err)
		if e.Code != manifest.Internal || e.PublicReason() != Reason || e.Retryable() != c.retryable {
			t.Errorf("the answer of %v: %+v, retryable %v", err, e, e.Retryable())
		}
		for _, r := range e.Message {
			if r < ' ' || r > '~' {
				t.Errorf("the message %q is not printable ASCII", e.Message)
			}
		}
	}
	for code, want := range map[int]Kind{sqlite3.SQLITE_FULL: Full, sqlite3.SQLITE_IOERR_SHMSIZE: Full, sqlite3.SQLITE_IOERR_WRITE: Failing, sqlite3.SQLITE_IOERR_CORRUPTFS: Failing} {
		if got := classifySQLite(code); got != want {
			t.Errorf("SQLite's %d is %q, not %q", code, got, want)
		}
	}
	for _, err := range []error{nil, context.Canceled, context.DeadlineExceeded, errors.New("constraint")} {
		if Wrap("", "x", err) != err {
			t.Errorf("%v counts as a fault of the disk", err)
		}
	}
}

// The healthy path allocates nothing.
func TestBeginAllocatesNothing(t *testing.T) {
	for _, w := range []*Watch{nil, NewWatch("events.db")} {
		w.Begin("commit").End(nil)
		if n := testing.AllocsPerRun(100, func() { w.Begin("commit").End(nil) }); n != 0 {
			t.Errorf("%v allocations for each operation", n)
		}
	}
}

func BenchmarkOperation(b *testing.B) {
	w := NewWatch("events.db")
	b.ReportAllocs()
	for b.Loop() {
		w.Begin("commit").End(nil)
	}
}
