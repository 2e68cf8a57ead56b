// Package atomicfile replaces files so that a power cut leaves the old or the new content. A file that
// root writes into another user's directory gets that owner, so that a service can read what a command
// of root saved for it. SetAside keeps a damaged file under another name, for an operator to look at.
//
// Nothing here locks: of two processes that replace a file at once, the later one wins as a whole. Who
// reads, changes and writes a file takes a lock (transport/enroll, login).
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ErrNotDurable is the error of a file that has its new content: its directory could not be synced.
var ErrNotDurable = errors.New("a power cut may bring back the old content")

// Replace writes a file of mode 0600. A reader, and a machine that lost its power, find either
// the old or the new content. Its directory must exist.
//
// When root writes, the file gets the owner of its directory. The owner is set before the
// rename: a reader must not find a file that it cannot open.
//
// The steps are those of a durable rename: write and sync a temporary file in the same
// directory, rename it, sync the directory. A failure before the rename, such as a full disk, leaves
// the directory as it was. If the last step fails, the new content is in place (ErrNotDurable).
func Replace(path string, data []byte) error { return write(path, data, 0o600, rename) }

// ReplaceMode is Replace with other permission bits.
func ReplaceMode(path string, data []byte, mode fs.FileMode) error {
	return write(path, data, mode, rename)
}

// Create is Replace for a file that must not exist: the error is fs.ErrExist where it does. A rename
// would replace an existing file; a second link to the temporary one fails then.
func Create(path string, data []byte) error {
	return write(path, data, 0o600, func(temporary, path string) error {
		err := os.Link(temporary, path)
		if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOSYS) {
			// A filesystem without hard links, such as that of a memory stick. Two processes at the
			// same time may both succeed here, and the later one wins.
			if exists(path) {
				return &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist}
			}
			return rename(temporary, path)
		}
		_ = os.Remove(temporary)
		return err
	})
}

// write writes a temporary file and calls place to give it its name. RemoveStale removes those that a
// power cut left.
func write(path string, data []byte, mode fs.FileMode, place func(temporary, path string) error) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = OwnLike(f, dir)
	}
	if err == nil && mode != 0o600 { // after the owner, whose change clears bits
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = place(f.Name(), path)
	}
	if err != nil {
		return err
	}
	if err := SyncDir(dir); err != nil {
		return fmt.Errorf("%w: %w", ErrNotDurable, err)
	}
	return nil
}

// Remove removes a file durably. A file that does not exist is no error.
func Remove(path string) error {
	if err := os.Remove(path); err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return err
	}
	return SyncDir(filepath.Dir(path))
}
