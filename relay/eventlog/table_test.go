package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"

	"agentctl/relay/kernel"
)

// mixedLog is a log that no relay has open, with events of many types and sizes of three tenants.
func mixedLog(t testing.TB, n int) (path string, events []kernel.Event) {
	t.Helper()
	path = logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	r := rand.New(rand.NewPCG(3, 4))
	var group []kernel.Event
	for i := range n {
		e := kernel.Event{Tenant: []string{"", "a", "b"}[r.IntN(3)], Aggregate: fmt.Sprint("x", i), CreatedMS: epoch + int64(i),
			Type: []string{"call", "call.refused", "event", "presence.online", "presence.offline", "ticket.created", "ticket.dropped"}[r.IntN(7)]}
		size := r.IntN(200)
		if r.IntN(50) == 0 {
			size = r.IntN(30_000) // overflow pages
		}
		e.Payload = json.RawMessage(`{"x":"` + strings.Repeat("ab", size/2) + `"}`)
		if group = append(group, e); len(group) == 100 {
			mustAppend(t, s, group...)
			group = nil
		}
	}
	if len(group) > 0 {
		mustAppend(t, s, group...)
	}
	events = all(t, s, Query{})
	stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path, events
}

// replayed returns what Replay calls fn with.
func replayed(t testing.TB, l kernel.Log, after uint64, types ...string) (events []kernel.Event) {
	t.Helper()
	if err := l.Replay(context.Background(), after, func(e kernel.Event) error { events = append(events, e); return nil }, types...); err != nil {
		t.Fatal(err)
	}
	return events
}

