package eventqueue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// faultyLog is a log whose Append fails or hangs.
type faultyLog struct {
	kernel.MemoryLog
	mu      sync.Mutex
	err     error
	hold    chan struct{}
	refuses string // type of events that it refuses
	offers  int
	full    bool // Offer refuses
}

func (l *faultyLog) Append(ctx context.Context, events ...kernel.Event) (uint64, error) {
	l.mu.Lock()
	err, hold, refuses := l.err, l.hold, l.refuses
	l.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	for _, e := range events {
		if e.Type == refuses {
			err = errors.New("malformed")
		}
	}
	if err != nil {
		return 0, err
	}
	return l.MemoryLog.Append(ctx, events...)
}

func (l *faultyLog) Offer(kernel.Event) bool { l.offers++; return !l.full }

func (l *faultyLog) set(err error, hold chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.hold = err, hold
}

// events returns what the log has, as "tenant type aggregate".
func (l *faultyLog) events() (list []string) {
	_ = l.Replay(context.Background(), 0, func(e kernel.Event) error {
		list = append(list, e.Tenant+" "+e.Type+" "+e.Aggregate)
		return nil
	})
	return list
}

// run runs a Queue until the test ends.
func run(t *testing.T, l kernel.Log, w *storage.Watch) (q *Queue, stop func()) {
	q = New(Options{Log: l, Store: "events.db", Watch: w})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- q.Run(ctx) }()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); <-ended }) }
	t.Cleanup(stop)
	return q, stop
}

func offer(q *Queue, tenant, typ string, i int) bool {
	return q.Offer(kernel.Event{Tenant: tenant, Type: typ, Aggregate: fmt.Sprint(i)})
}

// Events of a fault are written after it, in their order and with their times.
func TestEventsWaitForTheDisk(t *testing.T) {
	for name, fault := range map[string]error{"full": syscall.ENOSPC, "hung": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &faultyLog{}
				hold := make(chan struct{})
				if fault != nil {
					l.set(fault, nil)
				} else {
					l.set(nil, hold)
				}
				q, stop := run(t, l, nil)
				at := time.Now().UnixMilli()
				for i := range 1000 {
					if !offer(q, "a", []string{"alert.raised", "presence.online"}[i%2], i) {
						t.Fatal("refused")
					}
				}
				time.Sleep(time.Hour)
				if n := q.Stats().Waiting; n != 1000 || len(l.events()) != 0 {
					t.Fatalf("%d wait, the log has %d", n, len(l.events()))
				}
				l.set(nil, nil)
				close(hold)
				time.Sleep(10 * time.Second)
				got := l.events()
				if len(got) != 1000 || got[0] != "a alert.raised 0" || got[999] != "a presence.online 999" {
					t.Fatalf("%d events, %v", len(got), got[:min(len(got), 3)])
				}
				_ = l.Replay(t.Context(), 0, func(e kernel.Event) error {
					if e.CreatedMS != at {
						t.Fatalf("created at %d, not %d", e.CreatedMS, at)
					}
					return nil
				})
				stop()
			})
		})
	}
}

// A tenant fills its share and not that of others; what is missing is said in its place.
func TestGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{MemoryLog: kernel.MemoryLog{Max: 1 << 20}}
		l.set(syscall.EIO, nil)
		q, stop := run(t, l, nil)
		defer stop()
		for i := range maxEvents/2 + 7 {
			if ok := offer(q, "noisy", "alert.raised", i); ok != (i < maxEvents/2) {
				t.Fatalf("event %d: %v", i, ok)
			}
		}
		if !offer(q, "other", "alert.raised", 1) {
			t.Fatal("one tenant takes the place of another")
		}
		from := time.Now()
		time.Sleep(time.Minute)
		offer(q, "noisy", "presence.offline", 1)
		l.set(nil, nil)
		time.Sleep(2 * time.Second)
		if !offer(q, "noisy", "alert.cleared", 2) {
			t.Fatal("refused after the fault")
		}
		time.Sleep(time.Minute)
		var gap kernel.Event
		_ = l.Replay(t.Context(), 0, func(e kernel.Event) error {
			if e.Type == gapType {
				gap = e
			}
			return nil
		})
		var g Gap
		if err := json.Unmarshal(gap.Payload, &g); err != nil || gap.Tenant != "noisy" || gap.Check() != nil {
			t.Fatalf("gap %+v: %v", gap, err)
		}
		if g.Counts["alert.raised"] != 7 || g.Counts["presence.offline"] != 1 || g.FromMS != from.UnixMilli() || g.ToMS-g.FromMS != 60_000 {
			t.Fatalf("gap %+v", g)
		}
		all := l.events()
		if len(all) != maxEvents/2+3 || all[len(all)-1] != "noisy alert.cleared 2" || all[len(all)-2] != "noisy log.gap events.db" {
			t.Fatalf("%d events, the last %v", len(all), all[len(all)-2:])
		}
		if s := q.Stats(); s.Waiting != 0 || s.Bytes != 0 || s.Lost != 8 || len(q.tenants) != 0 {
			t.Fatalf("stats %+v", s)
		}
	})
}

