package auth

import (
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
