package history

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"syscall"

	"modernc.org/sqlite"

	"agentctl/atomicfile"
)

// applicationID marks the file as ours: "agh" and the version of the schema.
const applicationID = 'a'<<24 | 'g'<<16 | 'h'<<8 | 1

// The schema. user_version holds the number of samples: it is in a page that each commit
// writes anyway, and counting would read the whole file.
const schema = `
CREATE TABLE samples(
  ts        INTEGER PRIMARY KEY, -- ms since 1970; below 0: see boots
  cpu       INTEGER NOT NULL,    -- 1/100 percent
  mem       INTEGER NOT NULL,    -- KiB used
  mem_total INTEGER NOT NULL,    -- KiB
  disk      INTEGER NOT NULL,    -- 1/100 percent; -1: not known
  load_1m   INTEGER NOT NULL,    -- 1/100
  load_5m   INTEGER NOT NULL,
  load_15m  INTEGER NOT NULL
) STRICT;
CREATE TABLE keys(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE) STRICT; -- those that were recorded
CREATE TABLE readings(
  id    INTEGER PRIMARY KEY, -- ts * 256 + keys.id
  value INTEGER NOT NULL     -- 1/1000
) STRICT;
CREATE TABLE boots( -- whose time was not known: samples.ts = (id - 4096) * 2^42 + ms of its clock
  id   INTEGER PRIMARY KEY,
  boot TEXT NOT NULL UNIQUE
) STRICT;
CREATE VIEW metrics(ts, cpu, mem_total, mem_used) AS -- percent, MiB
  SELECT ts, cpu / 100.0, mem_total / 1024, mem / 1024 FROM samples WHERE ts > 0;
CREATE VIEW modules(ts, key, value) AS
  SELECT readings.id >> 8, keys.key, readings.value / 1000.0
  FROM readings JOIN keys ON keys.id = readings.id & 255 WHERE readings.id > 0;
`

// settings of a connection. A commit is on the disk when it returns (FULL), so a power cut
// loses none. The WAL costs half the writes of a rollback journal and is moved into the
// file every 128 pages, so both stay small; so does the cache, since recording touches the
// last pages only. Without mmap a page that cannot be read is an error and not a signal. The
// size of cells is checked when a page is read, which finds damage before it is used. A schema
// that is not trusted cannot call functions with side effects.
var settings = []string{
	"busy_timeout = 2000",
	"page_size = 4096",
	"journal_mode = WAL",
	"synchronous = FULL",
	"wal_autocheckpoint = 128",
	"journal_size_limit = 1048576",
	"cache_size = -96",
	"mmap_size = 0",
	"cell_size_check = ON",
	"trusted_schema = OFF",
}

// Errors of a file that must not be changed.
var (
	errForeign = errors.New("the file belongs to another program; name another one")
	// A directory, a pipe, a circle of links.
	errNotRegular = errors.New("it is not a regular file; move it away, or name another one")
	errNewer      = errors.New("the file was written by a newer agentctl; update agentctl, or name another file")
)

// db is an open file: one connection, its statements prepared once. The holder of
// Store.diskToken uses it. It calls the driver without database/sql, whose pool would cost a
// goroutine and half a megabyte of binary and is not needed.
type db struct {
	conn driver.Conn
	// stmts are the prepared statements, by their text.
	stmts map[string]*stmt
	// file identifies the file, also after its name was given to another one.
	file os.FileInfo
	// slot is that of this boot's undated rows, 0 for none.
	slot int64
	// span is the last one, to the last flush; the file has it with savedLength.
	span        span
	savedLength int64
	// rows is the number of samples, stored as user_version.
	rows int64
	// used are the keys that the file has, or had, readings of. A seek does not look for
	// others.
	used [256]bool
}

