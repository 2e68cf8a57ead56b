// Package netpoll reaches TCP sockets below Go's poller: single attempts that never wait,
// and an epoll instance whose one goroutine tells of thousands of sockets. A connection
// that is left alone so holds neither a goroutine nor a buffer.
//
// Elsewhere than on Linux New gives errors.ErrUnsupported and NewSock nil: callers then
// use a goroutine for each connection.
package netpoll

import "net"

// Events of a socket.
type Events uint8

// What Add can ask for and Run tells. Gone: the peer closed its side, or the connection
// broke; it is told unasked, perhaps twice, and with it what is still to read.
const (
	Readable Events = 1 << iota
	Writable
	PeerClosed
)

// ErrWouldBlock is a read that would have to wait. It is a temporary timeout in the sense of
// net.Error, so that crypto/tls goes on after it.
var ErrWouldBlock net.Error = nothing{}

type nothing struct{}

func (nothing) Error() string   { return "netpoll: nothing to read" }
func (nothing) Timeout() bool   { return true }
func (nothing) Temporary() bool { return true }
