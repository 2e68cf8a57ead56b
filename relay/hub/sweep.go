package hub

import (
	"maps"
	"slices"
	"time"

	"agentctl/transport/link"
)

// The sweep is a timer wheel with a slot per second. Each second it checks the nodes of
// one slot: it pings, drops a silent link and closes one whose grant has ended, and then
// schedules them again. It checks all nodes only when a grant may have been revoked,
// because going through a fleet costs more than pinging a part of it.
//
// The relay pings before its devices would: a device pings when it has received no ping
// for link.PingInterval, and pings at the devices' own times would wake this process once
// for each.
const (
	wheelSize      = 64 // seconds; more than link.IdleTimeout
	firstPingDelay = link.PingInterval*4/5 - 2*time.Second
	pingDelay      = link.PingInterval - time.Second
)

// scheduleLocked schedules the next check of n after a delay, rounded up to seconds.
func (h *Hub) scheduleLocked(n *Node, delay time.Duration) {
	delete(h.wheel[n.wheelSlot], n) // it may have been resumed during a sweep
	seconds := int((delay + time.Second - 1) / time.Second)
	n.wheelSlot = (h.sweepTick + min(max(seconds, 1), wheelSize-1)) % wheelSize
	h.wheel[n.wheelSlot][n] = struct{}{}
}

// In ticks of the sweep, which are seconds.
const (
	saveLastSeenTicks = 300 // between two calls of Options.SaveLastSeen
	cloneMarkTicks    = 60  // between two checks of clone marks and of the devices of the last hour
)

// sweep is one tick. Sessions and callbacks are called without Hub.mu.
func (h *Hub) sweep() {
	now := time.Now()
	h.mu.Lock()
	h.sweepTick++
	slot := h.wheel[h.sweepTick%wheelSize]
	due := slices.Collect(maps.Keys(slot))
	clear(slot)
	maps.DeleteFunc(h.takeoverHistories, func(_ string, r *takeoverHistory) bool { return r.isOver(now) })
	var all []*Node
	var ids []string // to save
	if h.sweepTick%saveLastSeenTicks == 0 {
		ids = slices.Collect(maps.Keys(h.nodes))
	}
	if h.grantsChanged() || ids != nil {
		all = slices.Collect(maps.Values(h.nodes))
	}
	h.mu.Unlock()

	// Each of these looks at few nodes: those that owe an answer, and those without a link.
	h.checkWatched()
	h.checkLost()
	if h.sweepTick%cloneMarkTicks == 0 {
		h.expireCloneMarks()
		h.countRecent()
	}
	for _, n := range all {
		h.checkGrant(n)
	}
	for _, n := range due {
		s := n.session.Load()
		if s.CheckLiveness() { // it pinged
			n.expectAnswer()
		}
		// The table forgets ended commands about three pings after the last one, so that an
		// idle node holds little.
		n.mu.Lock()
		n.calls.Age()
		n.mu.Unlock()
		if s.IdleTime() < link.IdleTimeout && h.opt.OnPing != nil {
			h.opt.OnPing(n)
		}
		h.checkGrant(n)
	}
	h.mu.Lock()
	for _, n := range due {
		if h.nodes[n.ID()] == n {
			h.scheduleLocked(n, n.nextCheck())
		}
	}
	h.mu.Unlock()
	if h.opt.SaveLastSeen != nil && len(ids) > 0 {
		h.opt.SaveLastSeen(ids)
	}
}

// grantsChanged reports whether a grant may have been revoked since the last call.
func (h *Hub) grantsChanged() bool {
	if h.opt.GrantRevision == nil {
		return true
	}
	before := h.grantRevision
	h.grantRevision = h.opt.GrantRevision()
	return h.grantRevision != before
}

// checkGrant closes the link of a node whose grant was revoked or has expired.
func (h *Hub) checkGrant(n *Node) {
	s := n.session.Load()
	if n.revoked == s || s.CheckGrant() == nil {
		return
	}
	n.revoked = s
	n.audit(AuditEvent{Kind: "revoked"})
	s.Close(link.CloseAuthFailed, "auth_failed")
}

// nextCheck is the delay until n has to be checked again: for a ping, for the idle timeout
// or for the end of its grant.
func (n *Node) nextCheck() time.Duration {
	s := n.session.Load()
	delay := min(pingDelay, link.IdleTimeout-s.IdleTime())
	if remaining, ok := s.GrantRemaining(); ok {
		delay = min(delay, remaining)
	}
	return delay
}
