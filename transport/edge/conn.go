package edge

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"
)

// Conn is a counted connection.
type Conn struct {
	*net.TCPConn
	conns *Conns
	agent atomic.Pointer[Identity] // whose share it belongs to; set once
	// current is who sent the present request, nil for a client without a valid token. Behind a proxy
	// it changes. Only the goroutine that serves the connection uses it.
	current *Identity

	requests atomic.Uint32 // that began before it had an agent, see IsLastRequest

	// Protected by Conns.mu.
	stranger *stranger // nil: it has shown a token, or is a proxy's
	closed   bool
}

// stranger is what a connection has until it shows a token.
type stranger struct {
	key     netip.Prefix // of its address
	since   time.Time
	element *list.Element // in Conns.order; nil: of a known address
	cancel  func()        // its wait for a TLS handshake; nil: it did not wait
}

// Close closes the connection and counts it out.
func (c *Conn) Close() error {
	c.conns.mu.Lock()
	// net/http, a handler and admit, for a victim, may all close: the first one counts.
	again := c.closed
	was := c.stranger
	if !again {
		c.closed = true
		c.conns.open--
		c.forgetStrangerLocked()
	}
	c.conns.mu.Unlock()
	if !again {
		if was != nil {
			if was.cancel != nil {
				was.cancel()
			}
			c.conns.rates.Charge(was.key.String(), 1, time.Now())
		}
		if id := c.agent.Load(); id != nil {
			c.conns.agents.Release(*id, 1)
		}
	}
	return c.TCPConn.Close()
}

// forgetStrangerLocked makes the connection count as one with a token. Conns.mu is held.
func (c *Conn) forgetStrangerLocked() {
	if c.stranger == nil {
		return
	}
	if c.stranger.element == nil {
		c.conns.returning--
	} else {
		c.conns.strangers--
		c.conns.order.Remove(c.stranger.element)
	}
	key := c.stranger.key
	if c.conns.addresses[key]--; c.conns.addresses[key] == 0 {
		delete(c.conns.addresses, key)
	}
	c.stranger = nil
}

// Authenticate notes that a valid token of id was shown on the connection. It returns an error,
// which is to be the answer (429), when the identity has its share of connections already. The
// connection belongs to the first identity that was shown on it. A nil Conn belongs to nobody.
func (c *Conn) Authenticate(id Identity) error {
	if c == nil {
		return nil
	}
	if agent := c.agent.Load(); agent != nil && *agent == id {
		c.current = agent
		return nil
	}
	return c.authenticate(&Identity{id.Tenant, id.Subject})
}

// authenticate is Authenticate for the first request of an identity on the connection.
func (c *Conn) authenticate(id *Identity) error {
	c.current = id
	if c.agent.Load() != nil {
		return nil
	}
	if !c.conns.agents.TryAcquire(*id, 1) {
		return Exhausted("too many connections of this identity are open; use fewer", time.Second)
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	if c.closed || !c.agent.CompareAndSwap(nil, id) {
		c.conns.agents.Release(*id, 1)
		return nil
	}
	c.markKnownLocked()
	return nil
}

// chargeAddress counts the connection against the rate of its address, as one without a token. Its
// client has not waited for a refusal: whoever does so on many connections gets no more of them.
func (c *Conn) chargeAddress() {
	if addr := addrOf(c.TCPConn); !c.conns.o.Proxies.Contains(addr) {
		c.conns.rates.Charge(AddressKey(addr).String(), 1, time.Now())
	}
}

// IsLastRequest counts a request on the connection, and reports whether the connection has to end
// after it: no token was shown on it in maxStrangerRequests. A nil Conn serves any number.
func (c *Conn) IsLastRequest() bool {
	if c == nil || c.agent.Load() != nil || c.requests.Add(1) < maxStrangerRequests {
		return false
	}
	return c.isStranger()
}

// isStranger reports whether no token was shown on the connection.
func (c *Conn) isStranger() bool {
	if c.agent.Load() != nil {
		return false
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	return c.stranger != nil
}

// MarkKnown notes that the peer is no stranger, and belongs to no identity that has a share: a
// board, whose links the hub bounds, a client that has just proved its key or its invite, or any
// client of a server that needs no token.
func (c *Conn) MarkKnown() {
	if c == nil {
		return
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	c.markKnownLocked()
}

// markKnownLocked ends the connection's time as a stranger, and makes its address known. Conns.mu
// is held.
func (c *Conn) markKnownLocked() {
	if c.stranger == nil {
		return
	}
	known := c.conns.known
	if _, ok := known[c.stranger.key]; !ok {
		for key := range known {
			if len(known) < maxKnownAddresses {
				break
			}
			delete(known, key)
		}
		known[c.stranger.key] = struct{}{}
	}
	c.forgetStrangerLocked()
}

// connKey carries a *Conn in the context of its requests.
type connKey struct{}

// WithConn is for http.Server.ConnContext: it lets ConnOf find the counted connection below TLS
// and other wrappers.
func WithConn(ctx context.Context, nc net.Conn) context.Context {
	if c := connBelow(nc); c != nil {
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// connBelow returns the counted connection below nc's wrappers, or nil.
func connBelow(nc net.Conn) *Conn {
	for {
		if c, ok := nc.(*Conn); ok {
			return c
		}
		wrapper, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		nc = wrapper.NetConn()
	}
}

// cancelWhenClosed makes Close call cancel, and reports whether the connection is an open one of a
// stranger from an address that showed no token. It does nothing for others.
func (c *Conn) cancelWhenClosed(cancel context.CancelFunc) bool {
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	if c.stranger == nil || c.stranger.element == nil {
		return false
	}
	c.stranger.cancel = cancel
	return true
}

// ConnOf returns the counted connection of a request; nil if it is not counted.
func ConnOf(r *http.Request) *Conn {
	c, _ := r.Context().Value(connKey{}).(*Conn)
	return c
}
