package netpoll

import "net"

// Reader reads a TCP connection without blocking. It saves system calls: after a read
// that emptied the socket, Read returns ErrWouldBlock without asking the kernel until
// OnReadable is called. Its methods are for one goroutine at a time.
type Reader struct {
	sock    *Socket
	drained bool // everything that the last event reported has been read
	ended   bool // the peer has closed: read until the kernel reports the end
}

// NewReader returns nil unless c is a TCP connection.
func NewReader(c net.Conn) *Reader {
	if s := NewSocket(c); s != nil {
		return &Reader{sock: s}
	}
	return nil
}

// OnReadable is called after each event; peerClosed is whether it had PeerClosed.
func (r *Reader) OnReadable(peerClosed bool) {
	r.drained = false
	r.ended = r.ended || peerClosed
}

// Read reads what has arrived, as Socket.Read.
func (r *Reader) Read(b []byte) (int, error) {
	if r.drained {
		return 0, ErrWouldBlock
	}
	n, err := r.sock.Read(b)
	// A short read emptied the socket. Once the peer has closed, no further event is reported,
	// so the end has to be read now.
	r.drained = !r.ended && err == nil && n < len(b)
	return n, err
}

// Socket returns the underlying socket.
func (r *Reader) Socket() *Socket { return r.sock }
