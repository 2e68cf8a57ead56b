package hub

import (
	"slices"
	"time"

	"agentctl/transport/link"
)

// A session of v2.1 survives its link (RFC-0002 §7.3):
//
//	linked   --link lost-->                lost      commands written are in doubt
//	lost     --auth asks for it-->         resuming  new commands wait
//	resuming --announce-->                 linked    commands in doubt are settled
//	         --handshake fails-->          lost
//	lost     --queueTime after the loss--  OnGone; new commands fail at once
//	         --link.ResumeTTL-->           ended     its table of commands is dropped
//	any      --another session-->          ended     that one inherits the table
//
// Sessions of v2, and those that were closed for good, go from linked to ended at once. Their
// table stays in Hub.lost for link.ResumeTTL too, so that an ack which comes on the next link
// is audited as late and not as foreign. Streams end with their link.
//
// Hub.lost has the nodes without a link, Hub.nodes those with one; no node is in both.
const (
	maxLost   = MaxNodes
	queueTime = 5 * time.Second // in which a command waits for a lost link
)

// finalCodes are the close codes after which no session can be resumed: the device says goodbye,
// was refused or violated the protocol, or the relay is shutting down. After all others it may
// come back: its link broke (0), was silent or congested, or was closed by a proxy.
var finalCodes = []int{link.CloseNormal, link.CloseBadFrame, link.CloseAuthFailed, link.CloseForbidden, link.CloseSuperseded,
	link.CloseManifestInvalid, link.CloseUpgradeRequired, link.CloseRateLimited, link.CloseDraining}

// isResumable reports whether a link that ended with err leaves a session to resume.
func isResumable(s *link.Session, err error) bool {
	return s.V21 && !slices.Contains(finalCodes, link.CloseCode(err)) && s.CheckGrant() == nil
}

// OnClosed handles the end of a link.
func (l *nodeLink) OnClosed(err error) {
	n, h := l.Node, l.hub
	defer h.wg.Done()
	resumable := isResumable(l.linkSession, err)
	h.mu.Lock()
	linked := h.nodes[n.ID()] == n && n.session.Load() == l.linkSession
	// A fresh session of the node has taken its place. If neither is true, this link's own
	// session was resumed on a newer link, and there is nothing to end.
	superseded := !linked && h.nodes[n.ID()] != n && h.lost[n.ID()] != n
	if linked {
		resumable = h.unlinkLocked(n, resumable)
	}
	h.mu.Unlock()
	switch {
	case linked && resumable:
		n.lose(l.linkSession)
		h.callback(h.opt.OnLost, n)
	case linked || superseded:
		n.end()
		h.gone(n)
	}
	n.audit(AuditEvent{Kind: "device_disconnect", Close: link.CloseCode(err)})
}

// unlinkLocked moves a node whose link has ended from Hub.nodes to Hub.lost. When that is full
// the node is forgotten. It returns whether the session is kept.
func (h *Hub) unlinkLocked(n *Node, resumable bool) (kept bool) {
	id, now := n.ID(), time.Now()
	delete(h.nodes, id)
	h.revision.Add(1)
	delete(h.wheel[n.wheelSlot], n)
	// Nodes that cannot be resumed are kept as well, for their table of ended commands.
	n.lostSince, n.isGone = now, false
	if len(h.lost) < h.lostLimit && !h.closing {
		h.lost[id] = n
		kept = resumable
	}
	n.isResumable = kept
	if m := h.clones[id]; m != nil && m.servedID == n.session.Load().BootID && m.quietFrom.IsZero() {
		m.quietFrom = now
	}
	return kept
}

// lose puts the commands that were written to a link in doubt. Subscriptions among them end:
// their stream ended with the link. It does nothing when that was done, or when the session has
// another link by now: the goroutine that saw the end of the link, and the handshake that
// resumes its session, both call it.
func (n *Node) lose(ended *link.Session) {
	n.mu.Lock()
	if n.state != stateLinked || n.session.Load() != ended {
		n.mu.Unlock()
		return
	}
	n.state, n.lostAt = stateLost, time.Now()
	n.calls.Lost()
	calls := n.calls.FailIf(func(p *pendingCall) bool { return p.onResult != nil })
	streams := n.endStreamsLocked()
	n.mu.Unlock()
	endAll(calls, streams)
}

// gone reports once that a node has no link. It decides under callbackMu: a node that was
// resumed meanwhile, while the callbacks of others ran, must not be reported after its OnReady.
func (h *Hub) gone(n *Node) {
	h.callbackMu.Lock()
	defer h.callbackMu.Unlock()
	h.mu.Lock()
	report := !n.isGone && h.nodes[n.ID()] != n
	n.isGone = n.isGone || report
	h.mu.Unlock()
	if report && h.opt.OnGone != nil {
		h.opt.OnGone(n)
	}
}

