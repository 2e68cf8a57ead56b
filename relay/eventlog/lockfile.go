package eventlog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// lockFile keeps a second relay from writing the log. The lock is on a separate file and
// lasts while that file is open; readers do not take it.
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
	return f, chownToOwner(f, filepath.Dir(path))
}

// chownToOwner makes the owner of the directory the owner of a file that root created.
func chownToOwner(f *os.File, dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || os.Geteuid() != 0 || st.Uid == 0 {
		return err
	}
	return f.Chown(int(st.Uid), int(st.Gid))
}
