package auth

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

func upsert(t *testing.T, s *Store, tenant, nodeID, want string, m string) string {
	t.Helper()
	name, err := s.UpsertNode(context.Background(), tenant, nodeID, want, []byte(m))
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// nodesOf lists a tenant's nodes that fit into one page.
func nodesOf(t *testing.T, s *Store, tenant string) ([]Node, error) {
	t.Helper()
	list, more, err := s.Nodes(t.Context(), NodeQuery{Tenant: tenant, Limit: 100})
	if more {
		t.Errorf("%d nodes, and more", len(list))
	}
	return list, err
}

// Large manifests end a page early, so that no request holds a fleet of them in memory.
func TestNodesPageBySize(t *testing.T) {
	s := openStore(t, Options{})
	large := `["` + strings.Repeat("x", MaxManifest-4) + `"]`
	const nodes = maxPageBytes/MaxManifest + 2
	for range nodes {
		upsert(t, s, "acme", manifest.NewNodeID(), "", large)
	}
	upsert(t, s, "zeta", manifest.NewNodeID(), "", large)
	var ids []string
	pages := 0
	for after, more := "", true; more; pages++ {
		var list []Node
		var err error
		if list, more, err = s.Nodes(t.Context(), NodeQuery{Tenant: "acme", After: after, Limit: 5000}); err != nil || len(list) == 0 {
			t.Fatalf("page %d: %d nodes, %v", pages, len(list), err)
		}
		for _, n := range list {
			ids = append(ids, n.NodeID)
		}
		after = ids[len(ids)-1]
	}
	if !slices.IsSorted(ids) || len(slices.Compact(ids)) != nodes || pages != 2 {
		t.Errorf("%d nodes in %d pages", len(ids), pages)
	}
}

func TestMintRegistersNode(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "device", Tenant: "acme"})
	if tenant, ok := s.NodeTenant(m.NodeID); !ok || tenant != "acme" {
		t.Errorf("owner: got %q, %v", tenant, ok)
	}
	list, err := nodesOf(t, s, "acme")
	if err != nil || len(list) != 1 || list[0].NodeID != m.NodeID || list[0].LastSeenMS != 0 || list[0].Name != "node-"+m.NodeID[20:] {
		t.Errorf("nodes: got %+v, %v", list, err)
	}
	if list, err := nodesOf(t, s, "zeta"); err != nil || len(list) != 0 {
		t.Errorf("nodes of another tenant: got %+v, %v", list, err)
	}
	if _, ok := s.NodeTenant(manifest.NewNodeID()); ok {
		t.Error("an unknown node has an owner")
	}
	// A second token for the same node, by id and by name; not for another tenant.
	for _, ref := range []string{m.NodeID, list[0].Name, m.NodeID[:20]} {
		if again := mint(t, s, MintRequest{Class: "device", Tenant: "acme", NodeID: ref}); again.NodeID != m.NodeID {
			t.Errorf("%s: got %s", ref, again.NodeID)
		}
	}
	_, err = s.Mint(t.Context(), MintRequest{Class: "device", Tenant: "zeta", NodeID: m.NodeID})
	if !errors.Is(err, ErrForeignNode) {
		t.Errorf("got %v, want ErrForeignNode", err)
	}
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 4 {
		t.Errorf("the refused mint left a row: %d, %v", len(list), err)
	}
}

func TestNamesAreUnique(t *testing.T) {
	s := openStore(t, Options{})
	var ids []string
	for range 40 {
		ids = append(ids, manifest.NewNodeID())
	}
	seen := map[string]bool{}
	long := strings.Repeat("n", manifest.MaxNameLen)
	for i, id := range ids {
		want := "lab"
		if i%2 == 1 {
			want = long
		}
		name := upsert(t, s, "acme", id, want, "")
		if seen[name] || !manifest.ValidNodeName(name) || !strings.HasPrefix(name, want[:3]) {
			t.Errorf("node %d: got %q", i, name)
		}
		seen[name] = true
	}
	if !seen["lab"] || !seen["lab-2"] || !seen["lab-3"] || !seen[long] {
		t.Errorf("names: got %v", seen)
	}
	if name := upsert(t, s, "zeta", manifest.NewNodeID(), "lab", ""); name != "lab" {
		t.Errorf("another tenant: got %q", name)
	}
	second := ids[2]
	if name := upsert(t, s, "acme", second, "lab", ""); name != "lab-2" {
		t.Errorf("the same wish again: got %q", name)
	}
	if name := upsert(t, s, "acme", second, "lab-2", ""); name != "lab-2" {
		t.Errorf("a wish for the name it has: got %q", name)
	}
	if name := upsert(t, s, "acme", second, "shed", ""); name != "shed" {
		t.Errorf("a new wish: got %q", name)
	}
	if name := upsert(t, s, "acme", second, "", ""); name != "shed" {
		t.Errorf("no wish: got %q", name)
	}
}

