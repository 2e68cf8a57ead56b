package history

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentctl/prober"
)

// hours is a Store with a sample for each second of n hours, the last 200 in memory, and
// with the readings of a board that has seven.
func hours(t testing.TB, n int) *Store {
	t.Helper()
	s, c := open(t, Options{Path: filepath.Join(quickDir(t), "history.db"), MaxAge: 10 * 365 * 24 * time.Hour})
	var readings []prober.Reading
	for _, key := range keyNames[:9] {
		if !strings.HasPrefix(key, "network.errors") { // there were none
			readings = append(readings, reading(key, 1))
		}
	}
	for i := range n * 3600 {
		c.step(time.Second)
		if i%10 == 0 {
			s.Add(c.sample(i), readings...)
		} else {
			s.Add(c.sample(i))
		}
		if left := n*3600 - i - 1; left%1700 == 200 {
			flush(t, s)
		}
	}
	return s
}

// cpu is what this thread used, to the nanosecond; the caller holds it.
func cpu() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// leastCPU is the least CPU time of five runs, all on the calling goroutine's thread.
func leastCPU(run func()) time.Duration {
	least := time.Hour
	for range 5 {
		before := cpu()
		run()
		least = min(least, cpu()-before)
	}
	return least
}

// everyRow is what reading all rows with all modules costs on this machine at this moment. The limits
// of the tests below are parts of it: an absolute time would depend on the machine. How many
// milliseconds a query takes is a figure of `make bench`.
func everyRow(t *testing.T, s *Store, n int) time.Duration {
	t.Helper()
	return leastCPU(func() {
		rows := 0
		if err := s.Query(context.Background(), Query{FromMS: epoch}, func(Row) error { rows++; return nil }); err != nil || rows < 3600*n {
			t.Fatalf("%d rows, want %d: %v", rows, 3600*n, err)
		}
	})
}

// checkCost compares a cost with a part of the cost of reading every row.
func checkCost(t *testing.T, what string, took, all time.Duration, part float64) {
	t.Helper()
	ratio := float64(took) / float64(all)
	t.Logf("%s: %v of CPU, %.3f of the %v for every row", what, took, ratio, all)
	if ratio > part && !raceDetector && strconv.IntSize == 64 { // SQLite counts in 64 bits
		t.Errorf("%s took %.3f of the CPU time of reading every row, want at most %.3f", what, ratio, part)
	}
}

// TestQueryCost: a query in steps of a minute or an hour seeks its rows and does not read them all,
// names that were never recorded included, and a query in steps of a second, which is every
// row, takes little memory. In a run that is not slow two hours stand for a day.
func TestQueryCost(t *testing.T) {
	n := often(24, 2)
	s := hours(t, n)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all := everyRow(t, s, n)
	tests := []struct {
		step    int64
		modules []string
		rows    int     // the last sample begins another bucket
		part    float64 // of the cost of every row
	}{
		{60_000, []string{"cpu", "memory"}, 60*n + 1, 0.25},
		{60_000, nil, 60*n + 1, 0.5},
		{3600_000, nil, n + 1, 0.06},
	}
	for _, tt := range tests {
		took := leastCPU(func() {
			rows := 0
			q := Query{FromMS: epoch, ToMS: epoch + msPerDay, StepMS: tt.step, Modules: tt.modules}
			err := s.Query(context.Background(), q, func(Row) error { rows++; return nil })
			if err != nil || rows != tt.rows {
				t.Fatalf("%d rows, want %d: %v", rows, tt.rows, err)
			}
		})
		checkCost(t, fmt.Sprintf("%d hours of %v by %d s", n, tt.modules, tt.step/1000), took, all, tt.part)
	}

	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, most, rows := m.HeapAlloc, uint64(0), 0
	started := cpu()
	err := s.Query(context.Background(), Query{FromMS: epoch, StepMS: 1000}, func(Row) error {
		if rows++; rows%1200 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapAlloc)
		}
		return nil
	})
	if err != nil || rows != 3600*n {
		t.Fatalf("%d rows, want %d: %v", rows, 3600*n, err)
	}
	t.Logf("%d hours by seconds: %v of CPU (with %d collections), %d KiB more on the heap", n, cpu()-started, rows/1200, (int64(most)-int64(before))>>10)
	if most > before+512<<10 {
		t.Errorf("the heap grew by %d KiB during the query, want at most 512", (most-before)>>10)
	}
}

