//go:build !windows

package enroll

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// tryLock takes the lock of an open file or directory; isBusy reports that another process has it.
// Closing the file releases it.
func tryLock(f *os.File) (isBusy bool, err error) {
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// openNoFollow opens a file that is there for reading. It refuses a symbolic link, as the one that makes
// the file does, and does not wait for the writer of a pipe.
func openNoFollow(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// isWritable reports whether this process can make files in a directory.
func isWritable(dir string) bool { return unix.Access(dir, unix.W_OK|unix.X_OK) == nil }
