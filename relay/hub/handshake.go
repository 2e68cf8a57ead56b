package hub

import (
	"context"
	"errors"
	"time"

	"agentctl/transport/link"
)

// How a link becomes a node's, from its handshake to the start of its session:
//
//	handshake   link.Accept, which calls admit (admit.go) after auth
//	serve       resume, or takeOver for a fresh session; then OnAnnounce and the session
//	linkLocked  enters the node into Hub.nodes and the timer wheel

// handshake runs a link's handshake and starts its session.
func (h *Hub) handshake(conn link.Conn, slot *Slot) {
	granted := link.Grant{Address: slot.client} // for the audit log, if the handshake fails
	var adm admission
	s, m, err := link.Accept(h.ctx, conn, link.AcceptOptions{
		Now: h.opt.Now,
		Authenticate: func(ctx context.Context, a *link.Auth) (*link.Grant, error) {
			g, err := h.opt.Authenticate(ctx, a)
			if err != nil {
				slot.Release() // the delay must not occupy a slot of its address
				if h.opt.DelayRefusal != nil {
					h.opt.DelayRefusal(ctx, slot.client)
				}
				return nil, err
			}
			g.Address = slot.client
			granted = *g
			return g, nil
		},
		Admit: func(ctx context.Context, s *link.Session, a *link.Auth) (link.Admission, error) {
			slot.authenticated()
			return h.admit(ctx, s, a, &adm)
		},
		ReconnectSpreadMS: h.reconnectSpreadMS, ValidateCapability: h.opt.ValidateCapability,
	})
	slot.Release()
	defer h.release(granted.NodeID, &adm)
	if err != nil {
		if adm.node != nil {
			h.cancelResumption(adm.node, adm.session)
		}
		h.refuse(granted, link.CloseCode(err))
		return
	}
	_ = h.readyPace.Wait(h.ctx) // it fails when the hub is closing, which serve finds out
	if err := h.serve(s, m, &adm); err != nil {
		h.refuse(s.Grant, err.Code)
		s.Close(err.Code, err.Reason)
		refused := &Node{hub: h} // handles what the device has sent already
		refused.newLink(s)
		_ = s.Run(h.ctx, &nodeLink{refused, s})
	}
}

// serve registers a link that has finished its handshake and starts its session.
func (h *Hub) serve(s *link.Session, m *link.Manifest, adm *admission) *link.Refusal {
	n := adm.node
	var t takeover
	var refusal *link.Refusal
	if n != nil {
		refusal = h.resume(n, s)
	} else {
		n = &Node{hub: h}
		n.newLink(s)
		t, refusal = h.takeOver(n, s, adm.rival)
	}
	if refusal != nil {
		return refusal
	}
	h.accepted.Add(1)
	if h.opt.SaveBoot != nil {
		h.opt.SaveBoot(s.NodeID, s.BootID)
	}
	n.audit(AuditEvent{Kind: "device_connect"})
	for _, before := range []*Node{t.lost, t.old} {
		if before != nil {
			n.inherit(before)
		}
	}
	n.OnAnnounce(m)
	if adm.node != nil {
		n.settle(adm.seen)
	}
	// After OnAnnounce, so that the node's tools stay available.
	if t.lost != nil {
		h.gone(t.lost)
	}
	if t.old != nil {
		n.closeSuperseded(t)
	}
	h.wg.Add(1)
	s.Start(h.poller, &nodeLink{n, s})
	return nil
}

func (h *Hub) refuse(g link.Grant, code int) {
	h.refused.Add(1)
	h.audit(AuditEvent{Kind: "device_refused", Tenant: g.Tenant, NodeID: g.NodeID, Address: g.Address, Close: code})
}

// mayServeLocked says why no link can be served now; nil: it can.
func (h *Hub) mayServeLocked(s *link.Session) *link.Refusal {
	if h.closing || (h.nodes[s.NodeID] == nil && len(h.nodes) >= h.nodeLimit) {
		return &link.Refusal{Code: link.CloseDraining, Reason: "overloaded"}
	}
	// A sweep during the handshake may have seen the revocation; the next one will not ask.
	if s.CheckGrant() != nil {
		return &link.Refusal{Code: link.CloseAuthFailed, Reason: "auth_failed"}
	}
	return nil
}

// resume makes s the link of a session that was lost.
func (h *Hub) resume(n *Node, s *link.Session) *link.Refusal {
	h.mu.Lock()
	refusal := h.mayServeLocked(s)
	if n.resumption != s || h.lost[s.NodeID] != n {
		refusal = &link.Refusal{Code: link.CloseSuperseded, Reason: "superseded"}
	}
	if refusal != nil {
		h.mu.Unlock()
		h.cancelResumption(n, s)
		return refusal
	}
	defer h.mu.Unlock()
	n.resumption, n.isGone = nil, false
	delete(h.lost, s.NodeID)
	n.newLink(s)
	h.linkLocked(n)
	h.resumed.Add(1)
	return nil
}

// takeover is the registration of a fresh session.
type takeover struct {
	old        *Node // that it superseded; nil: none
	lost       *Node // that had no link any more; nil: none
	isClone    bool  // old is of another installation, and both are of v2
	rejectBoth bool  // see takeover.go
}

// takeOver makes n the node of its id. rival is the node that contest has let it replace; if
// another one was faster, that one is contested as well.
func (h *Hub) takeOver(n *Node, s *link.Session, rival *Node) (takeover, *link.Refusal) {
	for {
		h.mu.Lock()
		old := h.nodes[s.NodeID]
		if old == nil || old == rival {
			t, refusal := h.takeOverLocked(n, s, old)
			h.mu.Unlock()
			return t, refusal
		}
		h.mu.Unlock()
		rival = old
		var refusal *link.Refusal
		if err := h.contest(h.ctx, s, rival); errors.As(err, &refusal) {
			return takeover{}, refusal
		}
	}
}

func (h *Hub) takeOverLocked(n *Node, s *link.Session, old *Node) (t takeover, _ *link.Refusal) {
	if refusal := h.mayServeLocked(s); refusal != nil {
		return t, refusal
	}
	t.lost = h.lost[s.NodeID]
	delete(h.lost, s.NodeID)
	h.linkLocked(n)
	if old != nil {
		n.isReady.Store(old.isReady.Load()) // the old link's tools are still in place
		delete(h.wheel[old.wheelSlot], old)
		h.takeovers.Add(1)
		t.old = old
		t.isClone = n.isClone(old)
		t.rejectBoth = t.isClone && h.recordTakeoverLocked(s.NodeID)
	}
	return t, nil
}

// linkLocked enters a node with a link.
func (h *Hub) linkLocked(n *Node) {
	s := n.session.Load()
	h.nodes[s.NodeID] = n
	h.revision.Add(1)
	h.scheduleLocked(n, min(firstPingDelay, n.nextCheck()))
	if m := h.clones[s.NodeID]; m != nil {
		m.servedID, m.quietFrom = s.BootID, time.Time{}
	}
}
