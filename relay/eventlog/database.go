package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/relay/storage"
	"agentctl/sqlitefile"
)

// applicationID identifies the file format: "age" and the version of the schema.
const applicationID = 'a'<<24 | 'g'<<16 | 'e'<<8 | 1

// schema of the file. It has two tables:
//
//	events     one row for each event, in the order of seq; created_at is Unix ms
//	retention  one row: every event below mark has been removed
//
// The columns are INTEGER (Postgres: BIGINT) and TEXT only. STRICT makes SQLite enforce
// the types, as Postgres does. The payload is TEXT and not JSONB: a replay returns its
// bytes unchanged.
//
// The triggers make the log append-only for every program that opens the file:
//
//	events_insert     seq only grows; also stops INSERT OR REPLACE, which would remove
//	                  a row without its delete trigger
//	events_update     no row changes
//	events_delete     only rows below the mark can be deleted
//	retention_*       the row cannot be deleted, and its mark only grows
//
// A tool with write access could drop the triggers; they guard against mistakes and not
// against an attacker.
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
	busyTimeoutMS = 5000 // for a lock of another process: a backup tool, say
	maxReaders    = 4    // connections of a Reader

	// writerPragmas: FULL syncs the write-ahead log at each commit, which is what makes
	// an event durable. The page cache is small (KiB) because the writer only appends.
	writerPragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cell_size_check = ON; " +
		"PRAGMA trusted_schema = OFF; PRAGMA journal_size_limit = 8388608; PRAGMA cache_size = -256"
)

// createMu serializes creation of the file by two Stores of one process: POSIX drops all
// of a process's locks on a file when any of its descriptors is closed, so closing the
// new file would take the locks of the other Store's connection.
var createMu sync.Mutex

// openWriter opens the file for writing, or makes it. recovered reports that it was not
// closed the last time: SQLite removes the write-ahead log at a clean close.
//
// The lock is acquired before SQLite opens the file, so a second relay changes nothing in it.
// Everything that was opened is in s.files, which Open closes after an error.
func (s *Store) openWriter() (recovered bool, err error) {
	path := s.opts.Path
	if path == "" {
		return false, errors.New("no path given")
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return false, err
	}
	if err = createFile(path); err != nil {
		return false, err
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return false, err
	}
	s.files = append(s.files, lock)
	if err := sqlitefile.ScanWAL(path); err != nil {
		return false, err // SQLite would ignore the events behind the damage
	}
	wal, err := os.Lstat(path + "-wal")
	recovered = err == nil && wal.Size() > 0

	ctx := context.Background()
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, fmt.Sprintf("_busy_timeout=%d&_txlock=immediate&_defensive=1", busyTimeoutMS)))
	if err != nil {
		return false, err
	}
	s.files = append(s.files, db)
	if s.conn, err = db.Conn(ctx); err != nil {
		return false, err
	}
	s.files = append(s.files, s.conn)
	isNew, err := checkFormat(ctx, s.conn)
	if err != nil {
		return false, err
	}
	if err := s.exec(writerPragmas); err != nil {
		return false, err
	}
	if isNew {
		if err := s.tx(func() error { return s.exec(schema + fmt.Sprintf("PRAGMA application_id = %d", applicationID)) }); err != nil {
			return false, err
		}
	}
	if recovered {
		var result string
		if err := s.queryRow("PRAGMA quick_check(1)").Scan(&result); err != nil {
			return false, err
		}
		if result != "ok" {
			return false, fmt.Errorf("%w: %s", ErrDamaged, result)
		}
	}
	const insert, row = "INSERT INTO events (seq, tenant, type, aggregate_id, payload, created_at) VALUES ", "(?, ?, ?, ?, ?, ?)"
	if s.insertMany, err = s.conn.PrepareContext(ctx, insert+row+strings.Repeat(", "+row, insertRows-1)); err != nil {
		return recovered, err
	}
	s.insertOne, err = s.conn.PrepareContext(ctx, insert+row)
	s.files = append(s.files, s.insertMany)
	if err == nil {
		s.files = append(s.files, s.insertOne)
	}
	return recovered, err
}

// checkFormat refuses a file of another program or of a newer agentctl. It writes
// nothing. isNew reports an empty file.
func checkFormat(ctx context.Context, db interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}) (isNew bool, err error) {
	var id, objects int64
	err = db.QueryRowContext(ctx, "SELECT (SELECT application_id FROM pragma_application_id), (SELECT count(*) FROM sqlite_schema)").Scan(&id, &objects)
	switch {
	case err != nil || id == applicationID:
		return false, err
	case id>>8 == applicationID>>8:
		return false, errors.New("it was written by a newer agentctl; run that version or a newer one (see: agentctl version)")
	case id != 0 || objects != 0:
		return false, errors.New("it belongs to another program; name another file or directory")
	}
	return true, nil
}

// exec runs statements without parameters on the write connection.
func (s *Store) exec(script string) error {
	_, err := s.conn.ExecContext(context.Background(), script)
	return err
}

// queryRow queries the write connection.
func (s *Store) queryRow(query string) *sql.Row {
	return s.conn.QueryRowContext(context.Background(), query)
}

// tx runs fn in an IMMEDIATE transaction, which takes the write lock at its beginning and
// not at its first write: a busy file fails before anything is done. It takes no context:
// the end of one caller's must not fail the events of the others.
func (s *Store) tx(fn func() error) error {
	if err := s.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	err := fn()
	if err == nil {
		err = s.exec("COMMIT")
	}
	if err != nil {
		_ = s.exec("ROLLBACK") // fails if SQLite has rolled back itself, as on a full disk
	}
	return err
}

// createFile makes an empty file for the owner of its directory, if it does not exist.
// SQLite would make it readable by everyone; its other files take mode and owner of this
// one.
func createFile(path string) error {
	createMu.Lock()
	defer createMu.Unlock()
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

// fileBytes returns the size of the database and its write-ahead log. It does not open
// them: the close would drop SQLite's locks.
func fileBytes(path string) (n int64) {
	for _, p := range []string{path, path + "-wal"} {
		if info, err := os.Stat(p); err == nil {
			n += info.Size()
		}
	}
	return n
}

// explain adds the path and the next step to an error of the log, and makes a fault of the
// disk a *storage.Error.
func explain(path string, err error) error {
	if err == nil {
		return nil
	}
	return storage.Wrap(FileName, explainText(path, err))
}

func explainText(path string, err error) error {
	code, dir := sqlitefile.Code(err), filepath.Dir(path)
	_, walDamaged := errors.AsType[*sqlitefile.WALDamage](err)
	if walDamaged || code == sqlite3.SQLITE_CORRUPT || code == sqlite3.SQLITE_NOTADB {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	switch {
	case errors.Is(err, ErrDamaged):
		return fmt.Errorf("event log %s: %w; restore it from a backup, or move it away together with its -wal file and begin a new one", path, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), code == sqlite3.SQLITE_READONLY, code == sqlite3.SQLITE_CANTOPEN:
		return fmt.Errorf("event log %s cannot be used by this user (uid %d): %w; run this as the owner of %s (sudo), or choose another directory", path, os.Geteuid(), err, dir)
	case errors.Is(err, syscall.ENOSPC), code == sqlite3.SQLITE_FULL:
		return fmt.Errorf("event log %s is on a full disk, nothing was kept: %w; free some space (df -h %s)", path, err, dir)
	case code == sqlite3.SQLITE_BUSY:
		return fmt.Errorf("event log %s is locked by another process: %w; find it with: fuser -v %s", path, err, path)
	}
	return fmt.Errorf("event log %s: %w", path, err)
}
