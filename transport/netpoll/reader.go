package netpoll

import "net"

// Reader reads a TCP connection without waiting, with as few system calls as edges allow:
// after a read that emptied the socket it does not ask again until Fresh. Its methods are
// for one goroutine at a time.
type Reader struct {
	sock    *Socket
	drained bool // everything that the last edge told of has been read
	ended   bool // the peer has gone: only a read that says so is the last
}

// NewReader is nil unless c is a TCP connection.
func NewReader(c net.Conn) *Reader {
	s := NewSocket(c)
	if s == nil {
		return nil
	}
	return &Reader{sock: s}
}

// OnReadable is called after each edge; gone is whether it told that the peer has gone.
func (r *Reader) OnReadable(gone bool) {
	r.drained = false
	r.ended = r.ended || gone
}

// Read takes what is there, as Sock.Read.
func (r *Reader) Read(b []byte) (int, error) {
	if r.drained {
		return 0, ErrWouldBlock
	}
	n, err := r.sock.Read(b)
	r.drained = !r.ended && err == nil && n < len(b)
	return n, err
}

// Socket is the socket below.
func (r *Reader) Socket() *Socket { return r.sock }
