package relay

import (
	"time"

	"agentctl/manifest"
)

// boardLabel returns what a board is called in titles and errors: the name that an operator gave it,
// or the start of its id. A name that the board proposed is no word of ours.
func (r *Relay) boardLabel(nodeID string) string {
	if a, ok := r.store.NodeAttributes(nodeID); ok && a.NameSet && a.Name != "" {
		return a.Name
	}
	return manifest.ShortID(nodeID)
}

// explainOffline says of a board of the caller's which one it is, since when it is away, and what
// can be asked meanwhile. Errors of calls that may have run stay as they are: they say that first.
func (r *Relay) explainOffline(nodeID string, e *manifest.Error) *manifest.Error {
	state := ""
	switch e.Reason {
	case "offline":
		state = " is not connected; " + r.lastSeen(nodeID)
	case "suspect":
		state = " is connected but has not answered for some seconds"
	default:
		return e
	}
	c := *e // plugins return shared errors
	c.Message = r.boardLabel(nodeID) + state + "; fleet.describe and fleet.events still tell about it"
	return &c
}

// lastSeen words the last sign of life of a board, in UTC.
func (r *Relay) lastSeen(nodeID string) string {
	if ms := r.store.LastSeen(nodeID); ms > 0 {
		return "last seen " + time.UnixMilli(ms).UTC().Format(time.RFC3339)
	}
	return "it was never connected"
}