// Calls do not wait here; those that the log refuses are counted.
func TestCallsPassThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{}
		q, stop := run(t, l, nil)
		defer stop()
		offer(q, "a", "call", 1)
		l.full = true
		if offer(q, "a", "call", 2) || offer(q, "a", "event", 3) {
			t.Error("accepted by a log that refuses")
		}
		q.Dropped([]kernel.Event{{Tenant: "a", Type: "call", CreatedMS: 1}, {Tenant: "a", Type: "call", CreatedMS: 2}})
		if s := q.Stats(); s.Lost != 4 || s.Unreported != 4 {
			t.Errorf("stats %+v", s)
		}
		time.Sleep(time.Second)
		var g Gap
		_ = l.Replay(t.Context(), 0, func(e kernel.Event) error { return json.Unmarshal(e.Payload, &g) })
		if all := l.events(); l.offers != 3 || len(all) != 1 || all[0] != "a log.gap events.db" || g.Counts["call"] != 3 || g.Counts["event"] != 1 || g.FromMS != 1 {
			t.Errorf("%d offers, events %v, gap %+v", l.offers, all, g)
		}
		if s := q.Stats(); s.Unreported != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// An event that the log refuses for what it is does not hold up the others.
func TestRefusedEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{refuses: "alert.bad"}
		q, stop := run(t, l, nil)
		defer stop()
		for i := range 5 {
			offer(q, "a", []string{"alert.raised", "alert.bad"}[i%2], i)
		}
		time.Sleep(time.Minute)
		if all := l.events(); len(all) != 3 || q.Stats().Lost != 2 {
			t.Errorf("events %v, stats %+v", all, q.Stats())
		}
	})
}

// Run ends on a disk that hangs.
func TestRunEndsOnAHungDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{}
		hold := make(chan struct{})
		l.set(nil, hold)
		q, stop := run(t, l, nil)
		offer(q, "a", "alert.raised", 1)
		time.Sleep(time.Minute)
		began := time.Now()
		stop()
		if d := time.Since(began); d > 2*finalTimeout {
			t.Errorf("Run ended after %v", d)
		}
	})
}

// Append says that the disk was the reason, and fails at once while it hangs.
func TestAppendExplains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{}
		l.set(nil, make(chan struct{}))
		w := storage.NewWatch("events.db")
		q := New(Options{Log: l, Store: "events.db", Watch: w})
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		_, err := q.Append(ctx, kernel.Event{Type: "ticket.created"})
		if storage.Classify(err) != storage.Hung {
			t.Errorf("after the deadline: %v", err)
		}
		op := w.Begin("commit")
		time.Sleep(storage.HungAfter + time.Second)
		began := time.Now()
		if _, err := q.Append(t.Context(), kernel.Event{Type: "ticket.created"}); storage.Classify(err) != storage.Hung || time.Since(began) != 0 {
			t.Errorf("while it hangs: %v after %v", err, time.Since(began))
		}
		op.End(nil)
	})
	q := New(Options{Store: "events.db"})
	_, err := q.Append(t.Context(), kernel.Event{Type: "ticket.created"})
	if storage.Classify(err) != storage.Missing || q.Offer(kernel.Event{Type: "alert.raised"}) || q.Fault() == nil || q.Last() != 0 {
		t.Errorf("without a log: %v", err)
	}
}

// Wait returns once the events before its mark are stored, and not before.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &faultyLog{}
		l.set(syscall.ENOSPC, nil)
		q, _ := run(t, l, nil)
		if err := q.Wait(t.Context(), q.Mark()); err != nil {
			t.Fatalf("nothing waits: %v", err)
		}
		offer(q, "a", "alert.raised", 1)
		mark := q.Mark()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := q.Wait(ctx, mark); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("on a full disk: %v", err)
		}
		l.set(nil, nil)
		if err := q.Wait(t.Context(), mark); err != nil || len(l.events()) != 1 {
			t.Errorf("got %v and %v", err, l.events())
		}
	})
}
