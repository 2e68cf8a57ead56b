package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/atomicfile"
	"agentctl/relay/storage"
	"agentctl/sqlitefile"
)

const (
	busyTimeoutMS = 5000 // for a lock of another process: a backup tool, say
	maxReaders    = 4    // connections of a Reader

	// writerPragmas: FULL syncs the write-ahead log at each commit, which is what makes
	// an event durable, and what sqlitefile.ScanWAL relies on. The page cache is small (KiB) because the
	// writer only appends. cell_size_check finds some damaged pages when they are read, before a change
	// spreads the damage. With trusted_schema off, triggers and views that somebody has put into the file
	// cannot call functions with side effects. initSpace sets the size of the write-ahead log.
	writerPragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cell_size_check = ON; " +
		"PRAGMA trusted_schema = OFF; PRAGMA cache_size = -256"
)

// createMu serializes creation of the file by two Stores of one process: POSIX drops all
// of a process's locks on a file when any of its descriptors is closed, so closing the
// new file would take the locks of the other Store's connection.
var createMu sync.Mutex

// openWriter opens the file for writing, makes it, or converts it to the present format.
// recovered reports that it was not closed the last time: SQLite removes the write-ahead log at a
// clean close.
//
// The lock is acquired before SQLite opens the file, so a second relay changes nothing in it.
// Everything that was opened is in s.files, which Open closes after an error. The write-ahead log is
// scanned before SQLite opens the file, because SQLite would ignore what is behind a damaged frame, and
// overwrite it.
func (s *Store) openWriter() (recovered bool, err error) {
	path := s.opts.Path
	if path == "" {
		return false, errors.New("no path given")
	}
	if err := s.opts.Expect.checkFile(path); err != nil {
		return false, err
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
	format, err := s.openConn(ctx)
	if err == nil && format == 1 {
		// Logs of the first format have no id, so the log that was recorded was not this one.
		if s.opts.Expect.ID != "" {
			return false, fmt.Errorf("%w: it has the format of an older agentctl, and log %s was recorded", ErrForeign, s.opts.Expect.ID)
		}
		if err = s.closeConn(); err == nil {
			err = migrate(ctx, path, s.log)
		}
		if err == nil {
			format, err = s.openConn(ctx)
		}
	}
	if err != nil {
		return false, err
	}
	if format == 0 { // before journal_mode, which writes the first page and so fixes the page size
		if err := s.exec(newFilePragmas); err != nil {
			return false, err
		}
	}
	if err := s.exec(writerPragmas); err != nil {
		return false, err
	}
	if recovered {
		// What a process wrote before it was killed counts from now on, but may not be synced: a
		// power cut during the next transaction could tear both, and look like damage.
		if err := s.exec("PRAGMA wal_checkpoint(PASSIVE)"); err != nil {
			return false, err
		}
	}
	if format == 0 {
		if err := s.tx(func() error { return createTables(ctx, s.conn, newLogID(), 0) }); err != nil {
			return false, err
		}
	}
	if s.w, err = newWriter(ctx, s.conn); err != nil {
		return recovered, err
	}
	s.w.maxChains = s.opts.maxChains
	s.files = append(s.files, s.w)
	return recovered, nil
}

// openConn opens the write connection, and returns the format of the file. It opens the file itself
// before, so that it is closed after the connection (sqlitefile.NewTable).
func (s *Store) openConn(ctx context.Context) (format int, err error) {
	if s.file, err = os.Open(s.opts.Path); err != nil {
		return 0, err
	}
	s.files = append(s.files, s.file)
	db, err := sql.Open("sqlite", sqlitefile.DSN(s.opts.Path, fmt.Sprintf("_busy_timeout=%d&_txlock=immediate&_defensive=1", busyTimeoutMS)))
	if err != nil {
		return 0, err
	}
	s.files = append(s.files, db)
	if s.conn, err = db.Conn(ctx); err != nil {
		return 0, err
	}
	s.files = append(s.files, s.conn)
	return checkFormat(ctx, s.conn)
}

// closeConn closes what openConn has opened.
func (s *Store) closeConn() (err error) {
	for range 3 {
		n := len(s.files) - 1
		err = errors.Join(err, s.files[n].Close())
		s.files = s.files[:n]
	}
	return err
}

// checkFormat refuses a file of another program or of a newer agentctl. It writes nothing.
// format is 0 for an empty file. A file that has tables but no application id is another program's.
func checkFormat(ctx context.Context, db queryer) (format int, err error) {
	var id, objects int64
	err = db.QueryRowContext(ctx, "SELECT (SELECT application_id FROM pragma_application_id), (SELECT count(*) FROM sqlite_schema)").Scan(&id, &objects)
	switch {
	case err != nil:
		return 0, err
	case id == applicationID1 || id == applicationID:
		return int(id & 0xff), nil
	case id>>8 == applicationID>>8:
		return 0, errors.New("it was written by a newer agentctl; run that version or a newer one (see: agentctl version)")
	case id != 0 || objects != 0:
		return 0, errors.New("it belongs to another program; name another file or directory")
	}
	return 0, nil
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
		if s.w != nil {
			s.w.forget()
		}
	}
	return err
}

