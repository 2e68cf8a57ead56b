package auth

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"agentctl/manifest"
)

// selectNodesSQL is completed by a condition; forEachNode reads its columns.
const selectNodesSQL = `SELECT n.node_id, n.tenant, n.name, n.manifest, n.created_ms, coalesce(s.ms, 0),
	coalesce(a.name_set, 0), coalesce(a.tags, ''), coalesce(a.description, '')
	FROM nodes n LEFT JOIN seen s ON s.id = n.id LEFT JOIN attributes a ON a.id = n.id WHERE `

// NodeQuery selects nodes of one tenant. Empty fields select all of them.
type NodeQuery struct {
	Tenant string
	Name   string   // exact
	Tags   []string // a node has all of them; at most MaxTags
	After  string   // only nodes whose ids come after this one
	Limit  int      // nodes of one page
}

// Nodes lists the nodes that a query selects, in the order of the ids: at most q.Limit of
// them, and fewer where their manifests are large. more reports that others follow.
func (s *Store) Nodes(ctx context.Context, q NodeQuery) (list []Node, more bool, err error) {
	where, args := "n.tenant = ? AND n.node_id > ?", []any{q.Tenant, q.After}
	if q.Name != "" {
		where, args = where+" AND n.name = ?", append(args, q.Name)
	}
	if len(q.Tags) > MaxTags {
		return nil, false, nil // no node has as many
	}
	for _, tag := range q.Tags {
		where, args = where+" AND instr(' ' || a.tags || ' ', ?) > 0", append(args, " "+tag+" ")
	}
	size, limit := 0, q.Limit
	err = s.forEachNode(ctx, func(n Node) error {
		if more = len(list) == limit || size >= maxPageBytes; more {
			return errStopRows
		}
		size += len(n.Manifest)
		list = append(list, n)
		return nil
	}, where+" ORDER BY n.node_id LIMIT ?", append(args, limit+1)...)
	return list, more, err
}

// NodesRevision is a number that differs whenever Nodes or MatchNodes may answer differently than
// before, also after a change by another process. Read it before what it describes: what changes in
// between then has a later revision.
func (s *Store) NodesRevision(ctx context.Context) (changes, seen int64, err error) {
	seen = s.seenRevision.Load()
	err = s.query(ctx, func(scan func(...any) error) error { return scan(&changes) }, "SELECT nodes FROM changes")
	return changes, seen, err
}

// Node finds one node of a tenant by its id, its name, or a prefix of its id that no
// other node of the tenant has, in this order. ErrNoNode also when it is another tenant's.
func (s *Store) Node(ctx context.Context, tenant, ref string) (Node, error) {
	if tenant == "" {
		return Node{}, ErrNoNode
	}
	return s.FindNode(ctx, tenant, ref)
}

// FindNode is Node for the operator of the machine: an empty tenant searches all of them,
// and a name that several tenants use is ErrAmbiguous. Never pass a caller's text as tenant.
func (s *Store) FindNode(ctx context.Context, tenant, ref string) (Node, error) {
	list, err := s.matchNodes(ctx, tenant, ref)
	switch {
	case err != nil:
		return Node{}, err
	case len(list) == 0:
		return Node{}, ErrNoNode
	case len(list) > 1:
		return Node{}, ErrAmbiguous
	}
	return list[0], nil
}

// MatchNodes returns the node that Node finds, none instead of ErrNoNode, and the first two that
// match instead of ErrAmbiguous.
func (s *Store) MatchNodes(ctx context.Context, tenant, ref string) ([]Node, error) {
	if tenant == "" {
		return nil, nil
	}
	return s.matchNodes(ctx, tenant, ref)
}

// LookupNode is Node from memory, for an id or a name only. The result has no Manifest and no
// CreatedMS, and a change by another process shows after the next Refresh.
func (s *Store) LookupNode(tenant, ref string) (found Node, ok bool) {
	ref = strings.ToLower(ref)
	s.registry.mu.RLock()
	n := s.registry.byID[ref]
	if n == nil || n.tenant != tenant {
		n = s.registry.byName[nodeName{tenant, ref}]
	}
	s.registry.mu.RUnlock()
	if n == nil {
		return Node{}, false
	}
	return Node{NodeID: n.nodeID, Tenant: n.tenant, NodeAttributes: n.nodeAttributes(), LastSeenMS: n.seenMS.Load()}, true
}

func (s *Store) matchNodes(ctx context.Context, tenant, ref string) (list []Node, err error) {
	ref = strings.ToLower(ref)
	if !manifest.ValidNodeName(ref) { // which every id and every prefix of one is
		return nil, nil
	}
	inTenant, args := "", []any(nil)
	if tenant != "" {
		inTenant, args = "n.tenant = ? AND ", []any{tenant}
	}
	add := func(n Node) error { list = append(list, n); return nil }
	if manifest.ValidNodeID(ref) {
		err = s.forEachNode(ctx, add, inTenant+"n.node_id = ?", append(args, ref)...)
	}
	if err == nil && len(list) == 0 {
		err = s.forEachNode(ctx, add, inTenant+"n.name = ? LIMIT 2", append(args, ref)...)
	}
	if err == nil && len(list) == 0 {
		// A prefix as a range, for the index. ~ comes after every character of an id.
		err = s.forEachNode(ctx, add, inTenant+"n.node_id >= ? AND n.node_id < ? LIMIT 2", append(args, ref, ref+"~")...)
	}
	return list, err
}

// forEachNode calls fn with the nodes that a condition selects. A last-seen time in memory
// is newer than that on disk, by up to SeenInterval.
func (s *Store) forEachNode(ctx context.Context, fn func(Node) error, where string, args ...any) error {
	return s.query(ctx, func(scan func(...any) error) error {
		var n Node
		var tags string
		err := scan(&n.NodeID, &n.Tenant, &n.Name, (*[]byte)(&n.Manifest), &n.CreatedMS, &n.LastSeenMS, &n.NameSet, &tags, &n.Description)
		if err != nil {
			return err
		}
		n.Tags = strings.Fields(tags)
		if mem := s.registry.get(n.NodeID); mem != nil {
			n.LastSeenMS = max(n.LastSeenMS, mem.seenMS.Load())
		}
		return fn(n)
	}, selectNodesSQL+where, args...)
}

// nodeByIDOrName finds a node for the operator, who sees all tenants. A well-formed id
// need not be registered.
func (s *Store) nodeByIDOrName(ctx context.Context, ref string) (string, error) {
	if manifest.ValidNodeID(ref) {
		return ref, nil
	}
	n, err := s.FindNode(ctx, "", ref)
	switch {
	case errors.Is(err, ErrNoNode):
		return "", fmt.Errorf("no node has this id, name or id prefix: %q; see: agentctl token ls", ref)
	case errors.Is(err, ErrAmbiguous):
		return "", fmt.Errorf("node %q: %w; give the node id", ref, err)
	}
	return n.NodeID, err
}
