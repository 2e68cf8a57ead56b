package auth

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
	"unique"

	"agentctl/manifest"
)

// Bounds of a node's attributes.
const (
	MaxTags        = 16  // of one node
	MaxDescription = 200 // characters
)

// NodeAttributes are what people know a node by. Operators and invites set them, so they
// are trusted text; the name is too if NameSet is true. Otherwise the board proposed the
// name: it is data, and does not belong into titles, descriptions and errors.
type NodeAttributes struct {
	Name        string   `json:"name"`     // unique in its tenant
	NameSet     bool     `json:"name_set"` // by an operator or an invite, and not proposed by the board
	Tags        []string `json:"tags"`     // sorted, without duplicates
	Description string   `json:"description"`
}

// Attributes is a change of a node's attributes. What is nil or empty stays as it is.
type Attributes struct {
	Name        *string // "" returns to the name that the board proposes
	AddTags     []string
	RemoveTags  []string // tags that the node does not have are ignored
	Description *string  // "" removes it
	// SuffixName makes a Name that another node was given into one with a suffix (attic-2),
	// for an invite of many uses. Without it such a name is refused with ErrNameTaken.
	SuffixName bool
}

// AttributeError refuses an attribute. Its text has nothing of any board.
type AttributeError struct {
	Field   string // name, tags or description
	Problem string
}

func (e *AttributeError) Error() string { return e.Field + ": " + e.Problem }

// ValidTag reports whether s may be a tag of a node: ^[a-z0-9][a-z0-9-]{0,31}$.
func ValidTag(s string) bool { return manifest.ValidNodeName(s) }

// ValidDescription reports whether s may describe a node: at most MaxDescription printable
// characters of one line. Characters that cannot be seen, or that change the direction of
// others, would let a text look different from what a program or a language model reads.
func ValidDescription(s string) bool {
	return utf8.ValidString(s) && utf8.RuneCountInString(s) <= MaxDescription &&
		!strings.ContainsFunc(s, func(r rune) bool {
			const blankBraille = '\u2800' // counts as a symbol, and prints nothing
			return !unicode.IsPrint(r) || r == blankBraille ||
				unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
		})
}

// Check returns an *AttributeError for a change that no node can take.
func (a *Attributes) Check() error {
	switch {
	case a.Name != nil && *a.Name != "" && !manifest.ValidNodeName(*a.Name):
		return &AttributeError{"name", "1 to 32 of a-z, 0-9 and -, not starting with -"}
	case a.Name != nil && manifest.ValidNodeID(*a.Name):
		return &AttributeError{"name", "it looks like a node id; choose a shorter one"}
	case a.Description != nil && !ValidDescription(*a.Description):
		return &AttributeError{"description", fmt.Sprintf("at most %d printable characters on one line", MaxDescription)}
	}
	for _, tags := range [][]string{a.AddTags, a.RemoveTags} {
		if len(tags) > MaxTags {
			return &AttributeError{"tags", fmt.Sprintf("a node has at most %d", MaxTags)}
		}
		for _, t := range tags {
			if !ValidTag(t) {
				return &AttributeError{"tags", "a tag is 1 to 32 of a-z, 0-9 and -, not starting with -"}
			}
		}
	}
	return nil
}

// attributes are NodeAttributes without the name, as they stay in memory. Nodes with equal
// ones share them (unique.Handle), so a node costs one pointer, and a fleet with the same
// few tags holds these once.
type attributes struct {
	nameSet     bool
	tags        string // sorted, separated by spaces
	description string
}

// noAttributes is what nearly all nodes have.
var noAttributes = unique.Make(attributes{})

// nodeAttributes returns the present attributes in the form that callers see.
func (n *node) nodeAttributes() NodeAttributes {
	a := n.attributes.Value()
	return NodeAttributes{Name: n.name, NameSet: a.nameSet, Tags: strings.Fields(a.tags), Description: a.description}
}

// NodeAttributes returns the attributes of a node. It reads memory.
func (s *Store) NodeAttributes(nodeID string) (NodeAttributes, bool) {
	n := s.registry.get(nodeID)
	if n == nil {
		return NodeAttributes{}, false
	}
	return n.nodeAttributes(), true
}

// AttributeChange is what SetNodeAttributes did.
type AttributeChange struct {
	NodeID string         `json:"node_id"`
	Before NodeAttributes `json:"before"`
	After  NodeAttributes `json:"after"`
	// Displaced is the node that had proposed the name and now has it with a suffix; empty
	// is none.
	Displaced     string `json:"displaced,omitempty"`
	DisplacedName string `json:"displaced_name,omitempty"` // its name now
}

