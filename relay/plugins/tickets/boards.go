package tickets

import (
	"agentctl/manifest"
)

// Boards is what the plugin knows about boards. Its functions read memory and answer for boards of
// the tenant only.
type Boards struct {
	// Find returns the id of the board that ref means: its name, or a start of its id that no
	// other board has. The error is a *manifest.Error.
	Find func(tenant, ref string) (nodeID string, err error)
	// Name returns the name of a board, "" for one that is unknown or has none.
	Name func(tenant, nodeID string) string
}

// UseBoards lets tickets name boards as callers do. Without it they are named by their ids. Call it
// before the plugin is loaded.
func (p *Plugin) UseBoards(b Boards) { p.boards = b }

// findBoard returns the id of the board that ref means. A whole id is taken as it is: a ticket may be
// about a board that is not registered, or was removed.
func (p *Plugin) findBoard(tenant, ref string) (nodeID string, err error) {
	if ref == "" || manifest.ValidNodeID(ref) {
		return ref, nil
	}
	if p.boards.Find == nil {
		return "", &manifest.Error{Code: manifest.ManifestInvalid, Message: "argument node_id: must be the id of a board", Reason: "schema"}
	}
	return p.boards.Find(tenant, ref)
}

// boardName returns the name of a ticket's board.
func (p *Plugin) boardName(tenant, nodeID string) string {
	if nodeID == "" || p.boards.Name == nil {
		return ""
	}
	return p.boards.Name(tenant, nodeID)
}

// BoardOf returns the id of the board that a ticket is about; "" for none, or for a ticket that is
// not kept.
func (p *Plugin) BoardOf(tenant, id string) string {
	k, err := p.tenant(tenant, false).get(id)
	if err != nil {
		return ""
	}
	return k.NodeID
}

// About returns the ids of the newest tickets about a board, at most so many.
func (p *Plugin) About(tenant, nodeID string, limit int) (ids []string) {
	list, _ := p.tenant(tenant, false).list("", nodeID, "", limit)
	for _, k := range list {
		ids = append(ids, k.ID)
	}
	return ids
}
