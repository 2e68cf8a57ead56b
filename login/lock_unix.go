//go:build !windows

package login

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// lockFile takes the lock of a file that others replace: it belongs to the file that has the
// name now, not to one that was replaced while this process waited. The wait is polled, because
// flock does not end with a context.
//
// flock(2) locks the open file and not the name, so a replacement under the lock gives the next process a
// file without one; isReplaced finds that out. The kernel releases the lock of a process that dies.
func lockFile(ctx context.Context, path string) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, maxLockWait)
	defer cancel()
	for {
		f, err := os.Open(path)
		if err != nil {
			return nil, &FileError{path, errors.Unwrap(err)}
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil && !isReplaced(f, path) {
			return func() { _ = f.Close() }, nil // which releases the lock
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, &FileError{path, fmt.Errorf("lock: %w", err)}
		}
		select {
		case <-ctx.Done():
			return nil, &FileError{path, errors.New("another process has kept it locked")}
		case <-time.After(lockPoll):
		}
	}
}

// isReplaced reports whether path names another file than the open one by now. A path that was
// removed does not: whoever takes the lock then finds no context.
func isReplaced(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Stat(path)
	return !errors.Is(errB, fs.ErrNotExist) && (errA != nil || errB != nil || !os.SameFile(a, b))
}
