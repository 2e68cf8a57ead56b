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
	// rest makes reads give netpoll.ErrNothing instead of waiting. It is called once.
	rest()
	// fresh is called in the reading goroutine after each edge; gone is whether it told
	// that the peer has gone.
	fresh(gone bool)
	// pingNow pings unless that may wait; false: nothing was written.
	pingNow() (bool, error)
}

var _ pollable = (*relayConn)(nil)

// nowReader is a connection below TLS whose reads can be made not to wait.
type nowReader interface{ ReadNow(r *netpoll.Reader) }

func (c *relayConn) socket() *netpoll.Socket {
	if t, secure := c.nc.(*tls.Conn); secure {
		if _, ok := t.NetConn().(nowReader); !ok {
			return nil
		}
	}
	tcp, ok := tcpConn(c.nc)
	if !ok {
		return nil
	}
	return netpoll.NewSocket(tcp)
}

func (c *relayConn) rest() {
	tcp, _ := tcpConn(c.nc)
	c.now = netpoll.NewReader(tcp)
	if t, secure := c.nc.(*tls.Conn); secure {
		t.NetConn().(nowReader).ReadNow(c.now)
	}
}

func (c *relayConn) fresh(gone bool) { c.now.OnReadable(gone) }

func (c *relayConn) pingNow() (bool, error) {
	if !c.wmu.TryLock() { // by a pong that the peer does not take, perhaps
		return false, nil
	}
	defer c.wmu.Unlock()
	if _, secure := c.nc.(*tls.Conn); secure {
		if n, err := c.now.Socket().Unacked(); n != 0 || err != nil {
			return false, err
		}
		if err := c.readyLocked(time.Time{}); err != nil {
			return false, err
		}
		return true, c.writeLocked(opPing, nil) // a small frame into an empty buffer does not wait
	}
	if c.bye || c.closing.Load() {
		return false, net.ErrClosed
	}
	n, err := c.now.Socket().Write(pingFrame)
	if errors.Is(err, os.ErrDeadlineExceeded) { // of an earlier write; Ping lifts it
		return false, nil
	}
	if n == 1 { // torn: the rest must come before anything else
		_, err = c.nc.Write(pingFrame[1:])
	}
	return n > 0, err
}

var pingFrame = []byte{0x80 | opPing, 0}
