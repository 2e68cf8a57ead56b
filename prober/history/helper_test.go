package history

import (
	"context"
	"database/sql/driver"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/prober"
)

// epoch is where the tests' clocks begin: 2026-11-20 at 0:00 UTC.
const epoch int64 = 1_795_132_800_000

// fakeClock is a wall clock and a boot's clock that move by hand.
type fakeClock struct {
	mu   sync.Mutex
	wall int64 // milliseconds since 1970; below prober.MinTSMS it is not trusted
	mono time.Duration
}

func (c *fakeClock) now() (int64, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall, c.wall >= prober.MinTSMS
}

func (c *fakeClock) monotonic() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mono
}

// step moves both clocks.
func (c *fakeClock) step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall += d.Milliseconds()
	c.mono += d
}

// set moves the wall clock alone.
func (c *fakeClock) set(wall int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall = wall
}

// sample is what a prober would deliver now; n makes it distinct.
func (c *fakeClock) sample(n int) prober.Sample {
	x := sampleAt(0, n)
	if ms, ok := c.now(); ok {
		x.TSMS = ms
	}
	x.Mono = c.monotonic()
	return x
}

func sampleAt(ts int64, n int) prober.Sample {
	return prober.Sample{
		TSMS:          ts,
		CPUPct:        float64(n%10001) / 100,
		MemBytes:      uint64(1<<20+n) << 10,
		MemTotalBytes: 8 << 30,
		DiskPct:       45.23,
		Load1:         float64(n%400) / 100,
		Load5:         0.5,
		Load15:        0.25,
	}
}

// open makes a Store with a fake clock; it is closed at the end of the test.
func open(t testing.TB, o Options) (*Store, *fakeClock) {
	t.Helper()
	c := &fakeClock{wall: epoch, mono: time.Minute}
	if o.Path == "" {
		o.Path = filepath.Join(t.TempDir(), "history.db")
	}
	o.Now, o.Mono = c.now, c.monotonic
	if o.BootID == "" {
		o.BootID = "boot-1"
	}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, c
}

// record adds n samples, one each second.
func record(s *Store, c *fakeClock, n int) {
	for i := range n {
		c.step(time.Second)
		s.Add(c.sample(i))
	}
}

// addReading adds a reading without a sample; one of the newest sample has its time.
func addReading(s *Store, of prober.Sample, key string, value float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	id := of.TSMS
	switch {
	case s.latestID != 0 && s.latest.TSMS == of.TSMS && s.latest.Mono == of.Mono:
		id = s.latestID
	case id < prober.MinTSMS:
		id = undatedID(memorySlot, s.mono())
	}
	s.seq++
	s.addReadingLocked(id, reading(key, value))
	s.hasUndated = s.hasUndated || id < 0
}

// fillFile is record and flush of many samples, by SQLite itself.
func fillFile(t testing.TB, s *Store, c *fakeClock, n int) {
	t.Helper()
	from, _ := c.now()
	c.step(time.Duration(n) * time.Second)
	err := s.withDB(func(d *db) error {
		return d.tx(func() error {
			d.rows += int64(n)
			return d.run(fmt.Sprintf("WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < %d) "+
				"INSERT INTO samples SELECT %d + n * 1000, n %% 10001, (1 << 20) + n, 1 << 23, 4523, n %% 400, 50, 25 FROM i", n, from))
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func flush(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func reopen(t testing.TB, s *Store, c *fakeClock, bootID string) *Store {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	next, err := Open(Options{Path: s.path, Now: c.now, Mono: c.monotonic, BootID: bootID})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	return next
}

// query collects rows, with copies of what is valid in fn only.
func query(t testing.TB, s *Store, q Query) []Row {
	t.Helper()
	var got []Row
	err := s.Query(context.Background(), q, func(r Row) error {
		r.Modules = append([]prober.Reading(nil), r.Modules...)
		got = append(got, r)
		return nil
	})
	if err != nil {
		t.Fatalf("Query(%+v): %v", q, err)
	}
	return got
}

func times(rows []Row) []int64 {
	ts := make([]int64, len(rows))
	for i, r := range rows {
		ts[i] = r.TSMS
	}
	return ts
}

// checkIntegrity has SQLite look at the whole file.
func checkIntegrity(t testing.TB, path string) {
	t.Helper()
	d, err := openDB(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	var said string
	err = d.each("PRAGMA integrity_check", func(row []driver.Value) bool {
		said, _ = row[0].(string)
		return false
	})
	if err != nil || said != "ok" {
		t.Fatalf("integrity_check: %q, %v", said, err)
	}
	counted, err := d.number("SELECT count(*) FROM samples")
	if err != nil || counted != d.rows {
		t.Fatalf("the file says it has %d samples, it has %d (%v)", d.rows, counted, err)
	}
}

// sqlite3 asks SQLite's own shell, an independent reader of the file.
func sqlite3Shell(t testing.TB, path, sql string) string {
	t.Helper()
	exe, err := exec.LookPath("sqlite3")
	if err != nil {
		t.Skip("there is no sqlite3 here to compare with")
	}
	out, err := exec.Command(exe, path, sql).CombinedOutput()
	if err != nil {
		t.Fatalf("sqlite3: %v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// slow reports whether AGENTCTL_SLOW requests the full tests: whole days, 60 kills.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// often is full in a slow run, else short.
func often(full, short int) int {
	if slow() {
		return full
	}
	return short
}

// quickDir is a directory where a commit need not wait for a disk, if there is one.
func quickDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "history-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// keyNames are the keys of the readings that are recorded.
var keyNames = func() (keys []string) {
	for _, s := range recordable {
		keys = append(keys, s.Key)
	}
	return keys
}()

func reading(key string, v float64) prober.Reading { return prober.Reading{Key: key, Value: v} }