// SetNodeAttributes changes the attributes of a node, or reports what it would change
// (dryRun). The error is an *AttributeError, ErrNameTaken, or ErrNoNode, also when the node
// is another tenant's.
func (s *Store) SetNodeAttributes(ctx context.Context, tenant, nodeID string, a Attributes, dryRun bool) (change AttributeChange, err error) {
	if err := a.Check(); err != nil {
		return change, err
	}
	var changed []*node
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		change, changed, err = s.setAttributesTx(tx, tenant, nodeID, a)
		if err == nil && dryRun {
			return errDryRun
		}
		return err
	}, func() { s.registry.put(changed) })
	if errors.Is(err, errDryRun) {
		err = nil
	}
	return change, err
}

// setAttributesTx is SetNodeAttributes inside a transaction. The caller has checked the
// change (Attributes.Check), and puts the nodes into the registry after the commit.
//
// A name that a board only proposed gives way to one that an operator sets: a board must not
// keep a name from its tenant, nor receive the calls that are meant for another board.
func (s *Store) setAttributesTx(tx *sql.Tx, tenant, nodeID string, a Attributes) (change AttributeChange, changed []*node, err error) {
	n, err := scanNode(tx.QueryRow(selectNodeSQL+"n.node_id = ? AND n.tenant = ?", nodeID, tenant).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return change, nil, ErrNoNode
	}
	if err != nil {
		return change, nil, err
	}
	change.NodeID, change.Before = nodeID, n.nodeAttributes()
	next := n.attributes.Value()
	if next.tags, err = changeTags(change.Before.Tags, a.AddTags, a.RemoveTags); err != nil {
		return change, nil, err
	}
	if a.Description != nil {
		next.description = *a.Description
	}
	name := n.name
	if a.Name != nil {
		var displaced *node
		if name, displaced, err = s.chooseName(tx, n, &a); err != nil {
			return change, nil, err
		}
		next.nameSet = *a.Name != ""
		if displaced != nil {
			changed = append(changed, displaced)
			change.Displaced, change.DisplacedName = displaced.nodeID, displaced.name
		}
	}
	if h := unique.Make(next); h != n.attributes || name != n.name {
		n.name, n.attributes = name, h
		if err := saveName(tx, n); err != nil {
			return change, nil, err
		}
		_, err := tx.Exec("INSERT OR REPLACE INTO attributes (id, name_set, tags, description) VALUES (?, ?, ?, ?)",
			n.rowID, next.nameSet, next.tags, next.description)
		if err != nil {
			return change, nil, err
		}
		changed = append(changed, n)
	}
	change.After = n.nodeAttributes()
	return change, changed, nil
}

// chooseName returns the name that a node gets from a change with a name. displaced is the
// node that had to give the name up.
//
//	no other node has it          the node gets it
//	another board proposed it     the node gets it, and the other one a suffix
//	it was set on another node    ErrNameTaken, or a suffix for this one (SuffixName)
//	the change has the name ""    what the board proposes or defaultName, with a suffix if it is taken
func (s *Store) chooseName(tx *sql.Tx, n *node, a *Attributes) (name string, displaced *node, err error) {
	if *a.Name == "" {
		name, err = uniqueName(tx, n.tenant, cmp.Or(n.wantedName, defaultName(n.nodeID)), n.nodeID, "")
		return name, nil, err
	}
	holder, err := scanNode(tx.QueryRow(selectNodeSQL+"n.tenant = ? AND n.name = ? AND n.node_id <> ?", n.tenant, *a.Name, n.nodeID).Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return *a.Name, nil, nil
	case err != nil:
		return "", nil, err
	case holder.attributes.Value().nameSet && a.SuffixName:
		name, err = uniqueName(tx, n.tenant, *a.Name, n.nodeID, "")
		return name, nil, err
	case holder.attributes.Value().nameSet:
		return "", nil, fmt.Errorf("%w: node %s", ErrNameTaken, holder.nodeID)
	}
	if holder.name, err = uniqueName(tx, n.tenant, *a.Name, holder.nodeID, *a.Name); err == nil {
		err = saveName(tx, holder)
	}
	return *a.Name, holder, err
}

// saveName writes the name of a node and counts the change, which other processes then read.
func saveName(tx *sql.Tx, n *node) error {
	if err := tx.QueryRow("UPDATE changes SET nodes = nodes + 1 RETURNING nodes").Scan(&n.change); err != nil {
		return err
	}
	_, err := tx.Exec("UPDATE nodes SET name = ?, change = ? WHERE id = ?", n.name, n.change, n.rowID)
	return err
}

// changeTags returns a node's tags after a change, sorted and separated by spaces.
func changeTags(tags, add, remove []string) (string, error) {
	tags = slices.Concat(tags, add)
	tags = slices.DeleteFunc(tags, func(t string) bool { return slices.Contains(remove, t) })
	slices.Sort(tags)
	tags = slices.Compact(tags)
	if len(tags) > MaxTags {
		return "", &AttributeError{"tags", fmt.Sprintf("a node has at most %d, this would be %d", MaxTags, len(tags))}
	}
	return strings.Join(tags, " "), nil
}
