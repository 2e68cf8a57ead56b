package link

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"time"

	"agentctl/transport/netpoll"
)

// pollable is a Conn whose reader need not wait.
type pollable interface {
	Conn
	// socket is what a Poller watches; nil: this connection must be read by a goroutine.
	socket() *netpoll.Socket
	// setNonblocking makes reads give netpoll.ErrNothing instead of waiting. It is called once.
	setNonblocking()
	// onReadable is called in the reading goroutine after each edge; gone is whether it told
	// that the peer has gone.
	onReadable(gone bool)
	// tryPing pings unless that may wait; false: nothing was written.
	tryPing() (bool, error)
}

var _ pollable = (*relayConn)(nil)

// nowReader is a connection below TLS whose reads can be made not to wait.
type nowReader interface{ ReadNow(r *netpoll.Reader) }

func (c *relayConn) socket() *netpoll.Socket {
	if t, secure := c.conn.(*tls.Conn); secure {
		if _, ok := t.NetConn().(nowReader); !ok {
			return nil
		}
	}
	tcp, ok := tcpConn(c.conn)
	if !ok {
		return nil
	}
	return netpoll.NewSocket(tcp)
}

func (c *relayConn) setNonblocking() {
	tcp, _ := tcpConn(c.conn)
	c.poll = netpoll.NewReader(tcp)
	if t, secure := c.conn.(*tls.Conn); secure {
		t.NetConn().(nowReader).ReadNow(c.poll)
	}
}

func (c *relayConn) onReadable(gone bool) { c.poll.OnReadable(gone) }

func (c *relayConn) tryPing() (bool, error) {
	if !c.writeMu.TryLock() { // by a pong that the peer does not take, perhaps
		return false, nil
	}
	defer c.writeMu.Unlock()
	if _, secure := c.conn.(*tls.Conn); secure {
		if n, err := c.poll.Socket().Unacked(); n != 0 || err != nil {
			return false, err
		}
		if err := c.readyLocked(time.Time{}); err != nil {
			return false, err
		}
		return true, c.writeLocked(opPing, nil) // a small frame into an empty buffer does not wait
	}
	if c.closeSent || c.closing.Load() {
		return false, net.ErrClosed
	}
	n, err := c.poll.Socket().Write(pingFrame)
	if errors.Is(err, os.ErrDeadlineExceeded) { // of an earlier write; Ping lifts it
		return false, nil
	}
	if n == 1 { // torn: the rest must come before anything else
		_, err = c.conn.Write(pingFrame[1:])
	}
	return n > 0, err
}

var pingFrame = []byte{0x80 | opPing, 0}
