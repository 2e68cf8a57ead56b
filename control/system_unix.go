//go:build !windows

package control

import "golang.org/x/sys/unix"

// isHungUp reports whether the other end of a socket is closed.
func isHungUp(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0 && p[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
}

// setMode sets the mode of a file by its descriptor.
func setMode(fd uintptr, mode uint32) { _ = unix.Fchmod(int(fd), mode) }

// tryLock takes the lock of an open file or directory; isBusy reports that another process has it.
func tryLock(fd uintptr) (isBusy bool) {
	return unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB) == unix.EWOULDBLOCK
}
