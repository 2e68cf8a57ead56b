package sse

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/transport/netpoll"
)

// Listener accepts connections that count the bytes written to them. Wrap the TCP listener
// directly, below TLS: the kernel reports acknowledged bytes of the TCP stream, and only
// there are written bytes the same bytes.
type Listener struct {
	net.Listener
	userTimeout time.Duration // default UserTimeout
}

// UserTimeout is the TCP user timeout (RFC 5482) of accepted connections: the kernel ends a
// connection when sent bytes stay unacknowledged, or the peer's receive window stays closed,
// for this long. It ends writes that have no deadline; streams have shorter limits.
const UserTimeout = 10 * time.Minute

// NewListener wraps ln.
func NewListener(ln net.Listener) *Listener { return &Listener{ln, UserTimeout} }

// Accept waits for the next connection; it is a *Conn.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if s := netpoll.NewSocket(c); s != nil {
		s.SetUserTimeout(l.userTimeout)
	}
	return &Conn{Conn: c}, nil
}

// rawConn returns the counted connection at or below c, or nil.
func rawConn(c net.Conn) *Conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	raw, _ := c.(*Conn)
	return raw
}

// Conn is a connection that counts the bytes written to it.
//
// Once a Writer has taken it over, a write does not wait. Bytes that the kernel does not
// accept stay in pending and are written first next time. A TLS layer above therefore never
// sees a write timeout, after which crypto/tls would fail every write.
type Conn struct {
	net.Conn
	written   atomic.Int64
	takenOver bool            // set once, before the Writer's first write
	nonblock  *netpoll.Reader // see ReadNonblocking

	mu      sync.Mutex      // protects the fields below: TLS answers the peer from a reading goroutine
	sock    *netpoll.Socket // nil when the kernel cannot be asked
	pending []byte          // accepted from the Writer, not yet taken by the kernel
	err     error           // the first failure, final
}

// takeOver turns c over to one Writer.
func (c *Conn) takeOver() { c.takenOver, c.sock = true, netpoll.NewSocket(c.Conn) }

// ReadNonblocking makes later reads use r, a non-blocking reader of the underlying
// connection. Call it between two reads.
func (c *Conn) ReadNonblocking(r *netpoll.Reader) { c.nonblock = r }

// Read reads the underlying connection.
func (c *Conn) Read(b []byte) (int, error) {
	if c.nonblock != nil {
		return c.nonblock.Read(b)
	}
	return c.Conn.Read(b)
}

// Written returns the number of bytes accepted for writing so far.
func (c *Conn) Written() int64 { return c.written.Load() }

// NetConn returns the underlying connection.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// CloseWrite sends FIN and leaves the reading side open. It fails with errors.ErrUnsupported
// on connections that cannot do that.
func (c *Conn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// SetWriteDeadline does nothing once a Writer has taken c over: the Writer sets its own,
// and crypto/tls would leave an expired one behind.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if c.takenOver {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}

// Write writes and counts b. After takeOver it does not wait, and keeps the rest in pending,
// which the Writer bounds.
func (c *Conn) Write(b []byte) (int, error) {
	if !c.takenOver {
		n, err := c.Conn.Write(b)
		c.written.Add(int64(n))
		return n, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	n := 0
	if len(c.pending) == 0 {
		if n = c.writeLocked(b, 0); c.err != nil {
			return n, c.err
		}
	}
	c.pending = append(c.pending, b[n:]...)
	c.written.Add(int64(len(b)))
	return len(b), nil
}

// flush writes pending bytes for up to wait. It returns how many are left, and the first
// error of a write.
func (c *Conn) flush(wait time.Duration) (pending int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) == 0 || c.err != nil {
		return len(c.pending), c.err
	}
	n := c.writeLocked(c.pending, wait)
	if c.pending = c.pending[:copy(c.pending, c.pending[n:])]; len(c.pending) == 0 {
		c.pending = nil
	}
	return len(c.pending), c.err
}

func (c *Conn) hasPending() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending) > 0
}

// minWriteTimeout is the shortest write deadline of a connection without a descriptor: with
// a shorter one, the deadline would pass before the first attempt.
const minWriteTimeout = time.Millisecond

// writeLocked writes as much as the connection accepts within wait, and returns how much.
func (c *Conn) writeLocked(b []byte, wait time.Duration) int {
	n := 0
	if c.sock != nil {
		if n, c.err = c.sock.Write(b); n == len(b) || c.err != nil || wait <= 0 {
			return n
		}
	}
	c.Conn.SetWriteDeadline(time.Now().Add(max(wait, minWriteTimeout)))
	m, err := c.Conn.Write(b[n:])
	c.Conn.SetWriteDeadline(time.Time{})
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.err = err
	}
	return n + m
}

// unacked returns how many written bytes the peer has not acknowledged.
func (c *Conn) unacked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(c.pending)
	if c.sock != nil {
		if q, err := c.sock.Unacked(); err == nil {
			n += q
		}
	}
	return n
}

// dropPending drops the bytes that the kernel has not accepted.
func (c *Conn) dropPending() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending = nil
}

// closeGracefully closes c; the kernel keeps delivering its send buffer for up to d.
func (c *Conn) closeGracefully(d time.Duration) {
	if c.sock != nil {
		c.sock.SetCloseTimeout(max(d, time.Second))
	}
	c.discardInput()
	c.Conn.Close()
}

// reset closes c with RST and discards what the peer has not read.
func (c *Conn) reset() {
	if t, ok := c.Conn.(interface{ SetLinger(int) error }); ok {
		t.SetLinger(0)
	}
	c.Conn.Close()
}

// discardInput empties the receive queue: closing a socket with unread input makes the
// kernel send RST, which can cost the peer the close event.
func (c *Conn) discardInput() {
	if c.sock == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var junk [512]byte
	for n := 0; n < maxInput; {
		m, err := c.sock.Read(junk[:])
		if n += m; err != nil {
			return
		}
	}
}
