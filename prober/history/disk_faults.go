package history

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/sqlitefile"
)

// Faults of the disk. While there is one, its reason is in Stats.State, samples stay in
// memory and flushes are repeated:
//
//	full, read-only, busy, io   repeated until it succeeds
//	foreign, newer              likewise, since the file may be replaced
//	corrupt                     the file is quarantined, and a new one begun at once
//	fault                       final: the file is not touched again by this process

// maxQuarantined is how many corrupt files are kept.
const maxQuarantined = 2

// AsideMark separates the name of the file from the time at which it was set aside.
const AsideMark = ".corrupt-"

// errCrash is a crash inside the database code, after which its memory is not trusted.
var errCrash = errors.New("the database code failed; restart agentctl to record again")

// withDB runs fn on the open file; the caller holds diskToken. When the file is corrupt it
// is quarantined, and fn runs on a new one.
func (s *Store) withDB(fn func(*db) error) error {
	err := s.tryDB(fn)
	if faultReason(err) != "corrupt" {
		return err
	}
	name, renameErr := s.quarantine()
	if renameErr != nil {
		return fmt.Errorf("%w; it could not be set aside: %w", err, renameErr)
	}
	s.log.Error("history file is corrupt, a new one is begun", zap.String("path", s.path), zap.String("set_aside", name), zap.Error(err))
	s.mu.Lock()
	s.stats.Quarantined++
	s.setErrorLocked(fmt.Errorf("%w; set aside as %s", err, filepath.Base(name)))
	s.mu.Unlock()
	return s.tryDB(fn)
}

// tryDB opens the file if it is not open and runs fn. A memory fault, which a disk that
// fails under the memory-mapped WAL index causes, is returned as an error; it is final.
func (s *Store) tryDB(fn func(*db) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("history", zap.String("panic", fmt.Sprint(p)), zap.Stack("stack"))
			s.db, s.fatalErr = nil, fmt.Errorf("history %s: %w", s.path, errCrash) // not closed: that would run the same code
			err = s.fatalErr
		}
	}()
	if s.fatalErr != nil {
		return s.fatalErr
	}
	if err := s.open(); err != nil {
		return fmt.Errorf("open history %s: %w", s.path, err)
	}
	if err := fn(s.db); err != nil {
		err = fmt.Errorf("history %s: %w", s.path, err)
		if e, ok := errors.AsType[*sqlite.Error](err); ok && e.Code()&0xff == sqlite3.SQLITE_IOERR { // a WAL index that was written in part stays wrong for as long as it is open
			_ = s.closeDB() // it may fail for the same reason
		}
		return err
	}
	return nil
}

// open opens the file that has the name now, unless it is open.
func (s *Store) open() error {
	if s.db != nil {
		info, err := os.Stat(s.path)
		if err == nil && os.SameFile(info, s.db.file) {
			return nil
		}
		s.log.Warn("history file was removed or replaced, opening the new one", zap.String("path", s.path))
		if err := s.closeDB(); err != nil {
			s.log.Warn("history file did not close", zap.Error(err))
		}
	}
	walErr := lostCommits(s.path)
	d, err := openDB(s.path)
	if err != nil {
		return err
	}
	if d.slot, err = d.number("SELECT id FROM boots WHERE boot = ?", s.bootID); err != nil {
		d.close()
		return err
	}
	if err := s.loadSpan(d); err != nil {
		d.close()
		return err
	}
	s.db = d
	s.mu.Lock()
	s.hasUndated = s.hasUndated || d.slot != 0
	s.stats.Rows = d.rows
	if walErr != nil {
		s.setErrorLocked(walErr)
	}
	s.mu.Unlock()
	if walErr != nil {
		s.log.Error("the newest samples of the history are lost", zap.String("path", s.path), zap.Error(walErr))
	}
	return nil
}

// lostCommits reports damage of the write-ahead log, which SQLite takes for its end. The samples
// behind it are lost, but those before are worth more than a file that is set aside for them.
func lostCommits(path string) error {
	err := sqlitefile.ScanWAL(path)
	if d, ok := errors.AsType[*sqlitefile.WALDamage](err); ok && !d.NoDatabase { // else somebody removed the file
		return err
	}
	return nil // SQLite will report that it cannot read the log
}

// closeDB closes the file, if it is open. The next use opens it again.
func (s *Store) closeDB() error {
	d := s.db
	s.db = nil
	if d == nil {
		return nil
	}
	return d.close()
}

// quarantine renames the file with its WAL, so that data can be recovered by hand, and
// removes older quarantined files: a card that fails repeatedly must not fill up with them.
func (s *Store) quarantine() (string, error) {
	s.closeDB() // it fails for the same reason
	at := time.Now()
	if ms, ok := s.now(); ok {
		at = time.UnixMilli(ms)
	}
	name := s.path + AsideMark + at.UTC().Format("20060102T150405.000")
	if err := os.Rename(s.path, name); err != nil {
		return "", err
	}
	// SQLite would take a WAL beside the new file for its own.
	if err := os.Rename(s.path+"-wal", name+"-wal"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if err := os.Remove(s.path + "-wal"); err != nil {
			return "", err
		}
	}
	if err := os.Remove(s.path + "-shm"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	old, _ := filepath.Glob(globEscaper.Replace(s.path) + AsideMark + "*[0-9]") // fails only for a bad pattern
	slices.Sort(old)
	for _, o := range old[:max(0, len(old)-maxQuarantined)] {
		os.Remove(o)
		os.Remove(o + "-wal")
	}
	return name, nil
}

// globEscaper makes a path match only itself in a pattern.
var globEscaper = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `\`, `\\`)

// faultReason is the fault that an error means; "" for nil.
func faultReason(err error) string {
	var e *sqlite.Error
	switch {
	case err == nil:
		return ""
	case errors.Is(err, errForeign), errors.Is(err, errNotRegular):
		return "foreign"
	case errors.Is(err, errNewer):
		return "newer"
	case errors.Is(err, errCrash):
		return "fault"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "full"
	case errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrPermission):
		return "read-only"
	case !errors.As(err, &e):
		return "io"
	}
	switch e.Code() & 0xff { // the extended code says more than a word can
	case sqlite3.SQLITE_FULL:
		return "full"
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM:
		return "read-only"
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return "corrupt"
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return "busy"
	}
	return "io"
}

// Retry makes the flusher try a disk again that failed, because the caller knows that it works.
func (s *Store) Retry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault != "" {
		s.flushRequested = true
		s.wakeFlusher()
	}
}

// setFault sets the fault that err means, none for nil, and logs when it changes: a disk that stays
// full is tried each 30 s, and one line says enough. ErrClosed is no fault of the disk.
func (s *Store) setFault(err error) {
	if errors.Is(err, ErrClosed) {
		return
	}
	s.mu.Lock()
	before, now := s.fault, faultReason(err)
	s.fault = now
	if err != nil {
		s.setErrorLocked(err)
	}
	s.mu.Unlock()
	switch {
	case now == before:
	case err == nil:
		s.log.Info("history is recorded again")
	default:
		s.log.Error("history is kept in memory only; the disk is retried", zap.String("reason", now), zap.Error(err))
	}
}

// setErrorLocked sets Stats.LastError, and its time where that is known.
func (s *Store) setErrorLocked(err error) {
	s.stats.LastError = err.Error()
	if ms, ok := s.now(); ok {
		s.stats.LastErrorMS = ms
	}
}
