package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// The log on disk behaves as the one in memory, sequence numbers apart, over reopenings
// and a clock that jumps.
func TestMatchesMemoryLog(t *testing.T) {
	path, c := logPath(t), newClock()
	o := Options{Path: path, Now: c.now}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	stop := run(t, s)
	reopen := func() {
		stop()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if s, err = Open(o); err != nil {
			t.Fatal(err)
		}
		stop = run(t, s)
	}
	var memory kernel.MemoryLog
	rapid.Check(t, func(rt *rapid.T) {
		for range rapid.IntRange(1, 5).Draw(rt, "appends") {
			events := rapid.SliceOfN(rapid.Custom(drawEvent), 1, 6).Draw(rt, "events")
			_, errMemory := memory.Append(context.Background(), events...)
			_, err := s.Append(context.Background(), events...)
			if (err == nil) != (errMemory == nil) {
				rt.Fatalf("disk %v, memory %v", err, errMemory)
			}
		}
		if rapid.IntRange(0, 5).Draw(rt, "reopen") == 0 {
			c.move(time.Duration(rapid.Int64Range(-5000, 5000).Draw(rt, "clock")) * time.Millisecond)
			reopen()
		}
	})
	var want []kernel.Event
	_ = memory.Replay(context.Background(), 0, func(e kernel.Event) error { want = append(want, e); return nil })
	got := all(t, s, Query{})
	if len(got) != len(want) {
		t.Fatalf("%d events, want %d", len(got), len(want))
	}
	last := uint64(0)
	for i, e := range got {
		if e.Seq <= last {
			t.Fatalf("seq %d after %d", e.Seq, last)
		}
		last = e.Seq
		e.Seq = want[i].Seq
		if !reflect.DeepEqual(e, want[i]) {
			t.Fatalf("event %d is %+v, want %+v", i, e, want[i])
		}
	}
	if s.Last() != last || s.Stats().Events != int64(len(got)) {
		t.Errorf("Last %d, want %d; stats %+v", s.Last(), last, s.Stats())
	}
	stop()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// drawEvent draws events that are good, and some that are not.
func drawEvent(t *rapid.T) kernel.Event {
	e := kernel.Event{
		Tenant:    rapid.SampledFrom([]string{"", "default", "b\u00e4ume", strings.Repeat("t", 64)}).Draw(t, "tenant"),
		Type:      rapid.SampledFrom([]string{"ticket.created", "call", "presence.offline", "call", "No"}).Draw(t, "type"),
		Aggregate: rapid.SampledFrom([]string{"", "T-1", "a\nb'\"", strings.Repeat("a", 128)}).Draw(t, "aggregate"),
		CreatedMS: rapid.Int64Range(1, epoch).Draw(t, "created"),
	}
	if rapid.Bool().Draw(t, "payload") {
		b, err := json.Marshal(map[string]any{"text": rapid.String().Draw(t, "text"), "n": rapid.Int64().Draw(t, "n")})
		if err != nil {
			t.Fatal(err)
		}
		e.Payload = b
	}
	return e
}

func TestAppend(t *testing.T) {
	s := open(t, Options{Path: logPath(t)})
	if _, err := s.Append(context.Background(), event("call", "t", 1)); !errors.Is(err, ErrNotRunning) {
		t.Errorf("before Run: %v", err)
	}
	stop := run(t, s)
	if err := s.Run(context.Background()); err == nil {
		t.Error("Run ran twice at a time")
	}
	seq := mustAppend(t, s, event("call", "t", 1), event("call", "t", 2))
	many := make([]kernel.Event, MaxAppend+1)
	for i := range many {
		many[i] = event("call", "t", i)
	}
	bad := func(change func(*kernel.Event)) []kernel.Event {
		e := event("call", "t", 3)
		change(&e)
		return []kernel.Event{event("call", "t", 2), e} // the good one must not be kept either
	}
	tests := []struct {
		name   string
		events []kernel.Event
		want   string
	}{
		{"type", bad(func(e *kernel.Event) { e.Type = "A" }), "type"},
		{"NUL", bad(func(e *kernel.Event) { e.Aggregate = "a\x00" }), "NUL"},
		{"tenant", bad(func(e *kernel.Event) { e.Tenant = "\xff" }), "UTF-8"},
		{"payload", bad(func(e *kernel.Event) { e.Payload = json.RawMessage("{\"a\":\"\xff\"}") }), "UTF-8"},
		{"array", bad(func(e *kernel.Event) { e.Payload = json.RawMessage("[]") }), "object"},
		{"large", bad(func(e *kernel.Event) { e.Payload = make([]byte, kernel.MaxPayload+1) }), "payload"},
		{"many", many, "at most"},
	}
	for _, tt := range tests {
		if last, err := s.Append(context.Background(), tt.events...); err == nil || last != 0 || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %d, %v; want an error with %q", tt.name, last, err, tt.want)
		}
	}
	if s.Last() != seq {
		t.Errorf("Last %d, want %d", s.Last(), seq)
	}
	e := event("call", "t", 3)
	e.Payload = json.RawMessage("{ \"a\": 1,\r\n\"b\": [2] }")
	mustAppend(t, s, e)
	if got := all(t, s, Query{After: seq}); len(got) != 1 || string(got[0].Payload) != `{"a":1,"b":[2]}` {
		t.Errorf("kept %+v", got)
	}
	stop()
	if _, err := s.Append(context.Background(), event("call", "t", 1)); !errors.Is(err, ErrNotRunning) {
		t.Errorf("after Run: %v", err)
	}
	if s.Offer(event("call", "t", 1)) {
		t.Error("an offer was taken after Run")
	}
	if st := s.Stats(); st.Appended != 3 || st.Events != 3 || st.Dropped != 1 || st.Offered != 1 {
		t.Errorf("stats %+v", st)
	}
}

