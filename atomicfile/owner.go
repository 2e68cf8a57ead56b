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
		return openExisting(path)
	}
	if err != nil {
		return nil, err
	}
	if err := OwnLike(f, filepath.Dir(path)); err != nil {
		_ = f.Close()
		_ = os.Remove(path)
		return nil, err
	}
	return f, nil
}

// MkdirAll makes a directory and its parents. Those that root makes get the owner of the
// directory they are made in. It does not sync their names: after a power cut a new directory may be
// gone, with what is in it.
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
	return ownDirLike(dir, filepath.Dir(dir))
}
