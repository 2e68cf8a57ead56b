package hub

import (
	"context"
	"net/netip"
	"time"

	"golang.org/x/time/rate"

	"agentctl/transport/link"
)

// This file takes new links: Attach starts their handshake, or lets it wait.
//
// After a restart of the relay, or a failure of its network, all its devices come back. Two
// measures spread them:
//
//   - reconnect_spread_ms gives each device at auth the time over which to spread its first
//     attempt. It follows the devices of the last hour and not those that are linked now:
//     the first ones that return would otherwise learn that the relay is small.
//   - Handshakes start at handshakeRate, in two queues: known addresses, and others. Links
//     above the rate wait, served round-robin by address, before the relay has sent anything:
//     such a link is a socket without a goroutine or a buffer, and its deadline for auth has not
//     begun. A device waits for hello for 10 s at least; maxHandshakes links take 8 s.
//
// Links also become ready at that rate (readyPace): when the machine was busy, handshakes that
// started one by one end together.
const (
	devicesPerSecond = 200 // at which devices should come back
	handshakeRate    = 250 // handshakes a second, and at most handshakeBurst more in one
	handshakeBurst   = 40
)

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
	q := &h.waitingStrangers
	if slot.isKnown {
		q = &h.waitingKnown
	}
	h.mu.Lock()
	full := h.closing || len(h.nodes) >= h.nodeLimit
	if !full {
		if q.len == 0 && q.pace.Allow() {
			h.startHandshakeLocked(conn, slot)
		} else {
			q.push(conn, slot)
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
	case q.hasWaiting <- struct{}{}:
	default:
	}
}

func (h *Hub) startHandshakeLocked(conn link.Conn, slot *Slot) {
	h.wg.Go(func() { h.handshake(conn, slot) })
}

// startWaiting starts the handshakes of the links that wait in a queue, at its pace, until ctx ends.
func (h *Hub) startWaiting(ctx context.Context, q *waitingLinks) {
	for {
		h.mu.Lock()
		idle := q.len == 0
		h.mu.Unlock()
		if idle {
			select {
			case <-ctx.Done():
				return
			case <-q.hasWaiting:
				continue
			}
		}
		if q.pace.Wait(ctx) != nil {
			return
		}
		h.mu.Lock()
		if q.len > 0 && !h.closing {
			w := q.pop()
			h.startHandshakeLocked(w.conn, w.slot)
		}
		h.mu.Unlock()
	}
}

// refuseWaiting closes the links that wait. The hub is closing.
func (h *Hub) refuseWaiting() {
	h.mu.Lock()
	queues := [...]addressQueue{h.waitingKnown.addressQueue, h.waitingStrangers.addressQueue}
	h.waitingKnown.addressQueue, h.waitingStrangers.addressQueue = addressQueue{}, addressQueue{}
	h.mu.Unlock()
	for i := range queues {
		for queues[i].len > 0 {
			w := queues[i].pop()
			w.slot.Release()
			h.refused.Add(1)
			h.wg.Go(func() { _ = w.conn.Close(link.CloseDraining, "draining") })
		}
	}
}

// waitingLinks are links that wait for their handshake. There are two queues, each with its
// pace: links of addresses from which a board has authenticated before, and those of strangers, so
// that a flood of strangers does not delay boards that come back.
type waitingLinks struct {
	addressQueue               // protected by Hub.mu
	pace         *rate.Limiter // of starts
	hasWaiting   chan struct{} // holds one element after the queue has grown
}

func newWaitingLinks() waitingLinks {
	return waitingLinks{pace: rate.NewLimiter(handshakeRate, handshakeBurst), hasWaiting: make(chan struct{}, 1)}
}

// addressQueue has the links of one address in the order in which they came, and serves the
// addresses round-robin, so that many links of one do not delay another. The zero value is empty.
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

// RecentWindow is the time that Options.RecentNodes covers.
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
