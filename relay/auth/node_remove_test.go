package auth

import (
	"errors"
	"path/filepath"
	"testing"

	"agentctl/enrollment"
	"agentctl/manifest"
)

func TestRemoveNode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := openStore(t, Options{StateDir: dir})
	other := openStore(t, Options{StateDir: dir}) // another process
	m := mint(t, s, MintRequest{Class: "device", Tenant: "acme"})
	upsert(t, s, "acme", m.NodeID, "attic", `["m"]`)
	set(t, s, "acme", m.NodeID, Attributes{AddTags: []string{"roof"}})
	refresh := func() {
		t.Helper()
		if err := other.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	refresh()
	if _, err := s.RemoveNode(t.Context(), "zeta", m.NodeID, false); !errors.Is(err, ErrNoNode) {
		t.Errorf("another tenant removes it: %v", err)
	}
	if n, err := s.RemoveNode(t.Context(), "acme", m.NodeID, true); n != 1 || err != nil {
		t.Errorf("dry run: %d, %v", n, err)
	}
	if _, err := s.Verify(m.Token); err != nil {
		t.Fatalf("after the dry run: %v", err)
	}
	if n, err := s.RemoveNode(t.Context(), "acme", m.NodeID, false); n != 1 || err != nil {
		t.Fatalf("got %d, %v", n, err)
	}
	refresh()
	for name, s := range map[string]*Store{"here": s, "in another process": other} {
		if _, ok := s.NodeTenant(m.NodeID); ok {
			t.Errorf("%s: the node is still known", name)
		}
		_, err := s.Verify(m.Token)
		refused(t, err, m.Token, ErrRevoked, "revoked")
		// A link that is still open announces once more.
		if _, err := s.UpsertNode(t.Context(), "acme", m.NodeID, "attic", []byte(`["n"]`)); !errors.Is(err, ErrRemoved) {
			t.Errorf("%s: an old link registers it again: %v", name, err)
		}
	}
	if list, err := nodesOf(t, s, "acme"); len(list) != 0 || err != nil {
		t.Errorf("listed: %v, %v", list, err)
	}
	if _, err := s.RemoveNode(t.Context(), "acme", m.NodeID, false); !errors.Is(err, ErrNoNode) {
		t.Errorf("removed twice: %v", err)
	}
	// A new token registers it again, without what it had. Its row may have the same id.
	again := mint(t, s, MintRequest{Class: "device", Tenant: "acme", NodeID: m.NodeID})
	if _, err := s.Verify(again.Token); err != nil {
		t.Error(err)
	}
	upsert(t, s, "acme", m.NodeID, "pi", "")
	refresh()
	for name, s := range map[string]*Store{"here": s, "in another process": other} {
		if a := attributesOf(t, s, m.NodeID); a.Name != "pi" || len(a.Tags) != 0 {
			t.Errorf("%s: it came back as %+v", name, a)
		}
	}
	reopened := openStore(t, Options{StateDir: dir})
	if a := attributesOf(t, reopened, m.NodeID); a.Name != "pi" {
		t.Errorf("after a restart: %+v", a)
	}
}

// A last-seen time that is written after the removal leaves no row for the node that gets
// the same row id.
func TestRemoveNodeBeforeFlush(t *testing.T) {
	s := openStore(t, Options{})
	a, b := manifest.NewNodeID(), manifest.NewNodeID()
	upsert(t, s, "acme", a, "", "")
	n := s.registry.get(a)
	if _, err := s.RemoveNode(t.Context(), "acme", a, false); err != nil {
		t.Fatal(err)
	}
	n.seenMS.Store(n.seenMS.Load() + 1e9)
	s.registry.mu.Lock()
	s.registry.byID[a] = n // as flushSeen has it, when the removal comes between
	s.registry.mu.Unlock()
	if err := s.flushSeen(t.Context()); err != nil {
		t.Fatal(err)
	}
	var rows int
	if err := s.db.readDB.QueryRow("SELECT count(*) FROM seen").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows of times, %v", rows, err)
	}
	mint(t, s, MintRequest{Class: "device", Tenant: "acme", NodeID: b})
	if got, err := s.Node(t.Context(), "acme", b); err != nil || got.LastSeenMS != 0 {
		t.Errorf("a new node was seen at %d, %v", got.LastSeenMS, err)
	}
}

// A board that has joined does not come back by its key after its node was removed: neither
// by a refresh nor by a repeat of its enrollment. A new invite gives it a new node.
func TestRemoveJoinedNode(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{Uses: 2})
	b := newHolder(t, s, code)
	out := b.mustEnroll()
	if n, err := s.RemoveNode(t.Context(), "default", out.Subject, false); n != 1 || err != nil {
		t.Fatalf("got %d, %v", n, err)
	}
	_, err := b.refresh(1, manifest.NewULID())
	wantReason(t, err, enrollment.ReasonRevoked)
	_, err = b.enroll()
	wantReason(t, err, enrollment.ReasonRevoked)
	if _, ok := s.NodeTenant(out.Subject); ok {
		t.Error("the node is back")
	}
	if again := newHolder(t, s, code).mustEnroll(); again.Subject == out.Subject {
		t.Error("the same node")
	}
}