// callback calls fn under callbackMu.
func (h *Hub) callback(fn func(*Node), n *Node) {
	if fn != nil {
		h.callbackMu.Lock()
		defer h.callbackMu.Unlock()
		fn(n)
	}
}

// WhileLost calls fn unless the node has a link again, and excludes OnReady and OnGone
// meanwhile. fn must be quick.
func (h *Hub) WhileLost(n *Node, fn func()) {
	h.callbackMu.Lock()
	defer h.callbackMu.Unlock()
	h.mu.Lock()
	lost := h.lost[n.ID()] == n && !n.isGone
	h.mu.Unlock()
	if lost {
		fn()
	}
}

// reserveSession finds the session that a device asks to resume and puts it into the state
// stateResuming, or returns nil. The relay may not have noticed the end of its link yet. A
// later handshake of the same device takes the reservation over: the one before has failed
// without the relay knowing.
func (h *Hub) reserveSession(s *link.Session, r *link.Resume) *Node {
	if r == nil || !s.V21 {
		return nil
	}
	h.mu.Lock()
	n := h.lost[s.NodeID]
	linked := n == nil
	if linked {
		n = h.nodes[s.NodeID]
	}
	if n == nil || h.closing {
		h.mu.Unlock()
		return nil
	}
	old := n.session.Load()
	hasEnded := !linked && (!n.isResumable || n.resumption == nil && time.Since(n.lostSince) >= link.ResumeTTL)
	isSame := old.V21 && old.ID == r.SessionID && old.BootID == s.BootID && old.InstanceID == s.InstanceID && old.Tenant == s.Tenant
	if hasEnded || !isSame {
		h.mu.Unlock()
		return nil
	}
	// The device has given up a link that still looks alive here. Its session is lost first,
	// so that no command is written to that link any more.
	if linked && !h.unlinkLocked(n, true) { // Hub.lost is full
		h.mu.Unlock()
		n.end()
		h.gone(n)
		old.Close(link.CloseSuperseded, "superseded")
		return nil
	}
	previous := n.resumption
	n.resumption = s
	h.mu.Unlock()
	n.lose(old)
	if linked {
		old.Close(link.CloseSuperseded, "superseded")
		h.callback(h.opt.OnLost, n)
	}
	if previous != nil {
		previous.Close(link.CloseSuperseded, "superseded")
	}
	n.setState(stateLost, stateResuming)
	return n
}

// setState changes the state if it is from.
func (n *Node) setState(from, to nodeState) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.state == from {
		n.state = to
	}
}

// cancelResumption gives a reservation back: the handshake has failed.
func (h *Hub) cancelResumption(n *Node, s *link.Session) {
	h.mu.Lock()
	isReserved := n.resumption == s // else a later handshake has taken the reservation over
	if isReserved {
		n.resumption = nil
	}
	h.mu.Unlock()
	if isReserved {
		n.setState(stateResuming, stateLost)
	}
}

// settle ends the wait of a resumed session's commands: those that the device has received
// are sent, the others are written again, and those that waited are written.
func (n *Node) settle(seen []link.ResumedCommand) {
	type failed struct {
		p   *pendingCall
		err error
	}
	var ended []failed
	var flush *link.Session
	n.mu.Lock()
	if n.state != stateEnded { // superseded in this moment
		n.state = stateLinked
	}
	// The frames follow the announce_ack in the session's queue. Commands of callers that
	// come meanwhile wait for mu, so the order of the table is the order on the link.
	for _, id := range n.calls.Resume(seen, time.Now()) {
		p, ok := n.calls.Value(id)
		if !ok {
			continue
		}
		unflushed, err := n.enqueueLocked(p)
		if unflushed != nil {
			flush = unflushed
		}
		if err != nil {
			if was, ok := n.calls.Expire(id); ok {
				if was != link.Queued {
					err = inDoubtError()
				}
				ended = append(ended, failed{p, err})
			}
		}
	}
	n.mu.Unlock()
	if flush != nil {
		flush.Flush()
	}
	for _, f := range ended {
		f.p.finish(callOutcome{err: f.err})
	}
}

// checkLost ends what has been without a link for too long. The sweep calls it each second.
func (h *Hub) checkLost() {
	now := time.Now()
	var gone, ended []*Node
	h.mu.Lock()
	for id, n := range h.lost {
		age := now.Sub(n.lostSince)
		// A handshake that is about to resume the session decides what becomes of it.
		if age >= queueTime && n.resumption == nil && !n.isGone {
			gone = append(gone, n)
		}
		if age >= link.ResumeTTL && n.resumption == nil {
			ended = append(ended, n)
			delete(h.lost, id)
		}
	}
	h.mu.Unlock()
	for _, n := range gone {
		h.gone(n)
	}
	for _, n := range ended {
		n.end()
	}
}
