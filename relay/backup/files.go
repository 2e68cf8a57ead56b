package backup

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// openFlags keep an open from following a symbolic link, and from waiting for the other end of a pipe.
const openFlags = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// lock takes an exclusive lock on an open file or directory, without waiting. It reports false while
// another process has it, and true on a network file system that has no locks: there two processes are
// not kept apart. The lock lasts until the file is closed or the process ends, also by kill -9.
func lock(f *os.File) bool {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	return err != unix.EWOULDBLOCK
}

// ownedBySelfOrRoot reports whether no other user but root can change the mode of a directory.
func ownedBySelfOrRoot(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return !ok || st.Uid == 0 || int(st.Uid) == os.Geteuid()
}

// syncFile makes the content of a file durable.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// databaseFiles are the names of an SQLite database and of what SQLite keeps beside it.
func databaseFiles(name string) []string {
	return []string{name, name + "-wal", name + "-shm", name + "-journal"}
}
