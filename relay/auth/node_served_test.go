package auth

import (
	"errors"
	"testing"
	"time"

	"agentctl/manifest"
)

// TestServed: what is saved of a node's links survives a restart, changes of the node and a
// second save, and goes when the node is removed.
func TestServed(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Options{StateDir: dir})
	id, other := manifest.NewNodeID(), manifest.NewNodeID()
	upsert(t, s, "acme", id, "pi", "")
	upsert(t, s, "acme", other, "pi-2", "")
	save := func(v Served) {
		t.Helper()
		if err := errors.Join(s.SaveBoot(t.Context(), id, v.BootID), s.SaveCloneTime(t.Context(), id, v.CloneMS)); err != nil || s.Served(id) != v {
			t.Fatalf("saved %+v, %v; want %+v", s.Served(id), err, v)
		}
	}
	if got := s.Served(id); got != (Served{}) {
		t.Errorf("a new node: %+v", got)
	}
	save(Served{BootID: manifest.NewULID()})
	if len(s.CloneTimes()) != 0 {
		t.Errorf("suspects %v", s.CloneTimes())
	}
	v := Served{BootID: manifest.NewULID(), CloneMS: 1_800_000_000_000}
	save(v)
	upsert(t, s, "acme", id, "pi-new", `[{"a":1}]`)
	if err := s.SaveBoot(t.Context(), manifest.NewNodeID(), v.BootID); err != nil {
		t.Errorf("an unknown node: %v", err)
	}
	if n := s.SeenWithin(time.Hour); n != 2 {
		t.Errorf("%d nodes were seen within an hour, want 2", n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, Options{StateDir: dir})
	if got := s.CloneTimes(); len(got) != 1 || got[id] != v.CloneMS || s.Served(id) != v || s.Served(other) != (Served{}) {
		t.Errorf("after a restart: %v", got)
	}
	if _, err := s.RemoveNode(t.Context(), "acme", id, false); err != nil {
		t.Fatal(err)
	}
	third := manifest.NewNodeID()
	upsert(t, s, "acme", third, "pi-3", "") // may get the row id of the removed one
	if got := s.Served(third); got != (Served{}) {
		t.Errorf("a new node has %+v of a removed one", got)
	}
}
