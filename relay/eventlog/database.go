package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"modernc.org/sqlite"
)

// applicationID marks the file as ours: "age" and the version of the schema.
const applicationID = 'a'<<24 | 'g'<<16 | 'e'<<8 | 1

// The tables hold INTEGER (Postgres: BIGINT) and TEXT only. STRICT makes SQLite hold to
// that; Postgres always does. The payload is TEXT, not JSONB: a replay gives its bytes
// back as they were.
//
// The insert trigger is there for INSERT OR REPLACE, which would remove a row without its
// delete trigger.
const schema = `
CREATE TABLE events (
  seq          INTEGER PRIMARY KEY,
  tenant       TEXT    NOT NULL,
  type         TEXT    NOT NULL,
  aggregate_id TEXT    NOT NULL,
  payload      TEXT    NOT NULL,
  created_at   INTEGER NOT NULL
) STRICT;
CREATE TABLE retention (
  id   INTEGER PRIMARY KEY CHECK (id = 1),
  mark INTEGER NOT NULL
) STRICT;
INSERT INTO retention (id, mark) VALUES (1, 0);

CREATE TRIGGER events_insert BEFORE INSERT ON events
WHEN NEW.seq <= (SELECT coalesce(max(seq), 0) FROM events)
  OR NEW.seq < (SELECT coalesce(max(mark), 0) FROM retention)
BEGIN SELECT RAISE(ABORT, 'events is append-only: seq must be above the last'); END;

CREATE TRIGGER events_update BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'events is append-only: no UPDATE'); END;

CREATE TRIGGER events_delete BEFORE DELETE ON events
WHEN OLD.seq >= (SELECT coalesce(max(mark), 0) FROM retention)
BEGIN SELECT RAISE(ABORT, 'events is append-only: no DELETE at or above the retention mark'); END;

CREATE TRIGGER retention_insert BEFORE INSERT ON retention
WHEN EXISTS (SELECT 1 FROM retention)
BEGIN SELECT RAISE(ABORT, 'retention has one row'); END;

CREATE TRIGGER retention_update BEFORE UPDATE ON retention
WHEN NEW.id <> OLD.id OR NEW.mark < OLD.mark
  OR NEW.mark > (SELECT coalesce(max(seq), OLD.mark - 1) + 1 FROM events)
BEGIN SELECT RAISE(ABORT, 'the retention mark only grows, up to one above the last event'); END;

CREATE TRIGGER retention_delete BEFORE DELETE ON retention
BEGIN SELECT RAISE(ABORT, 'retention has one row'); END;
`

const (
	busyTimeoutMS = 5000
	maxReaders    = 4 // connections of a Reader
)

// createMu keeps two Stores of one process from making the file at once: the close of the
// one's descriptor would take the locks of the other's connection.
var createMu sync.Mutex

// openWriter opens the file for writing, or makes it. recovered tells that it was not
// closed the last time.
func (s *Store) openWriter() (recovered bool, err error) {
	path := s.opts.Path
	if path == "" {
		return false, errors.New("no path given")
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return false, err
	}
	createMu.Lock()
	err = createFile(path)
	createMu.Unlock()
	if err != nil {
		return false, err
	}
	if s.lock, err = lockFile(path + ".lock"); err != nil {
		return false, err
	}
	wal, err := os.Lstat(path + "-wal")
	recovered = err == nil && wal.Size() > 0

	ctx := context.Background()
	s.db, err = sql.Open("sqlite", dsn(path, fmt.Sprintf("_busy_timeout=%d&_txlock=immediate&_defensive=1", busyTimeoutMS)))
	if err != nil {
		return false, err
	}
	if s.conn, err = s.db.Conn(ctx); err != nil {
		return false, err
	}
	fresh, err := identify(func(query string, to *int64) error { return s.conn.QueryRowContext(ctx, query).Scan(to) })
	if err != nil {
		return false, err
	}
	for _, set := range []string{"journal_mode = WAL", "synchronous = FULL", "cell_size_check = ON", "trusted_schema = OFF", "journal_size_limit = 8388608",
		"cache_size = -256"} { // KiB: the writer only appends
		if err := s.exec("PRAGMA " + set); err != nil {
			return false, fmt.Errorf("%s: %w", set, err)
		}
	}
	if fresh {
		err := s.tx(func() error { return s.exec(schema + fmt.Sprintf("PRAGMA application_id = %d", applicationID)) })
		if err != nil {
			return false, err
		}
	}
	if recovered {
		if err := s.quickCheck(ctx); err != nil {
			return false, err
		}
	}
	const insert, row = "INSERT INTO events (seq, tenant, type, aggregate_id, payload, created_at) VALUES ", "(?, ?, ?, ?, ?, ?)"
	if s.insertMany, err = s.conn.PrepareContext(ctx, insert+row+strings.Repeat(", "+row, insertRows-1)); err != nil {
		return recovered, err
	}
	s.insertOne, err = s.conn.PrepareContext(ctx, insert+row)
	return recovered, err
}

