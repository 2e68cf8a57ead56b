package sse

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sock reaches a TCP socket below Go's poller: single attempts that never wait,
// and the one number Go does not show. It is for one goroutine; its closures are
// made once, so a call allocates nothing.
type sock struct {
	raw syscall.RawConn
	buf []byte
	n   int
	err error

	doWrite, doRead func(uintptr) bool
	doUnacked       func(uintptr)
}

// newSock is nil unless c is a TCP connection.
func newSock(c net.Conn) *sock {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	s := &sock{raw: raw}
	s.doWrite = func(fd uintptr) bool { s.n, s.err = again(unix.Write, int(fd), s.buf); return true }
	s.doRead = func(fd uintptr) bool { s.n, s.err = again(unix.Read, int(fd), s.buf); return true }
	s.doUnacked = func(fd uintptr) { s.n, s.err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }
	return s
}

func again(call func(int, []byte) (int, error), fd int, b []byte) (int, error) {
	for {
		if n, err := call(fd, b); err != unix.EINTR {
			return n, err
		}
	}
}

// write offers b once. Fewer bytes than b without an error: the kernel is full.
func (s *sock) write(b []byte) (int, error) {
	s.buf = b
	err := s.raw.Write(s.doWrite)
	s.buf = nil
	switch {
	case err != nil:
		return 0, err
	case s.err == unix.EAGAIN:
		return 0, nil
	}
	return max(s.n, 0), s.err
}

// read takes what is there: 0 at the end, an error when nothing is there.
func (s *sock) read(b []byte) (int, error) {
	s.buf = b
	err := s.raw.Read(s.doRead)
	s.buf = nil
	switch {
	case err != nil:
		return 0, err
	case s.err != nil:
		return 0, s.err
	}
	return s.n, nil
}

// unacked is SIOCOUTQ: bytes (and a FIN) sent or queued that the peer's TCP has
// not acknowledged.
func (s *sock) unacked() (int, error) {
	if err := s.raw.Control(s.doUnacked); err != nil {
		return 0, err
	}
	return s.n, s.err
}

// giveUp bounds how long the kernel waits for an acknowledgement or a window.
func (s *sock) giveUp(after time.Duration) {
	s.raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after.Milliseconds()))
	})
}

// expire bounds how long the kernel goes on delivering after the descriptor is
// closed: without acknowledgement (TCP_USER_TIMEOUT), and afterwards for the
// peer's FIN (TCP_LINGER2).
func (s *sock) expire(after time.Duration) {
	s.giveUp(after)
	s.raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_LINGER2, max(1, int(after.Seconds())))
	})
}
