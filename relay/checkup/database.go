package checkup

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/sqlitefile"
)

// The checks of a database, in this order:
//
//	file       it exists if relay.json names it, is regular and not empty
//	-wal       sqlitefile.ScanWAL, before SQLite opens anything: SQLite would ignore the transactions
//	           behind a damaged frame without an error
//	pages      PRAGMA integrity_check: structure of every page, and each index against its table
//	identity   id and epoch, or last event, against relay.json; of relay.db also against its copy
//	rows       relay.db: the form of the values, and the checksums stored with them (rowChecks);
//	           events.db: tables and triggers, and the hashes (checkEventLog)

// openReadOnly opens a database so that nothing on disk changes. The caller calls closeDB. There is one
// connection, so the rows of a query must be closed before the next query begins, which would wait for
// them without an end. A read waits at most 5 s for a lock of SQLite.
func openReadOnly(path string) (db *sql.DB, closeDB func(), err error) {
	dsn, done, err := sqlitefile.ReadOnly(path, "_busy_timeout=5000")
	if err != nil {
		return nil, nil, err
	}
	db, err = sql.Open("sqlite", dsn)
	if err != nil {
		return nil, nil, errors.Join(err, done())
	}
	db.SetMaxOpenConns(1)
	return db, func() { _ = errors.Join(db.Close(), done()) }, nil // nothing was written
}

// checkSQLite checks what every SQLite database has: its file, its write-ahead log and its pages.
// isRecorded says that relay.json names the database, so that it must exist. repair is that of
// damage. The result is false if the content cannot be read; without a problem the database was
// never made.
func (c *checker) checkSQLite(ctx context.Context, name string, isRecorded bool, repair Repair) (isReadable bool) {
	path := c.path(name)
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !isRecorded && !exists(path+"-wal"):
		return false
	case errors.Is(err, fs.ErrNotExist):
		c.add(Problem{Store: name, Path: name, What: "it is missing", Repair: RepairRestore})
		return false
	case err != nil:
		c.fail(name, name, err, RepairNone)
		return false
	case !info.Mode().IsRegular():
		c.add(Problem{Store: name, Path: name, What: "it is not a regular file; move it away"})
		return false
	case info.Size() == 0:
		c.add(Problem{Store: name, Path: name, What: "it is empty", Repair: RepairRestore})
		return false
	}
	err = sqlitefile.ScanWAL(path)
	if damage, isDamage := errors.AsType[*sqlitefile.WALDamage](err); isDamage {
		c.add(Problem{Store: name, Path: damage.Path, Where: fmt.Sprintf("frame %d, byte %d", damage.Frame, damage.Offset), What: damage.Error(), Repair: repair})
	} else if err != nil {
		c.fail(name, name, err, repair)
		return false
	}
	if err := c.checkIntegrity(ctx, name, repair); err != nil {
		c.fail(name, name, fmt.Errorf("it cannot be read: %w", err), repair)
		return false
	}
	return true
}

// checkIntegrity runs SQLite's integrity_check, which reads every page and compares indexes with
// their tables. The pragma returns a row for each problem, at most maxProblems, or one row "ok". The error
// says that SQLite could not read on; the caller records it.
func (c *checker) checkIntegrity(ctx context.Context, name string, repair Repair) error {
	db, closeDB, err := openReadOnly(c.path(name))
	if err != nil {
		return err
	}
	defer closeDB()
	rows, err := db.QueryContext(ctx, fmt.Sprintf("PRAGMA integrity_check(%d)", maxProblems))
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return err
		}
		if line != "ok" {
			c.add(Problem{Store: name, Path: name, What: line, Repair: repair})
		}
	}
	return rows.Err()
}

// checkDatabase checks relay.db, and that it is the one that relay.json names. The only repair of damage
// is a backup: a row that is missing or changed could be a revocation.
func (c *checker) checkDatabase(ctx context.Context) (state, detail string) {
	noRelayRan := !exists(c.path("relay.db")) && !c.record.found && c.hasProblems("relay.json") && !exists(c.path("keys"))
	if noRelayRan { // checkRelayFile has reported that; nothing is missing
		return Absent, ""
	}
	if !c.checkSQLite(ctx, "relay.db", true, RepairRestore) {
		return "", ""
	}
	db, closeDB, err := openReadOnly(c.path("relay.db"))
	if err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
		return "", ""
	}
	defer closeDB()
	if err := c.compareWithRecord(ctx); err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
	}
	rows, err := c.checkRows(ctx, db)
	if err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
	}
	return "", fmt.Sprintf("pages, write-ahead log, %d rows, and that relay.json and its copy name it", rows)
}