// heldCommits is an Options.onCommit that holds each commit: it sends to inside, and goes on when it
// receives from leave. init makes the channels, in the bubble that uses them.
type heldCommits struct{ inside, leave chan bool }

func (h *heldCommits) init() { h.inside, h.leave = make(chan bool), make(chan bool) }

func (h *heldCommits) onCommit([]kernel.Event) { h.inside <- true; <-h.leave }

// An appender who goes away before its transaction keeps nothing; one who goes away
// during it gets an error that says it may have been kept.
func TestAppendContext(t *testing.T) {
	var held heldCommits
	withStore(t, Options{onCommit: held.onCommit}, func(t *testing.T, s *Store) {
		held.init()
		appendUntil := func(n int) (cancel func(), result chan error) {
			ctx, cancel := context.WithCancel(context.Background())
			result = make(chan error, 1)
			go func() { _, err := s.Append(ctx, event("call", "t", n)); result <- err }()
			return cancel, result
		}
		cancelFirst, first := appendUntil(1)
		<-held.inside // the first is durable
		cancelSecond, second := appendUntil(2)
		synctest.Wait() // the second is queued
		cancelSecond()
		if err := <-second; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nothing was kept") {
			t.Errorf("canceled while it was queued: got %v, want that nothing was kept", err)
		}
		cancelFirst()
		if err := <-first; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "may have been kept") {
			t.Errorf("canceled during the commit: got %v, want that it may have been kept", err)
		}
		held.leave <- true
		synctest.Wait()
		if got := all(t, s, Query{}); len(got) != 1 || string(got[0].Payload) != `{"n":1}` {
			t.Errorf("kept %+v, want the first event", got)
		}
	})
}