func TestUpsertRefuses(t *testing.T) {
	s := openStore(t, Options{})
	own := mint(t, s, MintRequest{Class: "device", Tenant: "acme"}).NodeID
	tests := []struct {
		name, tenant, node, want, manifest string
		is                                 error
	}{
		{"foreign", "zeta", own, "", "[]", ErrForeignNode},
		{"bad tenant", "Acme", own, "", "", nil},
		{"bad node", "acme", "8" + own[1:], "", "", nil},
		{"bad name", "acme", own, "Lab", "", nil},
		{"no JSON", "acme", own, "", "{", nil},
		{"huge", "acme", own, "", `"` + strings.Repeat("x", MaxManifest) + `"`, nil},
	}
	for _, tt := range tests {
		if _, err := s.UpsertNode(t.Context(), tt.tenant, tt.node, tt.want, []byte(tt.manifest)); err == nil || tt.is != nil && !errors.Is(err, tt.is) {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
	if n, err := s.Node(t.Context(), "acme", own); err != nil || len(n.Manifest) != 0 || n.LastSeenMS != 0 {
		t.Errorf("a refused upsert left a trace: %+v, %v", n, err)
	}
}

func TestFindNode(t *testing.T) {
	s := openStore(t, Options{})
	a, b, c := "01"+strings.Repeat("a", 24), "01b"+strings.Repeat("c", 23), "01b"+strings.Repeat("d", 23)
	upsert(t, s, "acme", a, "lab", `[{"cap_id":"echo"}]`)
	upsert(t, s, "acme", b, a, "") // a name that looks like the other's id
	upsert(t, s, "zeta", c, "shed", "")
	tests := []struct {
		tenant, ref, id string
		err             error
	}{
		{"acme", a, a, nil},
		{"acme", strings.ToUpper(a), a, nil},
		{"acme", "lab", a, nil},
		{"acme", "01a", a, nil},
		{"acme", "01b", b, nil}, // the other tenant's does not count
		{"acme", "01", "", ErrAmbiguous},
		{"acme", c, "", ErrNoNode},
		{"acme", "shed", "", ErrNoNode},
		{"acme", "", "", ErrNoNode},
		{"acme", "%", "", ErrNoNode},
		{"acme", strings.Repeat("0", 40), "", ErrNoNode},
		{"zeta", "shed", c, nil},
	}
	for _, tt := range tests {
		n, err := s.Node(t.Context(), tt.tenant, tt.ref)
		if n.NodeID != tt.id || !errors.Is(err, tt.err) {
			t.Errorf("%s %q: got %q, %v, want %q, %v", tt.tenant, tt.ref, n.NodeID, err, tt.id, tt.err)
		}
	}
	if n, _ := s.Node(t.Context(), "acme", "lab"); string(n.Manifest) != `[{"cap_id":"echo"}]` {
		t.Errorf("manifest: got %s", n.Manifest)
	}
}

// A restart, clean or not, keeps relay, keys, tokens, revocations and nodes.
func TestReopenKeepsState(t *testing.T) {
	ck := &clock{testTime}
	dir := t.TempDir()
	s, err := Open(Options{StateDir: dir, Now: ck.now, Audience: "https://relay.example"})
	if err != nil {
		t.Fatal(err)
	}
	agent := mint(t, s, MintRequest{Class: "agent"})
	stopped := mint(t, s, MintRequest{Class: "agent"})
	device := mint(t, s, MintRequest{Class: "device"})
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: stopped.JTI}); err != nil {
		t.Fatal(err)
	}
	upsert(t, s, DefaultTenant, device.NodeID, "lab", `["m"]`)
	id := s.relay.RelayID
	ck.t = testTime.Add(5 * time.Second)
	s.MarkSeen(device.NodeID, "unknown")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}

	s = openStore(t, Options{StateDir: dir, Now: ck.now})
	if s.relay.RelayID != id || s.Audience() != "https://relay.example" || s.Issuer() != s.Audience() {
		t.Errorf("got %s, %s, %s", s.relay.RelayID, s.Audience(), s.Issuer())
	}
	if _, err := s.Verify(agent.Token, ClassAgent); err != nil {
		t.Error(err)
	}
	_, err = s.Verify(stopped.Token, ClassAgent)
	refused(t, err, stopped.Token, ErrRevoked, "revoked")
	n, err := s.Node(t.Context(), DefaultTenant, "lab")
	if err != nil || n.NodeID != device.NodeID || string(n.Manifest) != `["m"]` || n.LastSeenMS != ck.t.UnixMilli() || n.CreatedMS != testTime.UnixMilli() {
		t.Errorf("got %+v, %v", n, err)
	}
	if tenant, ok := s.NodeTenant(device.NodeID); !ok || tenant != DefaultTenant {
		t.Errorf("owner: got %q, %v", tenant, ok)
	}

	// Another audience is kept and ends the old tokens.
	moved := openStore(t, Options{StateDir: dir, Now: ck.now, Audience: "https://new.example"})
	_, err = moved.Verify(agent.Token)
	refused(t, err, agent.Token, ErrInvalid, "issuer")
	if again := openStore(t, Options{StateDir: dir}); again.Audience() != "https://new.example" || again.relay.RelayID != id {
		t.Errorf("got %s, %s", again.Audience(), again.relay.RelayID)
	}
	if _, err := Open(Options{StateDir: dir, Audience: "two words"}); err == nil {
		t.Error("an audience with a space was taken")
	}
}