// TestSeriesCost: a series of two metrics in steps of a minute costs a part of what reading every row
// does, for each aggregate. In a run that is not slow two hours stand for a day.
func TestSeriesCost(t *testing.T) {
	n := often(24, 2)
	s := hours(t, n)
	runtime.LockOSThread() // cpu is that of this thread
	defer runtime.UnlockOSThread()
	all := everyRow(t, s, n)
	for _, aggregate := range []string{AggregateLast, AggregateMean, AggregateMin, AggregateMax} {
		took := leastCPU(func() {
			got := series(t, s, SeriesQuery{FromMS: epoch + 1, EndMS: epoch + int64(n)*3_600_000, StepMS: 60_000, Metrics: []string{"cpu_pct", "mem_bytes"}, Aggregate: aggregate})
			if len(got) != 60*n {
				t.Fatalf("%s: %d steps, want %d", aggregate, len(got), 60*n)
			}
		})
		checkCost(t, fmt.Sprintf("%d hours by minutes, %s", n, aggregate), took, all, 0.75)
	}
}

// memoryEnv makes the test binary measure what an open Store takes.
const memoryEnv = "HISTORY_TEST_MEMORY"

// TestMemory: a Store that records takes at most 2.5 MB of anonymous memory.
func TestMemory(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector takes more; `make test-slow` runs it without")
	}
	if dir := os.Getenv(memoryEnv); dir != "" {
		measureMemory(t, dir)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run", "^TestMemory$", "-test.v")
	cmd.Env = append(os.Environ(), memoryEnv+"="+quickDir(t))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var anon, file int64
	_, line, _ := strings.Cut(string(out), "added ")
	if _, err := fmt.Sscanf(line, "%d KiB anonymous, %d KiB of files", &anon, &file); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("a Store that records: %d KiB of anonymous memory, %d KiB of the program's own pages", anon, file)
	if anon > 2500 {
		t.Errorf("%d KiB of anonymous memory, want at most 2500", anon)
	}
}

func measureMemory(t *testing.T, dir string) {
	c := &fakeClock{wall: epoch, mono: time.Minute}
	for range 3 { // what the runtime takes once
		debug.FreeOSMemory()
	}
	anon, file := resident(t)
	s, err := Open(Options{Path: filepath.Join(dir, "history.db"), Now: c.now, Mono: c.monotonic, BootID: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	for range 600 { // two days
		record(s, c, 300)
		flush(t, s)
	}
	for range 300 {
		s.Add(c.sample(1))
	}
	debug.FreeOSMemory()
	anon2, file2 := resident(t)
	fmt.Printf("added %d KiB anonymous, %d KiB of files\n", anon2-anon, file2-file)
}

// resident is the process's resident memory, in KiB.
func resident(t *testing.T) (anon, file int64) {
	b, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		t.Skip(err)
	}
	var rss int64
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Rss:"); ok {
			fmt.Sscan(v, &rss)
		}
		if v, ok := strings.CutPrefix(line, "Anonymous:"); ok {
			fmt.Sscan(v, &anon)
		}
	}
	return anon, rss - anon
}

func BenchmarkFlush(b *testing.B) {
	s, c := open(b, Options{Path: filepath.Join(quickDir(b), "history.db")})
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		record(s, c, 300)
		b.StartTimer()
		if err := s.Flush(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/300, "ns/sample")
}

func BenchmarkAdd(b *testing.B) {
	s, c := open(b, Options{Path: filepath.Join(b.TempDir(), "history.db")})
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		c.step(time.Second)
		s.Add(c.sample(i))
	}
}

func BenchmarkQuery(b *testing.B) {
	s := hours(b, 24)
	for _, step := range []int64{60_000, 10_000, 5_000, 1000, 0} {
		b.Run(fmt.Sprint("day/step_ms=", step), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Query(context.Background(), Query{FromMS: epoch, StepMS: step}, func(Row) error { return nil }); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
