package relay

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/plugins/fleet"
	"agentctl/strictjson"
)

// fleetBoards is what the relay knows about boards, for the plugin fleet and for all that take a
// board's name.
type fleetBoards struct{ r *Relay }

var _ fleet.Boards = fleetBoards{}

// board joins what the registry and the hub know about a node.
func (f fleetBoards) board(n *auth.Node) fleet.Board {
	s := f.r.hub.Status(n.NodeID)
	b := fleet.Board{ID: n.NodeID, Name: n.Name, NameSet: n.NameSet, Tags: n.Tags, Description: n.Description,
		Status: fleet.Offline, CloneSuspected: s.CloneSuspected, LastSeenMS: n.LastSeenMS}
	switch {
	case s.Ready && s.Suspect:
		b.Status = fleet.Suspect
	case s.Ready:
		b.Status = fleet.Online
	}
	return b
}

// Lookup implements fleet.Boards.
func (f fleetBoards) Lookup(tenant, ref string) (fleet.Board, bool) {
	n, ok := f.r.store.LookupNode(tenant, ref)
	if !ok {
		return fleet.Board{}, false
	}
	return f.board(&n), true
}

// List implements fleet.Boards.
func (f fleetBoards) List(tenant string) []fleet.Board {
	nodes := f.r.store.TenantNodes(tenant)
	list := make([]fleet.Board, len(nodes))
	for i := range nodes {
		list[i] = f.board(&nodes[i])
	}
	return list
}

// Tools implements fleet.Boards. Tools of a linked board are in memory; those of another one come from
// relay.db, as it announced them last.
func (f fleetBoards) Tools(ctx context.Context, tenant, nodeID string) ([]manifest.Tool, error) {
	if tools := f.r.hub.Tools(nodeID); tools != nil {
		if owner, _ := f.r.store.NodeTenant(nodeID); owner == tenant {
			return tools, nil
		}
	}
	n, err := f.r.store.Node(ctx, tenant, nodeID)
	if err != nil {
		return nil, err
	}
	return announcedTools(&n), nil
}

// Protocol implements fleet.Boards.
func (f fleetBoards) Protocol(nodeID string) string { return f.r.hub.Protocol(nodeID) }

// Frame implements fleet.Boards.
func (f fleetBoards) Frame(nodeID string) (frame []byte, at time.Time, ok bool) {
	return f.r.hub.NewestFrame(nodeID)
}

// find returns the id of the board that ref means, see fleet.Resolve.
func (f fleetBoards) find(tenant, ref string) (nodeID string, err error) {
	b, err := fleet.Resolve(f, tenant, ref)
	return b.ID, err
}

// name returns the name of a board of the tenant, "" for another one.
func (f fleetBoards) name(tenant, nodeID string) string {
	if n, ok := f.r.store.LookupNode(tenant, nodeID); ok && n.NodeID == nodeID {
		return n.Name
	}
	return ""
}

// stagesDiffer reports whether a stage that may answer callers differently is enabled for some of them.
// Package fleet then keeps the answers of boards apart by caller (fleet.Options.Differs).
func (r *Relay) stagesDiffer() bool {
	return slices.ContainsFunc(r.kernel.Pipeline().Names(), func(name string) bool { return name == "acl" || name == "redact" })
}

// announcedTools are the tools of the manifest that the registry has of a node; none if it never
// connected.
func announcedTools(n *auth.Node) (list []manifest.Tool) {
	var caps []json.RawMessage
	if len(n.Manifest) == 0 || json.Unmarshal(n.Manifest, &caps) != nil {
		return nil
	}
	for _, raw := range caps {
		c := new(manifest.Capability)
		if strictjson.Unmarshal(raw, c) != nil {
			continue
		}
		tools, _ := manifest.Project(n.NodeID, c)
		list = append(list, tools...)
	}
	return list
}
