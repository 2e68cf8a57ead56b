package history

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/prober"
)

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	tests := []struct {
		name string
		o    Options
		ok   bool
	}{
		{"only a path", Options{Path: dir + "/h.db"}, true},
		{"no path", Options{}, false},
		{"flush too short", Options{Path: dir + "/h.db", Flush: time.Millisecond}, false},
		{"flush too long", Options{Path: dir + "/h.db", Flush: 2 * time.Hour}, false},
		{"age too short", Options{Path: dir + "/h.db", MaxAge: time.Second}, false},
		{"size too small", Options{Path: dir + "/h.db", MaxBytes: 1000}, false},
		{"all", Options{Path: dir + "/h.db", Flush: time.Second, MaxAge: time.Minute, MaxBytes: 2e6}, true},
	}
	for _, tt := range tests {
		s, err := Open(tt.o)
		if (err == nil) != tt.ok {
			t.Errorf("%s: Open said %v, want ok %v", tt.name, err, tt.ok)
		}
		if err == nil {
			s.Close()
		}
	}
}

func TestWindow(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 10) // epoch+1 s .. epoch+10 s
	flush(t, s)
	record(s, c, 5) // .. epoch+15 s, in memory
	at := func(sec int64) int64 { return epoch + sec*1000 }
	tests := []struct {
		name string
		q    Query
		want []int64
	}{
		{"both ends are in", Query{FromMS: at(3), ToMS: at(5)}, []int64{at(3), at(4), at(5)}},
		{"a millisecond less", Query{FromMS: at(3) + 1, ToMS: at(5) - 1}, []int64{at(4)}},
		{"file and memory", Query{FromMS: at(9), ToMS: at(12)}, []int64{at(9), at(10), at(11), at(12)}},
		{"0 is now", Query{FromMS: at(14)}, []int64{at(14), at(15)}},
		{"limit", Query{FromMS: at(9), Limit: 3}, []int64{at(9), at(10), at(11)}},
		{"last of each bucket", Query{FromMS: at(1), StepMS: 4000}, []int64{at(3), at(7), at(11), at(15)}},
		{"a bucket that the window cuts", Query{FromMS: at(1), ToMS: at(6), StepMS: 4000}, []int64{at(3), at(6)}},
		{"one bucket", Query{FromMS: at(1), StepMS: 1 << 50}, []int64{at(15)}},
		{"one bucket of all time", Query{FromMS: math.MinInt64, ToMS: math.MaxInt64, StepMS: math.MaxInt64}, []int64{at(15)}},
		{"from tomorrow until now", Query{FromMS: at(86_400)}, []int64{at(15)}},
		{"one module of the sample", Query{FromMS: at(15), Modules: []string{"cpu"}}, []int64{at(15)}},
		{"nothing there: the newest sample", Query{FromMS: at(-100), ToMS: at(-50)}, []int64{at(15)}},
		{"an unknown module", Query{Modules: []string{"tea"}}, []int64{}},
	}
	for _, tt := range tests {
		if got := times(query(t, s, tt.q)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}

	if err := s.Query(t.Context(), Query{FromMS: at(2), ToMS: at(1)}, nil); !errors.Is(err, ErrRange) {
		t.Errorf("a window that ends before it begins: %v, want ErrRange", err)
	}
	if err := s.Query(t.Context(), Query{StepMS: -1}, nil); err == nil {
		t.Error("a negative step was taken")
	}
	boom := errors.New("boom")
	if err := s.Query(t.Context(), Query{}, func(Row) error { return boom }); err != boom {
		t.Errorf("Query returned %v, want what fn said", err)
	}
}

func TestGapsAreNotFilled(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 100)
	c.step(72 * time.Hour)
	record(s, c, 100)
	flush(t, s)
	c.step(time.Hour)
	record(s, c, 2)
	got := times(query(t, s, Query{StepMS: 60_000}))
	var want []int64
	for _, first := range []int64{epoch, epoch + 100_000 + 72*3600_000} {
		for sec := int64(1); sec <= 100; sec++ {
			ts := first + sec*1000
			if n := len(want); n > 0 && want[n-1]/60_000 == ts/60_000 {
				want[n-1] = ts
			} else {
				want = append(want, ts)
			}
		}
	}
	now, _ := c.now()
	want = append(want, now)
	if !slices.Equal(got, want) {
		t.Errorf("buckets %v, want %v", got, want)
	}
	// From the first sample on the buckets are dense: their last rows are looked for.
	if got := times(query(t, s, Query{FromMS: epoch + 1000, StepMS: 60_000})); !slices.Equal(got, want) {
		t.Errorf("buckets %v, want %v", got, want)
	}
}

