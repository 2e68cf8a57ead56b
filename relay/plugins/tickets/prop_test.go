package tickets

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// TestReplay: after any operations, also those that are refused, a replay of the log gives
// the state that lives, and so does a replay of what is left when a snapshot was appended
// and the events before it are gone, whatever happened between its making and its append.
func TestReplay(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		d := newHarness(t)
		var made []string
		n := rapid.IntRange(1, 60).Draw(rt, "operations")
		snapshotAt, appendAfter := rapid.IntRange(0, n).Draw(rt, "snapshot at"), rapid.IntRange(0, 3).Draw(rt, "append after")
		var snapshot []kernel.Event
		var mark uint64
		for i := 0; i <= n+appendAfter; i++ {
			if i == snapshotAt {
				mark, snapshot = d.log.Last(), d.p.Snapshot()
			}
			if i == snapshotAt+appendAfter {
				if _, err := d.log.Append(context.Background(), snapshot...); err != nil {
					rt.Fatal(err)
				}
			}
			made = operate(rt, d, made)
		}
		live := dump(d.p)
		if got := dump(restored(rt, d.log, 0)); got != live {
			rt.Fatalf("replay gives\n%s, live is\n%s", got, live)
		}
		if got := dump(restored(rt, d.log, mark)); got != live {
			rt.Fatalf("replay behind %d gives\n%s, live is\n%s", mark, got, live)
		}
	})
}

func operate(rt *rapid.T, d *harness, made []string) []string {
	c := caller(rapid.SampledFrom([]string{"a", "a", "b"}).Draw(rt, "tenant"), rapid.SampledFrom([]string{"ann", "bob"}).Draw(rt, "actor"))
	id := "01HZX9K3M4P7Q8R9S0T1V2W3XY"
	if len(made) > 0 {
		id = rapid.SampledFrom(made).Draw(rt, "ticket")
	}
	tool := rapid.SampledFrom([]string{"create", "comment", "assign", "transition", "transition"}).Draw(rt, "tool")
	args := object{"id": id}
	switch tool {
	case "create":
		args = object{"title": rapid.SampledFrom([]string{"x", "<&>\u2028", "\u00fc"}).Draw(rt, "title"), "body": rapid.String().Draw(rt, "body")}
		if rapid.Bool().Draw(rt, "asks") {
			args["approval"] = object{"action": "y"}
		}
		if rapid.Bool().Draw(rt, "keyed") {
			args["idempotency_key"] = rapid.SampledFrom([]string{"k", "l"}).Draw(rt, "key")
		}
	case "comment":
		args["text"] = strings.Repeat("<", rapid.IntRange(1, MaxComment).Draw(rt, "text"))
	case "assign":
		args["agent_id"] = rapid.SampledFrom([]string{"", "ann", "bob"}).Draw(rt, "assignee")
	case "transition":
		args["to"] = rapid.SampledFrom(Statuses).Draw(rt, "to")
	}
	v, err := d.try(c, tool, args)
	if err == nil && tool == "create" {
		made = append(made, v.Ticket.ID)
	}
	if err != nil && reason(err) != "not_found" && reason(err) != "key_reused" {
		rt.Fatalf("%s %v: %v", tool, args, err)
	}
	return made
}

