package sqlitefile

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	sqlite3 "modernc.org/sqlite/lib"
)

// ReadError returns the disk's error in place of an error of SQLite about damage, if the database or its
// write-ahead log cannot be read to the end: SQLite reports a page that the disk does not return (EIO)
// as damage. Other errors, and real damage, are returned as they are. To find out, it reads the whole
// files, but not again within readErrorInterval after they could be read.
func ReadError(path string, err error) error {
	if err == nil || Code(err) != sqlite3.SQLITE_CORRUPT {
		return err
	}
	if e := readability.check(path); e != nil {
		return fmt.Errorf("a page could not be read: %w", e)
	}
	return err
}

// readErrorInterval keeps many queries that fail from reading a large file once each. Within it, a file
// that could be read counts as readable.
const (
	readErrorInterval = 30 * time.Second
	maxChecked        = 8 // databases; others are not checked
)

// checkedFiles are the databases that ReadError has read.
type checkedFiles struct {
	mu     sync.Mutex // held while a file is read
	byPath map[string]*checkedFile
}

// checkedFile keeps its file open until the process ends: to close it would give up the locks that
// SQLite holds on the database, which belong to the process (fcntl).
type checkedFile struct {
	file *os.File
	read time.Time // when all of it was read without an error
}

var readability = checkedFiles{byPath: make(map[string]*checkedFile)}

// check reads a database and its write-ahead log, and returns the error of the disk.
func (c *checkedFiles) check(path string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.byPath[path]
	switch {
	case f == nil && len(c.byPath) >= maxChecked:
		return nil
	case f == nil:
		file, err := os.Open(path)
		if err != nil {
			return ignoreMissing(err)
		}
		f = &checkedFile{file: file}
		c.byPath[path] = f
	case time.Since(f.read) < readErrorInterval:
		return nil
	}
	// By ReadAt, from the beginning: the descriptor stays open for the next check.
	if _, err := io.Copy(io.Discard, io.NewSectionReader(f.file, 0, 1<<62)); err != nil {
		return err
	}
	wal, err := os.Open(path + "-wal") // SQLite holds no lock on it
	if err == nil {
		defer func() { _ = wal.Close() }()
		_, err = io.Copy(io.Discard, wal)
	}
	if err = ignoreMissing(err); err == nil {
		f.read = time.Now()
	}
	return err
}

// ignoreMissing makes a missing file no error: nothing of it could not be read.
func ignoreMissing(err error) error {
	if os.IsNotExist(err) {
		return nil
	}
	return err
}
