package eventlog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"agentctl/atomicfile"
)

// lockFile locks the log for one writer: a second relay gets ErrInUse. The lock is on a separate file,
// because SQLite locks the database itself, and lasts until that file is closed. Readers do
// not take it. It is a flock, which belongs to the open file: unlike SQLite's own locks it stays when the
// process closes another descriptor of the file, and the kernel drops it when the process ends. On a
// filesystem without locks the log is opened without one.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		f.Close()
		return nil, fmt.Errorf("%w; stop that relay, or choose another directory (find it with: fuser -v %s)", ErrInUse, path)
	case err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENOLCK): // some network file systems have no locks
		f.Close()
		return nil, err
	}
	return f, atomicfile.OwnLike(f, filepath.Dir(path))
}
