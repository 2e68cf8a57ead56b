package history

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// maxQuarantined is how many files that were set aside are kept.
const maxQuarantined = 2

// errCrash is a crash inside the database code. What it left behind is not trusted.
var errCrash = errors.New("the database code failed; restart agentctl to record again")

// withDB runs fn on the open file; the caller holds the disk. A corrupt file is set aside,
// and fn is run on a new one.
func (s *Store) withDB(fn func(*db) error) error {
	err := s.tryDB(fn)
	if faultReason(err) != "corrupt" {
		return err
	}
	aside, asideErr := s.quarantine()
	if asideErr != nil {
		return fmt.Errorf("%w; it could not be set aside: %w", err, asideErr)
	}
	s.log.Error("history file is corrupt, a new one is begun", zap.String("path", s.path), zap.String("set_aside", aside), zap.Error(err))
	s.mu.Lock()
	s.stats.Quarantined++
	s.setErrorLocked(fmt.Errorf("%w; set aside as %s", err, filepath.Base(aside)))
	s.mu.Unlock()
	return s.tryDB(fn)
}

// tryDB opens the file if need be and runs fn. A memory fault, as a disk that fails under
// the mapped index of the WAL gives, is an error like another, but the last.
func (s *Store) tryDB(fn func(*db) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("history", zap.String("panic", fmt.Sprint(p)), zap.Stack("stack"))
			s.db, s.fatalErr = nil, fmt.Errorf("history %s: %w", s.path, errCrash) // left open: closing runs the same code
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
		return fmt.Errorf("history %s: %w", s.path, err)
	}
	return nil
}

// open makes s.db the file that has the name now.
func (s *Store) open() error {
	if s.db != nil {
		info, err := os.Stat(s.path)
		if err == nil && os.SameFile(info, s.db.file) {
			return nil
		}
		s.log.Warn("history file was removed or replaced, opening it anew", zap.String("path", s.path))
		if err := s.closeDB(); err != nil {
			s.log.Warn("history file did not close", zap.Error(err))
		}
	}
	d, err := openDB(s.path)
	if err != nil {
		return err
	}
	if d.slot, err = d.number("SELECT id FROM boots WHERE boot = ?", s.bootID); err != nil {
		d.close()
		return err
	}
	s.db = d
	s.mu.Lock()
	s.hasUndated = s.hasUndated || d.slot != 0
	s.stats.Rows = d.rows
	s.mu.Unlock()
	return nil
}

func (s *Store) closeDB() error {
	d := s.db
	s.db = nil
	if d == nil {
		return nil
	}
	return d.close()
}

// quarantine renames the file, with the WAL that belongs to it, so that what is in it can
// be got out by hand. Of earlier ones only the newest stays.
func (s *Store) quarantine() (string, error) {
	s.closeDB() // its error is the one that brought us here
	at := time.Now()
	if ms, ok := s.now(); ok {
		at = time.UnixMilli(ms)
	}
	aside := s.path + ".corrupt-" + at.UTC().Format("20060102T150405.000")
	if err := os.Rename(s.path, aside); err != nil {
		return "", err
	}
	// A WAL beside the new file would be taken for its own: it goes along, or away.
	if err := os.Rename(s.path+"-wal", aside+"-wal"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if err := os.Remove(s.path + "-wal"); err != nil {
			return "", err
		}
	}
	if err := os.Remove(s.path + "-shm"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	old, err := filepath.Glob(escapeGlob(s.path) + ".corrupt-*[0-9]")
	if err != nil {
		return aside, nil
	}
	slices.Sort(old)
	for _, name := range old[:max(0, len(old)-maxQuarantined)] {
		os.Remove(name)
		os.Remove(name + "-wal")
	}
	return aside, nil
}

// escapeGlob makes path stand for itself in a pattern.
func escapeGlob(path string) string {
	var out []byte
	for i := range len(path) {
		switch path[i] {
		case '*', '?', '[', '\\':
			out = append(out, '\\')
		}
		out = append(out, path[i])
	}
	return string(out)
}

// faultReason is a word for an error of the disk; "" for none.
func faultReason(err error) string {
	var e *sqlite.Error
	switch {
	case err == nil:
		return ""
	case errors.Is(err, errForeign):
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

// setFault keeps how the disk is, and logs when that changes.
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
		s.log.Error("history is kept in memory only, the disk is tried again", zap.String("reason", now), zap.Error(err))
	}
}

func (s *Store) setErrorLocked(err error) {
	s.stats.LastError = err.Error()
	if ms, ok := s.now(); ok {
		s.stats.LastErrorMS = ms
	}
}