// TestGapBeforeMemory checks that a query finds rows after a gap that are in memory only.
func TestGapBeforeMemory(t *testing.T) {
	s, c := open(t, Options{})
	add := func(n int) {
		for i := range n {
			c.step(time.Second)
			addReading(s, c.sample(0), "network.bytes_in_per_s", float64(i))
		}
	}
	add(120)
	flush(t, s)
	c.step(time.Hour)
	add(1)
	now, _ := c.now()
	want := []int64{epoch + 59_000, epoch + 119_000, epoch + 120_000, now}
	if got := times(query(t, s, Query{FromMS: epoch + 1000, StepMS: 60_000})); !slices.Equal(got, want) {
		t.Errorf("buckets %v, want %v", got, want)
	}
}

// TestManyReadings checks that the readings of one time stay together at the end of a chunk.
func TestManyReadings(t *testing.T) {
	s, c := open(t, Options{})
	const n = 1000
	for i := range n {
		c.step(time.Second)
		for k := range 7 {
			addReading(s, c.sample(0), keyNames[k], float64(i))
		}
	}
	for range 2 { // from memory, from the file
		rows := query(t, s, Query{FromMS: epoch})
		for i, r := range rows {
			if len(r.Modules) != 7 || r.HasSample || r.Modules[6].Value != float64(i) {
				t.Fatalf("row %d is %+v, want 7 readings", i, r)
			}
		}
		if len(rows) != n {
			t.Errorf("%d rows, want %d", len(rows), n)
		}
		flush(t, s)
	}
}

// TestFormat reads the file with SQLite's shell: the documented view, STRICT tables, and the
// size of a row.
func TestFormat(t *testing.T) {
	s, c := open(t, Options{})
	s.Add(sampleAt(epoch+500, 1234))
	addReading(s, sampleAt(epoch+500, 0), "temperature.hottest_c", 48.312)
	c.step(time.Second)
	flush(t, s)
	tests := []struct{ sql, want string }{
		{"SELECT * FROM metrics", fmt.Sprintf("%d|12.34|8192|1025", epoch+500)},
		{"SELECT ts, cpu, mem_total, mem_used FROM metrics", fmt.Sprintf("%d|12.34|8192|1025", epoch+500)},
		{"SELECT * FROM modules", fmt.Sprintf("%d|temperature.hottest_c|48.312", epoch+500)},
		{"SELECT count(*) FROM pragma_table_list WHERE strict AND type = 'table' AND name NOT LIKE 'sqlite%'", "5"},
		{"PRAGMA journal_mode", "wal"},
		{"PRAGMA integrity_check", "ok"},
	}
	for _, tt := range tests {
		if got := sqlite3Shell(t, s.path, tt.sql); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.sql, got, tt.want)
		}
	}
	info, err := os.Stat(s.path)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the file has mode %v (%v), want 0640", info.Mode(), err)
	}
}

func TestSurvivesRestart(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 7)
	addReading(s, c.sample(0), "network.bytes_in_per_s", 1234.5)
	before := query(t, s, Query{FromMS: epoch})
	s = reopen(t, s, c, "boot-1")
	after := query(t, s, Query{FromMS: epoch})
	if fmt.Sprint(before) != fmt.Sprint(after) || len(after) != 7 {
		t.Errorf("after a restart: %v\nbefore: %v", after, before)
	}
	if st := s.Stats(); st.Rows != 7 || st.State != "ok" || st.Unsaved != 0 {
		t.Errorf("stats %+v, want 7 rows, ok, nothing unsaved", st)
	}
}

// TestRounding checks that a query returns the kernel's figures bit for bit.
func TestRounding(t *testing.T) {
	s, c := open(t, Options{})
	x := prober.Sample{TSMS: epoch + 1, CPUPct: 99.99, MemBytes: 427<<20 + 4096, MemTotalBytes: 1<<42 + 1024, DiskPct: 0.01, Load1: 0.07, Load5: 1e9, Load15: 128.3}
	s.Add(x)
	c.step(time.Second)
	for range 2 { // from memory, from the file
		got := query(t, s, Query{FromMS: epoch})
		want := x
		want.Load5 = math.MaxInt32 / 100.0
		if len(got) != 1 || got[0].Sample != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		flush(t, s)
	}
}