// openDB opens the file, or creates it with its directory.
func openDB(path string) (_ *db, err error) {
	if err := atomicfile.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() || errors.Is(err, syscall.ELOOP) {
		return nil, errNotRegular
	}
	// SQLite would create it readable by all; its WAL and index take the mode of this file.
	f, err := atomicfile.Open(path, 0o640)
	if errors.Is(err, syscall.ELOOP) { // a link to another disk, whose target is there
		f, err = os.OpenFile(path, os.O_RDWR, 0)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	f.Close() // no lock is lost: SQLite has none yet
	if err != nil {
		return nil, err
	}
	name := url.URL{Scheme: "file", Path: path}
	conn, err := (&sqlite.Driver{}).Open(name.String())
	if err != nil {
		return nil, err
	}
	d := &db{conn: conn, stmts: map[string]*stmt{}, file: info}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	fresh, err := d.identify()
	if err != nil {
		return nil, err
	}
	for _, set := range settings {
		if err := d.run("PRAGMA " + set); err != nil {
			return nil, fmt.Errorf("%s: %w", set, err)
		}
	}
	if fresh {
		err := d.tx(func() error { return d.run(schema + fmt.Sprintf("PRAGMA application_id = %d", applicationID)) })
		if err != nil {
			return nil, err
		}
	}
	err = d.each("SELECT id FROM keys", func(row []driver.Value) bool {
		id, _ := row[0].(int64)
		d.used[uint8(id)] = true
		return true
	})
	if err != nil {
		return nil, err
	}
	d.rows, err = d.number("PRAGMA user_version")
	return d, err
}

// identify checks by the application id whose file it is, and writes nothing. A file with
// objects and no id, or with another id, belongs to another program.
func (d *db) identify() (fresh bool, err error) {
	id, err := d.number("PRAGMA application_id")
	switch {
	case err != nil:
		return false, err
	case id == applicationID:
		return false, nil
	case id>>8 == applicationID>>8:
		return false, errNewer
	}
	objects, err := d.number("SELECT count(*) FROM sqlite_schema")
	if err == nil && (id != 0 || objects != 0) {
		err = errForeign
	}
	return true, err
}

// close closes the statements and the connection, which checkpoints the WAL.
func (d *db) close() error {
	var errs []error
	for _, st := range d.stmts {
		errs = append(errs, st.s.Close())
	}
	return errors.Join(append(errs, d.conn.Close())...)
}

// run executes statements without parameters, once.
func (d *db) run(script string) error {
	_, err := d.conn.(driver.ExecerContext).ExecContext(context.Background(), script, nil)
	return err
}

// tx runs fn in a transaction that takes the write lock at once, and stores d.rows, the
// number of samples, when fn changed it.
func (d *db) tx(fn func() error) error {
	if err := d.run("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	before := d.rows
	err := fn()
	if err == nil && d.rows != before {
		err = d.run(fmt.Sprintf("PRAGMA user_version = %d", d.rows))
	}
	if err == nil {
		err = d.run("COMMIT")
	}
	if err != nil {
		d.rows = before
		d.run("ROLLBACK") // fails when SQLite has rolled back itself, as for a full disk
	}
	return err
}

// stmt is a prepared statement with its parameters and a row, which are reused.
type stmt struct {
	s    driver.Stmt
	args []driver.NamedValue
	row  []driver.Value
}

// prepare returns the statement of a query, which is compiled once, with its parameters
// set.
func (d *db) prepare(query string, args []driver.Value) (*stmt, error) {
	st := d.stmts[query]
	if st == nil {
		s, err := d.conn.Prepare(query)
		if err != nil {
			return nil, err
		}
		st = &stmt{s: s}
		d.stmts[query] = st
	}
	st.args = st.args[:0]
	for i, v := range args {
		st.args = append(st.args, driver.NamedValue{Ordinal: i + 1, Value: v})
	}
	return st, nil
}

// forget closes prepared statements that are not used again. Without it a client could fill the memory
// with statements for each choice of metrics.
func (d *db) forget(queries ...string) {
	for _, query := range queries {
		if st := d.stmts[query]; st != nil {
			_ = st.s.Close() // it only reads
			delete(d.stmts, query)
		}
	}
}

// exec runs a prepared statement and returns how many rows it changed. It takes no context:
// a commit must not be interrupted half-way. busy_timeout bounds the wait for other programs.
func (d *db) exec(query string, args ...driver.Value) (int64, error) {
	st, err := d.prepare(query, args)
	if err != nil {
		return 0, err
	}
	r, err := st.s.(driver.StmtExecContext).ExecContext(context.Background(), st.args)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// each calls fn with the rows while it returns true; fn must not keep them.
func (d *db) each(query string, fn func(row []driver.Value) (more bool), args ...driver.Value) error {
	st, err := d.prepare(query, args)
	if err != nil {
		return err
	}
	rows, err := st.s.(driver.StmtQueryContext).QueryContext(context.Background(), st.args)
	if err != nil {
		return err
	}
	if st.row == nil {
		st.row = make([]driver.Value, len(rows.Columns()))
	}
	for more := true; err == nil && more; {
		if err = rows.Next(st.row); err == nil {
			more = fn(st.row)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return errors.Join(err, rows.Close())
}

// number is the first column of the only row, 0 when there is none or it is null.
func (d *db) number(query string, args ...driver.Value) (n int64, err error) {
	err = d.each(query, func(row []driver.Value) bool {
		n, _ = row[0].(int64)
		return false
	}, args...)
	return n, err
}
