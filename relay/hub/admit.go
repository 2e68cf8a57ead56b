package hub

import (
	"context"
	"time"

	"agentctl/transport/link"
)

// admission is what was decided about a link after its authentication.
type admission struct {
	session   *link.Session
	node      *Node                 // whose session it resumes; nil: it gets a fresh one
	seen      []link.ResumedCommand // what the device has received of that session
	rival     *Node                 // the linked node that it may take over; nil: none
	isCounted bool                  // it counts in Hub.admitted
}

// maxAdmitted is how many links of one node may be between auth and ready: the holder of one
// token cannot occupy more of the relay.
const maxAdmitted = 4

// admit decides whether a device that has proved its identity may have the link of its node,
// and which session it gets. It may take probeTimeout, while an older link is pinged.
func (h *Hub) admit(ctx context.Context, s *link.Session, a *link.Auth, adm *admission) (link.Admission, error) {
	h.mu.Lock()
	if h.admitted[s.NodeID] >= maxAdmitted {
		h.mu.Unlock()
		return link.Admission{}, &link.Refusal{Code: link.CloseRateLimited, Reason: "rate_limited"}
	}
	h.admitted[s.NodeID]++
	adm.session, adm.isCounted = s, true
	h.mu.Unlock()
	if n := h.reserveSession(s, a.Resume); n != nil {
		adm.node, adm.seen = n, a.Resume.Seen
		return link.Admission{SessionID: a.Resume.SessionID, Resumed: true}, nil
	}
	adm.rival = h.node(s.NodeID)
	return link.Admission{}, h.contest(ctx, s, adm.rival)
}

// release undoes what admit has counted.
func (h *Hub) release(nodeID string, adm *admission) {
	if adm.isCounted {
		h.mu.Lock()
		if h.admitted[nodeID]--; h.admitted[nodeID] == 0 {
			delete(h.admitted, nodeID)
		}
		h.mu.Unlock()
	}
}

// contest decides whether a link may take a node over from the rival that has it, which may be
// nil. The error is nil or a *link.Refusal:
//
//   - Both links are of v2: the newer one wins, see takeover.go.
//   - The same boot_id: it is the same process, which has given its older link up.
//   - The rival answers a ping: there are two live installations. The rival stays.
//   - The rival does not answer: it is a restart, or half of a broken link is left over. It
//     loses, but while a clone is suspected only after cloneQuiet.
func (h *Hub) contest(ctx context.Context, s *link.Session, rival *Node) error {
	superseded := &link.Refusal{Code: link.CloseSuperseded, Reason: "superseded"}
	isV2 := !s.V21
	if rival != nil {
		old := rival.session.Load()
		switch isV2 = isV2 && !old.V21; {
		case isV2:
		case old.BootID == s.BootID:
			return nil
		case isAlive(ctx, old):
			h.SuspectClone(s.NodeID)
			return superseded
		case !h.mayReplace(s):
			h.beginQuiet(s.NodeID)
			old.Close(link.CloseTimeout, "timeout")
			return superseded
		}
	} else if !h.mayReplace(s) {
		h.SuspectClone(s.NodeID)
		return superseded
	}
	if isV2 && h.inPenalty(s.NodeID) {
		return superseded
	}
	return nil
}

// beginQuiet begins cloneQuiet for a rival that did not answer. The end of its link would do so
// too, but may be noticed a second later; the newcomer, which waits exactly cloneQuiet after its
// refusal, would then be too early and have to wait twice as long again.
func (h *Hub) beginQuiet(nodeID string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.clones[nodeID]; m != nil && m.quietFrom.IsZero() {
		m.quietFrom = time.Now()
	}
}

// mayReplace reports whether a clone mark lets a link of another boot_id in.
func (h *Hub) mayReplace(s *link.Session) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.clones[s.NodeID]
	return m == nil || m.servedID == "" || m.servedID == s.BootID ||
		!m.quietFrom.IsZero() && time.Since(m.quietFrom) >= cloneQuiet
}
