package edge

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Bounds of connections on which no valid token was shown yet: strangers.
const (
	maxStrangersPerAddress = 256  // TCP, TLS and HTTP connections of one address
	maxStrangers           = 3072 // of all addresses, and at most a quarter of MaxOpen
	// A new one replaces the oldest of all when there are maxStrangers and it is this old: a good
	// client shows its token sooner.
	minStrangerAge = 250 * time.Millisecond
	// Addresses from which a token was shown have separate places, a quarter as many, in which
	// nothing is replaced: a flood of other addresses does not touch them.
	knownPart         = 4
	maxKnownAddresses = 16384 // when it is full, any of them is replaced

	// An address may open this many connections a second that end without a token, after a burst.
	// One that opens more is refused before TLS and HTTP cost anything. The rate is what health
	// checks and the boards of a laboratory with wrong tokens stay far below.
	strangerRate     = 200
	strangerBurst    = 1000
	maxStrangerRates = 4096 // addresses whose rate is tracked; the one used last is dropped first
	maxRefusing      = 256  // refused connections that may read their refusal
	refusalTimeout   = 500 * time.Millisecond
	// A connection serves this many requests without a token, so that strangerRate bounds the requests
	// of an address, too.
	maxStrangerRequests = 16
	// TLS handshakes of unknown addresses begin at this rate, because each takes 0.3 ms of a CPU.
	tlsRate  = 500 // a second
	tlsBurst = 100
	tlsWait  = 5 * time.Second

	maxAgentConns     = 16384 // connections on which agents showed a token
	agentConnsDivisor = 2     // of MaxOpen, at most
)

// ConnOptions configure Conns.
type ConnOptions struct {
	// MaxOpen bounds all connections: what the limit of open files leaves.
	MaxOpen int
	// Proxies are not counted by address: their connections are those of many clients.
	Proxies TrustedProxies
}

// Conns counts the connections of a server's listeners:
//
//	accepted ── stranger ── Authenticate ──> identity's share of the pool of agents
//	         │          └── MarkKnown ──> counts for MaxOpen only
//	         └─ over a bound of the address or of all: refused with 429, or closed where TLS is
//
// A stranger's connection that ends as one costs its address a token of a rate.
type Conns struct {
	o       ConnOptions
	rates   *Limiter      // of connections that end without a token, by address
	blocks  *Limiter      // of refused connections, by address; see connListener.block
	tlsPace *rate.Limiter // of handshakes of unknown addresses
	agents  *Pool         // connections on which agents showed a token

	refusals *Refusals
	blocked  blockStats
	refused  atomic.Uint64 // connections, since the start
	refusing atomic.Int64  // refused connections that may still read their refusal

	mu        sync.Mutex                // protects the fields below, Conn.stranger and Conn.closed
	open      int                       // all counted connections
	strangers int                       // of unknown addresses
	returning int                       // strangers of known addresses
	known     map[netip.Prefix]struct{} // addresses from which a token was shown
	addresses map[netip.Prefix]int      // strangers by AddressKey, of both kinds
	order     list.List                 // *Conn of the strangers of unknown addresses, the oldest first
}

// NewConns makes Conns. It starts nothing.
func NewConns(o ConnOptions) *Conns {
	return &Conns{o: o, rates: NewLimiter(maxStrangerRates, true), tlsPace: rate.NewLimiter(tlsRate, tlsBurst), addresses: make(map[netip.Prefix]int), known: make(map[netip.Prefix]struct{}),
		agents: NewPool(int64(min(maxAgentConns, o.MaxOpen/agentConnsDivisor))), refusals: NewRefusals(), blocks: NewLimiter(maxStrangerRates, true)}
}

// Listen listens on a TCP address, for Conns.Listener. It does without Multipath TCP, with which a
// listener cannot drop connection attempts.
func Listen(address string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return lc.Listen(context.Background(), "tcp", address)
}

// MaxOpenConns is how many connections the limit of open files allows, beside the files
// of the stores and of plugins.
func MaxOpenConns() int {
	n := int(min(maxOpenFiles(), 1<<20))
	return n - min(max(n/8, 128), n/2)
}

// Refusals delays the refusals of requests; others that refuse the same clients may share it.
func (c *Conns) Refusals() *Refusals { return c.refusals }

// Agents returns the figures of connections on which agents showed a token.
func (c *Conns) Agents() PoolStats { return c.agents.Stats() }

// Blocked returns how many addresses are blocked, for blockTime each, of how many at most on one
// listener. Refused is how many were.
func (c *Conns) Blocked() PoolStats {
	return PoolStats{c.blocked.blocked.Load(), maxBlocked, c.blocked.begun.Load()}
}

// Strangers returns the figures of connections without a token.
func (c *Conns) Strangers() PoolStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return PoolStats{int64(c.strangers + c.returning), int64(c.maxStrangers() + c.maxReturning()), c.refused.Load()}
}

func (c *Conns) maxStrangers() int { return min(maxStrangers, c.o.MaxOpen/4) }

// maxReturning bounds strangers of known addresses.
func (c *Conns) maxReturning() int { return max(1, c.maxStrangers()/knownPart) }

// Listener returns a listener whose TCP connections are counted; others pass uncounted. plain
// reports that HTTP without TLS follows, so that a refusal can be written.
func (c *Conns) Listener(ln net.Listener, plain bool) net.Listener {
	l := &connListener{Listener: ln, conns: c, plain: plain}
	if tcp, ok := ln.(*net.TCPListener); ok {
		l.blocked = &blockList{ln: tcp, stats: &c.blocked}
	}
	return l
}

