package eventlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

// withStore opens and runs a log in a bubble of virtual time, and checks the file afterwards. The log is a
// new one unless Options.Path names one.
func withStore(t *testing.T, o Options, fn func(*testing.T, *Store)) {
	t.Helper()
	o.Path = cmp.Or(o.Path, logPath(t))
	synctest.Test(t, func(t *testing.T) {
		s, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		defer func() { // also when fn ends the test
			cancel()
			if err := <-done; err != context.Canceled {
				t.Error(err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		fn(t, s)
	})
	integrity(t, o.Path)
}

func TestRetainAge(t *testing.T) {
	var asked atomic.Int64
	o := Options{MaxAge: 16 * time.Hour, Snapshot: func(context.Context) ([]kernel.Event, error) {
		return []kernel.Event{event("snapshot.ticket", "open", int(asked.Add(1)))}, nil
	}}
	withStore(t, o, func(t *testing.T, s *Store) {
		first := mustAppend(t, s, event("ticket.created", "open", 0))
		for range 19 * 20 { // an event each three minutes
			time.Sleep(3 * time.Minute)
			mustAppend(t, s, event("call", "t", 0))
		}
		// Calls go after MaxAge and a 16th of it, and again each hour: at 17 h, 18 h and 19 h. The
		// one event of state goes at 17 h.
		st, snapshots := s.Stats(), asked.Load()
		if snapshots != 1 || st.Snapshots != uint64(snapshots) || st.RetentionError != "" {
			t.Errorf("%d snapshots, %+v", snapshots, st)
		}
		if st.Events < 16*20 || st.Events > 17*20+5 || st.Removed == 0 || s.Stats().First != st.Mark || s.Stats().First <= first || s.CanResume(first, Query{}) || !s.CanResume(st.Mark-1, Query{}) || s.CanResume(s.Last()+1, Query{}) {
			t.Errorf("stats %+v", st)
		}
		got := all(t, s, Query{})
		if got[0].Seq != s.Stats().First || int64(len(got)) != st.Events {
			t.Errorf("%d events from %d; stats %+v", len(got), got[0].Seq, st)
		}
		if got := all(t, s, Query{Aggregates: []string{"open"}}); len(got) == 0 || got[0].Type != "snapshot.ticket" {
			t.Errorf("what was known of the ticket is gone: %+v", got)
		}
	})
}

// A wall clock that is ahead removes nothing: not when it jumps, nor when the log is opened with it.
// With the uptime the events become old all the same.
func TestRetainWithWrongClock(t *testing.T) {
	path, ck := logPath(t), newClock()
	check := func(jump, uptime time.Duration, want bool) {
		t.Helper()
		s, err := Open(Options{Path: path, Now: ck.now, MaxAge: 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		s.uptime = func() time.Duration { return uptime }
		stop := run(t, s)
		if s.Stats().Events == 0 {
			mustAppend(t, s, event("call", "t", 0))
		}
		ck.move(jump)
		stop()
		if v, err := s.victim(ClassCalls, nil, false); (v != nil) != want || err != nil {
			t.Errorf("after %v: victim %v, %v", uptime, v, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	check(365*24*time.Hour, time.Hour, false)
	check(0, time.Hour, false) // the clock is still ahead
	check(0, 26*time.Hour, true)
	check(-365*24*time.Hour, 26*time.Hour, false) // NTP has set it: the event is new
}

// Everything may go; the numbers go on above.
func TestRetainAll(t *testing.T) {
	withStore(t, Options{MaxAge: time.Hour}, func(t *testing.T, s *Store) {
		last := mustAppend(t, s, event("call", "t", 0), event("call", "t", 1))
		time.Sleep(2 * time.Hour)
		if st := s.Stats(); st.Events != 0 || st.First != 0 || st.Last != last || st.Mark != last+1 {
			t.Errorf("stats %+v", st)
		}
		if got, err := s.readLast(); got != last || err != nil {
			t.Errorf("the last seq is %d on disk (%v), want %d", got, err, last)
		}
		if next := mustAppend(t, s, event("call", "t", 2)); next != last+1 || s.Stats().First != next {
			t.Errorf("next %d, first %d, after %d", next, s.Stats().First, last)
		}
	})
}

func TestRetainSize(t *testing.T) {
	big := json.RawMessage(`{"x":"` + strings.Repeat("x", 4000) + `"}`)
	withStore(t, Options{MaxBytes: 1 << 20, MaxAge: -1}, func(t *testing.T, s *Store) {
		peak := int64(0)
		e := kernel.Event{Type: "call", Aggregate: "t", Payload: big}
		for range 120 { // 5 MB
			mustAppend(t, s, e, e, e, e, e, e, e, e, e, e)
			time.Sleep(20 * time.Second)
			peak = max(peak, s.Stats().Bytes)
		}
		time.Sleep(2 * time.Minute)
		var size int64
		if err := s.Reader.db.QueryRow("SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size").Scan(&size); err != nil {
			t.Fatal(err)
		}
		if st := s.Stats(); size > 1<<20 || size < 1<<19-1<<16 || st.Removed < 900 || peak > 1<<20 || st.Dropped > 0 {
			t.Errorf("size %d, peak on disk %d, stats %+v", size, peak, st)
		}
	})
}

// No snapshot, no removal.
func TestRetainRefused(t *testing.T) {
	busy := errors.New("the tickets are busy")
	var free atomic.Bool
	snapshot := func(context.Context) ([]kernel.Event, error) {
		if free.Load() {
			return nil, nil
		}
		return nil, busy
	}
	withStore(t, Options{MaxAge: time.Hour, Snapshot: snapshot}, func(t *testing.T, s *Store) {
		mustAppend(t, s, event("ticket.created", "t", 0))
		time.Sleep(3 * time.Hour)
		if st := s.Stats(); st.Events != 1 || !strings.Contains(st.RetentionError, busy.Error()) || st.LastError != "" {
			t.Errorf("stats %+v", st)
		}
		free.Store(true)
		time.Sleep(2 * time.Minute)
		if st := s.Stats(); st.Events != 0 || st.RetentionError != "" {
			t.Errorf("stats %+v", st)
		}
	})
}

// counters is a plugin whose state is sums: a replay that misses or repeats an event of a
// counter shows. It does as docs/eventlog.md says: one lock around Append and apply, and
// around the snapshot.
type counters struct {
	mu   sync.Mutex
	sums map[string]int
	log  *Store
}

type sum struct {
	N   int  `json:"n"`
	End bool `json:"end,omitempty"`
}

func (c *counters) apply(e kernel.Event) {
	var s sum
	if err := json.Unmarshal(e.Payload, &s); err != nil {
		panic(err)
	}
	_, known := c.sums[e.Aggregate]
	switch {
	case e.Type == "snapshot.counter", e.Type == "counter.begun":
		c.sums[e.Aggregate] = s.N
	case e.Type == "counter.ended":
		delete(c.sums, e.Aggregate)
	case known: // else it began before the mark, and has ended or its snapshot follows
		c.sums[e.Aggregate] += s.N
	}
}

func (c *counters) do(ctx context.Context, typ, about string, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := event(typ, about, n)
	if _, err := c.log.Append(ctx, e); err != nil {
		return err
	}
	c.apply(e)
	return nil
}

func (c *counters) snapshot(context.Context) (events []kernel.Event, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for about, n := range c.sums {
		events = append(events, event("snapshot.counter", about, n))
	}
	return events, nil
}

// While counters count, retention removes nearly all of the log, again and again; a replay
// of what is left rebuilds them each time.
func TestSnapshotRebuilds(t *testing.T) {
	c := &counters{sums: map[string]int{}}
	committed := make(chan struct{}, 1) // holds a signal
	path, ck := logPath(t), newClock()
	s := open(t, Options{Path: path, Now: ck.now, MaxAge: time.Second, Snapshot: c.snapshot, onCommit: func([]kernel.Event) { signal(committed) }})
	checkNow := make(chan struct{})
	c.log, s.retainNow = s, checkNow
	s.uptime = func() time.Duration { return ck.now().Sub(time.UnixMilli(epoch)) }
	run(t, s)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				about := fmt.Sprintf("%d-%d", g, i%40)
				typ := "counter.added"
				switch {
				case i < 40 || i%97 == 40: // some end and begin again
					typ = "counter.begun"
				case i%53 == 0:
					typ = "counter.ended"
				}
				if err := c.do(ctx, typ, about, i%7); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	rounds := 3
	if slow() {
		rounds = 30
	}
	for round := range rounds {
		removed := s.Stats().Removed
		for before := s.Stats().Appended; s.Stats().Appended < before+300; {
			<-committed
		}
		ck.move(time.Minute) // those are old now
		for s.Stats().Removed < removed+10 {
			checkNow <- struct{}{} // again and again: a check during a round does nothing
			<-committed
			if e := s.Stats().RetentionError; e != "" {
				t.Fatal(e)
			}
		}
		c.mu.Lock() // nobody is between Append and apply
		var got *counters
		for err := ErrRemoved; errors.Is(err, ErrRemoved); { // retention runs meanwhile
			got = &counters{sums: map[string]int{}}
			if err = s.Replay(ctx, 0, func(e kernel.Event) error { got.apply(e); return nil }); err != nil && !errors.Is(err, ErrRemoved) {
				t.Error(err)
			}
		}
		if len(got.sums) == 0 {
			t.Error("no counters")
		}
		for about, n := range c.sums {
			if got.sums[about] != n {
				t.Errorf("round %d: %s is %d, rebuilt as %d", round, about, n, got.sums[about])
			}
		}
		for about := range got.sums {
			if _, ok := c.sums[about]; !ok {
				t.Errorf("round %d: %s had ended", round, about)
			}
		}
		c.mu.Unlock()
	}
	cancel()
	wg.Wait()
	t.Logf("stats %+v", s.Stats())
}
