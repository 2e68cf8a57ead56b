package link

import (
	"net"

	"golang.org/x/sys/unix"
)

// setUserTimeout makes the kernel give a dead peer up, as a back-stop of DeadAfter.
func setUserTimeout(c net.Conn) {
	tcp, ok := tcpConn(c)
	if !ok {
		return
	}
	if raw, err := tcp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(tcpUserTimeout.Milliseconds()))
		})
	}
}
