package sse

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Outlet is an open stream that no goroutine waits on, for a server that feeds thousands
// of streams from a few goroutines: its writes never wait, and a Poller tells when it has
// room again or its peer has gone. What the kernel does not take of one write is kept and
// goes first; the caller writes nothing more until that is gone. Writer is for streams
// with a goroutine each. Its methods are for one goroutine at a time.
type Outlet struct {
	conn net.Conn // what the client speaks to: raw, or TLS above it
	raw  *Conn
	key  uint64 // the Poller's
}

// Detach answers the request with 200 and the head of an event stream, and takes the
// connection from net/http, whose goroutine and buffers are free once the handler has
// returned. Otherwise it is as Streams.Open; the caller must call Close.
func Detach(w http.ResponseWriter, r *http.Request) (*Outlet, error) {
	if r.ProtoMajor != 1 {
		return nil, fmt.Errorf("sse: event stream over %s: HTTP/1.1 is needed: %w", r.Proto, errors.ErrUnsupported)
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, fmt.Errorf("sse: take over the connection: %w", err)
	}
	raw := rawConn(conn)
	if raw == nil {
		if _, isTLS := conn.(*tls.Conn); isTLS {
			conn.Close()
			return nil, errors.New("sse: this TLS listener does not stand on an sse.Listener: wrap the TCP listener with sse.NewListener first")
		}
		raw = &Conn{Conn: conn}
		conn = raw
	}
	raw.takeOver(0)
	o := &Outlet{conn: conn, raw: raw}
	if _, err := o.Offer(responseHead(w.Header())); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// Offer writes b in one piece, shared with other outlets or not; it never waits. full:
// some of it waits here, and Flush comes before the next Offer. ErrPeerClosed: the
// connection broke.
func (o *Outlet) Offer(b []byte) (full bool, err error) {
	if _, err := o.conn.Write(b); err != nil {
		return false, fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	return o.raw.hasPending(), nil
}

// Flush writes what waits, and waits itself for room up to wait.
func (o *Outlet) Flush(wait time.Duration) (full bool, err error) {
	n, err := o.raw.flush(wait), o.raw.failed()
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	return n > 0, nil
}

// Close ends the stream with FIN behind what the kernel has taken; it goes on delivering
// that for 30 s at most. Take the outlet off its Poller first.
func (o *Outlet) Close() {
	if t, ok := o.conn.(*tls.Conn); ok {
		t.CloseWrite()
	}
	o.raw.closeGracefully(30 * time.Second)
}

// failed is the first failure of a write.
func (c *Conn) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Watcher is told about an outlet by a Poller, from the Poller's goroutine or one of its
// takeOver: the methods must be quick.
type Watcher interface {
	OnWritable() // there may be room again after a full outlet
	OnClosed()   // the peer closed its side, or the connection broke; perhaps told twice
}
