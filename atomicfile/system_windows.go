package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/windows"
)

// On Windows permission bits and owners mean nothing: a file has the access list of its directory,
// which in a user's profile admits that user, SYSTEM and the administrators.

// A file that another process has open cannot be replaced. Programs have these files open for
// moments only, so that rename waits for them.
const (
	renameTries = 50
	renamePause = 20 * time.Millisecond
)

func rename(from, to string) error {
	for try := 1; ; try++ {
		err := os.Rename(from, to)
		isBusy := errors.Is(err, windows.ERROR_SHARING_VIOLATION) || errors.Is(err, windows.ERROR_ACCESS_DENIED)
		if !isBusy || try == renameTries {
			return err
		}
		time.Sleep(renamePause)
	}
}

// openExisting opens a file for Open, unless it is a link.
func openExisting(path string) (*os.File, error) {
	if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

// SyncDir does nothing: NTFS keeps names in a journal, and directories cannot be synced.
func SyncDir(string) error { return nil }

func ownDirLike(string, string) error { return nil }

// OwnLike does nothing: see above.
func OwnLike(*os.File, string) error { return nil }
