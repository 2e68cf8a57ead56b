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

// Socket is a TCP socket below Go's poller: single system calls that never block, and TCP
// options that package net does not offer. Its methods may be called concurrently; none
// allocates.
type Socket struct{ raw syscall.RawConn }

// tcpConn is a TCP connection: a *net.TCPConn, or a type that embeds one.
type tcpConn interface {
	syscall.Conn
	SetLinger(sec int) error // which only TCP has
}

// NewSocket returns nil unless c is a TCP connection.
func NewSocket(c net.Conn) *Socket {
	t, ok := c.(tcpConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	return &Socket{raw}
}

// attempt is one system call on a descriptor: its input and outcome, and the functions
// that syscall.RawConn takes. They are closures over the attempt, made once for many
// calls because a closure made for each call would be an allocation.
type attempt struct {
	buf []byte
	n   int
	err error

	write, read func(fd uintptr) (done bool)
	unacked     func(fd uintptr)
}

var attempts = sync.Pool{New: func() any {
	a := new(attempt)
	a.write = func(fd uintptr) bool { a.n, a.err = retryInterrupted(unix.Write, int(fd), a.buf); return true }
	a.read = func(fd uintptr) bool { a.n, a.err = retryInterrupted(unix.Read, int(fd), a.buf); return true }
	a.unacked = func(fd uintptr) { a.n, a.err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }
	return a
}}

func retryInterrupted(call func(int, []byte) (int, error), fd int, b []byte) (int, error) {
	for {
		if n, err := call(fd, b); err != unix.EINTR {
			return n, err
		}
	}
}

// finish returns the outcome of one attempt and puts a back into the pool. rawErr is the
// reason why the system call was not made, for instance net.ErrClosed.
func (a *attempt) finish(call string, rawErr error) (int, error) {
	n, err := a.n, a.err
	a.buf = nil
	attempts.Put(a)
	switch {
	case rawErr != nil:
		return 0, rawErr
	case err == unix.EAGAIN:
		return 0, ErrWouldBlock
	case err != nil:
		return 0, os.NewSyscallError(call, err)
	}
	return n, nil
}

// Write writes b with one system call. It writes less than b, without an error, when the
// send buffer is full.
func (s *Socket) Write(b []byte) (int, error) {
	a := attempts.Get().(*attempt)
	a.buf = b
	n, err := a.finish("write", s.raw.Write(a.write))
	if err == ErrWouldBlock {
		err = nil
	}
	return n, err
}

// Read reads available bytes with one system call. It returns ErrWouldBlock when there are
// none, and io.EOF at the end.
func (s *Socket) Read(b []byte) (int, error) {
	a := attempts.Get().(*attempt)
	a.buf = b
	n, err := a.finish("read", s.raw.Read(a.read))
	if n == 0 && err == nil && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

// Unacked returns the number of bytes, with a FIN counted as one, that were written to the
// socket and that the peer's TCP has not acknowledged (SIOCOUTQ).
func (s *Socket) Unacked() (int, error) {
	a := attempts.Get().(*attempt)
	return a.finish("ioctl", s.raw.Control(a.unacked))
}

// SetUserTimeout bounds how long the kernel waits for an acknowledgement, or for a peer
// that keeps its receive window closed, before it ends the connection (TCP_USER_TIMEOUT).
func (s *Socket) SetUserTimeout(d time.Duration) {
	s.setOption(unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
}

// SetCloseTimeout bounds how long the kernel goes on delivering after the descriptor was
// closed: d for each acknowledgement (TCP_USER_TIMEOUT), then d for the peer's FIN
// (TCP_LINGER2, whole seconds, at least one).
func (s *Socket) SetCloseTimeout(d time.Duration) {
	s.SetUserTimeout(d)
	s.setOption(unix.TCP_LINGER2, max(1, int(d.Seconds())))
}

// setOption sets a TCP option. A failure is ignored: the options are a second line of
// defense behind the callers' own timeouts.
func (s *Socket) setOption(option, value int) {
	_ = s.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value) })
}
