package link

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"agentctl/transport/netpoll"
)

// rawConn returns the TCP socket of one end of a link.
func rawConn(c Conn) (syscall.RawConn, error) {
	var nc net.Conn
	switch c := c.(type) {
	case *deviceConn:
		nc = c.ws.NetConn()
	case *relayConn:
		nc = c.conn
	}
	tcp, ok := netpoll.Lowest(nc).(*net.TCPConn)
	if !ok {
		return nil, errors.New("not TCP")
	}
	return tcp.SyscallConn()
}

// hasUserTimeout reports whether TCP_USER_TIMEOUT is set on one end of a link.
func hasUserTimeout(c Conn) bool {
	raw, err := rawConn(c)
	if err != nil {
		return false
	}
	ms := 0
	err = raw.Control(func(fd uintptr) { ms, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
	return err == nil && ms == 30_000
}

// awaitInput waits until the socket of one end of a link has input, and leaves it there.
func awaitInput(t *testing.T, c Conn) {
	t.Helper()
	raw, err := rawConn(c)
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return !errors.Is(err, unix.EAGAIN)
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}
