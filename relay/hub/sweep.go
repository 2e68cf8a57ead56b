package hub

import (
	"maps"
	"slices"
	"time"

	"agentctl/transport/link"
)

// Each second the sweep looks at the nodes whose time has come: to ping, to drop a silent
// link, to cut one whose token has expired. It looks at all only when a token may have been
// revoked, since to go through a fleet costs more than to ping a part of it.
//
// The relay pings before its devices would: they ping when they have heard no ping within
// link.PingInterval, and pings at the devices' own times would wake this process once each.
const (
	wheelSize = 64 // seconds; more than link.IdleTimeout
	firstPing = link.PingInterval*4/5 - 2*time.Second
	pingAfter = link.PingInterval - time.Second
)

// lookLocked has the sweep look at n after that time, rounded up to seconds.
func (h *Hub) lookLocked(n *Node, after time.Duration) {
	seconds := int((after + time.Second - 1) / time.Second)
	n.slot = (h.second + min(max(seconds, 1), wheelSize-1)) % wheelSize
	h.wheel[n.slot][n] = struct{}{}
}

// seenEvery is how many seconds lie between two calls of Options.Seen.
const seenEvery = 300

func (h *Hub) sweep() {
	now := time.Now()
	h.mu.Lock()
	h.second++
	slot := h.second % wheelSize
	due := slices.Collect(maps.Keys(h.wheel[slot]))
	clear(h.wheel[slot])
	for id, r := range h.rivals {
		if now.After(r.until.Add(maxPenalty)) && (len(r.times) == 0 || now.Sub(r.times[len(r.times)-1]) > rivalWindow) {
			delete(h.rivals, id)
		}
	}
	var all []*Node
	if h.revised() || h.second%seenEvery == 0 {
		all = slices.Collect(maps.Values(h.nodes))
	}
	h.mu.Unlock()

	for _, n := range all {
		h.checkGrant(n)
	}
	for _, n := range due {
		n.session.CheckLiveness()
		if n.session.IdleTime() < link.IdleTimeout && h.opt.OnPing != nil {
			h.opt.OnPing(n)
		}
		h.checkGrant(n)
	}
	h.mu.Lock()
	for _, n := range due {
		if h.nodes[n.session.NodeID] == n {
			h.lookLocked(n, n.patience())
		}
	}
	h.mu.Unlock()
	if h.opt.SaveLastSeen != nil && h.second%seenEvery == 0 && len(all) > 0 {
		ids := make([]string, len(all))
		for i, n := range all {
			ids[i] = n.session.NodeID
		}
		h.opt.SaveLastSeen(ids)
	}
}

// revised is whether grants may have been taken back since it was last asked.
func (h *Hub) revised() bool {
	if h.opt.GrantRevision == nil {
		return true
	}
	before := h.revision
	h.revision = h.opt.GrantRevision()
	return h.revision != before
}

// checkGrant cuts a node whose token holds no longer.
func (h *Hub) checkGrant(n *Node) {
	if n.revoked || n.session.CheckActive == nil || n.session.CheckActive() == nil {
		return
	}
	n.revoked = true
	h.event(AuditEvent{Kind: "revoked", Tenant: n.session.Tenant, NodeID: n.session.NodeID})
	n.session.Close(link.CloseAuthFailed, "auth_failed")
}

// patience is how long the sweep need not look at a node that it has just looked at.
func (n *Node) patience() time.Duration {
	wait := min(pingAfter, link.IdleTimeout-n.session.IdleTime())
	if until := n.session.ExpiresAt; !until.IsZero() {
		wait = min(wait, time.Until(until))
	}
	return wait
}