// A fleet that reconnects writes nothing; last-seen times are written once a minute.
func TestReconnectWritesNothing(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{StateDir: dir})
		reader := openStore(t, Options{StateDir: dir})
		node := manifest.NewNodeID()
		upsert(t, s, "acme", node, "lab", `[1]`)
		version := func() (v int64) {
			if err := reader.db.readDB.QueryRow("PRAGMA data_version").Scan(&v); err != nil {
				t.Fatal(err)
			}
			return v
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { s.Run(ctx) })

		before := version()
		time.Sleep(SeenInterval / 2)
		s.db.writeSlot <- struct{}{} // nobody may write now: what follows must not wait for it
		upsert(t, s, "acme", node, "lab", `[1]`)
		upsert(t, s, "acme", node, "", "")
		<-s.db.writeSlot
		s.MarkSeen(node)
		seen := time.Now().UnixMilli()
		if got := version(); got != before {
			t.Errorf("a reconnect wrote to the database")
		}
		if n, err := reader.Node(ctx, "acme", node); err != nil || n.LastSeenMS == seen {
			t.Errorf("before the flush: got %+v, %v", n, err)
		}
		time.Sleep(SeenInterval/2 + time.Second)
		synctest.Wait()
		if n, err := reader.Node(ctx, "acme", node); err != nil || n.LastSeenMS != seen {
			t.Errorf("after the flush: got %d, %v, want %d", n.LastSeenMS, err, seen)
		}
		s.db.writeSlot <- struct{}{} // with nothing new to save, no write is even begun
		if err := s.flushSeen(ctx); err != nil {
			t.Error(err)
		}
		<-s.db.writeSlot
		after := version()
		time.Sleep(3 * SeenInterval)
		synctest.Wait()
		if got := version(); got != after {
			t.Errorf("an idle relay wrote to the database")
		}
		upsert(t, s, "acme", node, "lab", `[2]`)
		if got := version(); got == after {
			t.Errorf("a new manifest was not written")
		}
		cancel()
		wg.Wait()
	})
}

// What another process registers is known after a poll; what two processes change at
// once converges.
func TestTwoStoresShareRegistry(t *testing.T) {
	dir := t.TempDir()
	a, b := openStore(t, Options{StateDir: dir}), openStore(t, Options{StateDir: dir})
	m := mint(t, b, MintRequest{Class: "device", Tenant: "acme"})
	if _, ok := a.NodeTenant(m.NodeID); ok {
		t.Error("known before the poll")
	}
	// It may connect before the poll.
	if name := upsert(t, a, "acme", m.NodeID, "lab", "[]"); name != "lab" {
		t.Errorf("got %q", name)
	}
	other := mint(t, b, MintRequest{Class: "device", Tenant: "acme"}).NodeID
	if name := upsert(t, b, "acme", other, "lab", "[]"); name != "lab-2" {
		t.Errorf("got %q", name)
	}
	for _, s := range []*Store{a, b} {
		if err := s.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		for node, want := range map[string]string{m.NodeID: "lab", other: "lab-2"} {
			if n := s.registry.get(node); n == nil || n.name != want || n.tenant != "acme" {
				t.Errorf("%s: got %+v, want %s", node, n, want)
			}
		}
	}
}