// createFile makes an empty file for the owner of its directory, if it does not exist. SQLite would
// make it readable by everyone. SQLite's other files get mode and owner of this one.
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
	return errors.Join(atomicfile.OwnLike(f, filepath.Dir(path)), f.Close())
}

// fileBytes returns the size of the database, its write-ahead log and the index of that. It does
// not open them: the close would drop SQLite's locks.
func fileBytes(path string) int64 {
	return fileSize(path) + fileSize(path+"-wal") + fileSize(path+"-shm")
}

// fileSize returns the size of a file, 0 if there is none.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// isDamage reports whether an error says that the file is damaged. SQLite returns SQLITE_NOTADB if the
// header was overwritten.
func isDamage(err error) bool {
	code := sqlitefile.Code(err)
	_, isWAL := errors.AsType[*sqlitefile.WALDamage](err)
	return isWAL || code == sqlite3.SQLITE_CORRUPT || code == sqlite3.SQLITE_NOTADB || errors.Is(err, ErrDamaged)
}

// explain adds the path and the next step to an error of the log, and makes a fault of the
// disk a *storage.Error.
func explain(path string, err error) error {
	if err == nil {
		return nil
	}
	err = sqlitefile.ReadError(path, err)
	return storage.Wrap(filepath.Dir(path), FileName, explainText(path, err))
}

// explainText adds the path and the next step. The errors of Expect get no step: the owner of the record
// knows it. Damage comes first, because an error may also be of another kind.
func explainText(path string, err error) error {
	code, dir := sqlitefile.Code(err), filepath.Dir(path)
	if isDamage(err) && !errors.Is(err, ErrDamaged) {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	switch {
	case errors.Is(err, ErrMissing), errors.Is(err, ErrEmpty), errors.Is(err, ErrOlder), errors.Is(err, ErrForeign):
		return fmt.Errorf("%w: %s", err, path) // its owner knows what to do
	case errors.Is(err, ErrDamaged):
		return fmt.Errorf("event log %s: %w; see what can be read with: agentctl relay check, and restore a backup or rescue it with: agentctl relay salvage", path, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), code == sqlite3.SQLITE_READONLY, code == sqlite3.SQLITE_CANTOPEN:
		return fmt.Errorf("event log %s cannot be used by this user (uid %d): %w; run this as the owner of %s (sudo), or choose another directory", path, os.Geteuid(), err, dir)
	case storage.Classify(err) == storage.Full:
		return fmt.Errorf("event log %s is on a full disk, nothing was kept: %w; free some space (df -h %s)", path, err, dir)
	case code == sqlite3.SQLITE_BUSY:
		return fmt.Errorf("event log %s is locked by another process: %w; find it with: fuser -v %s", path, err, path)
	}
	return fmt.Errorf("event log %s: %w", path, err)
}
