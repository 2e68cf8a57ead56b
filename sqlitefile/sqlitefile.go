// Package sqlitefile knows what SQLite database files look like on disk, for the stores that keep
// their data in one.
//
//   - ScanWAL finds damage in a write-ahead log. SQLite takes it for the end of the log, and ignores
//     every transaction behind it without an error. A store calls ScanWAL before SQLite opens the
//     file.
//   - File reads the rows of a database page by page, without its b-trees: all that can be read of
//     a file that SQLite cannot read.
//   - Table reads the rows of one table in order, by its b-tree, several times as fast as SQLite.
//   - ReadOnly gives the DSN of a connection that changes nothing on disk.
//   - ReadError distinguishes a disk that returns errors from a file that is damaged.
//   - DSN and Code are what all stores share when they use the driver.
//
// The formats are those of https://www.sqlite.org/fileformat2.html: of the write-ahead log in wal.go, of
// pages in pages.go, of rows in record.go.
//
// # Locks
//
// SQLite locks a database with fcntl. The kernel drops all such locks of a process on a file as soon
// as the process closes any descriptor of it (https://www.sqlite.org/howtocorrupt.html §2.2). Another
// process could then write at the same time. So a database that is opened here is closed before SQLite
// opens it (ScanWAL, OpenFile, the copy of ReadOnly), after SQLite has closed it (Table), or never
// (ReadError).
package sqlitefile

import (
	"errors"
	"net/url"
	"path/filepath"

	"modernc.org/sqlite"
)

// DSN returns the URI of a database file; the driver reads its options from the query.
func DSN(path, query string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return (&url.URL{Scheme: "file", OmitHost: true, Path: filepath.ToSlash(path), RawQuery: query}).String()
}

// Code returns the primary result code of an SQLite error, 0 for any other error.
func Code(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}
