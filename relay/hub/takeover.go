package hub

import (
	"time"

	"agentctl/transport/link"
)

// When both are of v2, a second link of the same node id takes the node over: the first one is
// closed with 4409. There are two cases, distinguished by the instance id of the installation:
//
//   - The same installation: the first link is half-open, left over from a broken network.
//   - Another installation: a clone, for instance a copied SD card. It is audited as
//     clone_suspected. When clones take each other over maxTakeovers times within
//     takeoverWindow, both are refused for a penalty, which doubles from one minute up to
//     maxPenalty, so that neither flaps between them.

// isClone reports whether old, which n takes over, is of another installation. On v2.1 the
// takeover was decided by a ping instead, see contest.
func (n *Node) isClone(old *Node) bool {
	a, b := old.session.Load(), n.session.Load()
	return !a.V21 && !b.V21 && a.InstanceID != b.InstanceID
}

// closeSuperseded closes the link that n took over, and n itself when both are rejected.
func (n *Node) closeSuperseded(t takeover) {
	t.old.session.Load().Close(link.CloseSuperseded, "superseded")
	if t.isClone {
		n.audit(AuditEvent{Kind: "clone_suspected"})
	}
	if t.rejectBoth {
		n.session.Load().Close(link.CloseSuperseded, "superseded")
	}
}

// takeoverHistory remembers the takeovers between installations with one node id.
type takeoverHistory struct {
	times        []time.Time // within takeoverWindow, at most maxTakeovers
	penaltyUntil time.Time   // both installations are refused until then
	penalty      time.Duration
}

const (
	maxTakeovers   = 3
	takeoverWindow = time.Minute
	maxPenalty     = time.Hour
	maxHistories   = 4096 // node ids; a takeover of another one is not recorded
)

// recordTakeoverLocked records a takeover between installations; true: both are refused
// from now on.
func (h *Hub) recordTakeoverLocked(nodeID string) (rejectBoth bool) {
	now := time.Now()
	r := h.takeoverHistories[nodeID]
	if r == nil {
		if len(h.takeoverHistories) >= maxHistories {
			return false
		}
		r = &takeoverHistory{}
		h.takeoverHistories[nodeID] = r
	}
	r.times = append(r.times, now)
	for now.Sub(r.times[0]) > takeoverWindow {
		r.times = r.times[1:]
	}
	if len(r.times) < maxTakeovers {
		return false
	}
	r.penalty = min(max(2*r.penalty, takeoverWindow), maxPenalty)
	r.penaltyUntil, r.times = now.Add(r.penalty), nil
	return true
}

// isOver reports whether the history no longer matters. A penalty counts for maxPenalty
// after its end, so that clones which go on get a longer one.
func (r *takeoverHistory) isOver(now time.Time) bool {
	n := len(r.times)
	return now.After(r.penaltyUntil.Add(maxPenalty)) && (n == 0 || now.Sub(r.times[n-1]) > takeoverWindow)
}

// inPenalty reports whether a node id is refused because clones compete for it.
func (h *Hub) inPenalty(nodeID string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.takeoverHistories[nodeID]
	return r != nil && time.Now().Before(r.penaltyUntil)
}
