package edge

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/transport/netpoll"
)

// A small request costs net/http as much as everything that the relay does with it: a goroutine
// that waits for the client to leave, four deadlines, two buffers. directConn serves the plain
// requests of a connection without it, through the same handler:
//
//	net/http reads ── a request that parseDirect and Server.Direct take ──> Handler, one write
//	               └─ anything else: net/http gets the bytes, and the connection, for good
//
// net/http still owns the connection. It accepts and closes it, recovers panics, and waits in the
// Read below while requests are served. docs/adr/0019 says what this saves and what it costs.
type directConn struct {
	framingConn
	server     *Server
	ctx        context.Context // of ConnContext
	handedOver bool            // net/http serves the connection

	// Set by the first direct request.
	remoteAddr string
	key        uint64
	cancel     context.CancelFunc // of ctx: the client has left

	isHijacked atomic.Bool // a handler owns the connection below
}

// restTimeout is how long the rest of a direct request may take that did not arrive whole. Some
// clients write head and body separately.
const restTimeout = 100 * time.Millisecond

// Read serves direct requests. It returns when net/http has something to do.
func (c *directConn) Read(b []byte) (int, error) {
	if c.handedOver {
		return c.framingConn.Read(b)
	}
	c.handedOver = true
	defer c.stop() // also after a panic, which net/http logs
	n, err := c.serveDirect(b)
	if c.cancel != nil && err == nil {
		err = c.SetReadDeadline(time.Now().Add(headerTimeout)) // as after the accept
	}
	c.scan(b[:n])
	if err != nil {
		c.explainTLS(err)
	}
	return n, err
}

// serveDirect serves the direct requests that come first. b[:n] are the bytes after them.
func (c *directConn) serveDirect(b []byte) (n int, err error) {
	for {
		// The first request has the deadline that net/http has set for its head.
		if c.cancel != nil && n == 0 {
			if err := c.awaitRequest(); err != nil {
				return 0, err
			}
		}
		if n == 0 {
			if n, err = c.Conn.Read(b); err != nil {
				return n, err
			}
		}
		if c.cancel != nil { // some clients end a body with an empty line, which net/http skips, too
			if n = copy(b, bytes.TrimLeft(b[:n], "\r\n")); n == 0 {
				continue
			}
		}
		var r http.Request // on the stack; serveOne makes the copy that the handler gets
		ok, size := parseDirect(&r, b[:n])
		if !ok && size > 0 { // a part of a request
			if n, err = c.readRest(b, n, size); err != nil {
				return n, err
			}
			ok, size = parseDirect(&r, b[:n])
		}
		if !ok || !c.server.Direct(r.URL.Path) || !c.start() {
			return n, nil
		}
		if !c.serveOne(&r) {
			return 0, io.EOF // net/http closes
		}
		n = copy(b, b[size:n])
	}
}

// start makes the connection one of the server's direct ones, and reports whether it is. It is
// watched from then on: a client that leaves cancels its request.
func (c *directConn) start() bool {
	if c.cancel != nil {
		return true
	}
	ctx, cancel := context.WithCancel(c.ctx)
	c.ctx, c.cancel, c.remoteAddr = ctx, cancel, c.RemoteAddr().String()
	if c.server.direct.add(c) {
		return true
	}
	cancel()
	c.cancel = nil
	return false
}

// hijack gives the connection below to a handler. net/http believes that the client has left, and
// gives its buffers to other connections.
func (c *directConn) hijack() net.Conn {
	c.isHijacked.Store(true)
	c.server.direct.remove(c.key) // before the deadline, which drain overwrites
	_ = c.Conn.SetDeadline(time.Time{})
	return c.Conn
}

// Close closes the connection, unless a handler owns it.
func (c *directConn) Close() error {
	if c.isHijacked.Load() {
		return nil
	}
	return c.framingConn.Close()
}

// stop ends what start has begun.
func (c *directConn) stop() {
	if c.cancel != nil {
		c.cancel()
		c.server.direct.remove(c.key)
	}
}

