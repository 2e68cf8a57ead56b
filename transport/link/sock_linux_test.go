package link

import "golang.org/x/sys/unix"

func hasUserTimeout(c *wsConn) bool {
	tcp, ok := tcpConn(c.ws.NetConn())
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
