//go:build !windows

package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

func rename(from, to string) error { return os.Rename(from, to) }

// openExisting opens a file for Open. It follows no link, and does not wait for the other end of
// a named pipe.
func openExisting(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// SyncDir writes the names in a directory to the disk.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}

// ownDirLike is OwnLike for a directory.
func ownDirLike(dir, like string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	d, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return OwnLike(d, like)
}

// OwnLike gives a file that this process made the owner and the group of a directory. It does nothing
// if this process is not root. If only the group differs and the kernel refuses to change it, that is no
// error. It takes the open file, since a name could be replaced by a link.
func OwnLike(f *os.File, dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	of, err := os.Stat(dir)
	if err != nil {
		return err
	}
	now, err := f.Stat()
	if err != nil {
		return err
	}
	want, have := of.Sys().(*syscall.Stat_t), now.Sys().(*syscall.Stat_t)
	if want.Uid == have.Uid && want.Gid == have.Gid {
		return nil
	}
	err = f.Chown(int(want.Uid), int(want.Gid))
	if want.Uid == have.Uid && errors.Is(err, fs.ErrPermission) {
		return nil // root without CAP_CHOWN, as in a container: the right owner can use the file
	}
	return err
}
