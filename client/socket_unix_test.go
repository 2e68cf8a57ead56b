//go:build !windows

package client

import "syscall"

// setReceiveBuffer bounds what the kernel keeps for a socket that is not read.
func setReceiveBuffer(fd uintptr, bytes int) {
	_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, bytes)
}
