package backup

import (
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// openFlags keep an open from following a link or waiting for a pipe.
const openFlags = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// lockDir takes an exclusive lock on an open directory or file, without waiting. ok is false
// while another process has it.
func lockDir(f *os.File) (ok bool) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	return err != unix.EWOULDBLOCK // some network file systems have no locks
}

// ownedBySelfOrRoot reports whether nobody else than this user and root can change a directory's
// mode.
func ownedBySelfOrRoot(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return !ok || st.Uid == 0 || int(st.Uid) == os.Geteuid()
}
