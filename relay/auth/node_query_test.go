package auth

import (
	"reflect"
	"strings"
	"testing"
)

// Every change of what Nodes answers has another revision, also that of another process.
func TestNodesRevision(t *testing.T) {
	dir := t.TempDir()
	s, other := openStore(t, Options{StateDir: dir}), openStore(t, Options{StateDir: dir})
	node := mint(t, s, MintRequest{Class: ClassDevice}).NodeID
	revision := func() [2]int64 {
		t.Helper()
		changes, seen, err := s.NodesRevision(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return [2]int64{changes, seen}
	}
	before := revision()
	if revision() != before {
		t.Error("the revision changes by itself")
	}
	name := "attic"
	for what, change := range map[string]func() error{
		"seen":       func() error { s.MarkSeen(node); return nil },
		"registered": func() error { _, err := s.UpsertNode(t.Context(), DefaultTenant, node, "", nil); return err },
		"announced": func() error {
			_, err := s.UpsertNode(t.Context(), DefaultTenant, node, "cellar", []byte(`[]`))
			return err
		},
		"new": func() error { mint(t, s, MintRequest{Class: ClassDevice}); return nil },
		"renamed by another process": func() error {
			_, err := other.SetNodeAttributes(t.Context(), DefaultTenant, node, Attributes{Name: &name}, false)
			return err
		},
		"tagged": func() error {
			_, err := s.SetNodeAttributes(t.Context(), DefaultTenant, node, Attributes{AddTags: []string{"roof"}}, false)
			return err
		},
		"removed by another process": func() error {
			_, err := other.RemoveNode(t.Context(), DefaultTenant, mint(t, s, MintRequest{Class: ClassDevice}).NodeID, false)
			return err
		},
	} {
		if err := change(); err != nil {
			t.Fatal(what, err)
		}
		if now := revision(); now == before {
			t.Errorf("%s: the revision is still %v", what, now)
		} else {
			before = now
		}
	}
}

// Neither a page nor a reference reads or sorts all nodes of a tenant.
func TestNodeQueryPlans(t *testing.T) {
	s := openStore(t, Options{StateDir: t.TempDir()})
	for where, index := range map[string]string{
		"n.tenant = ? AND n.node_id > ? ORDER BY n.node_id LIMIT ?":      "nodes_tenant (tenant=? AND node_id>?)",
		"n.tenant = ? AND n.node_id >= ? AND n.node_id < ? LIMIT 2":      "nodes_tenant (tenant=? AND node_id>? AND node_id<?)",
		"n.tenant = ? AND n.name = ? LIMIT 2":                            "(tenant=? AND name=?)",
		"n.tenant = ? AND n.node_id > ? AND n.name = ? ORDER BY node_id": "(tenant=? AND name=?)",
	} {
		var plan strings.Builder
		args := make([]any, strings.Count(where, "?"))
		err := forEachRow(t.Context(), s.db.readDB, func(scan func(...any) error) error {
			var line string
			err := scan(new(int), new(int), new(int), &line)
			plan.WriteString(line + "\n")
			return err
		}, "EXPLAIN QUERY PLAN "+selectNodesSQL+where, args...)
		if err != nil || !strings.Contains(plan.String(), index) {
			t.Errorf("%s:\n%swant %s: %v", where, &plan, index, err)
		}
	}
}

// Memory finds by id and name what the database finds, after every kind of change.
func TestLookupNode(t *testing.T) {
	dir := t.TempDir()
	s, other := openStore(t, Options{StateDir: dir}), openStore(t, Options{StateDir: dir})
	ids := []string{"01hzx9k3m4p7q8r9s0t1v2w3xa", "01hzx9k3m4p7q8r9s0t1v2w3xb", "01hzx9k3m4p7q8r9s0t1v2w3xc"}
	refs := append([]string{"attic", "ATTIC", "cellar", "cellar-2", "roof", "nobody", ""}, ids...)
	check := func(after string) {
		t.Helper()
		if err := s.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, tenant := range []string{"acme", "zeta", ""} {
			for _, ref := range refs {
				want, err := s.Node(t.Context(), tenant, ref)
				got, ok := s.LookupNode(tenant, ref)
				want.Manifest, want.CreatedMS = nil, 0
				if ok != (err == nil) || ok && !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %s %q: got %+v %t, want %+v %v", after, tenant, ref, got, ok, want, err)
				}
			}
		}
		if len(s.registry.byName) != len(s.registry.byID) {
			t.Errorf("%s: %d names of %d nodes", after, len(s.registry.byName), len(s.registry.byID))
		}
	}
	upsert(t, s, "acme", ids[0], "attic", "[]")
	upsert(t, other, "acme", ids[1], "cellar", "[]")
	upsert(t, s, "zeta", ids[2], "attic", "[]")
	check("registered")
	set(t, s, "acme", ids[0], Attributes{Name: new("cellar"), AddTags: []string{"north"}}) // takes it from the other node
	check("a name taken")
	set(t, other, "acme", ids[0], Attributes{Name: new("roof")})
	set(t, other, "acme", ids[1], Attributes{Name: new("cellar")})
	check("renamed by another process")
	set(t, s, "acme", ids[0], Attributes{Name: new("")})
	check("an old name again")
	if _, err := other.RemoveNode(t.Context(), "acme", ids[0], false); err != nil {
		t.Fatal(err)
	}
	check("removed by another process")
	if _, err := s.RemoveNode(t.Context(), "acme", ids[1], false); err != nil {
		t.Fatal(err)
	}
	check("removed")
}

// TestTenantNodes: the nodes of one tenant, from memory.
func TestTenantNodes(t *testing.T) {
	s := openStore(t, Options{})
	own := mint(t, s, MintRequest{Class: ClassDevice}).NodeID
	mint(t, s, MintRequest{Class: ClassDevice, Tenant: "other"})
	if _, err := s.SetNodeAttributes(t.Context(), DefaultTenant, own, Attributes{Name: new("attic"), AddTags: []string{"pi"}}, false); err != nil {
		t.Fatal(err)
	}
	s.MarkSeen(own)
	list := s.TenantNodes(DefaultTenant)
	if len(list) != 1 || list[0].NodeID != own || list[0].Name != "attic" || !list[0].NameSet || len(list[0].Tags) != 1 || list[0].LastSeenMS == 0 {
		t.Errorf("got %+v", list)
	}
	if list := s.TenantNodes("nobody"); len(list) != 0 {
		t.Errorf("a tenant without nodes has %+v", list)
	}
}
