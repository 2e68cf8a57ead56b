package sqlitefile

import (
	"bytes"
	"database/sql"
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

// logFrames describes the frames of a sound write-ahead log, counted from 1.
type logFrames struct {
	content []byte
	offset  func(frame int) int
	count   int
	commits []int // the transactions that end at a frame or behind it
}

func readFrames(t *testing.T, path string) *logFrames {
	t.Helper()
	content, err := os.ReadFile(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	w, err := openWAL(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.close)
	l := &logFrames{content: content, offset: func(i int) int { return int(w.offset(i)) }, count: w.frames, commits: make([]int, w.frames+2)}
	for i := w.frames; i > 0; i-- {
		f, err := w.frame(i)
		if err != nil {
			t.Fatal(err)
		}
		if l.commits[i] = l.commits[i+1]; f.commit != 0 {
			l.commits[i]++
		}
	}
	return l
}

// firstChanged returns the first frame that differs in another content of the log.
func (l *logFrames) firstChanged(content []byte) int {
	for i := 1; ; i++ {
		if from, to := l.offset(i), l.offset(i+1); !bytes.Equal(l.content[from:to], content[from:to]) {
			return i
		}
	}
}

// ScanWAL finds the damaged frame, and knows about how many transactions are behind it. It cannot notice
// damage to the last transactions. Each frame gets a third of the damages, another third than its
// neighbors; AGENTCTL_SLOW=1 gives it all.
func TestDamagedFrames(t *testing.T) {
	path := newDB(t, 24, 700) // a transaction has one frame, or two or three where it needs a new page
	log := readFrames(t, path)
	const frameSize = frameHeaderSize + 4096
	parts := []struct {
		name     string
		from, to int // in the frame, or in the next one
	}{
		{"header", 0, frameHeaderSize},
		{"page", frameHeaderSize, frameSize},
		{"end", 4000, frameSize},
		{"end and next header", 4100, frameSize + frameHeaderSize},
	}
	const unnoticed = 3 // transactions at the end of a log whose damage may look like its end
	for frame := 1; frame <= log.count; frame++ {
		for n, kind := range slices.Sorted(maps.Keys(patterns)) {
			for m, part := range parts {
				if (frame+n+m)%3 != 0 && !slow() {
					continue
				}
				damaged := bytes.Clone(log.content)
				at := log.offset(frame)
				patterns[kind](damaged[at+part.from : min(at+part.to, len(damaged))])
				if bytes.Equal(damaged, log.content) {
					continue // such as zeros in a page that ends with zeros
				}
				if err := os.WriteFile(path+"-wal", damaged, 0o600); err != nil {
					t.Fatal(err)
				}
				first := log.firstChanged(damaged)
				behind := log.commits[first]
				switch d := damageOf(t, path); {
				case d == nil && behind > unnoticed:
					t.Errorf("frame %d, %s of %s: not noticed, with %d transactions behind it", frame, kind, part.name, behind)
				case d != nil && (d.Frame != first || d.Lost > behind || d.Lost < behind-unnoticed):
					t.Errorf("frame %d, %s of %s: got %v, want frame %d and about %d lost", frame, kind, part.name, d, first, behind)
				}
			}
		}
	}
}

// Why ScanWAL is needed: SQLite opens a log with a damaged frame without an error, and has fewer rows.
func TestSQLiteIgnoresDamagedFrames(t *testing.T) {
	const rows = 24
	path := newDB(t, rows, 700)
	log := readFrames(t, path)
	change(t, path+"-wal", func(b []byte) []byte { b[log.offset(5)+100] ^= 1; return b })
	if n := countRows(t, path); n >= rows/2 {
		t.Errorf("SQLite has %d of %d rows, want few", n, rows)
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

// powerCuts is a database whose machine loses its power again and again.
type powerCuts struct {
	t    *testing.T
	rng  *rand.Rand
	path string // of the database as the last cut left it
	rows int    // that were committed and synced, at least
}

// insert runs a transaction of up to most rows, some of which are larger than the page cache: SQLite
// writes pages to the log before the commit. end ends the transaction.
func (c *powerCuts) insert(db *sql.DB, most int, end func(*sql.Tx) error) (rows int) {
	c.t.Helper()
	tx, err := db.Begin()
	if err != nil {
		c.t.Fatal(err)
	}
	rows = 1 + c.rng.IntN(most)
	for range rows {
		mustExec(c.t, tx, "INSERT INTO t(v) VALUES (?)", fmt.Sprintf("%0*d", c.rng.IntN(9000), 1))
	}
	if err := end(tx); err != nil {
		c.t.Fatal(err)
	}
	return rows
}

// run opens the database, writes to it, and cuts the power during the last transaction.
func (c *powerCuts) run() {
	c.t.Helper()
	db := openDB(c.t, c.path, "cache_spill = 1")
	mustExec(c.t, db, "CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT")
	for range c.rng.IntN(5) {
		if c.rng.IntN(3) == 0 {
			c.insert(db, 40, (*sql.Tx).Rollback)
		} else {
			c.rows += c.insert(db, 40, (*sql.Tx).Commit)
		}
	}
	synced, _ := os.ReadFile(c.path + "-wal")
	after := filepath.Join(c.t.TempDir(), "cut.db")
	c.insert(db, 60, func(tx *sql.Tx) error { // on the disk the commit may be complete, or missing
		if c.rng.IntN(4) == 0 {
			copyDB(c.t, c.path, after)
			return tx.Rollback()
		}
		defer func() { copyDB(c.t, c.path, after) }()
		return tx.Commit()
	})
	db.Close()
	change(c.t, after+"-wal", func(b []byte) []byte { return c.loseSectors(b, synced) })
	c.path = after
}

// loseSectors takes some of the sectors back that were written since the log was synced.
func (c *powerCuts) loseSectors(written, synced []byte) []byte {
	const sector = 512
	share := c.rng.Float64() // of the sectors that reached the disk
	for at := 0; at < len(written); at += sector {
		if c.rng.Float64() <= share {
			continue
		}
		lost := written[at:min(at+sector, len(written))]
		clear(lost)
		if at < len(synced) {
			copy(lost, synced[at:])
		}
	}
	return written
}

// A power cut may lose any sectors that were written since the last sync. That is no damage, also when
// cuts follow each other without a checkpoint, and when transactions were rolled back that had written
// pages to the log.
func TestPowerCutsAreNoDamage(t *testing.T) {
	rounds, rng := 8, rand.New(rand.NewPCG(1, 2))
	if slow() {
		rounds = 100
	}
	for round := range rounds {
		c := &powerCuts{t: t, rng: rng, path: filepath.Join(t.TempDir(), "cut.db")}
		for range 4 {
			c.run()
			if d := damageOf(t, c.path); d != nil {
				t.Fatalf("round %d: got %v, want no damage", round, d)
			}
			rows := countRows(t, c.path)
			if rows < c.rows {
				t.Fatalf("round %d: %d rows, want the %d that were committed", round, rows, c.rows)
			}
			c.rows = rows // those of the last transaction may be there
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
