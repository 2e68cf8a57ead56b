// Package sqlitefile knows what SQLite database files look like on disk, for the stores that keep
// their data in one.
//
//   - ScanWAL finds damage in a write-ahead log, which SQLite itself takes for the end of the log
//     and ignores, together with every transaction behind it. A store calls it before SQLite
//     opens the file.
//   - File reads the rows of a database page by page, without its b-trees: what can be read of a
//     file that SQLite cannot read.
//   - Table reads the rows of one table in their order, by its b-tree, several times as fast as SQLite.
//   - DSN and Code are what all stores share when they use the driver.
//
// The formats are those of https://www.sqlite.org/fileformat2.html.
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