// restored makes a plugin of the events behind a mark.
func restored(t rapid.TB, log kernel.Log, after uint64) *Plugin {
	rest := &kernel.MemoryLog{Max: 100_000}
	if err := log.Replay(context.Background(), after, func(e kernel.Event) error {
		_, err := rest.Append(context.Background(), e)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	p := New(kernel.New(kernel.Options{}), rest)
	done, err := p.Restore(context.Background(), rest)
	if err != nil || done.Skipped > 0 {
		t.Fatalf("restored %+v, %v", done, err)
	}
	return p
}

// fill puts a ticket of a status into a plugin, without the tools.
func fill(d *harness, i int, status Status, text int) string {
	k := Ticket{ID: d.p.ids.next(), Title: fmt.Sprint("t", i), Body: strings.Repeat("x", text), Status: status, Priority: "low",
		CreatedBy: "ann", CreatedAt: 1, UpdatedAt: int64(i), Version: 3}
	t := d.p.tenant("a", true)
	e := newEvent("a", eventSnapshot, k.ID, k.UpdatedAt, payload{Ticket: &k})
	if _, err := d.log.Append(context.Background(), e); err != nil {
		d.t.Fatal(err)
	}
	d.p.apply(t, &e, &payload{Ticket: &k})
	return k.ID
}

// TestFinishedAreDropped: the one that was finished longest ago goes, with an event, and a
// replay knows it as well.
func TestFinishedAreDropped(t *testing.T) {
	d := newHarness(t)
	var ids []string
	for i := range MaxFinished {
		ids = append(ids, fill(d, i, Closed, 10))
	}
	id := d.create(ann, "one more")
	d.move(ann, id, Closed)
	if _, err := d.try(ann, "get", object{"id": ids[0]}); reason(err) != "not_found" {
		t.Errorf("the oldest: %v", err)
	}
	d.do(ann, "get", object{"id": ids[1]})
	d.move(ann, id, Open) // frees space, but the dropped one stays away
	if got := dump(restored(t, d.log, 0)); got != dump(d.p) {
		t.Error("another state after a replay")
	}
	// A snapshot that was made before the drop does not bring it back either.
	k := Ticket{ID: ids[0], Status: Closed, Version: 9}
	if _, err := d.log.Append(t.Context(), newEvent("a", eventSnapshot, k.ID, 1, payload{Ticket: &k})); err != nil {
		t.Fatal(err)
	}
	if got := dump(restored(t, d.log, 0)); got != dump(d.p) {
		t.Error("a late snapshot brings a dropped ticket back")
	}
}

func TestBounds(t *testing.T) {
	d := newHarness(t)
	for i := range MaxUnfinished - 1 {
		fill(d, i, []Status{Open, Waiting, Resolved, Pending}[i%4], 10)
	}
	closed := fill(d, 0, Closed, 10)
	last := d.create(ann, "the last")
	if _, err := d.try(ann, "create", object{"title": "too many"}); reason(err) != "full" || manifest.AsError(err).Code != manifest.RateLimited {
		t.Errorf("create: %v", err)
	}
	if _, err := d.try(ann, "transition", object{"id": closed, "to": Open}); reason(err) != "full" {
		t.Errorf("reopen: %v", err)
	}
	d.create(caller("b", "eve"), "of another tenant")
	for range MaxComments {
		d.do(ann, "comment", object{"id": last, "text": strings.Repeat("<", MaxComment)}) // six bytes each when escaped
	}
	if _, err := d.try(ann, "comment", object{"id": last, "text": "x"}); reason(err) != "full" {
		t.Errorf("comment: %v", err)
	}
	for _, e := range d.p.Snapshot() {
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	d.move(ann, last, Closed)
	if got := dump(restored(t, d.log, 0)); got != dump(d.p) {
		t.Error("another state after a replay")
	}
	t.Logf("a change and a replay of %d events: %v", d.log.Last(), time.Since(start))
}

// TestDropsForText: finished tickets are dropped for text, unfinished ones are not, and all
// tenants together are bounded as well.
func TestDropsForText(t *testing.T) {
	d := newHarness(t)
	finished := fill(d, 0, Closed, 8000)
	fill(d, 1, Closed, 8000)
	id := d.create(ann, "x")
	for i := 2; d.p.tenant("a", false).text+8000 < MaxText; i++ {
		fill(d, i, Open, 8000)
	}
	d.do(ann, "comment", object{"id": id, "text": strings.Repeat("c", MaxComment)})
	var err error
	made := 0
	for ; err == nil && made < 5; made++ {
		_, err = d.try(ann, "create", object{"title": "x", "body": strings.Repeat("b", MaxBody)})
	}
	if reason(err) != "full" || made == 1 {
		t.Errorf("text of one tenant: %v after %d", err, made)
	}
	if _, err := d.try(ann, "get", object{"id": finished}); reason(err) != "not_found" {
		t.Errorf("the finished one: %v", err)
	}
	if got := d.p.tenant("a", false).text; got > MaxText || d.p.text.Load() != int64(got) {
		t.Errorf("%d bytes, counted %d", got, d.p.text.Load())
	}
	d.p.text.Store(MaxAllText)
	if _, err := d.try(caller("b", "eve"), "create", object{"title": "x"}); reason(err) != "full" {
		t.Errorf("text of all: %v", err)
	}
	d.p.text.Store(0)
	d.p.tickets.Store(MaxAllTickets)
	if _, err := d.try(caller("b", "eve"), "create", object{"title": "x"}); reason(err) != "full" {
		t.Errorf("tickets of all: %v", err)
	}
}

// TestFitLog: whatever text fills a tenant, a snapshot of it fits into the part of the log that is
// kept free for snapshots (1/16), also when that is small.
func TestFitLog(t *testing.T) {
	const log = 4 << 20
	for name, text := range map[string]string{"plain": strings.Repeat("x", 1000), "controls": strings.Repeat("\x01", 1000), "markup": strings.Repeat("<", 1000), "short": "."} {
		d := newHarness(t)
		d.p.FitLog(log)
		var err error
		for n := 0; err == nil && n < MaxUnfinished; n++ {
			var v view
			v, err = d.try(ann, "create", object{"title": "t", "body": text})
			for i := 0; err == nil && i < 20; i++ {
				_, err = d.try(ann, "comment", object{"id": v.Ticket.ID, "text": text})
			}
		}
		size := 0
		for _, e := range d.p.Snapshot() {
			size += len(e.Payload) + 100
		}
		if reason(err) != "full" || size > log/16 || size < log/128 {
			t.Errorf("%s: a snapshot of %d bytes, %v", name, size, err)
		}
	}
}

// TestManyDrops: more small tickets than one append takes give way to a large one.
func TestManyDrops(t *testing.T) {
	d := newHarness(t)
	for i := range MaxFinished {
		fill(d, i, Closed, 10)
	}
	t1 := d.p.tenant("a", false)
	drop, ok := t1.dropsFor(MaxText-t1.text/4, 0, "")
	if !ok || len(drop) <= maxDrops {
		t.Fatalf("%d give way, %v", len(drop), ok)
	}
	id := d.p.ids.next()
	if err := d.p.commitWithDrops(t.Context(), t1, drop, change{eventCreated, id, payload{V: 1, By: "ann", Title: "x", Priority: "low"}}); err != nil {
		t.Fatal(err)
	}
	if n := len(t1.tickets); n != MaxFinished-len(drop)+1 {
		t.Errorf("%d tickets", n)
	}
	if got := dump(restored(t, d.log, 0)); got != dump(d.p) {
		t.Error("another state after a replay")
	}
}

// TestIDs: ids rise within a millisecond, from many goroutines, and past what was restored.
func TestIDs(t *testing.T) {
	var s ids
	s.skipPast("7ZZZZZZZZ0ZZZZZZZZZZZZZZZZ")
	list := []string{"7ZZZZZZZZ0ZZZZZZZZZZZZZZZZ"}
	for range 1000 {
		list = append(list, s.next())
	}
	if !slices.IsSorted(list) || len(slices.Compact(list)) != 1001 {
		t.Error("ids do not rise")
	}
	for _, id := range list {
		if u, ok := manifest.ParseULID(id); !ok || u != id {
			t.Fatalf("%s is no ULID", id)
		}
	}
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