// Many boards that announce at once share transactions; each gets its own outcome.
func TestConcurrentUpsertsShareCommits(t *testing.T) {
	s := openStore(t, Options{})
	foreign := mint(t, s, MintRequest{Class: "device", Tenant: "zeta"}).NodeID
	const boards = 200
	var wg sync.WaitGroup
	errs := make([]error, boards)
	names := make([]string, boards)
	ids := make([]string, boards)
	for i := range boards {
		ids[i] = manifest.NewNodeID()
		if i%50 == 7 {
			ids[i] = foreign
		}
		wg.Go(func() {
			names[i], errs[i] = s.UpsertNode(t.Context(), "acme", ids[i], "mock", fmt.Appendf(nil, "[%d]", i))
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for i := range boards {
		if ids[i] == foreign {
			if !errors.Is(errs[i], ErrForeignNode) {
				t.Errorf("board %d: got %v, want ErrForeignNode", i, errs[i])
			}
			continue
		}
		n, err := s.Node(t.Context(), "acme", ids[i])
		if errs[i] != nil || err != nil || n.Name != names[i] || seen[n.Name] || !bytes.Equal(n.Manifest, fmt.Appendf(nil, "[%d]", i)) {
			t.Errorf("board %d: got %+v, %v, %v", i, n, errs[i], err)
		}
		seen[n.Name] = true
	}
}

// A caller whose context has ended leaves the queue; the others' writes are not harmed.
func TestWriteCancelled(t *testing.T) {
	s := openStore(t, Options{})
	s.db.writeSlot <- struct{}{} // someone is writing
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.UpsertNode(ctx, "acme", manifest.NewNodeID(), "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if len(s.db.queue) != 0 {
		t.Errorf("%d writes still wait", len(s.db.queue))
	}
	<-s.db.writeSlot
	upsert(t, s, "acme", manifest.NewNodeID(), "", "")
	if list, err := nodesOf(t, s, "acme"); err != nil || len(list) != 1 {
		t.Errorf("got %d nodes, %v", len(list), err)
	}
}

// A row that was read before a change must not replace what the change left in memory.
func TestOlderNodeEntryIsIgnored(t *testing.T) {
	s := openStore(t, Options{})
	id := manifest.NewNodeID()
	upsert(t, s, "acme", id, "lab", "")
	stale := s.registry.get(id)
	upsert(t, s, "acme", id, "shed", "")
	s.registry.put([]*node{stale})
	if n := s.registry.get(id); n.name != "shed" {
		t.Errorf("got %q", n.name)
	}
}

// In a shared transaction a write that fails rolls back its own changes and no others.
func TestFailedWriteRollsBackAlone(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{StateDir: dir})
		insert := func(id int, err error) error {
			return s.db.write(t.Context(), func(tx *sql.Tx) error {
				if _, err := tx.Exec("INSERT INTO seen VALUES (?, 1)", id); err != nil {
					t.Error(err)
				}
				return err
			}, nil)
		}
		bad := errors.New("bad")
		s.db.writeSlot <- struct{}{} // so that all three wait for one transaction
		var wg sync.WaitGroup
		for id, err := range []error{nil, bad, nil} {
			wg.Go(func() {
				if got := insert(id, err); !errors.Is(got, err) {
					t.Errorf("%d: got %v, want %v", id, got, err)
				}
			})
		}
		synctest.Wait()
		<-s.db.writeSlot
		wg.Wait()
		var ids string
		if err := s.db.readDB.QueryRow("SELECT group_concat(id) FROM (SELECT id FROM seen ORDER BY id)").Scan(&ids); err != nil || ids != "0,2" {
			t.Errorf("got rows %s, %v", ids, err)
		}
	})
}

// A relay that crashed in a board's first minute knows when it was there.
func TestLastSeenSurvivesCrash(t *testing.T) {
	dir, ck := t.TempDir(), &clock{testTime}
	s := openStore(t, Options{StateDir: dir, Now: ck.now})
	node := mint(t, s, MintRequest{Class: "device", Tenant: "acme"}).NodeID
	if _, err := s.UpsertNode(t.Context(), "acme", node, "", []byte(`["m"]`)); err != nil {
		t.Fatal(err)
	}
	after := openStore(t, Options{StateDir: dir, Now: ck.now}) // s was not closed, and Run never ran
	if n, err := after.Node(t.Context(), "acme", node); err != nil || n.LastSeenMS != testTime.UnixMilli() {
		t.Errorf("got %d, %v, want %d", n.LastSeenMS, err, testTime.UnixMilli())
	}
}
