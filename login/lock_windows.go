package login

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/windows"
)

// lockFile takes the lock of a context's file. The lock is on a file beside it, because on Windows a file
// that is open cannot be replaced. That file remains, empty: to remove it would race with the next process.
// Windows releases the lock of a process that dies.
func lockFile(ctx context.Context, path string) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, maxLockWait)
	defer cancel()
	if _, err := os.Stat(path); err != nil {
		return nil, &FileError{path, errors.Unwrap(err)}
	}
	f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, &FileError{path + ".lock", errors.Unwrap(err)}
	}
	for {
		err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, new(windows.Overlapped))
		if err == nil {
			return func() { _ = f.Close() }, nil // which releases the lock
		}
		if !errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
			_ = f.Close()
			return nil, &FileError{path, fmt.Errorf("lock: %w", err)}
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, &FileError{path, errors.New("another process has kept it locked")}
		case <-time.After(lockPoll):
		}
	}
}