// Offers are kept within 200 ms, those from before Run too; a full queue refuses them and
// leaves half of the queue to appends.
func TestOffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := Open(Options{Path: logPath(t), MaxQueued: 16})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 6 {
			if got := s.Offer(event("call", "t", i)); got != (i < 4) {
				t.Errorf("offer %d: %v", i, got)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		for round := range 2 {
			time.Sleep(200 * time.Millisecond)
			if st := s.Stats(); st.Appended != uint64(4+round) || st.Commits != uint64(1+round) {
				t.Errorf("round %d: stats %+v", round, st)
			}
			if !s.Offer(event("call", "t", 9)) {
				t.Error("the queue is still full")
			}
		}
		cancel()
		if err := <-done; err != context.Canceled {
			t.Error(err)
		}
		if st := s.Stats(); st.Offered != 8 || st.Dropped != 2 || st.Appended != 6 {
			t.Errorf("stats %+v", st)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Offers that come during a commit wait for others like all offers; a whole batch does not wait.
func TestOffersAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *Store
		offers := 0
		s, err := Open(Options{Path: logPath(t), onCommit: func([]kernel.Event) {
			if offers++; offers < 10 {
				s.Offer(event("call", "t", offers))
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		synctest.Wait()
		s.Offer(event("call", "t", 0))
		time.Sleep(3*offerInterval + time.Millisecond)
		if st := s.Stats(); st.Commits != 3 || st.Offered != 4 {
			t.Errorf("after three intervals: %+v", st)
		}
		time.Sleep(7 * offerInterval)
		for i := range 2 * maxBatchEvents {
			s.Offer(event("call", "t", i))
		}
		synctest.Wait() // a commit between two offers may leave the last ones to the next interval
		if st := s.Stats(); st.Queued >= maxBatchEvents {
			t.Errorf("a whole batch waits: %+v", st)
		}
		time.Sleep(offerInterval + time.Millisecond)
		if st := s.Stats(); st.Queued != 0 || st.Appended != 10+2*maxBatchEvents {
			t.Errorf("after another interval: %+v", st)
		}
		cancel()
		if err := <-done; err != context.Canceled {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A full queue refuses an append at once. What is queued during a commit is committed together.
func TestQueueFull(t *testing.T) {
	var held heldCommits
	const maxQueued = 6 // a tenant may have half of it
	withStore(t, Options{MaxQueued: maxQueued, onCommit: held.onCommit}, func(t *testing.T, s *Store) {
		held.init()
		results := make(chan error, 1+maxQueued/2)
		try := func() { _, err := s.Append(context.Background(), event("call", "t", 1)); results <- err }
		go try()
		<-held.inside
		for range maxQueued / 2 {
			go try()
		}
		synctest.Wait()
		if _, err := s.Append(context.Background(), event("call", "t", 1)); !errors.Is(err, kernel.ErrLogFull) {
			t.Errorf("a full queue: got %v, want ErrLogFull", err)
		}
		held.leave <- true
		<-held.inside
		held.leave <- true
		for range cap(results) {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if st := s.Stats(); st.Commits != 2 || st.SharedCommits != 1 || st.Appended != 4 {
			t.Errorf("%d events in %d commits, %d of them shared; want 4 in 2, one shared", st.Appended, st.Commits, st.SharedCommits)
		}
	})
}

// Run may end and begin again; what was offered meanwhile is refused, followers continue.
func TestRunAgain(t *testing.T) {
	s := open(t, Options{Path: logPath(t)})
	sub := s.topic.Subscribe(fanout.SubscribeOptions[kernel.Event]{})
	for n := range 3 {
		stop := run(t, s)
		seq := mustAppend(t, s, event("call", "t", n))
		if e, ok := sub.Next(); !ok || e.Seq != seq {
			t.Errorf("life %d: followed %+v, want %d", n, e, seq)
		}
		if err := s.Close(); err == nil {
			t.Error("closed while Run runs")
		}
		stop()
		if s.Offer(event("call", "t", n)) {
			t.Error("an offer was accepted after Run ended")
		}
	}
	if st := s.Stats(); st.Events != 3 || st.Dropped != 3 {
		t.Errorf("stats %+v", st)
	}
}

// Numbers begin at the clock and never go back, whatever the clock does.
func TestSeq(t *testing.T) {
	path, c := logPath(t), newClock()
	life := func() (first, last uint64) {
		s, err := Open(Options{Path: path, Now: c.now})
		if err != nil {
			t.Fatal(err)
		}
		stop := run(t, s)
		first = mustAppend(t, s, event("call", "t", 1))
		c.move(time.Hour)
		last = mustAppend(t, s, event("call", "t", 1))
		c.move(-time.Hour)
		stop()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return first, last
	}
	first, last := life()
	if first != uint64(epoch)<<12 || last != first+1 {
		t.Errorf("first life %d %d", first, last)
	}
	c.move(-time.Hour)
	if first, _ = life(); first != uint64(epoch)<<12+2 {
		t.Errorf("clock went back: %d", first)
	}
	c.move(2 * time.Hour)
	if first, last = life(); first != uint64(epoch+3600_000)<<12 {
		t.Errorf("clock went on: %d", first)
	}
	c.move(100 * 365 * 24 * time.Hour) // numbers beyond 2^53 are not for JSON
	if first, _ = life(); first != last+1 {
		t.Errorf("absurd clock: %d after %d", first, last)
	}
}

func TestOpen(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	if _, err := Open(Options{Path: path}); err == nil || !strings.Contains(err.Error(), "another relay") {
		t.Errorf("two at a time: %v", err)
	}
	for _, name := range []string{"", "-wal", "-shm", ".lock"} {
		info, err := os.Stat(path + name)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("Run after Close: %v", err)
	}

	dir := t.TempDir()
	write := func(name string, data []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	foreign := filepath.Join(dir, "foreign")
	if _, err := openRaw(t, foreign).Exec("CREATE TABLE x (y)"); err != nil {
		t.Fatal(err)
	}
	newer := filepath.Join(dir, "newer")
	if _, err := openRaw(t, newer).Exec("PRAGMA application_id = 1634166019"); err != nil { // "age" 3
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct{ name, path, want string }{
		{"nothing", "", "no path"},
		{"directory", dir, "regular file"},
		{"text", write("text", []byte(strings.Repeat("no database\n", 100))), "damaged"},
		{"cut", write("cut", good[:5000]), "damaged"},
		{"foreign", foreign, "another program"},
		{"newer", newer, "newer agentctl"},
		{"below a file", filepath.Join(write("file", nil), "x"), "not a directory"},
	}
	for _, tt := range tests {
		if s, err := Open(Options{Path: tt.path}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
			if err == nil {
				s.Close()
			}
		}
	}
}

func ExampleStore() {
	dir, err := os.MkdirTemp("", "eventlog")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	log, err := Open(Options{Path: filepath.Join(dir, FileName)})
	if err != nil {
		panic(err)
	}
	defer log.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	log.Offer(kernel.Event{Type: "presence.online", Aggregate: "attic"}) // kept once Run runs
	go func() { done <- log.Run(ctx) }()
	<-log.Started()
	if _, err := log.Append(ctx, kernel.Event{Type: "ticket.created", Aggregate: "T-1", Payload: json.RawMessage(`{"title": "pump"}`)}); err != nil {
		panic(err)
	}
	cancel()
	<-done
	_ = log.Replay(context.Background(), 0, func(e kernel.Event) error {
		fmt.Println(e.Type, e.Aggregate, string(e.Payload))
		return nil
	})
	// Output:
	// presence.online attic {}
	// ticket.created T-1 {"title":"pump"}
}
