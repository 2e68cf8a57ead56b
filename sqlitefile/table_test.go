package sqlitefile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// newTree makes a database with a table t of n rows between those of another table, all in the file, and
// returns the page at which t begins.
func newTree(t testing.TB, n int, pragmas ...string) (path string, root uint32) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "tree.db")
	db := openDB(t, path, pragmas...)
	for _, name := range []string{"other", "t"} {
		mustExec(t, db, "CREATE TABLE "+name+"(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	}
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= n; i++ {
		mustExec(t, tx, "INSERT INTO t VALUES (?, ?)", i*3, rowText(i))
		mustExec(t, tx, "INSERT INTO other VALUES (?, ?)", i, rowText(i%7))
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, "DELETE FROM t WHERE id BETWEEN 100 AND 200") // pages that are used again
	mustExec(t, db, "INSERT INTO t VALUES (?, ?)", n*3+1, "row 0 ")
	mustExec(t, db, "PRAGMA wal_checkpoint(TRUNCATE)")
	if err := db.QueryRow("SELECT rootpage FROM sqlite_schema WHERE name = 't'").Scan(&root); err != nil {
		t.Fatal(err)
	}
	return path, root
}

// readTree reads the rows of a table, by its pages.
func readTree(path string, root uint32, fn func(*Record) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	table, err := NewTable(file, root)
	if err != nil {
		return err
	}
	for i := range table.Leaves() {
		if err := table.Rows(i, fn); err != nil {
			return err
		}
	}
	return nil
}

// A Table returns the rows that SQLite returns, in their order, for every page size.
func TestTableOfEveryPageSize(t *testing.T) {
	for size := minPageSize; size <= maxPageSize; size *= 2 {
		path, root := newTree(t, 300, fmt.Sprintf("page_size = %d", size))
		db := openDB(t, path)
		rows, err := db.Query("SELECT id, v FROM t ORDER BY id")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		err = readTree(path, root, func(r *Record) error {
			var id int64
			var v string
			if n++; !rows.Next() {
				return errors.New("a row more than SQLite has")
			}
			if err := rows.Scan(&id, &v); err != nil {
				return err
			}
			if r.RowID != id || len(r.Values) != 2 || r.Values[0].Kind != Null || string(r.Values[1].Bytes) != v {
				return fmt.Errorf("row %d is %.40q, SQLite has row %d %.40q", r.RowID, r.Values[1].Bytes, id, v)
			}
			return nil
		})
		if err != nil || rows.Next() || n < 200 {
			t.Errorf("page size %d: %d rows, %v", size, n, err)
		}
		rows.Close()
	}
}

// What is damaged is an error or changed rows, never a crash or a loop.
func TestTableOfDamagedPages(t *testing.T) {
	path, root := newTree(t, 60, "page_size = 512")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	failed := 0
	for range 500 {
		b := append([]byte(nil), whole...)
		for range 1 + r.IntN(3) {
			at := r.IntN(len(b))
			if r.IntN(2) == 0 {
				at = at&^511 + r.IntN(16) // of the header of a page
			}
			b[at] = byte(r.IntN(256))
		}
		if r.IntN(10) == 0 {
			b = b[:r.IntN(len(b))]
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		n := 0
		if err := readTree(path, root, func(*Record) error { n++; return nil }); err != nil {
			failed++
		}
		if n > 10_000 {
			t.Fatalf("%d rows of 60", n)
		}
	}
	if failed < 20 {
		t.Errorf("%d of 500 damaged files were noticed", failed)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, root := range []uint32{0, 1 << 30} {
		if err := readTree(path, root, func(*Record) error { return nil }); !errors.Is(err, ErrNotSound) {
			t.Errorf("root %d: %v", root, err)
		}
	}
}