// compareWithRecord compares relay.db with relay.json and with its copy in keys/. Files that are
// behind relay.db are no problem: the relay writes them after it. A database that is behind the files is
// an older copy, with which revoked tokens would work again. The error is an *auth.StateError
// for that, or one of reading.
//
// It compares the audience too, which auth.CheckRecord does not do: at a start with another --audience
// the two differ for a moment.
func (c *checker) compareWithRecord(ctx context.Context) error {
	is, err := auth.ReadDatabase(ctx, c.dir)
	if err == nil {
		err = auth.CheckRecord(c.dir, is)
	}
	if err == nil && c.record.found && is.RelayID != "" && is.Audience != c.record.Audience {
		c.add(Problem{Store: "relay.db", Path: "relay.json", Where: "audience", What: fmt.Sprintf("it is %q, and relay.db has %q: tokens would be refused; move relay.json away, it is made anew from relay.db", c.record.Audience, is.Audience)})
	}
	return err
}

// rowChecks say what the values of a row must look like. integrity_check does not notice a text that
// has changed: only a value whose form is known, or that has a checksum, can show it.
var rowChecks = []struct {
	table, query string
	ok           func(v [][]byte) bool // v are the columns of the query, as text
}{
	{"tokens", "SELECT jti, scopes, class, iat <= exp FROM tokens", func(v [][]byte) bool {
		_, isULID := manifest.ParseULID(string(v[0]))
		return isULID && isText(v[1]) && isText(v[2]) && len(v[2]) > 0 && string(v[3]) == "1"
	}},
	{"revocations", "SELECT kind, value, at > 0 AND until >= 0 FROM revocations", func(v [][]byte) bool {
		return isText(v[0]) && isText(v[1]) && len(v[1]) > 0 && string(v[2]) == "1"
	}},
	// sum is the SHA-256 of the manifest.
	{"nodes", "SELECT node_id, manifest, sum, name, tenant FROM nodes", func(v [][]byte) bool {
		manifestJSON, sum := v[1], sha256.Sum256(v[1])
		sumFits := len(v[2]) != len(sum) || string(v[2]) == string(sum[:]) // a row without a checksum passes
		return isText(v[3]) && isText(v[4]) && (len(manifestJSON) == 0 || jsontext.Value(manifestJSON).IsValid() && sumFits)
	}},
	{"invites", "SELECT code, prefix, used <= uses, expires >= created FROM invites", func(v [][]byte) bool {
		return isText(v[0]) && isText(v[1]) && string(v[2]) == "1" && string(v[3]) == "1"
	}},
	{"enrollments", "SELECT jkt, public_key, sub, tenant FROM enrollments", func(v [][]byte) bool {
		return isText(v[0]) && len(v[1]) == 32 && isText(v[2]) && isText(v[3])
	}},
}

// checkRows checks the values of relay.db, and returns the number of rows. An error in one table ends it:
// the database cannot be read, and needs a backup whatever the other tables have.
func (c *checker) checkRows(ctx context.Context, db *sql.DB) (n int, err error) {
	for _, q := range rowChecks {
		if lacksTable(ctx, db, q.table) { // an older agentctl wrote the database
			continue
		}
		rows, err := c.checkTable(ctx, db, q.table, q.query, q.ok)
		if n += rows; err != nil {
			return n, err
		}
	}
	return n, nil
}

// lacksTable reports whether a database has no such table. If the schema cannot be read it returns false,
// and the caller's query returns the error.
func lacksTable(ctx context.Context, db *sql.DB, name string) bool {
	var n int
	err := db.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?", name).Scan(&n)
	return err == nil && n == 0
}

// checkTable calls ok with the columns of each row of a query, and returns the number of rows. It scans
// bytes, because a conversion would fail at the first damaged value, and the rows after it would not be
// checked. The number in a problem counts the rows of the query, from 1.
func (c *checker) checkTable(ctx context.Context, db *sql.DB, table, query string, ok func([][]byte) bool) (n int, err error) {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		return 0, err
	}
	values := make([][]byte, len(columns))
	pointers := make([]any, len(columns))
	for i := range values {
		pointers[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(pointers...); err != nil {
			return n, err
		}
		if n++; !ok(values) {
			c.add(Problem{Store: "relay.db", Path: "relay.db", Where: fmt.Sprintf("table %s, row %d", table, n), What: "a value is not of the form that the relay writes", Repair: RepairRestore})
		}
	}
	return n, rows.Err()
}