// TestNoDisk checks that a sample without a disk value is recorded.
func TestNoDisk(t *testing.T) {
	s, c := open(t, Options{})
	x := c.sample(1)
	x.TSMS, x.DiskPct, x.DiskErr = epoch+1, 0, prober.ErrDisk
	s.Add(x)
	c.step(time.Second)
	for range 2 { // from memory, from the file
		got := query(t, s, Query{FromMS: epoch})
		if len(got) != 1 || got[0].Sample.DiskErr != prober.ErrDisk || got[0].Sample.DiskPct != 0 || got[0].Sample.CPUPct != x.CPUPct {
			t.Errorf("got %+v, want the sample without its disk", got)
		}
		flush(t, s)
	}
}

func TestModules(t *testing.T) {
	s, c := open(t, Options{})
	for i := range 20 {
		c.step(time.Second)
		readings := []prober.Reading{reading("network.bytes_in_per_s", float64(i)*1.5)}
		if i%5 == 0 {
			readings = append(readings, reading("temperature.hottest_c", -40.125+float64(i)))
		}
		s.Add(c.sample(i), readings...)
		if i == 11 {
			flush(t, s)
		}
	}
	at := func(sec int64) int64 { return epoch + sec*1000 }
	got := query(t, s, Query{FromMS: at(11), ToMS: at(12)})
	want := fmt.Sprint([]Row{
		{at(11), true, sampleAt(at(11), 10), []prober.Reading{reading("network.bytes_in_per_s", 15), reading("temperature.hottest_c", -30.125)}},
		{at(12), true, sampleAt(at(12), 11), []prober.Reading{reading("network.bytes_in_per_s", 16.5)}},
	})
	if fmt.Sprint(got) != want {
		t.Errorf("rows %v, want %v", got, want)
	}
	// The last reading of each sensor in a bucket that has nothing else, in one query.
	for _, step := range []int64{10_000, 1 << 50} {
		got = query(t, s, Query{FromMS: at(1), ToMS: at(15), StepMS: step, Modules: []string{"temperature", "network"}})
		last := got[len(got)-1]
		want := fmt.Sprint(Row{at(15), false, prober.Sample{}, []prober.Reading{reading("network.bytes_in_per_s", 21), reading("temperature.hottest_c", -30.125)}})
		if step == 1<<50 && (fmt.Sprint(last) != want || len(got) != 1) {
			t.Errorf("step %d: %v, want %v", step, got, want)
		}
		if step == 10_000 && (len(got) != 2 || fmt.Sprint(got[0].Modules) != "[{network.bytes_in_per_s 12} {temperature.hottest_c -35.125}]") {
			t.Errorf("step %d: %v", step, got)
		}
	}
	if got := query(t, s, Query{Modules: []string{"net"}}); len(got) != 20 {
		t.Errorf("net is network, but: %v", got)
	}
	if got := query(t, s, Query{Modules: []string{"netw"}}); len(got) != 0 {
		t.Errorf("netw is no module, but: %v", got)
	}
	if got := query(t, s, Query{Modules: []string{"network.bytes_in_per_s"}}); len(got) != 20 || got[0].HasSample {
		t.Errorf("by its full name: %v", got)
	}
}

// TestHostileReadings checks that memory and file stay bounded whatever a module reports.
func TestHostileReadings(t *testing.T) {
	s, c := open(t, Options{})
	c.step(time.Second)
	x := c.sample(1)
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		addReading(s, x, "wear.used_pct", v)
	}
	for _, key := range []string{"", strings.Repeat("x", 65), "a\nb", "\x00", "käse"} {
		addReading(s, x, key, 1)
	}
	bad := x
	bad.CPUPct = math.NaN()
	s.Add(bad)
	if d := s.Stats().Dropped; d != 9 {
		t.Errorf("%d dropped, want 9", d)
	}
	for i := range 1000 {
		addReading(s, x, fmt.Sprint("key", i), 1)
	}
	if d := s.Stats().Dropped; d != 1009 {
		t.Errorf("%d dropped, want 1009", d)
	}
	addReading(s, x, "wear.used_pct", math.MaxFloat64)
	flush(t, s)
	got := query(t, s, Query{Modules: []string{"wear"}})
	if len(got) != 1 || got[0].Modules[0].Value != float64(1<<53)/1000 {
		t.Errorf("a huge reading: %v", got)
	}
	checkIntegrity(t, s.path)
}

