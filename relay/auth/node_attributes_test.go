package auth

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentctl/manifest"
)

func set(t *testing.T, s *Store, tenant, nodeID string, a Attributes) AttributeChange {
	t.Helper()
	c, err := s.SetNodeAttributes(t.Context(), tenant, nodeID, a, false)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func attributesOf(t *testing.T, s *Store, nodeID string) NodeAttributes {
	t.Helper()
	a, ok := s.NodeAttributes(nodeID)
	if !ok {
		t.Fatal("no such node")
	}
	return a
}

func TestSetNodeAttributes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := openStore(t, Options{StateDir: dir})
	other := openStore(t, Options{StateDir: dir}) // another process
	id := manifest.NewNodeID()
	upsert(t, s, "acme", id, "pi", "")
	if a := attributesOf(t, s, id); a.Name != "pi" || a.NameSet || len(a.Tags) != 0 || a.Description != "" {
		t.Errorf("a new node has %+v", a)
	}
	c := set(t, s, "acme", id, Attributes{Name: new("attic"), AddTags: []string{"roof", "north", "roof"}, Description: new("under the ridge, nördlich")})
	want := NodeAttributes{"attic", true, []string{"north", "roof"}, "under the ridge, nördlich"}
	if fmt.Sprint(c.After) != fmt.Sprint(want) || c.Before.Name != "pi" || c.Before.NameSet || c.NodeID != id {
		t.Errorf("got %+v", c)
	}
	// A board that proposes a name does not replace an operator's, in this process or in another.
	if name := upsert(t, s, "acme", id, "evil", ""); name != "attic" {
		t.Errorf("the board is called %q now", name)
	}
	if err := other.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := attributesOf(t, other, id); fmt.Sprint(a) != fmt.Sprint(want) {
		t.Errorf("the other process has %+v", a)
	}
	n, err := other.Node(t.Context(), "acme", "attic")
	if err != nil || n.NodeID != id || fmt.Sprint(n.NodeAttributes) != fmt.Sprint(want) {
		t.Errorf("got %+v, %v", n, err)
	}
	dry, err := s.SetNodeAttributes(t.Context(), "acme", id, Attributes{Name: new("x"), RemoveTags: []string{"roof", "none"}}, true)
	if err != nil || dry.After.Name != "x" || !slices.Equal(dry.After.Tags, []string{"north"}) || fmt.Sprint(attributesOf(t, s, id)) != fmt.Sprint(want) {
		t.Errorf("dry run: %+v, %v; now %+v", dry, err, attributesOf(t, s, id))
	}
	set(t, s, "acme", id, Attributes{Name: new(""), RemoveTags: []string{"roof", "north"}, Description: new("")})
	if a := attributesOf(t, s, id); a.Name != "evil" || a.NameSet || len(a.Tags) != 0 || a.Description != "" {
		t.Errorf("after taking all back: %+v", a)
	}
}

// An operator's name is one node's; a name that a board only proposed gives way to it.
func TestSetNameClash(t *testing.T) {
	s := openStore(t, Options{})
	squatter, mine, third := manifest.NewNodeID(), manifest.NewNodeID(), manifest.NewNodeID()
	upsert(t, s, "acme", squatter, "attic", "")
	upsert(t, s, "acme", mine, "", "")
	upsert(t, s, "acme", third, "", "")
	upsert(t, s, "zeta", manifest.NewNodeID(), "attic", "") // another tenant's name does not matter
	c := set(t, s, "acme", mine, Attributes{Name: new("attic")})
	if c.Displaced != squatter || c.DisplacedName != "attic-2" || c.After.Name != "attic" {
		t.Errorf("got %+v", c)
	}
	if a := attributesOf(t, s, squatter); a.Name != "attic-2" || a.NameSet {
		t.Errorf("the squatter is %+v", a)
	}
	if name := upsert(t, s, "acme", squatter, "attic", ""); name != "attic-2" {
		t.Errorf("the squatter came back as %q", name)
	}
	if _, err := s.SetNodeAttributes(t.Context(), "acme", third, Attributes{Name: new("attic")}, false); !errors.Is(err, ErrNameTaken) {
		t.Errorf("a name given twice: %v", err)
	}
	if c := set(t, s, "acme", third, Attributes{Name: new("attic"), SuffixName: true}); !c.After.NameSet || c.After.Name != "attic-3" {
		t.Errorf("with a suffix: %+v", c.After)
	}
	if c := set(t, s, "acme", mine, Attributes{Name: new("attic")}); c.Displaced != "" || c.After.Name != "attic" {
		t.Errorf("the same name again: %+v", c)
	}
}

