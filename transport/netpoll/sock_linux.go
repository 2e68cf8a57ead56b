package netpoll

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Socket is a TCP socket below Go's poller: single attempts that never wait, and the one
// number Go does not show. Its methods may be called at the same time; a call allocates
// nothing.
type Socket struct{ raw syscall.RawConn }

// NewSocket is nil unless c is a TCP connection.
func NewSocket(c net.Conn) *Socket {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	return &Socket{raw}
}

// attempt is one system call on a descriptor; the closures are made once for many of them.
type attempt struct {
	buf []byte
	n   int
	err error

	write, read func(uintptr) bool
	unacked     func(uintptr)
}

var attempts = sync.Pool{New: func() any {
	a := new(attempt)
	a.write = func(fd uintptr) bool { a.n, a.err = again(unix.Write, int(fd), a.buf); return true }
	a.read = func(fd uintptr) bool { a.n, a.err = again(unix.Read, int(fd), a.buf); return true }
	a.unacked = func(fd uintptr) { a.n, a.err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }
	return a
}}

func again(call func(int, []byte) (int, error), fd int, b []byte) (int, error) {
	for {
		if n, err := call(fd, b); err != unix.EINTR {
			return n, err
		}
	}
}

// finish takes the outcome of one attempt, which err kept from being made, and gives a back.
func (a *attempt) finish(call string, err error) (int, error) {
	n, failed := a.n, a.err
	a.buf = nil
	attempts.Put(a)
	switch {
	case err != nil:
		return 0, err
	case failed == unix.EAGAIN:
		return 0, ErrWouldBlock
	case failed != nil:
		return 0, os.NewSyscallError(call, failed)
	}
	return n, nil
}

// Write offers b once. Fewer bytes than b without an error: the kernel is full.
func (s *Socket) Write(b []byte) (int, error) {
	a := attempts.Get().(*attempt)
	a.buf = b
	n, err := a.finish("write", s.raw.Write(a.write))
	if err == ErrWouldBlock {
		return 0, nil
	}
	return n, err
}

// Read takes what is there: ErrWouldBlock when that is nothing, io.EOF at the end.
func (s *Socket) Read(b []byte) (int, error) {
	a := attempts.Get().(*attempt)
	a.buf = b
	n, err := a.finish("read", s.raw.Read(a.read))
	if n == 0 && err == nil && len(b) > 0 {
		return 0, io.EOF
	}
	return n, err
}

// Unacked is SIOCOUTQ: bytes (and a FIN) sent or queued that the peer's TCP has not
// acknowledged.
func (s *Socket) Unacked() (int, error) {
	a := attempts.Get().(*attempt)
	return a.finish("ioctl", s.raw.Control(a.unacked))
}

// SetUserTimeout bounds how long the kernel waits for an acknowledgement or a window.
func (s *Socket) SetUserTimeout(after time.Duration) {
	s.raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after.Milliseconds()))
	})
}

// SetCloseTimeout bounds how long the kernel goes on delivering after the descriptor is
// closed: without acknowledgement (TCP_USER_TIMEOUT), and afterwards for the
// peer's FIN (TCP_LINGER2).
func (s *Socket) SetCloseTimeout(after time.Duration) {
	s.SetUserTimeout(after)
	s.raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_LINGER2, max(1, int(after.Seconds())))
	})
}
