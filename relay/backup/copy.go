package backup

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/time/rate"
	"modernc.org/sqlite"

	"agentctl/sqlitefile"
)

// A relay may run while its files are copied. Its commits must not wait long for the disk, so the bytes
// per second are limited, and synced in small parts. Databases are copied from a snapshot by SQLite's
// online backup (https://www.sqlite.org/backup.html): a copy of the file could have half of a transaction.

// Speeds of copying, bytes per second.
const (
	backupRate = 16 << 20 // half of what a cheap card reads: a relay uses the disk meanwhile
	fullRate   = 1 << 30  // no relay runs; the disk is the bound
)

// Sizes of copying, bytes.
const (
	copyChunk = 256 << 10 // read or written at a time
	syncEvery = 8 << 20   // synced at a time: one large sync would delay the commits of the relay
)

// copier copies files at a bounded speed.
type copier struct{ limit *rate.Limiter }

func newCopier(bytesPerSecond int) *copier {
	return &copier{rate.NewLimiter(rate.Limit(bytesPerSecond), 4*copyChunk)}
}

// wait waits until n more bytes may be read or written. n is at most the limiter's burst of four chunks:
// more would be an error.
func (c *copier) wait(ctx context.Context, n int) error { return c.limit.WaitN(ctx, n) }

// file copies a regular file to a new one of mode 0600, syncs it and returns its size and hash. A file
// that grows is copied up to its present size.
func (c *copier) file(ctx context.Context, from, to string) (f File, err error) {
	in, err := openRegular(from)
	if err != nil {
		return f, err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return f, err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	sum := sha256.New()
	n, err := c.copy(ctx, io.MultiWriter(out, sum), io.LimitReader(in, info.Size()), out.Sync)
	if err != nil {
		return f, fmt.Errorf("copy %s: %w", from, err)
	}
	return File{Bytes: n, SHA256: hex.EncodeToString(sum.Sum(nil))}, out.Sync()
}

// describe returns the size and the hash of a file.
func (c *copier) describe(ctx context.Context, path string) (f File, err error) {
	in, err := openRegular(path)
	if err != nil {
		return f, err
	}
	defer func() { _ = in.Close() }()
	sum := sha256.New()
	n, err := c.copy(ctx, sum, in, func() error { return nil })
	return File{Bytes: n, SHA256: hex.EncodeToString(sum.Sum(nil))}, err
}

// copy copies in chunks, and calls sync after each syncEvery bytes.
func (c *copier) copy(ctx context.Context, to io.Writer, from io.Reader, sync func() error) (n int64, err error) {
	for {
		m, err := io.CopyN(to, from, copyChunk)
		n += m
		atEnd := errors.Is(err, io.EOF)
		if atEnd {
			err = nil
		}
		if err == nil {
			err = c.wait(ctx, int(m))
		}
		if err == nil && !atEnd && n%syncEvery == 0 {
			err = sync()
		}
		if err != nil || atEnd {
			return n, err
		}
	}
}

// openRegular opens a regular file and nothing else. The state directory may belong to another user:
// a link planted there would make root read another file, and a pipe would block.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|openFlags, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file; move it away", path))
	}
	return f, nil
}

// snapshot is a database as it was when openSnapshot returned: a read transaction that stays open.
// Until it is closed, SQLite cannot empty the database's write-ahead log, which therefore grows while
// a relay writes.
type snapshot struct {
	path string
	db   *sql.DB
	conn *sql.Conn // has the transaction; nil if openSnapshot failed
}

// openSnapshot begins a snapshot. It writes nothing; other processes may write meanwhile.
func openSnapshot(ctx context.Context, path string) (s *snapshot, err error) {
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, "mode=ro&_busy_timeout=5000"))
	if err != nil {
		return nil, err
	}
	s = &snapshot{path: path, db: db}
	if s.conn, err = db.Conn(ctx); err == nil {
		// BEGIN reads nothing. The snapshot is that of the first read.
		if _, err = s.conn.ExecContext(ctx, "BEGIN"); err == nil {
			var n int
			err = s.conn.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema").Scan(&n)
		}
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return s, nil
}

func (s *snapshot) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
	_ = s.db.Close()
}

// copyTo copies the snapshot to a new file of mode 0600, at the copier's speed, and checks the copy.
// Other processes may write to the database meanwhile.
func (s *snapshot) copyTo(ctx context.Context, c *copier, to string) error {
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	err = s.conn.Raw(func(driverConn any) error {
		source, ok := driverConn.(interface {
			NewBackup(uri string) (*sqlite.Backup, error)
		})
		if !ok {
			return errors.New("the SQLite driver has no online backup")
		}
		// A copy that fails is deleted, so it needs no journal.
		b, err := source.NewBackup(sqlitefile.DSN(to, "_pragma=journal_mode(OFF)&_pragma=synchronous(OFF)"))
		if err != nil {
			return err
		}
		return errors.Join(s.steps(ctx, c, b, out), b.Finish())
	})
	if err == nil {
		err = out.Sync()
	}
	if err == nil {
		err = checkCopy(ctx, to)
	}
	if err != nil {
		return fmt.Errorf("copy %s: %w", s.path, err)
	}
	return nil
}

// steps copies all pages, a chunk at a time. out is the file of the copy, to be synced. The connection's
// read transaction stays open over all steps: without it SQLite would begin again each time that another
// process has written.
func (s *snapshot) steps(ctx context.Context, c *copier, b *sqlite.Backup, out *os.File) error {
	const pageSize = 4096 // assumed; with larger pages the copy exceeds its speed
	for written := 0; ; written += copyChunk {
		if err := c.wait(ctx, copyChunk); err != nil {
			return err
		}
		more, err := b.Step(copyChunk / pageSize)
		if err != nil || !more {
			return err
		}
		if written%syncEvery == 0 {
			if err := out.Sync(); err != nil {
				return err
			}
		}
	}
}

// checkCopy checks that a copy of a database is sound, and makes it one file, without a write-ahead
// log. No other process has it open.
func checkCopy(ctx context.Context, path string) error {
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, "_pragma=journal_mode(DELETE)"))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	return quickCheck(ctx, db)
}

// quickCheck runs SQLite's quick_check, which reads every page. The error says what is damaged.
func quickCheck(ctx context.Context, db interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}) error {
	var result string
	if err := db.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&result); err != nil {
		return err
	}
	if result != "ok" {
		return fmt.Errorf("it is damaged: %s", result)
	}
	return nil
}
