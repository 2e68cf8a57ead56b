package eventlog

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// What SQL selects is what Query.matches selects, over several pages.
func TestSelect(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	var kept []kernel.Event
	for n := 0; n < 3*maxPageRows; n += MaxAppend {
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
	for f := range 6 {
		wg.Go(func() {
			for f > 2 && s.Last() < end-uint64(rand.IntN(writers*each*groups)) {
				time.Sleep(100 * time.Microsecond)
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
				if f == 0 && got%400 == 0 {
					time.Sleep(20 * time.Millisecond)
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
	s := start(t, Options{Path: logPath(t)})
	last := mustAppend(t, s, event("call", "t", 0))
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan uint64, 1)
	done := make(chan error)
	go func() {
		done <- s.Follow(ctx, Query{After: last + 1}, func(e kernel.Event) error { got <- e.Seq; return nil })
	}()
	for s.topic.Len() == 0 {
		time.Sleep(100 * time.Microsecond)
	}
	mustAppend(t, s, event("call", "t", 1))
	mustAppend(t, s, event("call", "t", 2))
	if seq := <-got; seq != last+2 {
		t.Errorf("first is %d, want %d", seq, last+2)
	}
	cancel()
	if err := <-done; err != context.Canceled {
		t.Error(err)
	}
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

// A separate reader reads while a relay writes, when none runs, and after a crash; it
// writes nothing into the log.
func TestReader(t *testing.T) {
	path := logPath(t)
	if _, err := OpenReader(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "a relay makes it") {
		t.Errorf("no log: %v", err)
	}
	s := open(t, Options{Path: path})
	stop := run(t, s)
	want := mustAppend(t, s, event("call", "t", 1), event("call", "t", 2))
	checkAt := func(when, path string) {
		t.Helper()
		r, err := OpenReader(path)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		defer r.Close()
		if got := all(t, r, Query{}); len(got) != 2 || got[1].Seq != want {
			t.Errorf("%s: %+v", when, got)
		}
		if _, last, err := r.Bounds(context.Background()); last != want || err != nil {
			t.Errorf("%s: last %d, %v", when, last, err)
		}
		if _, err := r.db.Exec("UPDATE chains SET mark = mark"); err == nil {
			t.Errorf("%s: a reader wrote", when)
		}
	}
	check := func(when string) { t.Helper(); checkAt(when, path) }
	check("while a relay writes")
	stop()
	check("while a relay is idle")

	crashed := logPath(t) // all in the write-ahead log, and no relay to move it
	if err := os.Mkdir(filepath.Dir(crashed), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + name)
		if err == nil {
			err = os.WriteFile(crashed+name, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	checkAt("after a crash", crashed)
	checkAt("after a crash, again", crashed)
	if s2, err := Open(Options{Path: crashed}); err != nil || !s2.Stats().Recovered || s2.Last() != want {
		t.Errorf("after a crash and a reader: %v", err)
	} else if err := s2.Close(); err != nil {
		t.Error(err)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	check("without a relay")
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the file changed (%v)", err)
	}
	if s, err = Open(Options{Path: path}); err != nil {
		t.Fatal(err)
	}
	if s.Stats().Recovered {
		t.Error("a reader left a closed log as after a crash")
	}
	s.Close()
}