// Before Run, a replay of presence may leave out what later events have replaced, and nothing else.
func TestReplayPresence(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	r := rand.New(rand.NewPCG(5, 6))
	var group []kernel.Event
	add := func(about string, n int) {
		p := kernel.Presence{ID: about, Kind: []string{kernel.PresenceDevice, kernel.PresenceAgent, "later"}[r.IntN(3)], Name: strings.Repeat("n", r.IntN(100)), LastPingMS: int64(n)}
		payload, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		group = append(group, kernel.Event{Tenant: []string{"a", "b"}[r.IntN(2)], Type: kernel.PresenceTypes[r.IntN(3)], Aggregate: about, Payload: payload},
			kernel.Event{Tenant: "a", Type: "event", Aggregate: about})
		if len(group) == 200 {
			mustAppend(t, s, group...)
			group = nil
		}
	}
	for i := range 1000 {
		about := r.IntN(10)
		if i < 200 { // some are not heard of again
			about = r.IntN(40)
		}
		add(fmt.Sprint("x", about), i)
	}
	stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Options{Path: path})
	newestOf := func(replay func(fn func(kernel.Event) error) error) (newest map[string]kernel.Event, n int) {
		newest = make(map[string]kernel.Event)
		if err := replay(func(e kernel.Event) error {
			kind, ok := kernel.PresenceKind(&e)
			if !ok {
				t.Errorf("not about presence: %+v", e)
			}
			newest[e.Tenant+" "+kind+" "+e.Aggregate] = e
			n++
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return newest, n
	}
	presence := func(fn func(kernel.Event) error) error { return s.ReplayPresence(t.Context(), fn) }
	want, events := newestOf(func(fn func(kernel.Event) error) error { return s.Replay(t.Context(), 0, fn, kernel.PresenceTypes...) })
	got, read := newestOf(presence)
	if !reflect.DeepEqual(got, want) || read > events/2 || events != 1000 {
		t.Errorf("%d newest events of %d, want %d of %d", len(got), read, len(want), events)
	}
	s.table.presence = nil // too many
	if got, read := newestOf(presence); !reflect.DeepEqual(got, want) || read != events {
		t.Errorf("without the table of presence: %d newest events of %d", len(got), read)
	}
	s.table = nil
	if got, read := newestOf(presence); !reflect.DeepEqual(got, want) || read != events {
		t.Errorf("from SQLite: %d newest events of %d", len(got), read)
	}
}

// Before Run and behind it, a replay returns the same events.
func TestReplayBeforeRun(t *testing.T) {
	const n = 1500
	path, events := mixedLog(t, n)
	s := open(t, Options{Path: path})
	if s.table == nil {
		t.Fatal("the pages were not read")
	}
	queries := []struct {
		after uint64
		types []string
	}{
		{0, []string{"ticket.*"}}, {0, []string{"presence.online", "presence.offline"}}, {events[n/2].Seq, []string{"event"}},
		{0, []string{"t*", "presence.online"}}, {0, []string{"none"}}, {events[n-1].Seq, []string{"ticket.*"}},
		{0, []string{"c*", "event"}}, {0, []string{"call"}}, {0, nil}, // with calls
	}
	check := func(when string) {
		t.Helper()
		for _, q := range queries {
			var want []kernel.Event
			for _, e := range events {
				if e.Seq > q.after && kernel.MatchesType(q.types, e.Type) {
					want = append(want, e)
				}
			}
			if got := replayed(t, s, q.after, q.types...); !reflect.DeepEqual(got, want) {
				t.Errorf("%s, %v behind %d: %d events, want %d", when, q.types, q.after, len(got), len(want))
			}
		}
	}
	check("before Run")
	seen, stop := 0, errors.New("enough")
	if err := s.Replay(context.Background(), 0, func(kernel.Event) error { seen++; return stop }, "ticket.*"); err != stop || seen != 1 {
		t.Errorf("an error of fn: %v after %d events", err, seen)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := s.Replay(ctx, 0, func(kernel.Event) error { cancel(); return nil }, "ticket.*"); err != context.Canceled {
		t.Errorf("a canceled replay: %v", err)
	}
	run(t, s)
	if s.table != nil {
		t.Error("the pages are read while Run writes them")
	}
	check("while Run runs")
}

// The pages are also read after a process was killed: Open moves what it wrote into the file.
func TestReplayAfterKill(t *testing.T) {
	path := logPath(t)
	s := start(t, Options{Path: path})
	for i := range 300 {
		mustAppend(t, s, event("ticket.created", fmt.Sprint(i), i), call("default", i))
	}
	copied := logPath(t)
	copyLog(t, path, copied)
	killed := open(t, Options{Path: copied})
	if !killed.Stats().Recovered || killed.table == nil {
		t.Errorf("recovered %v, and the pages are read: %v", killed.Stats().Recovered, killed.table != nil)
	}
	if got := replayed(t, killed, 0, "ticket.*"); len(got) != 300 {
		t.Errorf("%d events", len(got))
	}
}

// copyLog copies the files of a log, open or closed.
func copyLog(t testing.TB, from, to string) {
	t.Helper()
	if err := os.MkdirAll(strings.TrimSuffix(to, FileName), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-wal"} {
		b, err := os.ReadFile(from + suffix)
		if suffix != "" && errors.Is(err, os.ErrNotExist) {
			continue // the log was closed
		}
		if err == nil {
			err = os.WriteFile(to+suffix, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Whatever is damaged, a start replays all events of state, or refuses.
func TestStartWithDamagedPages(t *testing.T) {
	path, events := mixedLog(t, 400)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var want []kernel.Event
	for _, e := range events {
		if kernel.MatchesType([]string{"ticket.*"}, e.Type) {
			want = append(want, e)
		}
	}
	r := rand.New(rand.NewPCG(5, 6))
	rounds := 30
	if slow() {
		rounds = 200
	}
	refused, opened := 0, 0
	for range rounds {
		b := append([]byte(nil), whole...)
		at := pageSize + r.IntN(len(b)-pageSize-64) // the schema is SQLite's business
		for i := range 1 + r.IntN(40) {
			b[at+i] = byte(r.IntN(256))
		}
		copied := logPath(t)
		if err := os.MkdirAll(strings.TrimSuffix(copied, FileName), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(copied, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(Options{Path: copied})
		if err != nil {
			refused++
			continue
		}
		var got []kernel.Event
		err = s.Replay(context.Background(), 0, func(e kernel.Event) error { got = append(got, e); return nil }, "ticket.*")
		if err != nil {
			refused++
		} else if opened++; !reflect.DeepEqual(got, want) {
			t.Errorf("%d events were replayed, want %d", len(got), len(want))
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if refused < rounds/10 || opened < rounds/10 {
		t.Errorf("%d refused, %d opened", refused, opened)
	}
}

// Pages that change between Open and Replay are not believed: SQLite reads them, and says so.
func TestPagesThatChange(t *testing.T) {
	path, _ := mixedLog(t, 400)
	s := open(t, Options{Path: path})
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	info, _ := f.Stat()
	if _, err := f.WriteAt(make([]byte, info.Size()-4096), 4096); err != nil {
		t.Fatal(err)
	}
	if err := s.Replay(context.Background(), 0, func(kernel.Event) error { return nil }, "ticket.*"); !errors.Is(err, ErrDamaged) {
		t.Errorf("Replay: %v", err)
	}
}
