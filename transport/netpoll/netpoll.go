// Package netpoll accesses TCP sockets below Go's own poller: single attempts to read or
// write that never block, and an epoll instance whose one goroutine reports the readiness
// of thousands of sockets. An idle connection therefore needs neither a goroutine nor a
// buffer.
//
//	ep, err := netpoll.New()                       // errors.ErrUnsupported: not on Linux
//	go ep.Run(ctx, func(key uint64, ev Events) {}) // reports readiness, edge-triggered
//	ep.Add(netpoll.NewSocket(conn), key, Readable)
//	r := netpoll.NewReader(conn)                   // r.OnReadable after each report,
//	r.Read(b)                                      // then until ErrWouldBlock
//
// On systems other than Linux, New returns errors.ErrUnsupported and NewSocket nil; callers
// then use a goroutine for each connection.
package netpoll

import "net"

// Events is a set of readiness events of a socket, in the bits of Linux's epoll.
type Events uint32

// Readable and Writable are requested with Add. PeerClosed is always reported: the peer
// closed its side, or the connection broke. It is a mask of several bits, may be reported
// twice, and there may still be input to read.
const (
	Readable   Events = 0x0001 // EPOLLIN
	Writable   Events = 0x0004 // EPOLLOUT
	PeerClosed Events = 0x2018 // EPOLLRDHUP, EPOLLHUP, EPOLLERR
)

// ErrWouldBlock is returned by a read that found no input. As a net.Error it is a
// temporary timeout, because crypto/tls makes every other read error permanent.
var ErrWouldBlock net.Error = wouldBlock{}

type wouldBlock struct{}

func (wouldBlock) Error() string   { return "netpoll: nothing to read" }
func (wouldBlock) Timeout() bool   { return true }
func (wouldBlock) Temporary() bool { return true }

// Lowest finds the connection below TLS and the wrappers of listeners.
func Lowest(c net.Conn) net.Conn {
	for {
		wrapper, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = wrapper.NetConn()
	}
}
