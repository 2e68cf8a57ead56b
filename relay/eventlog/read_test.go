package eventlog

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// What SQL selects is what Query.matches selects, over several pages.
func TestSelect(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	var kept []kernel.Event
	for n := 0; n < 2*maxPageRows; n += MaxAppend {
		var group []kernel.Event
		for i := range MaxAppend {
			e := event([]string{"call", "ticket.created", "ticket.closed", "tickets"}[i%4], []string{"log/level", "log/x", "T_1"}[i%3], i)
			e.Tenant = []string{"default", "greenhouse"}[i%2]
			group = append(group, e)
		}
		mustAppend(t, s, group...)
	}
	big := event("big", "T-1", 0)
	big.Payload = []byte(`{"x":"` + strings.Repeat("x", kernel.MaxPayload-8) + `"}`)
	for range 2 * maxPageBytes / len(big.Payload) {
		mustAppend(t, s, big)
	}
	kept = all(t, s, Query{})
	if int64(len(kept)) != s.Stats().Events || kept[0].Seq != s.Stats().First || kept[len(kept)-1].Seq != s.Last() {
		t.Fatalf("%d events; stats %+v", len(kept), s.Stats())
	}
	mid := kept[len(kept)/2].Seq
	tests := []Query{
		{Tenant: "greenhouse"},
		{Types: []string{"ticket.*"}},
		{Types: []string{"ticket*", "call"}, Tenant: "default"},
		{Aggregates: []string{"log/*"}, After: mid},
		{Aggregates: []string{"T_1", "%"}, To: mid}, // no LIKE: _ and % are themselves
		{Types: []string{"*"}, After: mid, To: mid + 1500},
		{Types: []string{"Ticket.*"}},
		{Tenant: "' OR 1=1 --"},
		{After: s.Last()},
		{After: 1 << 63},
		{Types: []string{"big"}, Aggregates: []string{"T-1"}},
		{Tenants: []string{"greenhouse", ""}, Class: ClassState},
		{Tenants: []string{"greenhouse", "default"}, Class: ClassCalls, After: mid},
		{Tenants: []string{"nobody"}},
	}
	for _, q := range tests {
		var want []kernel.Event
		for _, e := range kept {
			if e.Seq > q.After && (q.To == 0 || e.Seq <= q.To) && q.matches(e) {
				want = append(want, e)
			}
		}
		if got := all(t, s, q); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v: %d events, want %d", q, len(got), len(want))
		}
	}
	if err := s.Select(context.Background(), Query{Types: make([]string, maxPatterns+1)}, nil); err == nil {
		t.Error("a query without bounds was taken")
	}
	stop := errors.New("enough")
	if err := s.Replay(context.Background(), 0, func(kernel.Event) error { return stop }); err != stop {
		t.Errorf("Replay: %v", err)
	}
}

// A replay has a stable end, lets appends through, and fails when retention overtakes it.
func TestReplayDuringAppends(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	for range 3 * maxPageRows / MaxAppend {
		group := make([]kernel.Event, MaxAppend)
		for i := range group {
			group[i] = event("call", "t", i)
		}
		mustAppend(t, s, group...)
	}
	end, n := s.Last(), 0
	err := s.Replay(context.Background(), 0, func(e kernel.Event) error {
		if n++; n%500 == 0 {
			mustAppend(t, s, event("late", "t", n))
		}
		if e.Seq > end {
			t.Fatalf("event %d is of after the beginning", e.Seq)
		}
		return nil
	})
	if err != nil || n != 3*maxPageRows {
		t.Errorf("%d events, %v", n, err)
	}

	db, n := openRaw(t, s.path), 0
	err = s.Replay(context.Background(), 0, func(e kernel.Event) error {
		if n++; n == 1 {
			for _, q := range []string{"UPDATE chains SET mark = (SELECT min(seq) FROM events) + 2000 WHERE class = 'calls'", "DELETE FROM calls WHERE seq < (SELECT mark FROM chains WHERE class = 'calls')"} {
				if _, err := db.Exec(q); err != nil {
					t.Fatal(err)
				}
			}
		}
		return nil
	})
	if !errors.Is(err, ErrRemoved) || n != maxPageRows {
		t.Errorf("%d events, %v; want the first page and ErrGone", n, err)
	}
	if got := all(t, s, Query{}); len(got) != int(s.Last()-end)+3*maxPageRows-2000 {
		t.Errorf("%d events left", len(got))
	}
}

