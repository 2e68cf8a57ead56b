package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// A log of the first format had one table for all events, and one retention mark:
//
//	events     seq, tenant, type, aggregate_id, payload, created_at
//	retention  id = 1, mark
//
// migrate copies it into a new file beside it, which then takes its name (docs/adr/0016). The old
// file does not change until then, so a migration that is killed begins again at the next Open.
const (
	migrationSuffix   = ".new"
	migrationProgress = 5 * time.Second // between two lines of the service log
)

// migrate replaces the log by one of the present format. The caller holds the lock of the log and
// has closed the database. The steps: checkpoint the write-ahead log of the old file, copy its events into
// a new file, sync that, rename it over the old one, sync the directory. After an error before the rename
// the old log still has all events.
func migrate(ctx context.Context, path string, log *zap.Logger) (err error) {
	began := time.Now()
	old, err := sql.Open("sqlite", sqlitefile.DSN(path, fmt.Sprintf("_busy_timeout=%d", busyTimeoutMS)))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	old.SetMaxOpenConns(1)
	// Without write-ahead log the old file is complete, and no -wal file is left that SQLite
	// would read into the new one. It fails while another process has the log open.
	var mode string
	if err := old.QueryRowContext(ctx, "PRAGMA journal_mode = DELETE").Scan(&mode); err != nil {
		return err
	}
	if mode != "delete" {
		return fmt.Errorf("its write-ahead log cannot be closed (journal mode %s)", mode)
	}
	temporary := path + migrationSuffix
	if err := removeDatabase(temporary); err != nil {
		return err
	}
	if err := createFile(temporary); err != nil {
		return err
	}
	n, err := copyEvents(ctx, old, temporary, log)
	if err != nil {
		return errors.Join(fmt.Errorf("cannot convert it to the present format, it is unchanged: %w", err), removeDatabase(temporary))
	}
	if err := old.Close(); err != nil {
		return err
	}
	if err := replaceFile(temporary, path); err != nil {
		return err
	}
	log.Info("event log converted to the present format", zap.String("path", path), zap.Int64("events", n),
		zap.Int64("bytes", fileBytes(path)), zap.Duration("after", time.Since(began)))
	return nil
}

// copyEvents makes the new log at path from the events of old, and returns their number. Each chain gets
// the mark of the old log, so that no reader resumes across events that were removed.
func copyEvents(ctx context.Context, old *sql.DB, path string, log *zap.Logger) (n int64, err error) {
	// Nobody needs the new file if this process ends, so it has no journal and is synced once.
	conn, closeConn, err := openScratch(ctx, path, newFilePragmas+"; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -4096")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, closeConn()) }()
	var mark uint64
	var total int64
	if err := old.QueryRowContext(ctx, "SELECT max(mark, 0), (SELECT count(*) FROM events) FROM retention").Scan(&mark, &total); err != nil {
		return 0, err
	}
	if err := createTables(ctx, conn, newLogID(), max(mark, 1)-1); err != nil {
		return 0, err
	}
	w, err := newWriter(ctx, conn)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	w.newMark = mark
	loggedAt := time.Now()
	// A pager reads pages of events, so that the log need not fit into memory.
	p, err := (&Reader{path: path, db: old, format: 1}).newPager(ctx, Query{})
	if err != nil {
		return 0, err
	}
	for p.pos < p.q.To {
		page, err := p.next(ctx)
		if err != nil {
			return 0, err
		}
		if err := insertPage(ctx, w, page); err != nil {
			return 0, err
		}
		n += int64(len(page))
		if time.Since(loggedAt) > migrationProgress {
			loggedAt = time.Now()
			log.Info("converting the event log", zap.Int64("events", n), zap.Int64("of", total))
		}
	}
	if n != total {
		return 0, fmt.Errorf("%w: it has %d events, and %d could be read", ErrDamaged, total, n)
	}
	return n, nil
}

// insertPage inserts events in one transaction.
func insertPage(ctx context.Context, w *writer, page []kernel.Event) error {
	if len(page) == 0 {
		return nil
	}
	if _, err := w.conn.ExecContext(ctx, "BEGIN"); err != nil {
		return err
	}
	if err := w.insert(ctx, page); err != nil {
		return err // the file is thrown away
	}
	_, err := w.conn.ExecContext(ctx, "COMMIT")
	return err
}

// replaceFile gives a complete file the name of another, durably.
func replaceFile(from, to string) error {
	f, err := os.OpenFile(from, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(to))
}

// removeDatabase removes a database and what SQLite keeps beside it.
func removeDatabase(path string) error {
	for _, suffix := range []string{"-wal", "-shm", "-journal", ""} {
		if err := os.Remove(path + suffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
