package hub

import (
	"time"

	"agentctl/transport/link"
)

// A device is suspect while something that it has to answer, a ping or a command, was sent
// suspectTime ago and nothing was received since: no message, no ping, no pong. Calls to it
// fail at once instead of waiting for their deadline; whatever is received clears it.
//
// The state is computed when it is asked for, from unansweredAt and the session's time of the
// last read. The sweep looks at the few nodes from which an answer is due, to report changes,
// and pings those that have not answered a command: a handler that hangs is no reason to
// suspect a device whose link is alive.
const (
	suspectTime = 5 * time.Second
	probeAfter  = 2 * time.Second // of an unanswered command; leaves time for the pong
)

// processStart is the zero of sinceStart.
var processStart = time.Now()

// sinceStart is the monotonic clock in nanoseconds, as a number that fits an atomic; it is never 0.
func sinceStart() int64 { return int64(time.Since(processStart)) + 1 }

// unanswered is how long the oldest unanswered message has been waiting; false: there is none.
func (n *Node) unanswered() (waiting time.Duration, ok bool) {
	at := n.unansweredAt.Load()
	if at == 0 {
		return 0, false
	}
	waiting = time.Duration(sinceStart() - at)
	return waiting, n.session.Load().IdleTime() > waiting
}

// isSuspect reports whether a linked device is suspect.
func (n *Node) isSuspect() bool {
	waiting, ok := n.unanswered()
	return ok && waiting >= suspectTime
}

// expectAnswer records that a ping or a command was sent just now.
func (n *Node) expectAnswer() {
	if _, waiting := n.unanswered(); waiting {
		return // for an earlier one
	}
	n.unansweredAt.Store(sinceStart())
	h := n.hub
	h.watchMu.Lock()
	if !n.isWatched {
		n.isWatched = true
		h.watched = append(h.watched, n)
	}
	h.watchMu.Unlock()
}

// checkWatched looks at the nodes from which an answer is due. The sweep calls it each second.
func (h *Hub) checkWatched() {
	h.watchMu.Lock()
	watched := h.watched
	h.watched = nil
	h.watchMu.Unlock()
	kept := watched[:0]
	for _, n := range watched {
		waiting, ok := n.unanswered()
		linked := h.isCurrent(n)
		// Without a link a node is offline, which says more than suspect.
		suspect := ok && linked && waiting >= suspectTime
		if suspect != n.isReportedSuspect.Load() {
			n.isReportedSuspect.Store(suspect)
			h.revision.Add(1)
			h.reportSuspect(n, suspect)
		}
		if ok && linked {
			if at := n.unansweredAt.Load(); waiting >= probeAfter && at != n.probedAt {
				n.probedAt = at
				_ = n.session.Load().Send(nil)
			}
			kept = append(kept, n)
			continue
		}
		h.watchMu.Lock()
		// Asked again under watchMu: while isWatched is set, expectAnswer adds nothing to the list.
		if _, ok := n.unanswered(); ok && linked {
			kept = append(kept, n)
		} else {
			n.isWatched = false
		}
		h.watchMu.Unlock()
	}
	clear(watched[len(kept):])
	h.watchMu.Lock()
	if h.watched = append(kept, h.watched...); len(h.watched) == 0 {
		h.watched = nil
	}
	h.watchMu.Unlock()
}

// reportSuspect reports a change of a node that has a link, in order with its OnReady.
func (h *Hub) reportSuspect(n *Node, suspect bool) {
	h.callbackMu.Lock()
	defer h.callbackMu.Unlock()
	if h.opt.OnSuspect != nil && h.isCurrent(n) {
		h.opt.OnSuspect(n, suspect)
	}
}

// newLink forgets what was sent on an earlier link of the node.
func (n *Node) newLink(s *link.Session) {
	n.session.Store(s)
	n.unansweredAt.Store(0)
}