func TestSetNodeAttributesRefused(t *testing.T) {
	s := openStore(t, Options{})
	id := manifest.NewNodeID()
	upsert(t, s, "acme", id, "pi", "")
	var many []string
	for i := range MaxTags {
		many = append(many, fmt.Sprint("t", i))
	}
	set(t, s, "acme", id, Attributes{AddTags: many, Description: new(strings.Repeat("ü", MaxDescription))})
	for _, a := range []Attributes{
		{Name: new("Attic")}, {Name: new("a.b")}, {Name: new("-a")}, {Name: new("dachböden")}, {Name: new(strings.Repeat("a", 33))},
		{Name: new("a b")}, {Name: new("a\n")}, {Name: new(manifest.NewNodeID())}, {Name: new("..")}, {Name: new("a/b")},
		{AddTags: []string{"a.b"}}, {AddTags: []string{""}}, {AddTags: []string{"a b"}}, {RemoveTags: []string{"%"}}, {AddTags: []string{"Ä"}},
		{AddTags: []string{"one-more"}}, {AddTags: append(many, "x")}, {RemoveTags: append(many, "x")},
		{Description: new(strings.Repeat("a", MaxDescription+1))}, {Description: new("a\nb")}, {Description: new("a\tb")}, {Description: new("\x1b[2J")},
		{Description: new("a\u202eb")}, {Description: new("a\u200bb")}, {Description: new("a\u2066b")}, {Description: new("a\U000e0041b")},
		{Description: new("a\ufe0fb")}, {Description: new("a\u3164b")}, {Description: new("a\u2800b")}, {Description: new("a\u00adb")},
		{Description: new("a\u034fb")}, {Description: new("\xff")}, {Description: new("a\u2028b")}, {Description: new("a\u0085b")},
	} {
		var bad *AttributeError
		if _, err := s.SetNodeAttributes(t.Context(), "acme", id, a, false); !errors.As(err, &bad) || bad.Problem == "" {
			t.Errorf("%+v: %v", a, err)
		}
	}
	for _, tenant := range []string{"zeta", ""} {
		if _, err := s.SetNodeAttributes(t.Context(), tenant, id, Attributes{Name: new("mine")}, false); !errors.Is(err, ErrNoNode) {
			t.Errorf("tenant %q: %v", tenant, err)
		}
	}
	if a := attributesOf(t, s, id); a.Name != "pi" || len(a.Tags) != MaxTags {
		t.Errorf("a refused change left %+v", a)
	}
}

func TestNodesByNameAndTag(t *testing.T) {
	s := openStore(t, Options{})
	ids := []string{manifest.NewNodeID(), manifest.NewNodeID(), manifest.NewNodeID()}
	slices.Sort(ids)
	a, b, c := ids[0], ids[1], ids[2]
	for i, id := range ids {
		upsert(t, s, "acme", id, fmt.Sprint("n", i), "")
	}
	foreign := manifest.NewNodeID()
	upsert(t, s, "zeta", foreign, "n0", "")
	set(t, s, "acme", a, Attributes{AddTags: []string{"roof", "north"}})
	set(t, s, "acme", b, Attributes{AddTags: []string{"roof-2", "roof", "south"}})
	set(t, s, "zeta", foreign, Attributes{AddTags: []string{"roof"}})
	for _, tt := range []struct {
		q    NodeQuery
		want []string
	}{
		{NodeQuery{}, []string{a, b, c}},
		{NodeQuery{Tags: []string{"roof"}}, []string{a, b}},
		{NodeQuery{Tags: []string{"roof"}, After: a}, []string{b}},
		{NodeQuery{Tags: []string{"roof", "north"}}, []string{a}},
		{NodeQuery{Tags: []string{"ro"}}, nil},
		{NodeQuery{Tags: []string{"%"}}, nil},
		{NodeQuery{Name: "n1"}, []string{b}},
		{NodeQuery{Name: "n1", Tags: []string{"north"}}, nil},
		{NodeQuery{Name: "N1"}, nil},
	} {
		tt.q.Tenant, tt.q.Limit = "acme", 10
		list, _, err := s.Nodes(t.Context(), tt.q)
		var got []string
		for _, n := range list {
			got = append(got, n.NodeID)
		}
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%+v: %v, %v", tt.q, got, err)
		}
	}
}
