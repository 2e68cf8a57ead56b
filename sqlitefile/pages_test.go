package sqlitefile

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// rowsOf reads the rows of t from the pages.
func rowsOf(t testing.TB, path string) map[int64]string {
	t.Helper()
	f, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows := map[int64]string{}
	if _, err := f.Records(func(r *Record) error {
		if !r.Index && len(r.Values) == 2 && r.Values[0].Kind == Null && r.Values[1].Kind == Text && strings.HasPrefix(string(r.Values[1].Bytes), "row ") {
			rows[r.RowID] = string(r.Values[1].Bytes)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return rows
}

func rowText(i int) string {
	return fmt.Sprintf("row %d %s", i, strings.Repeat("x", i*i%9000))
}

// Every page size, with rows that need overflow pages, in the file and in the log.
func TestRecordsOfEveryPageSize(t *testing.T) {
	n, inFile := 60, 36 // rows, and those of them in the file
	if slow() {
		n, inFile = 200, 120
	}
	for size := minPageSize; size <= maxPageSize; size *= 2 {
		dir := t.TempDir()
		db := openDB(t, filepath.Join(dir, "live.db"), fmt.Sprintf("page_size = %d", size))
		mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
		mustExec(t, db, "CREATE INDEX x ON t(v)")
		for i := 1; i <= n; i++ {
			if i == inFile {
				mustExec(t, db, "PRAGMA wal_checkpoint(TRUNCATE)")
			}
			mustExec(t, db, "INSERT INTO t(id, v) VALUES (?, ?)", i, rowText(i))
		}
		path := copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy.db"))
		check := func(what string) {
			t.Helper()
			rows := rowsOf(t, path)
			if len(rows) != n {
				t.Errorf("page size %d, %s: %d rows", size, what, len(rows))
			}
			for id, v := range rows {
				if v != rowText(int(id)) {
					t.Errorf("page size %d, %s: row %d is %.40q", size, what, id, v)
				}
			}
		}
		check("as written")
		if d := damageOf(t, path); d != nil {
			t.Errorf("page size %d: %v", size, d)
		}
		change(t, path, func(b []byte) []byte { clear(b[:100]); return b })
		check("without a header")
		change(t, path+"-wal", func(b []byte) []byte { clear(b[:32]); return b })
		check("without both headers")
		db.Close()
		path = copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy2.db"))
		change(t, path, func(b []byte) []byte { clear(b[:100]); return b })
		check("checkpointed, without a header")
	}
}

func TestValues(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v.db")
	db := openDB(t, path)
	mustExec(t, db, "CREATE TABLE v(a, b, c, d)")
	ints := []int64{0, 1, -1, 127, -128, 128, 32767, -32768, 1 << 23, -(1 << 23), 1 << 31, -(1 << 31), 1 << 47, -(1 << 47), math.MaxInt64, math.MinInt64}
	for _, n := range ints {
		mustExec(t, db, "INSERT INTO v VALUES (?, ?, ?, ?)", n, float64(n)/3+0.5, []byte{1, 2, 3}, nil)
	}
	db.Close()
	f, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var got []int64
	st, err := f.Records(func(r *Record) error {
		if v := r.Values; len(v) == 4 {
			if v[1].Kind != Float || v[1].Float != float64(v[0].Int)/3+0.5 || v[2].Kind != Blob || !bytes.Equal(v[2].Bytes, []byte{1, 2, 3}) || v[3].Kind != Null {
				t.Errorf("%+v", v)
			}
			got = append(got, v[0].Int)
		}
		return nil
	})
	if err != nil || fmt.Sprint(got) != fmt.Sprint(ints) || st.BadCells != 0 {
		t.Errorf("%v %v %+v", got, err, st)
	}
}

// Rows behind a damaged frame are read too.
func TestRecordsBehindDamage(t *testing.T) {
	const rows = 60
	path := newDB(t, rows, 300)
	change(t, path+"-wal", func(b []byte) []byte { b[32+4*4120+2000] ^= 1; return b })
	if n := countRows(t, path); n > 10 {
		t.Fatalf("SQLite has %d rows", n)
	}
	if got := rowsOf(t, path); len(got) != rows {
		t.Errorf("%d rows of %d", len(got), rows)
	}
	change(t, path+"-wal", func(b []byte) []byte { clear(b[:32]); return b })
	if got := rowsOf(t, path); len(got) != rows {
		t.Errorf("without the header: %d rows of %d", len(got), rows)
	}
}

// What a transaction wrote that was rolled back is not a row.
func TestRolledBackRowsAreNotRead(t *testing.T) {
	dir := t.TempDir()
	db := openDB(t, filepath.Join(dir, "live.db"))
	mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		mustExec(t, tx, "INSERT INTO t(v) VALUES (?)", rowText(i))
	}
	tx.Rollback()
	mustExec(t, db, "INSERT INTO t(v) VALUES (?)", "row 1 it is")
	path := copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy.db"))
	if info, _ := os.Stat(path + "-wal"); info.Size() < 100*4120 {
		t.Fatal("the transaction wrote nothing")
	}
	if got := rowsOf(t, path); len(got) != 1 || got[1] != "row 1 it is" {
		t.Errorf("%d rows: %.40q", len(got), got[1])
	}
}

func TestTruncatedDatabase(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.db")
	db := openDB(t, path)
	mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	for i := 1; i <= 400; i++ {
		mustExec(t, db, "INSERT INTO t(v) VALUES (?)", fmt.Sprintf("row %d %0300d", i, i))
	}
	db.Close()
	info, _ := os.Stat(path)
	os.Truncate(path, info.Size()/2+1000)
	got := rowsOf(t, path)
	if len(got) < 180 || len(got) > 210 {
		t.Errorf("%d rows", len(got))
	}
	for id, v := range got {
		if v != fmt.Sprintf("row %d %0300d", id, id) {
			t.Errorf("row %d: %.40q", id, v)
		}
	}
}

// No input makes the reader or the scanner fail in an unbounded way.
func FuzzFile(f *testing.F) {
	path := newDB(f, 6, 600)
	db, _ := os.ReadFile(path)
	wal, _ := os.ReadFile(path + "-wal")
	f.Add(db, wal)
	f.Add(db, []byte{})
	f.Add([]byte{}, wal)
	f.Add(append(make([]byte, 512), db[512:]...), append(make([]byte, 32), wal[32:]...))
	f.Fuzz(func(t *testing.T, db, wal []byte) {
		if len(db)+len(wal) > 1<<20 {
			t.Skip("too large to be useful")
		}
		path := filepath.Join(t.TempDir(), "f.db")
		if err := os.WriteFile(path, db, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+"-wal", wal, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := ScanWAL(path); err != nil && damageOf(t, path).Lost < 1 {
			t.Errorf("damage without a loss: %v", err)
		}
		file, err := OpenFile(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		st, err := file.Records(func(r *Record) error {
			if len(r.Values) == 0 || len(r.Values) > maxColumns {
				t.Errorf("a record of %d columns", len(r.Values))
			}
			return nil
		})
		if err != nil || st.Records > len(db)+len(wal) {
			t.Errorf("%+v: %v", st, err)
		}
	})
}