type connListener struct {
	net.Listener
	conns   *Conns
	plain   bool
	blocked *blockList // nil: the listener is not TCP
}

// Accept waits for the next connection within the bounds, and refuses those beyond.
func (l *connListener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := nc.(*net.TCPConn)
		if !ok {
			return nc, nil
		}
		if conn := l.conns.admit(tcp); conn != nil {
			return conn, nil
		}
		l.conns.refused.Add(1)
		tooMany := l.block(tcp)
		l.conns.refuse(tcp, l.plain && !tooMany)
	}
}

// block counts a refused connection, and blocks its address after too many. It reports whether
// there were too many.
func (l *connListener) block(tcp *net.TCPConn) bool {
	key, now := AddressKey(addrOf(tcp)), time.Now()
	if l.conns.blocks.Take(key.String(), blockRate, blockBurst, now) == 0 {
		return false
	}
	if l.blocked != nil {
		l.blocked.add(key, now)
	}
	return true
}

// addrOf returns the address of a connection's peer.
func addrOf(tcp *net.TCPConn) netip.Addr {
	peer, ok := tcp.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return peer.AddrPort().Addr().Unmap().WithZone("")
}

// admit counts a new connection in, or returns nil. An address gets a quarter of what is free at
// most, so that some is left for the next one however many addresses there are.
func (c *Conns) admit(tcp *net.TCPConn) *Conn {
	addr := addrOf(tcp)
	key, isProxy := AddressKey(addr), c.o.Proxies.Contains(addr)
	if !isProxy && c.rates.Wait(key.String(), strangerRate, strangerBurst, time.Now()) > 0 {
		return nil
	}
	if isProxy {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.addLocked(&Conn{TCPConn: tcp, conns: c})
	}
	if conn := c.admitReturning(tcp, key); conn != nil {
		return conn
	}
	// Where all places of strangers are taken, a new one replaces an old one: clients that hold
	// connections open without a token must not keep others out. Close takes mu, so it is not held here.
	if victim := c.victim(); victim != nil {
		_ = victim.Close()
		c.refused.Add(1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mayAddLocked(key, c.maxStrangers()-c.strangers) {
		return nil
	}
	conn := c.addLocked(&Conn{TCPConn: tcp, conns: c})
	if conn != nil {
		c.addresses[key]++
		c.strangers++
		conn.stranger = &stranger{key: key, since: time.Now(), element: c.order.PushBack(conn)}
	}
	return conn
}

// admitReturning counts a new connection of a known address in, or returns nil.
func (c *Conns) admitReturning(tcp *net.TCPConn, key netip.Prefix) *Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.known[key]; !known || !c.mayAddLocked(key, c.maxReturning()-c.returning) {
		return nil
	}
	conn := c.addLocked(&Conn{TCPConn: tcp, conns: c})
	if conn != nil {
		c.addresses[key]++
		c.returning++
		conn.stranger = &stranger{key: key, since: time.Now()}
	}
	return conn
}

// mayAddLocked reports whether an address may have one more of the free places. c.mu is held.
func (c *Conns) mayAddLocked(key netip.Prefix, free int) bool {
	return free > 0 && c.addresses[key] < min(maxStrangersPerAddress, max(1, free/4))
}

// addLocked counts a connection, or returns nil when there are as many as there may be. c.mu is
// held.
func (c *Conns) addLocked(conn *Conn) *Conn {
	if c.open >= c.o.MaxOpen {
		return nil
	}
	c.open++
	return conn
}

// victim returns the stranger that a new one replaces; nil if a place is free, or nobody can be replaced.
func (c *Conns) victim() *Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.strangers < c.maxStrangers() || c.order.Len() == 0 {
		return nil
	}
	oldest := c.order.Front().Value.(*Conn)
	if time.Since(oldest.stranger.since) < minStrangerAge {
		return nil
	}
	return oldest
}

// refusal is the answer to a connection over the bounds, sent before its request is read.
var refusal = func() []byte {
	body := string(AppendError(nil, Exhausted("too many connections of this address without a token; try again", time.Second), "")) + "\n"
	return []byte("HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n" + body)
}()

// refuse closes a connection that was not admitted. It does not block: the send buffer of a new
// connection takes the answer. The close comes a moment later, because one with unread input
// would reset the connection before the peer has read the answer.
func (c *Conns) refuse(tcp *net.TCPConn, plain bool) {
	if !plain || c.refusing.Add(1) > maxRefusing {
		if plain {
			c.refusing.Add(-1)
		}
		_ = tcp.SetLinger(0) // no state is left behind for a flood
		_ = tcp.Close()
		return
	}
	_, _ = tcp.Write(refusal)
	_ = tcp.CloseWrite()
	time.AfterFunc(refusalTimeout, func() {
		_ = tcp.Close()
		c.refusing.Add(-1)
	})
}

// PaceTLS returns cfg with a bound of the rate at which handshakes of unknown addresses begin. Those
// above it wait in the order of arrival, up to tlsWait.
func (c *Conns) PaceTLS(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		ctx, cancel := context.WithTimeout(hello.Context(), tlsWait)
		defer cancel()
		if conn := connBelow(hello.Conn); conn == nil || !conn.cancelWhenClosed(cancel) {
			return nil, nil
		}
		err := c.tlsPace.Wait(ctx) // it fails at once when the queue is longer than that
		if err != nil {
			<-ctx.Done() // a client that tries again at once waits here, where it costs least
		}
		return nil, err
	}
	return cfg
}
