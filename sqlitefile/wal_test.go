package sqlitefile

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func damageOf(t testing.TB, path string) *WALDamage {
	t.Helper()
	err := ScanWAL(path)
	var d *WALDamage
	if err != nil && !errors.As(err, &d) {
		t.Fatal(err)
	}
	return d
}

func TestSoundLogs(t *testing.T) {
	path := newDB(t, 40, 100)
	if d := damageOf(t, path); d != nil {
		t.Errorf("a sound log: %v", d)
	}
	if d := damageOf(t, filepath.Join(t.TempDir(), "none.db")); d != nil {
		t.Errorf("no log: %v", d)
	}
	for _, size := range []int{0, 10, 32, 40} {
		os.Truncate(path+"-wal", int64(size))
		if d := damageOf(t, path); d != nil {
			t.Errorf("a log of %d bytes: %v", size, d)
		}
	}
}

// slow reports whether AGENTCTL_SLOW=1 asks for the tests in full.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// Each frame but the last two is damaged in several ways. SQLite opens the file without an error
// and has fewer rows; ScanWAL says where the damage is. Each frame gets every third damage, another
// third than its neighbors; AGENTCTL_SLOW=1 gives it all.
func TestDamagedFrames(t *testing.T) {
	const rows = 24
	path := newDB(t, rows, 700) // sometimes a new page, so two or three frames
	sound, err := os.ReadFile(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	w, err := openWAL(path)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if err := w.scan(); err != nil || w.commits != rows {
		t.Fatal(w.commits, err)
	}
	commits := make([]int, w.frames+2) // transactions that end at or behind a frame
	for i := w.frames; i > 0; i-- {
		f, _ := w.frame(i)
		if commits[i] = commits[i+1]; f.commit != 0 {
			commits[i]++
		}
	}
	parts := map[string][2]int{"header": {0, 24}, "page": {24, 24 + 4096}, "end": {4000, 24 + 4096}, "end and next header": {4100, 4120 + 24}}
	for i := 1; i <= w.frames; i++ {
		for n, name := range slices.Sorted(maps.Keys(patterns)) {
			for m, part := range slices.Sorted(maps.Keys(parts)) {
				damage, at := patterns[name], parts[part]
				if (i+n+m)%3 != 0 && i != 5 && !slow() {
					continue
				}
				b := bytes.Clone(sound)
				from := int(w.offset(i))
				damage(b[from+at[0] : min(len(b), from+at[1])])
				if bytes.Equal(b, sound) {
					continue
				}
				os.WriteFile(path+"-wal", b, 0o600)
				d := damageOf(t, path)
				first := 0 // the first frame with a change
				for first = 1; bytes.Equal(b[w.offset(first):w.offset(first+1)], sound[w.offset(first):w.offset(first+1)]); first++ {
				}
				switch {
				case d == nil && commits[first] > 3:
					t.Errorf("frame %d, %s of %s: not noticed, %d transactions behind it", i, name, part, commits[first])
				case d != nil && (d.Frame != first || d.Lost > commits[first] || d.Lost < commits[first]-3):
					t.Errorf("frame %d, %s of %s: %v; %d transactions from frame %d on", i, name, part, d, commits[first], first)
				}
				if i == 5 && part == "page" {
					os.WriteFile(path+"-wal", b, 0o600)
					if n := countRows(t, path); n >= rows {
						t.Errorf("SQLite has %d rows", n)
					}
				}
			}
		}
	}
}

func TestDamagedHeader(t *testing.T) {
	for name, damage := range patterns {
		path := newDB(t, 10, 100)
		change(t, path+"-wal", func(b []byte) []byte { damage(b[:32]); return b })
		if d := damageOf(t, path); d == nil || d.Frame != 0 || d.Lost < 9 {
			t.Errorf("%s in the header: %v", name, d)
		}
		// The whole block, with the header of the first frame.
		change(t, path+"-wal", func(b []byte) []byte { damage(b[:4096]); return b })
		if d := damageOf(t, path); d == nil || d.Frame != 0 || d.Lost < 7 {
			t.Errorf("%s in the first block: %v", name, d)
		}
		if n := countRows(t, path); n != 0 {
			t.Errorf("SQLite has %d rows", n)
		}
	}
}

// A power cut during the first write of a new header leaves frames that are in the database.
func TestInterruptedHeader(t *testing.T) {
	dir := t.TempDir()
	db := openDB(t, filepath.Join(dir, "live.db"))
	mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	for range 30 {
		mustExec(t, db, "INSERT INTO t(v) VALUES ('a row')")
	}
	mustExec(t, db, "PRAGMA wal_checkpoint(FULL)")
	path := copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy.db"))
	change(t, path+"-wal", func(b []byte) []byte { clear(b[12:20]); return b })
	if d := damageOf(t, path); d != nil {
		t.Errorf("all frames are in the database: %v", d)
	}
	mustExec(t, db, "INSERT INTO t(v) VALUES ('a row')") // a new log over the old one
	path = copyDB(t, filepath.Join(dir, "live.db"), filepath.Join(dir, "copy.db"))
	if d := damageOf(t, path); d != nil {
		t.Errorf("an old log behind a short new one: %v", d)
	}
	if n := countRows(t, path); n != 31 {
		t.Fatalf("%d rows", n)
	}
}

func TestLogWithoutDatabase(t *testing.T) {
	path := newDB(t, 5, 100)
	for _, remove := range []func(){func() { os.Truncate(path, 0) }, func() { os.Remove(path) }} {
		remove()
		if d := damageOf(t, path); d == nil || !d.NoDatabase || d.Lost != 5 {
			t.Errorf("%+v", d)
		}
	}
}

// Power cuts: of what the last transactions wrote since their sync, any 512-byte sectors may be on
// the disk. None of that is damage, also when cuts follow each other without a checkpoint, and when
// transactions are rolled back that have written pages already.
func TestPowerCutsAreNoDamage(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	rounds := 8
	if slow() {
		rounds = 100
	}
	for round := range rounds {
		path := filepath.Join(t.TempDir(), "cut.db")
		acknowledged := 0
		for range 4 {
			db := openDB(t, path, "cache_spill = 1")
			mustExec(t, db, "CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
			for range rng.IntN(5) {
				tx, err := db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				n := 1 + rng.IntN(40)
				for range n {
					mustExec(t, tx, "INSERT INTO t(v) VALUES (?)", fmt.Sprintf("%0*d", rng.IntN(9000), 1))
				}
				if rng.IntN(3) == 0 {
					tx.Rollback()
				} else if err := tx.Commit(); err != nil {
					t.Fatal(err)
				} else {
					acknowledged += n
				}
			}
			before, _ := os.ReadFile(path + "-wal")
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			for range 1 + rng.IntN(60) {
				mustExec(t, tx, "INSERT INTO t(v) VALUES (?)", fmt.Sprintf("%0*d", rng.IntN(9000), 2))
			}
			if rng.IntN(4) > 0 {
				if err := tx.Commit(); err != nil {
					t.Fatal(err)
				}
			}
			cut := copyDB(t, path, filepath.Join(t.TempDir(), "cut.db"))
			tx.Rollback()
			db.Close()
			share := rng.Float64()
			change(t, cut+"-wal", func(b []byte) []byte {
				for at := 0; at < len(b); at += 512 {
					if end := min(at+512, len(b)); rng.Float64() > share {
						clear(b[at:end])
						if at < len(before) {
							copy(b[at:end], before[at:])
						}
					}
				}
				return b
			})
			if d := damageOf(t, cut); d != nil {
				t.Fatalf("round %d: %v", round, d)
			}
			if n := countRows(t, cut); n < acknowledged {
				t.Fatalf("round %d: %d rows of %d", round, n, acknowledged)
			} else {
				acknowledged = n
			}
			path = cut
		}
	}
}

// A scan beside a writer never takes what is being written for damage.
func TestScanBesideWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "live.db")
	db := openDB(t, path, "wal_autocheckpoint = 50")
	mustExec(t, db, "PRAGMA wal_autocheckpoint = 50")
	mustExec(t, db, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	rows := 200 // four checkpoints
	if slow() {
		rows = 600
	}
	done := make(chan error)
	go func() {
		defer close(done)
		for i := range rows {
			if _, err := db.Exec("INSERT INTO t(v) VALUES (?)", fmt.Sprintf("%0*d", i*7, i)); err != nil {
				done <- err
				return
			}
		}
	}()
	scans := 0
	for {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d scans", scans)
			return
		default:
			if d := damageOf(t, path); d != nil {
				t.Fatal(d)
			}
			scans++
		}
	}
}
