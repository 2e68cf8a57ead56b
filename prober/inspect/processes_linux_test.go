package inspect

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// stat returns a /proc/PID/stat: ticks of CPU time in user mode, the start in ticks since boot, and
// the resident memory in pages. Parent is process 1, and there are three threads.
func stat(pid int, name string, ticks, start, pages int) string {
	return fmt.Sprintf("%d (%s) S 1 %d %d 0 -1 4194560 1 2 3 4 %d 0 7 8 20 0 3 0 %d 1000000 %d 18446744073709551615 1 1", pid, name, pid, pid, ticks, start, pages)
}

// writeStat replaces the stat of a process.
func writeStat(t *testing.T, m *Machine, pid int, text string) {
	t.Helper()
	if err := os.WriteFile(m.path("proc", strconv.Itoa(pid), "stat"), []byte(text), 0o644); err != nil {
		t.Error(err)
	}
}

// A process that uses 25 ticks, a quarter of a second, in a window of half a second is at 50 %.
func TestProcessesByCPU(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/10/stat": stat(10, "idle", 500, 1, 1),
		"proc/30/stat": stat(30, "busy", 100, 1, 1),
	})
	synctest.Test(t, func(t *testing.T) {
		time.AfterFunc(100*time.Millisecond, func() { writeStat(t, m, 30, stat(30, "busy", 125, 1, 1)) })
		got := m.Processes(within(t, time.Minute), ProcessQuery{SortBy: "cpu", Limit: 10, Window: 500 * time.Millisecond})
		if got.Total != 2 || got.Matching != 2 || got.WindowMS != 500 || len(got.Unfinished) > 0 {
			t.Errorf("got %+v, want two processes in a window of 500 ms", got)
		}
		checkCPU(t, got.Processes, map[string]float64{"busy": 50, "idle": 0}, "busy", "idle")
	})
}

// checkCPU checks the CPU use of processes by name, and the order of their names.
func checkCPU(t *testing.T, list []Process, want map[string]float64, order ...string) {
	t.Helper()
	var names []string
	for _, p := range list {
		names = append(names, p.Name)
		if p.CPUPct == nil || *p.CPUPct != want[p.Name] {
			t.Errorf("%s: got %+v, want %v %% of a processor", p.Name, p, want[p.Name])
		}
	}
	if !slices.Equal(names, order) {
		t.Errorf("the order is %q, want %q", names, order)
	}
}

func TestProcessesByMemory(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/1/stat": stat(1, "small", 0, 1, 10),
		"proc/2/stat": stat(2, "large", 0, 1, 900),
		"proc/3/stat": stat(3, "middle", 0, 1, 90),
	})
	got := m.Processes(within(t, 30*time.Second), ProcessQuery{SortBy: "memory", Limit: 2, Window: time.Millisecond})
	if got.Total != 3 || len(got.Processes) != 2 || got.Processes[0].Name != "large" || got.Processes[1].Name != "middle" {
		t.Fatalf("got %+v, want the two largest of three", got)
	}
	if want := 900 * pageSize; got.Processes[0].MemBytes != want {
		t.Errorf("resident memory is %d, want %d", got.Processes[0].MemBytes, want)
	}
}

func TestProcessDetails(t *testing.T) {
	const bootMS = treeTimeMS - 1_000_000 // the tree's uptime is 1000 s
	m := tree(t, map[string]string{
		"proc/uptime":     "1000.00 1.0\n",
		"proc/20/stat":    stat(20, "evil) S 1 (x", 0, 300, 1),
		"proc/20/status":  "Name:\tevil\nUid:\t4242424\t4242424\n",
		"proc/20/cmdline": "evil\x00--password=hunter2\x00",
	})
	q := ProcessQuery{SortBy: "cpu", Limit: 10, Window: time.Millisecond, Args: true}
	got := m.Processes(within(t, 30*time.Second), q)
	if len(got.Processes) != 1 {
		t.Fatalf("got %+v, want one process", got)
	}
	p := got.Processes[0]
	p.CPUPct = nil
	want := Process{PID: 20, PPID: 1, Name: "evil) S 1 (x", User: "4242424", State: "sleeping", MemBytes: pageSize, Threads: 3,
		StartedMS: bootMS + 3_000, Args: "evil --password=hunter2"}
	if p != want {
		t.Errorf("got  %+v\nwant %+v", p, want)
	}
	q.Args = false
	if got := m.Processes(within(t, 30*time.Second), q); len(got.Processes) != 1 || got.Processes[0].Args != "" {
		t.Errorf("got %+v, want no command line where none is asked for", got)
	}
}

