package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Open opens a file for reading and writing, and creates it with mode if there is none. A file
// that root creates gets the owner of its directory, as with Replace; one that exists keeps its
// owner.
//
// It follows no symbolic link at path: in another user's directory that would let the user choose
// a file for root to write to.
func Open(path string, mode fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	}
	if err != nil {
		return nil, err
	}
	if err := ownLike(f, filepath.Dir(path)); err != nil {
		_ = f.Close()
		_ = os.Remove(path)
		return nil, err
	}
	return f, nil
}

// MkdirAll makes a directory and its parents. Those that root makes get the owner of the
// directory they are made in.
func MkdirAll(dir string, mode fs.FileMode) error {
	if st, err := os.Stat(dir); err == nil {
		if st.IsDir() {
			return nil
		}
		return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := MkdirAll(parent, mode); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, mode); err != nil {
		if st, serr := os.Stat(dir); serr == nil && st.IsDir() {
			return nil // another process made it
		}
		return err
	}
	if os.Geteuid() != 0 {
		return nil
	}
	d, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return ownLike(d, filepath.Dir(dir))
}

// ownLike gives a file that this process made the owner and the group of a directory, if this
// process is root and they differ. It works on the open file: a name could be replaced by a link.
func ownLike(f *os.File, dir string) error {
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
	return f.Chown(int(want.Uid), int(want.Gid))
}