// identify tells whose file it is, and writes nothing.
func identify(number func(query string, to *int64) error) (fresh bool, err error) {
	var id, objects int64
	if err := number("PRAGMA application_id", &id); err != nil {
		return false, err
	}
	switch {
	case id == applicationID:
		return false, nil
	case id>>8 == applicationID>>8:
		return false, errors.New("it was written by a newer agentctl; run that one (agentctl version)")
	}
	if err := number("SELECT count(*) FROM sqlite_schema", &objects); err != nil {
		return false, err
	}
	if id != 0 || objects != 0 {
		return false, errors.New("it belongs to another program; name another file or directory")
	}
	return true, nil
}

func (s *Store) quickCheck(ctx context.Context) error {
	var said string
	if err := s.conn.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&said); err != nil {
		return err
	}
	if said != "ok" {
		return fmt.Errorf("%w: %s", ErrDamaged, said)
	}
	return nil
}

// exec runs statements without parameters.
func (s *Store) exec(script string) error {
	_, err := s.conn.ExecContext(context.Background(), script)
	return err
}

// tx runs fn in a transaction. It does not take the context of one caller: the events of
// the others must not fail with it.
func (s *Store) tx(fn func() error) error {
	if err := s.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	err := fn()
	if err == nil {
		err = s.exec("COMMIT")
	}
	if err != nil {
		_ = s.exec("ROLLBACK") // it may have happened already: SQLite rolls back a full disk itself
	}
	return err
}

func dsn(path, query string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return (&url.URL{Scheme: "file", OmitHost: true, Path: filepath.ToSlash(path), RawQuery: query}).String()
}

// createFile makes an empty file for the owner of its directory, if it is not there. SQLite
// would make it readable by all; its other files take the mode and the owner of this one.
func createFile(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Lstat(path)
		if err == nil && !info.Mode().IsRegular() {
			err = errors.New("it is not a regular file; move it away")
		}
		return err
	}
	if err != nil {
		return err
	}
	return errors.Join(chownToOwner(f, filepath.Dir(path)), f.Close())
}

// fileBytes is the size of the database and its write-ahead log.
func fileBytes(path string) (n int64) {
	for _, p := range []string{path, path + "-wal"} {
		if info, err := os.Stat(p); err == nil { // never opened: the close would take SQLite's locks
			n += info.Size()
		}
	}
	return n
}

// SQLite's primary result codes that say something about the file.
const (
	sqliteBusy     = 5
	sqliteReadOnly = 8
	sqliteCorrupt  = 11
	sqliteFull     = 13
	sqliteCantOpen = 14
	sqliteNotADB   = 26
)

// explain adds to an error of the log what to do about it.
func explain(path string, err error) error {
	var e *sqlite.Error
	code := 0
	if errors.As(err, &e) {
		code = e.Code() & 0xff
	}
	dir := filepath.Dir(path)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrDamaged), code == sqliteCorrupt, code == sqliteNotADB:
		if !errors.Is(err, ErrDamaged) {
			err = fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		return fmt.Errorf("event log %s: %w; restore it from a backup, or move it away together with its -wal file and begin a new one", path, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), code == sqliteReadOnly, code == sqliteCantOpen:
		return fmt.Errorf("event log %s cannot be used by this user (uid %d): %w; run this as the owner of %s (sudo), or name another with --state-dir DIR", path, os.Geteuid(), err, dir)
	case errors.Is(err, syscall.ENOSPC), code == sqliteFull:
		return fmt.Errorf("event log %s is on a full disk, nothing was kept: %w; free some space (df -h %s)", path, err, dir)
	case code == sqliteBusy:
		return fmt.Errorf("event log %s is locked by another process: %w; see which: fuser -v %s", path, err, path)
	}
	return fmt.Errorf("event log %s: %w", path, err)
}