// TestNewNamesInAnOldFile checks that a key is written when it is first used, and that readings
// of keys which this version does not know stay in the file and are not returned.
func TestNewNamesInAnOldFile(t *testing.T) {
	s, c := open(t, Options{})
	c.step(time.Second)
	s.Add(c.sample(0), reading(keyNames[0], 1))
	flush(t, s)
	err := s.withDB(func(d *db) error {
		return d.run("INSERT INTO keys VALUES(255, 'later'); INSERT INTO readings SELECT id | 255, 7 FROM readings")
	})
	if err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, c, "boot-1")
	for range 20 {
		c.step(time.Second)
		s.Add(c.sample(0), reading("wear.pre_eol", 2))
		flush(t, s)
	}
	for _, step := range []int64{0, 1, 1 << 40} {
		rows := query(t, s, Query{FromMS: epoch, StepMS: step})
		got := fmt.Sprint(rows[0].Modules, rows[len(rows)-1].Modules)
		want := "[{network.bytes_in_per_s 1}] [{wear.pre_eol 2}]"
		if step > 1 {
			want = "[{network.bytes_in_per_s 1} {wear.pre_eol 2}] [{network.bytes_in_per_s 1} {wear.pre_eol 2}]"
		}
		if got != want {
			t.Errorf("step %d: readings %s, want %s", step, got, want)
		}
	}
	if got := ask(t, s, "SELECT group_concat(key) FROM keys"); got != "network.bytes_in_per_s,wear.pre_eol,later\n" {
		t.Errorf("keys %s", got)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "not a directory")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, c := open(t, Options{Path: filepath.Join(file, "history.db")})
	record(s, c, maxUnsaved+100)
	if err := s.Flush(t.Context()); err == nil {
		t.Fatal("flushed into a file that is no directory")
	}
	st := s.Stats()
	if st.Unsaved != maxUnsaved || st.Dropped != 100 || !strings.HasPrefix(st.State, "degraded:") || st.LastError == "" {
		t.Errorf("stats %+v, want %d unsaved, 100 dropped, degraded", st, maxUnsaved)
	}
	rows := query(t, s, Query{FromMS: epoch})
	if len(rows) != maxUnsaved || rows[0].TSMS != epoch+101_000 {
		t.Errorf("%d rows from %d, want the newest %d", len(rows), rows[0].TSMS, maxUnsaved)
	}
	if err := s.Close(); err == nil {
		t.Error("Close does not say that samples are lost")
	}
}

func TestOneSampleAMillisecond(t *testing.T) {
	s, c := open(t, Options{})
	c.step(time.Second)
	s.Add(sampleAt(epoch+5, 1))
	s.Add(sampleAt(epoch+5, 2))
	flush(t, s)
	s.Add(sampleAt(epoch+5, 3))
	for range 2 {
		if got := query(t, s, Query{FromMS: epoch}); len(got) != 1 || got[0].Sample != sampleAt(epoch+5, 1) {
			t.Errorf("got %v, want the first", got)
		}
		flush(t, s)
	}
	if st := s.Stats(); st.Repeated != 1 || st.Rows != 1 {
		t.Errorf("stats %+v, want one repeated and one row", st)
	}

	// The same for readings, looked for and read.
	for i := range 30 {
		addReading(s, sampleAt(epoch+int64(i), 0), "wear.used_pct", float64(i))
	}
	flush(t, s)
	addReading(s, sampleAt(epoch+29, 0), "wear.used_pct", 77)
	c.step(time.Second)
	for _, step := range []int64{0, 1000} {
		rows := query(t, s, Query{FromMS: epoch, StepMS: step, Modules: []string{"wear.used_pct"}})
		if last := rows[len(rows)-1]; last.TSMS != epoch+29 || last.Modules[0].Value != 29 {
			t.Errorf("step %d: the last is %+v, want the first reading of its millisecond", step, last)
		}
	}
}

func TestClosed(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 3)
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s.Add(c.sample(1))
	if err := s.Flush(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Flush: %v, want ErrClosed", err)
	}
	if err := s.Query(t.Context(), Query{}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Query: %v, want ErrClosed", err)
	}
	if st := s.Stats(); st.Unsaved != 0 || st.Rows != 3 {
		t.Errorf("stats %+v, want 3 rows", st)
	}
	for _, suffix := range []string{"-wal", "-shm"} {
		if _, err := os.Stat(s.path + suffix); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", suffix, err)
		}
	}
}

// TestDiskThatHangs checks that callers wait a bounded time for a disk that hangs.
func TestDiskThatHangs(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 3)
	if err := s.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Flush(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Flush: %v, want canceled", err)
	}
	record(s, c, 1) // does not wait
	if n := s.Stats().Unsaved; n != 4 {
		t.Errorf("%d unsaved, want 4", n)
	}
	s.unlock()
}
