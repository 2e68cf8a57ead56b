package link

import (
	"net"

	"golang.org/x/sys/unix"

	"agentctl/transport/netpoll"
)

func hasUserTimeout(c Conn) bool {
	var nc net.Conn
	switch c := c.(type) {
	case *deviceConn:
		nc = c.ws.NetConn()
	case *relayConn:
		nc = c.conn
	}
	tcp, ok := netpoll.Lowest(nc).(*net.TCPConn)
	if !ok {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	ms := 0
	err = raw.Control(func(fd uintptr) { ms, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
	return err == nil && ms == 30_000
}
