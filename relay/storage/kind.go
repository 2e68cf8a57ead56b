package storage

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/sqlitefile"
)

// Kind is what is wrong with a store. The words are part of the interface of readyz, of the
// metrics and of `agentctl relay status`.
type Kind string

// The kinds of problems.
const (
	Slow       Kind = "slow"        // an operation took longer than SlowAfter
	Hung       Kind = "hung"        // an operation has not returned for HungAfter
	Full       Kind = "full"        // no space, or over a quota of the disk
	ReadOnly   Kind = "read_only"   // the filesystem or the file cannot be written
	Failing    Kind = "failing"     // any other error of the disk
	Locked     Kind = "locked"      // another process holds the database's lock
	Damaged    Kind = "damaged"     // the content is not what was written
	Missing    Kind = "missing"     // the relay was started without the store
	Lost       Kind = "lost"        // something was not kept: audit lines, events
	NearlyFull Kind = "nearly_full" // the disk will be full soon
)

// Retryable reports whether waiting can help the caller of a request that a problem of this
// kind stopped: without an operator's repair.
func (k Kind) Retryable() bool {
	return k != ReadOnly && k != Damaged && k != Missing
}

// severity orders kinds: a store with several problems is described by the worst.
func (k Kind) severity() int {
	switch k {
	case Damaged, Missing:
		return 6
	case Hung:
		return 5
	case ReadOnly, Full, Failing:
		return 4
	case Locked:
		return 3
	case Slow:
		return 2
	case Lost:
		return 1
	}
	return 0
}

// Classify returns the kind of fault that an error is, or "" for an error that says nothing
// about the disk: a canceled request, a constraint, a value out of range. The end of a context is no
// fault here, since most contexts end for other reasons; TimedOut is for calls that waited for the disk.
func Classify(err error) Kind {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return classifySQLite(e.Code())
	}
	if _, ok := errors.AsType[*sqlitefile.WALDamage](err); ok {
		return Damaged
	}
	var errno syscall.Errno
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return ""
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Hung
	case errors.As(err, &errno):
		switch errno {
		case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
			return Full
		case syscall.EROFS, syscall.EACCES, syscall.EPERM:
			return ReadOnly
		case syscall.EINTR, syscall.EAGAIN:
			return Slow
		}
		return Failing
	case errors.Is(err, fs.ErrPermission):
		return ReadOnly
	case errors.Is(err, io.ErrShortWrite), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrClosed):
		return Failing
	}
	return ""
}

// classifySQLite maps a result code of SQLite (https://www.sqlite.org/rescode.html), primary or extended;
// the low byte of an extended code is the primary one.
func classifySQLite(code int) Kind {
	switch code & 0xff {
	case sqlite3.SQLITE_FULL:
		return Full
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT:
		return Damaged
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH:
		return ReadOnly
	case sqlite3.SQLITE_IOERR:
		if code == sqlite3.SQLITE_IOERR_SHMSIZE { // no space for the index of the write-ahead log
			return Full
		}
		return Failing
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS:
		return Failing
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return Locked
	}
	return ""
}
