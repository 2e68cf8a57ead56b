package hub

import (
	"context"
	"time"

	"agentctl/transport/link"
)

// Two installations with one identity, for instance a copied SD card, are recognized when
// both are alive: the boot_id, new at each start of a daemon and never on its disk, differs,
// and the link of the first one answers a ping while the second one asks for the node. The
// node then has a cloneMark, which survives a restart of the relay:
//
//	SuspectClone   raises the mark, or renews it; Options.OnCloneSuspected(true)
//	contest        while it lasts, another boot_id than the last served one is admitted only
//	               after that one has had no link for cloneQuiet
//	sweep          clears it after cloneMemory without another claim; OnCloneSuspected(false)

const (
	cloneMemory    = 24 * time.Hour
	cloneQuiet     = time.Minute
	probeTimeout   = 5 * time.Second // in which a live link answers a ping
	maxCloneMarks  = MaxNodes
	cloneSaveEvery = time.Hour // so that a clone that keeps trying does not write each time
)

// cloneMark is a suspected clone. Hub.mu protects it. Its times are monotonic.
type cloneMark struct {
	lastClaim time.Time // of a second installation
	servedID  string    // boot_id of the link that was served last; "" is not known
	quietFrom time.Time // since when that one has had no link; zero while it has one
	savedAt   time.Time // the lastClaim that was saved
}

// loadCloneMarks restores the marks of an earlier run. Their age is by the wall clock, since
// there is no other; a time in the future counts as now.
func (h *Hub) loadCloneMarks(saved map[string]int64) {
	now := time.Now()
	for id, ms := range saved {
		age := min(max(now.Sub(time.UnixMilli(ms)), 0), cloneMemory)
		claim := now.Add(-age)
		h.clones[id] = &cloneMark{lastClaim: claim, savedAt: claim, servedID: h.lastBoot(id), quietFrom: now}
	}
}

// SuspectClone records that a second installation has claimed a node, and reports it if that
// is new: it asked for the node while the first one was alive, or it used a refresh token
// that had been used before.
func (h *Hub) SuspectClone(nodeID string) {
	bootID := h.lastBoot(nodeID)
	now := time.Now()
	h.mu.Lock()
	m := h.clones[nodeID]
	isNew := m == nil
	if isNew {
		if len(h.clones) >= maxCloneMarks {
			h.mu.Unlock()
			return
		}
		m = &cloneMark{servedID: bootID, quietFrom: now}
		if n := h.nodes[nodeID]; n != nil {
			m.servedID, m.quietFrom = n.session.Load().BootID, time.Time{}
		}
		h.clones[nodeID] = m
		h.revision.Add(1)
	}
	m.lastClaim = now
	// Each claim renews the mark in memory; the disk may lag behind by cloneSaveEvery.
	save := isNew || now.Sub(m.savedAt) >= cloneSaveEvery
	if save {
		m.savedAt = now
	}
	h.mu.Unlock()
	if save {
		h.saveClone(nodeID, now.UnixMilli())
	}
	if isNew {
		h.audit(AuditEvent{Kind: "clone_suspected", NodeID: nodeID})
		h.reportClone(nodeID, true)
	}
}

// CloneSuspected reports whether a node has a clone mark.
func (h *Hub) CloneSuspected(nodeID string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.clones[nodeID] != nil
}

// expireCloneMarks clears the marks that nothing has renewed for cloneMemory.
func (h *Hub) expireCloneMarks() {
	now := time.Now()
	var expired []string
	h.mu.Lock()
	for id, m := range h.clones {
		if now.Sub(m.lastClaim) >= cloneMemory {
			delete(h.clones, id)
			h.revision.Add(1)
			expired = append(expired, id)
		}
	}
	h.mu.Unlock()
	for _, id := range expired {
		h.saveClone(id, 0)
		h.reportClone(id, false)
	}
}

func (h *Hub) lastBoot(nodeID string) string {
	if h.opt.LastBoot == nil {
		return ""
	}
	return h.opt.LastBoot(nodeID)
}

func (h *Hub) saveClone(nodeID string, ms int64) {
	if h.opt.SaveCloneTime != nil {
		h.opt.SaveCloneTime(nodeID, ms)
	}
}

// reportClone reports a change of a mark, in order with OnReady, which asks for the mark.
func (h *Hub) reportClone(nodeID string, suspected bool) {
	h.callbackMu.Lock()
	defer h.callbackMu.Unlock()
	if h.opt.OnCloneSuspected != nil && h.CloneSuspected(nodeID) == suspected {
		h.opt.OnCloneSuspected(nodeID, suspected)
	}
}

// LiveSession pings the link of a node, within 5 s. alive: the device has answered that very
// ping, and sessionID is its session, on a link of this age.
func (h *Hub) LiveSession(ctx context.Context, nodeID string) (sessionID string, age time.Duration, alive bool) {
	n := h.node(nodeID)
	if n == nil {
		return "", 0, false
	}
	s := n.session.Load()
	age = s.Age()
	return s.ID, age, isAlive(ctx, s)
}

// isAlive pings a link and waits for the pong, at most probeTimeout. Concurrent callers share
// one ping.
func isAlive(ctx context.Context, s *link.Session) bool {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return s.Probe(ctx) == nil
}

// ExtendGrant moves the end of a linked node's grant to a later time, because its token was
// refreshed. It does nothing when the node has another session by now.
func (h *Hub) ExtendGrant(nodeID, sessionID string, expiresAt time.Time) {
	if n := h.node(nodeID); n != nil {
		if s := n.session.Load(); s.ID == sessionID {
			s.ExtendGrant(expiresAt)
		}
	}
}
