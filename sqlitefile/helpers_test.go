package sqlitefile

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// openDB opens a database as the stores do: a log that is synced at each commit.
func openDB(t testing.TB, path string, pragmas ...string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", DSN(path, ""))
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	for _, p := range append(pragmas, "journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0", "cache_size = -64") {
		mustExec(t, db, "PRAGMA "+p)
	}
	return db
}

func mustExec(t testing.TB, db interface {
	Exec(string, ...any) (sql.Result, error)
}, query string, args ...any) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// copyDB copies a database with its log, as a power cut at this moment would leave them.
func copyDB(t testing.TB, from, to string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-wal"} {
		b, err := os.ReadFile(from + suffix)
		if os.IsNotExist(err) {
			os.Remove(to + suffix)
			continue
		}
		if err == nil {
			err = os.WriteFile(to+suffix, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	os.Remove(to + "-shm")
	return to
}

// countRows opens a copy with SQLite and counts the rows of t.
func countRows(t testing.TB, path string) (n int) {
	t.Helper()
	db := openDB(t, copyDB(t, path, filepath.Join(t.TempDir(), "count.db")))
	if err := db.QueryRow("SELECT count(*) FROM t").Scan(&n); err != nil {
		t.Fatal(err)
	}
	db.Close()
	return n
}

// newDB makes a database whose table is in the file, and rows transactions of one row each in
// the log. It returns a copy.
func newDB(t testing.TB, rows, rowBytes int) string {
	t.Helper()
	dir := t.TempDir()
	db := openDB(t, filepath.Join(dir, "live.db"))
	mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	mustExec(t, db, "PRAGMA wal_checkpoint(TRUNCATE)")
	for i := range rows {
		mustExec(t, db, "INSERT INTO t(v) VALUES (?)", fmt.Sprintf("row %d %s", i+1, strings.Repeat("x", rowBytes)))
	}
	path := copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy", "copy.db"))
	db.Close()
	return path
}

// change changes a file in place.
func change(t testing.TB, path string, fn func(b []byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, fn(b), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// patterns are kinds of damage to some bytes.
var patterns = map[string]func(b []byte){
	"zeros": func(b []byte) { clear(b) },
	"ones": func(b []byte) {
		for i := range b {
			b[i] = 0xff
		}
	},
	"one bit": func(b []byte) { b[len(b)/2] ^= 0x10 },
}
