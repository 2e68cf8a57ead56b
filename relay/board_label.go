package relay

import (
	"time"

	"agentctl/manifest"
	"agentctl/relay/plugins/fleet"
)

// boardLabel returns what a board is called in titles and errors: the name that an operator gave it,
// or the start of its id. A name that the board proposed is no word of ours.
func (r *Relay) boardLabel(nodeID string) string {
	a, _ := r.store.NodeAttributes(nodeID)
	b := fleet.Board{ID: nodeID, Name: a.Name, NameSet: a.NameSet}
	return b.Label()
}

// maxCompared bounds the boards that a wrong id is compared with, so that calls with wrong ids cost
// about as much as others.
const maxCompared = 2000

// unknownBoard is the error for a node that the tenant does not have. It must not say whether
// another tenant has it.
func (r *Relay) unknownBoard(tenant, ref string) error {
	var own []fleet.Board
	if r.store.NodeCount() <= maxCompared {
		own = fleetBoards{r}.List(tenant)
	}
	return fleet.UnknownBoard(own, ref)
}

// explainOffline says of a board of the caller's which one it is, since when it is away, and what
// can be asked meanwhile. Errors of calls that may have run stay as they are: they say that first.
func (r *Relay) explainOffline(nodeID string, e *manifest.Error) *manifest.Error {
	state := ""
	switch e.Reason {
	case "offline":
		state = " is not connected; " + r.lastSeen(nodeID)
	case "suspect":
		state = " is connected but does not answer"
	default:
		return e
	}
	c := *e // plugins return shared errors
	c.Message = r.boardLabel(nodeID) + state + "; fleet.describe and fleet.events still answer about it"
	return &c
}

// lastSeen words the last sign of life of a board, in UTC.
func (r *Relay) lastSeen(nodeID string) string {
	if ms := r.store.LastSeen(nodeID); ms > 0 {
		return "last seen " + time.UnixMilli(ms).UTC().Format(time.RFC3339)
	}
	return "it was never connected"
}
