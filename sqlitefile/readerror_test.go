package sqlitefile

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// What SQLite calls damage is the disk's error where the disk gives no page, and damage elsewhere.
func TestReadError(t *testing.T) {
	readability.byPath = make(map[string]*checkedFile) // it does not check more than maxChecked databases of a process
	path := filepath.Join(t.TempDir(), "x.db")
	db := openDB(t, path)
	mustExec(t, db, "CREATE TABLE x (a)")
	mustExec(t, db, "PRAGMA wal_checkpoint(TRUNCATE)")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(make([]byte, 100), 4096); err != nil { // the header of the table's page
		t.Fatal(err)
	}
	_ = f.Close()
	db, err = sql.Open("sqlite", DSN(path, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	damage := db.QueryRow("SELECT count(*) FROM x").Scan(new(int))
	if damage == nil {
		t.Fatal("the damage is not noticed")
	}
	if got := ReadError(path, damage); got != damage {
		t.Errorf("a file that can be read: %v", got)
	}
	if got := ReadError(t.TempDir(), damage); !errors.Is(got, syscall.EISDIR) { // as a disk that fails
		t.Errorf("a file that cannot be read: %v", got)
	}
	if got := ReadError(path+"-none", damage); got != damage {
		t.Errorf("a file that is gone: %v", got)
	}
	// A database without a write-ahead log is not read again either, soon after.
	if err := os.Remove(path + "-wal"); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	readability.byPath = make(map[string]*checkedFile)
	if got := ReadError(path, damage); got != damage || readability.byPath[path].read.IsZero() {
		t.Errorf("a database without a log: %v, read at %v", got, readability.byPath[path].read)
	}
	if got := ReadError(path, errBusyDB); got != errBusyDB || ReadError(path, nil) != nil {
		t.Errorf("another error: %v", got)
	}
}

var errBusyDB = errors.New("busy")