// Followers that come at any time and place, quick and slow ones, see every event behind
// theirs once, in order.
func TestFollow(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	const writers, each, groups = 4, 20, 60
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	end := s.nextSeq + writers*each*groups - 1
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for g := range groups {
				events := make([]kernel.Event, each)
				for i := range events {
					events[i] = event("call", fmt.Sprint(w), g*each+i)
				}
				if _, err := s.Append(ctx, events...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	await := func(seq uint64) { // until the log has reached it
		if err := s.Follow(ctx, Query{After: seq - 1, To: seq}, func(kernel.Event) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	for f := range 6 { // those from 3 on come later, those with an odd number want one writer, and 0 is slow
		wg.Go(func() {
			if f > 2 {
				await(end - uint64(rand.IntN(writers*each*groups)))
			}
			q := Query{To: end, Aggregates: [][]string{nil, {"1"}}[f%2]}
			got := 0
			err := s.Follow(ctx, q, func(e kernel.Event) error {
				if e.Seq <= q.After || f%2 == 1 && e.Aggregate != "1" {
					t.Errorf("%d: event %+v after %d", f, e, q.After)
				}
				if got++; f%2 == 0 && q.After > 0 && e.Seq != q.After+1 {
					t.Errorf("%d: event %d after %d", f, e.Seq, q.After)
				}
				q.After = e.Seq
				if f == 0 && got%400 == 0 { // falls behind the ring, and returns to the disk
					await(min(q.After+2*followBuffer, end))
				}
				return nil
			})
			want := writers * each * groups
			if f%2 == 1 {
				want /= writers
			}
			if err != nil || got != want {
				t.Errorf("%d: %d events, want %d, %v", f, got, want, err)
			}
		})
	}
	wg.Wait()
}

// A follower may name a number that is still to come.
func TestFollowFutureSeq(t *testing.T) {
	withStore(t, Options{}, func(t *testing.T, s *Store) {
		last := mustAppend(t, s, event("call", "t", 0))
		ctx, cancel := context.WithCancel(context.Background())
		got, done := make(chan uint64, 2), make(chan error)
		go func() {
			done <- s.Follow(ctx, Query{After: last + 1}, func(e kernel.Event) error { got <- e.Seq; return nil })
		}()
		synctest.Wait() // it follows
		mustAppend(t, s, event("call", "t", 1))
		mustAppend(t, s, event("call", "t", 2))
		if seq := <-got; seq != last+2 {
			t.Errorf("the first event is %d, want %d", seq, last+2)
		}
		cancel()
		if err := <-done; err != context.Canceled {
			t.Error(err)
		}
	})
}

func TestSubscribe(t *testing.T) {
	s := open(t, Options{Path: logPath(t)})
	sub := s.topic.Subscribe(fanout.SubscribeOptions[kernel.Event]{Resume: true, After: s.Last()})
	if sub.Missed() {
		t.Error("the end of the log is unknown to its tail")
	}
	stop := run(t, s)
	seq := mustAppend(t, s, event("call", "t", 7))
	if e, ok := sub.Next(); !ok || e.Seq != seq || string(e.Payload) != `{"n":7}` || e.CreatedMS == 0 {
		t.Errorf("tail has %+v when Append returns", e)
	}
	stop()
	s.Close()
	if err := sub.Err(); err != ErrClosed {
		t.Errorf("tail ended with %v", err)
	}
}

// checkReader opens a log with OpenReader and wants to find two events, of which the second has a seq, and
// that the reader cannot write.
func checkReader(t *testing.T, when, path string, last uint64) {
	t.Helper()
	r, err := OpenReader(path)
	if err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	defer r.Close()
	if got := all(t, r, Query{}); len(got) != 2 || got[1].Seq != last {
		t.Errorf("%s: got %+v, want two events up to %d", when, got, last)
	}
	if _, got, err := r.Bounds(context.Background()); got != last || err != nil {
		t.Errorf("%s: the last event is %d, %v; want %d", when, got, err, last)
	}
	if _, err := r.db.Exec("UPDATE chains SET mark = mark"); err == nil {
		t.Errorf("%s: the reader wrote", when)
	}
}

// A separate reader reads while a relay writes, and when none runs. It changes nothing.
func TestReader(t *testing.T) {
	path := logPath(t)
	if _, err := OpenReader(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "a relay makes it") {
		t.Errorf("no log: got %v, want that a relay makes it", err)
	}
	s := open(t, Options{Path: path})
	stop := run(t, s)
	last := mustAppend(t, s, event("call", "t", 1), event("call", "t", 2))
	checkReader(t, "while a relay writes", path, last)
	stop()
	checkReader(t, "while a relay is idle", path, last)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	checkReader(t, "without a relay", path, last)
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the reader has changed the file, %v", err)
	}
	if again := open(t, Options{Path: path}); again.Stats().Recovered {
		t.Error("a reader left the closed log like one that was not closed")
	}
}

// After a crash all events may be in the write-ahead log. A reader finds them there, and leaves it to the next
// relay to move them into the database.
func TestReaderAfterCrash(t *testing.T) {
	path, crashed := logPath(t), logPath(t)
	s := start(t, Options{Path: path})
	last := mustAppend(t, s, event("call", "t", 1), event("call", "t", 2))
	copyLog(t, path, crashed)
	checkReader(t, "after a crash", crashed, last)
	checkReader(t, "after a crash, again", crashed, last)
	if again := open(t, Options{Path: crashed}); !again.Stats().Recovered || again.Last() != last {
		t.Errorf("the next relay: recovered %v, last event %d; want true, %d", again.Stats().Recovered, again.Last(), last)
	}
}
