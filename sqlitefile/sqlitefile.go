// Package sqlitefile knows what SQLite database files look like on disk, for the stores that keep
// their data in one.
//
//   - ScanWAL finds damage in a write-ahead log, which SQLite itself takes for the end of the log
//     and ignores, together with every transaction behind it. A store calls it before SQLite
//     opens the file.
//   - File reads the rows of a database page by page, without its b-trees: what can be read of a
//     file that SQLite cannot read.
//   - DSN, Code and FaultOf are what all stores share when they use the driver.
//
// The formats are those of https://www.sqlite.org/fileformat2.html.
package sqlitefile

import (
	"errors"
	"net/url"
	"path/filepath"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
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

// Fault is what an SQLite error says about its file.
type Fault uint8

// Faults. FaultNone is also that of an error that is not SQLite's.
const (
	FaultNone    Fault = iota
	FaultDamaged       // not a database, or damaged: SQLITE_CORRUPT, SQLITE_NOTADB
	FaultAccess        // no permission: SQLITE_READONLY, SQLITE_CANTOPEN, SQLITE_PERM
	FaultFull          // a full disk: SQLITE_FULL
	FaultBusy          // locked by another connection: SQLITE_BUSY, SQLITE_LOCKED
	FaultIO            // the disk failed: SQLITE_IOERR
)

// FaultOf returns the fault that an error reports. A *WALDamage is FaultDamaged.
func FaultOf(err error) Fault {
	if _, ok := errors.AsType[*WALDamage](err); ok {
		return FaultDamaged
	}
	switch Code(err) {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return FaultDamaged
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return FaultAccess
	case sqlite3.SQLITE_FULL:
		return FaultFull
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return FaultBusy
	case sqlite3.SQLITE_IOERR:
		return FaultIO
	}
	return FaultNone
}
