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
//   - Handshakes start at handshakeRate. Links above it wait in a queue, in the order in
//     which they came, before the relay has sent anything: such a link is a socket without a
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

// Attach takes one upgraded link and serves it until it ends. It returns at once, so that
// the HTTP server's buffers are freed; Run waits for the session. A link over the limits is
// closed with 4503, in the caller's goroutine. client is the address of the device, for the audit
// log; it may be invalid.
func (h *Hub) Attach(conn link.Conn, client netip.Addr) {
	h.mu.Lock()
	full := h.closing || len(h.nodes) >= h.nodeLimit || h.handshaking.Load() >= h.handshakeLimit
	if !full {
		h.handshaking.Add(1)
		if len(h.waiting) == 0 && h.startPace.Allow() {
			h.startHandshakeLocked(waitingLink{conn, client})
		} else {
			h.waiting = append(h.waiting, waitingLink{conn, client})
		}
	}
	h.mu.Unlock()
	if full {
		h.refused.Add(1)
		_ = conn.Close(link.CloseDraining, "overloaded")
		return
	}
	select {
	case h.hasWaiting <- struct{}{}:
	default:
	}
}

// waitingLink is a link whose handshake has not begun.
type waitingLink struct {
	conn   link.Conn
	client netip.Addr
}

func (h *Hub) startHandshakeLocked(w waitingLink) {
	h.wg.Go(func() { h.handshake(w.conn, w.client) })
}

// startWaiting starts the handshakes of the links that wait, at handshakeRate, until ctx ends.
func (h *Hub) startWaiting(ctx context.Context) {
	for {
		h.mu.Lock()
		idle := len(h.waiting) == 0
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
		if len(h.waiting) > 0 && !h.closing {
			next := h.waiting[0]
			h.waiting[0] = waitingLink{}
			if h.waiting = h.waiting[1:]; len(h.waiting) == 0 {
				h.waiting = nil // frees the array
			}
			h.startHandshakeLocked(next)
		}
		h.mu.Unlock()
	}
}

// refuseWaiting closes the links that wait. The hub is closing.
func (h *Hub) refuseWaiting() {
	h.mu.Lock()
	waiting := h.waiting
	h.waiting = nil
	h.mu.Unlock()
	for _, w := range waiting {
		h.handshaking.Add(-1)
		h.refused.Add(1)
		h.wg.Go(func() { _ = w.conn.Close(link.CloseDraining, "draining") })
	}
}