// awaitRequest bounds the wait for the next request. It fails when the server stops.
func (c *directConn) awaitRequest() error {
	if err := c.SetReadDeadline(time.Now().Add(idleTimeout)); err != nil {
		return err
	}
	if c.server.direct.isDraining() { // after the deadline, which drain overwrites
		return io.EOF
	}
	return nil
}

// readRest reads until b begins with a whole request or something else than a direct one, for
// restTimeout at most. n bytes are there, and size are needed.
func (c *directConn) readRest(b []byte, n, size int) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(restTimeout)); err != nil {
		return 0, err
	}
	for n < size && size <= len(b) {
		m, err := c.Conn.Read(b[n:])
		n += m
		if ne, ok := err.(net.Error); ok && ne.Timeout() {
			break
		} else if err != nil {
			return 0, err
		}
		if n >= size { // not for each byte of a body
			_, size = parseDirect(new(http.Request), b[:n])
		}
	}
	return n, c.SetReadDeadline(time.Now().Add(headerTimeout)) // net/http may get a part of a head
}

// serveOne answers one request, and reports whether the connection may serve another one.
func (c *directConn) serveOne(r *http.Request) (reuse bool) {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	w := newDirectWriter(c)
	r.RemoteAddr = c.remoteAddr
	c.server.Handler.ServeHTTP(w, r.WithContext(ctx))
	return w.finish()
}

// directConns are the connections of a server that direct requests have come on.
type directConns struct {
	mu       sync.Mutex // protects the fields below
	ep       *netpoll.Epoll
	conns    map[uint64]*directConn
	lastKey  uint64 // keys are not reused: an event may be reported after the connection has ended
	draining chan struct{}
	isEmpty  chan struct{} // closed when the last connection has ended; made by drain
}

// connContext is http.Server.ConnContext.
func connContext(ctx context.Context, nc net.Conn) context.Context {
	ctx = WithConn(ctx, nc)
	if c, ok := nc.(*directConn); ok {
		c.ctx = ctx
	}
	return ctx
}

// open reports whether connections can be watched; run must be called then.
func (d *directConns) open() bool {
	ep, err := netpoll.New()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.ep = ep
	}
	return err == nil
}

// run watches the connections until ctx ends.
func (d *directConns) run(ctx context.Context) {
	_ = d.ep.Run(ctx, func(key uint64, ev netpoll.Events) {
		if ev&netpoll.PeerClosed == 0 {
			return
		}
		d.mu.Lock()
		c := d.conns[key]
		d.mu.Unlock()
		if c != nil {
			c.cancel()
		}
	})
}

// add reports false for a connection that cannot be watched, and when the server stops.
func (d *directConns) add(c *directConn) bool {
	sock := netpoll.NewSocket(netpoll.Lowest(c.Conn))
	if sock == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// drain closes draining under mu, so it either finds the connection in conns or is seen here.
	if d.ep == nil || d.isDraining() {
		return false
	}
	d.lastKey++
	if d.ep.Add(sock, d.lastKey, 0) != nil {
		return false
	}
	c.key = d.lastKey
	d.conns[c.key] = c
	return true
}

func (d *directConns) remove(key uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conns, key)
	if len(d.conns) == 0 && d.isEmpty != nil {
		close(d.isEmpty)
		d.isEmpty = nil
	}
}

// isDraining reports whether drain was called.
func (d *directConns) isDraining() bool {
	select {
	case <-d.draining:
		return true
	default:
		return false
	}
}

// drain lets the requests in progress finish, and waits until their connections have ended or ctx
// ends.
func (d *directConns) drain(ctx context.Context) {
	d.mu.Lock()
	if !d.isDraining() {
		close(d.draining)
	}
	for _, c := range d.conns {
		_ = c.SetReadDeadline(time.Unix(1, 0)) // ends the wait for the next request
	}
	var empty chan struct{}
	if len(d.conns) > 0 {
		if d.isEmpty == nil {
			d.isEmpty = make(chan struct{})
		}
		empty = d.isEmpty
	}
	d.mu.Unlock()
	if empty != nil {
		select {
		case <-empty:
		case <-ctx.Done():
		}
	}
}
