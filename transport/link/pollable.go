package link

import (
	"bytes"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"time"

	"agentctl/transport/netpoll"
)

// pollable is a Conn that can be read without blocking, so that a Poller can wait for its
// input instead of a goroutine.
type pollable interface {
	Conn
	// socket is what a Poller watches; nil: only a goroutine can read this connection.
	socket() *netpoll.Socket
	// setNonblocking makes Read return netpoll.ErrWouldBlock instead of waiting. It is
	// called once.
	setNonblocking()
	// onReadable is called in the reading goroutine after each event; peerClosed is
	// whether the event said that the peer has closed.
	onReadable(peerClosed bool)
	// tryPing pings without blocking; written is false when that was not possible. whole is false
	// when writeRest has to write the rest of it.
	tryPing(payload []byte) (written, whole bool, err error)
	// tryWrite is Write without blocking, in the same way.
	tryWrite(msg []byte) (written, whole bool, err error)
	writeRest() error
}

var _ pollable = (*relayConn)(nil)

// nonblockingReader is a connection below TLS that can be switched to a netpoll.Reader.
type nonblockingReader interface{ ReadNonblocking(r *netpoll.Reader) }

func (c *relayConn) socket() *netpoll.Socket {
	if t, isTLS := c.conn.(*tls.Conn); isTLS {
		if _, ok := t.NetConn().(nonblockingReader); !ok {
			return nil
		}
	}
	return netpoll.NewSocket(netpoll.Lowest(c.conn))
}

func (c *relayConn) setNonblocking() {
	c.poll = netpoll.NewReader(netpoll.Lowest(c.conn))
	if t, isTLS := c.conn.(*tls.Conn); isTLS {
		t.NetConn().(nonblockingReader).ReadNonblocking(c.poll)
	}
}

func (c *relayConn) onReadable(peerClosed bool) { c.poll.OnReadable(peerClosed) }

func (c *relayConn) tryPing(payload []byte) (written, whole bool, err error) {
	return c.tryFrame(opPing, payload)
}

func (c *relayConn) tryWrite(msg []byte) (written, whole bool, err error) {
	return c.tryFrame(opText, msg)
}

// maxTLSFrame is the size of a payload that an empty send buffer takes, with what TLS adds, in bytes.
const maxTLSFrame = 8 << 10

// tryFrame writes a frame to the socket directly, because net.Conn has no write that does not
// block. What the socket does not take of a frame that it has begun is kept in unsent. Through TLS
// it writes as usual, but only when the send buffer is empty: a frame of maxTLSFrame does not block
// then.
func (c *relayConn) tryFrame(op byte, payload []byte) (written, whole bool, err error) {
	if !c.writeMu.TryLock() { // for instance, a pong blocks because the peer reads nothing
		return false, true, nil
	}
	defer c.writeMu.Unlock()
	if c.closeSent || c.closing.Load() {
		return false, true, net.ErrClosed
	}
	if _, isTLS := c.conn.(*tls.Conn); isTLS {
		if len(payload) > maxTLSFrame {
			return false, true, nil
		}
		if n, err := c.poll.Socket().Unacked(); n != 0 || err != nil {
			return false, true, err
		}
		if err := c.prepareWriteLocked(time.Time{}); err != nil {
			return false, true, err
		}
		return true, true, c.writeLocked(op, payload)
	}
	if len(c.unsent) > 0 {
		return false, true, nil
	}
	bp := frameBuffers.Get().(*[]byte)
	b := appendFrame(*bp, op, payload)
	defer func() { recycle(&frameBuffers, bp, b) }()
	n, err := c.poll.Socket().Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) { // the deadline of an earlier write; Ping removes it
		return false, true, nil
	}
	if n > 0 && n < len(b) {
		c.unsent = bytes.Clone(b[n:])
	}
	return n > 0, len(c.unsent) == 0, err
}

// writeRest writes unsent, within writeTimeout.
func (c *relayConn) writeRest() error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if len(c.unsent) == 0 {
		return nil
	}
	if err := c.prepareWriteLocked(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	err := c.writeUnsentLocked()
	_ = c.conn.SetWriteDeadline(time.Time{})
	return err
}