// Files that are not processes, and processes that cannot be read, are not counted.
func TestProcessesByName(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/1/stat":  stat(1, "systemd", 0, 1, 1),
		"proc/20/stat": stat(20, "Evil", 0, 1, 1),
		"proc/40/stat": "garbage",
		"proc/50/stat": "",
		"proc/sys/x":   "",
	})
	got := m.Processes(within(t, 30*time.Second), ProcessQuery{SortBy: "cpu", Limit: 10, Window: time.Millisecond, Name: "eVIL"})
	if got.Total != 2 || got.Matching != 1 || len(got.Processes) != 1 || got.Processes[0].PID != 20 {
		t.Errorf("got %+v, want process 20 of two", got)
	}
}

// A process that ended is left out, and so is one whose number was given to another process.
func TestProcessesVanish(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/1/stat": stat(1, "stays", 1, 1, 1),
		"proc/2/stat": stat(2, "ends", 1, 1, 1),
		"proc/3/stat": stat(3, "replaced", 1, 1, 1),
	})
	synctest.Test(t, func(t *testing.T) {
		time.AfterFunc(100*time.Millisecond, func() {
			_ = os.RemoveAll(m.path("proc/2"))
			writeStat(t, m, 3, stat(3, "another", 1, 99, 1))
		})
		got := m.Processes(within(t, time.Minute), ProcessQuery{SortBy: "cpu", Limit: 10, Window: 500 * time.Millisecond})
		if len(got.Processes) != 1 || got.Processes[0].Name != "stays" || len(got.Unfinished) > 0 {
			t.Errorf("got %+v, want the process that stays", got)
		}
	})
}

func TestProcessesWithoutTime(t *testing.T) {
	files := make(map[string]string)
	for pid := 1; pid <= 2000; pid++ {
		files[fmt.Sprintf("proc/%d/stat", pid)] = stat(pid, "p", 1, 1, pid)
	}
	m := tree(t, files)

	t.Run("context has ended", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		got := m.Processes(ctx, ProcessQuery{SortBy: "cpu", Limit: 5})
		if !slices.Contains(got.Unfinished, "processes") || got.Processes == nil {
			t.Errorf("got %+v, want an empty list that is unfinished", got)
		}
	})
	t.Run("window takes all the time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			got := m.Processes(within(t, time.Second), ProcessQuery{SortBy: "memory", Limit: 5, Window: time.Minute})
			if !slices.Contains(got.Unfinished, "cpu") || got.WindowMS != 0 || got.Total != 2000 {
				t.Errorf("got %+v, want 2000 processes without CPU times", got)
			}
			if took := time.Since(begin); took > time.Second {
				t.Errorf("it took %v, want at most the time of its context", took)
			}
		})
	})
}

func TestParseStat(t *testing.T) {
	valid := procStat{pid: 7, ppid: 1, threads: 3, ticks: 5, start: 9, rss: 11, state: 'S'}
	named := func(name string) procStat { s := valid; s.name = name; return s }
	negative := named("x")
	negative.rss = 0
	tests := []struct {
		line string
		want procStat
	}{
		{stat(7, "a b", 5, 9, 11), named("a b")},
		{stat(7, "", 5, 9, 11), named("")},
		{stat(7, ") R 0 (", 5, 9, 11), named(") R 0 (")},
		{strings.Replace(stat(7, "x", 5, 9, 11), " 11 ", " -1 ", 1), negative},
	}
	for _, tt := range tests {
		got, wanted, ok := parseStat([]byte(tt.line), nil)
		if !ok || !wanted || got != tt.want {
			t.Errorf("parseStat(%q) = %+v, %v, %v, want %+v", tt.line, got, wanted, ok, tt.want)
		}
	}
	for _, line := range []string{"", "7 (x) S 1", "x (x) S 1 2", "7 (x)", ")(", "-1 (x) S 1 2"} {
		if got, _, ok := parseStat([]byte(line), nil); ok {
			t.Errorf("parseStat(%q) = %+v, want a refusal", line, got)
		}
	}
}
