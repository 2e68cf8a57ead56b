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
	wheelSize      = 64 // seconds; more than link.IdleTimeout
	firstPingDelay = link.PingInterval*4/5 - 2*time.Second
	pingDelay      = link.PingInterval - time.Second
)

// scheduleLocked has the sweep look at n after that time, rounded up to seconds.
func (h *Hub) scheduleLocked(n *Node, after time.Duration) {
	seconds := int((after + time.Second - 1) / time.Second)
	n.wheelSlot = (h.second + min(max(seconds, 1), wheelSize-1)) % wheelSize
	h.wheel[n.wheelSlot][n] = struct{}{}
}

// saveLastSeenEvery is how many seconds lie between two calls of Options.Seen.
const saveLastSeenEvery = 300

func (h *Hub) sweep() {
	now := time.Now()
	h.mu.Lock()
	h.second++
	slot := h.second % wheelSize
	due := slices.Collect(maps.Keys(h.wheel[slot]))
	clear(h.wheel[slot])
	for id, r := range h.takeoverHistories {
		if now.After(r.penaltyUntil.Add(maxPenalty)) && (len(r.times) == 0 || now.Sub(r.times[len(r.times)-1]) > takeoverWindow) {
			delete(h.takeoverHistories, id)
		}
	}
	var all []*Node
	if h.grantsChanged() || h.second%saveLastSeenEvery == 0 {
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
			h.scheduleLocked(n, n.nextCheck())
		}
	}
	h.mu.Unlock()
	if h.opt.SaveLastSeen != nil && h.second%saveLastSeenEvery == 0 && len(all) > 0 {
		ids := make([]string, len(all))
		for i, n := range all {
			ids[i] = n.session.NodeID
		}
		h.opt.SaveLastSeen(ids)
	}
}

// grantsChanged is whether grants may have been taken back since it was last asked.
func (h *Hub) grantsChanged() bool {
	if h.opt.GrantRevision == nil {
		return true
	}
	before := h.grantRevision
	h.grantRevision = h.opt.GrantRevision()
	return h.grantRevision != before
}

// checkGrant cuts a node whose token holds no longer.
func (h *Hub) checkGrant(n *Node) {
	if n.revoked || n.session.CheckActive == nil || n.session.CheckActive() == nil {
		return
	}
	n.revoked = true
	h.audit(AuditEvent{Kind: "revoked", Tenant: n.session.Tenant, NodeID: n.session.NodeID})
	n.session.Close(link.CloseAuthFailed, "auth_failed")
}

// nextCheck is how long the sweep need not look at a node that it has just looked at.
func (n *Node) nextCheck() time.Duration {
	wait := min(pingDelay, link.IdleTimeout-n.session.IdleTime())
	if until := n.session.ExpiresAt; !until.IsZero() {
		wait = min(wait, time.Until(until))
	}
	return wait
}
