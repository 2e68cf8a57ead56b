package hub

import (
	"context"
	"net/netip"
	"time"

	"agentctl/transport/link"
)

// After a restart of the relay, or a failure of its network, all its devices come back. Two
// measures spread them:
//
//   - reconnect_spread_ms tells each device at auth over which time to spread its first
//     attempt. It follows the devices of the last hour and not those that are linked now:
//     the first ones that return would otherwise learn that the relay is small.
//   - Handshakes start at handshakeRate. Links above it wait in a queue, their addresses in
//     turns, before the relay has sent anything: such a link is a socket without a
//     goroutine or a buffer, and its deadline for auth has not begun. A device waits for
//     hello for 10 s at least; maxHandshakes links take 8 s. Links become ready at the same
//     rate: when the machine was busy, handshakes that started one by one end together.
const (
	devicesPerSecond = 200 // at which devices should come back
	handshakeRate    = 250 // handshakes a second, and at most handshakeBurst more in one
	handshakeBurst   = 40
)

// RecentWindow is the time that Options.RecentNodes looks back.
const RecentWindow = time.Hour

// reconnectSpreadMS is the reconnect_spread_ms of auth_ok.
func (h *Hub) reconnectSpreadMS() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(1000, int64(max(len(h.nodes), h.recentNodes))*1000/devicesPerSecond)
}

// countRecent updates the number of devices of the last hour.
func (h *Hub) countRecent() {
	if h.opt.RecentNodes == nil {
		return
	}
	recent := h.opt.RecentNodes()
	h.mu.Lock()
	h.recentNodes = recent
	h.mu.Unlock()
}

// Attach serves a link, as AttachReserved does, that is not counted by address, such as one in
// memory. client is the address of the device, for the audit log; it may be invalid.
func (h *Hub) Attach(conn link.Conn, client netip.Addr) {
	h.mu.Lock()
	slot := h.newSlotLocked(client, netip.Prefix{}, nil, nil)
	h.mu.Unlock()
	if slot == nil {
		h.refused.Add(1)
		_ = conn.Close(link.CloseDraining, "overloaded")
		return
	}
	h.AttachReserved(conn, slot)
}

// AttachReserved takes one upgraded link and serves it until it ends. It returns at once, so that
// the HTTP server's buffers are freed; Run waits for the session. A link over the limits is
// closed with 4503, in the caller's goroutine. slot is what Reserve returned for it.
func (h *Hub) AttachReserved(conn link.Conn, slot *Slot) {
	h.mu.Lock()
	full := h.closing || len(h.nodes) >= h.nodeLimit
	if !full {
		if h.waiting.len == 0 && h.startPace.Allow() {
			h.startHandshakeLocked(conn, slot)
		} else {
			h.waiting.push(conn, slot)
		}
	}
	h.mu.Unlock()
	if full {
		slot.Release()
		h.refused.Add(1)
		_ = conn.Close(link.CloseDraining, "overloaded")
		return
	}
	select {
	case h.hasWaiting <- struct{}{}:
	default:
	}
}

func (h *Hub) startHandshakeLocked(conn link.Conn, slot *Slot) {
	h.wg.Go(func() { h.handshake(conn, slot) })
}

// startWaiting starts the handshakes of the links that wait, at handshakeRate, until ctx ends.
func (h *Hub) startWaiting(ctx context.Context) {
	for {
		h.mu.Lock()
		idle := h.waiting.len == 0
		h.mu.Unlock()
		if idle {
			select {
			case <-ctx.Done():
				return
			case <-h.hasWaiting:
				continue
			}
		}
		if h.startPace.Wait(ctx) != nil {
			return
		}
		h.mu.Lock()
		if h.waiting.len > 0 && !h.closing {
			w := h.waiting.pop()
			h.startHandshakeLocked(w.conn, w.slot)
		}
		h.mu.Unlock()
	}
}

// refuseWaiting closes the links that wait. The hub is closing.
func (h *Hub) refuseWaiting() {
	h.mu.Lock()
	waiting := h.waiting
	h.waiting = waitingLinks{}
	h.mu.Unlock()
	for waiting.len > 0 {
		w := waiting.pop()
		w.slot.Release()
		h.refused.Add(1)
		h.wg.Go(func() { _ = w.conn.Close(link.CloseDraining, "draining") })
	}
}

// waitingLinks are links that wait for their handshake. Those of addresses from which a board has
// authenticated before come first, except that each fourth place is a stranger's: a flood of
// strangers does not delay boards that come back, and a new board is not shut out.
type waitingLinks struct {
	len             int
	known, stranger addressQueue
	popped          int
}

const strangersTurn = 4

func (q *waitingLinks) push(conn link.Conn, slot *Slot) {
	if slot.isKnown {
		q.known.push(conn, slot)
	} else {
		q.stranger.push(conn, slot)
	}
	q.len++
}

// pop removes the next link. There must be one.
func (q *waitingLinks) pop() waitingLink {
	q.len--
	q.popped++
	if q.known.len == 0 || (q.popped%strangersTurn == 0 && q.stranger.len > 0) {
		return q.stranger.pop()
	}
	return q.known.pop()
}

// addressQueue has the links of one address in the order in which they came, and the addresses in
// turns, so that many links of one do not delay another. The zero value is empty.
type addressQueue struct {
	len    int
	queues map[netip.Prefix][]waitingLink
	order  []netip.Prefix // addresses with a queue; the first is the next
}

type waitingLink struct {
	conn link.Conn
	slot *Slot
}

func (q *addressQueue) push(conn link.Conn, slot *Slot) {
	if q.queues == nil {
		q.queues = make(map[netip.Prefix][]waitingLink)
	}
	if len(q.queues[slot.address]) == 0 {
		q.order = append(q.order, slot.address)
	}
	q.queues[slot.address] = append(q.queues[slot.address], waitingLink{conn, slot})
	q.len++
}

// pop removes the next link. There must be one.
func (q *addressQueue) pop() waitingLink {
	address := q.order[0]
	q.order = q.order[1:]
	queue := q.queues[address]
	next := queue[0]
	queue[0] = waitingLink{}
	if len(queue) > 1 {
		q.queues[address] = queue[1:]
		q.order = append(q.order, address)
	} else {
		delete(q.queues, address)
	}
	if q.len--; q.len == 0 {
		*q = addressQueue{} // frees what has grown
	}
	return next
}
