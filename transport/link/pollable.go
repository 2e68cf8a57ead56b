package link

import (
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
	// tryPing pings without blocking; written is false when that was not possible.
	tryPing(payload []byte) (written bool, err error)
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
	return netpoll.NewSocket(lowest(c.conn))
}

func (c *relayConn) setNonblocking() {
	c.poll = netpoll.NewReader(lowest(c.conn))
	if t, isTLS := c.conn.(*tls.Conn); isTLS {
		t.NetConn().(nonblockingReader).ReadNonblocking(c.poll)
	}
}

func (c *relayConn) onReadable(peerClosed bool) { c.poll.OnReadable(peerClosed) }

// tryPing writes to the socket directly, because net.Conn has no write that does not
// block. Through TLS it writes as usual, but only when the send buffer is empty: a frame
// this small does not block then.
func (c *relayConn) tryPing(payload []byte) (written bool, err error) {
	if !c.writeMu.TryLock() { // for instance, a pong blocks because the peer reads nothing
		return false, nil
	}
	defer c.writeMu.Unlock()
	if _, isTLS := c.conn.(*tls.Conn); isTLS {
		if n, err := c.poll.Socket().Unacked(); n != 0 || err != nil {
			return false, err
		}
		if err := c.prepareWriteLocked(time.Time{}); err != nil {
			return false, err
		}
		return true, c.writeLocked(opPing, payload)
	}
	if c.closeSent || c.closing.Load() {
		return false, net.ErrClosed
	}
	bp := frameBuffers.Get().(*[]byte)
	frame := append(append(*bp, finBit|opPing, byte(len(payload))), payload...)
	defer func() { recycle(&frameBuffers, bp, frame) }()
	n, err := c.poll.Socket().Write(frame)
	if errors.Is(err, os.ErrDeadlineExceeded) { // the deadline of an earlier write; Ping removes it
		return false, nil
	}
	if n > 0 && n < len(frame) { // a part of it: the rest must be written before anything else
		_, err = c.conn.Write(frame[n:])
	}
	return n > 0, err
}
