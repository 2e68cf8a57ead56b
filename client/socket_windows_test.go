package client

import "syscall"

// setReceiveBuffer bounds what the kernel keeps for a socket that is not read.
func setReceiveBuffer(fd uintptr, bytes int) {
	_ = syscall.SetsockoptInt(syscall.Handle(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, bytes)
}
