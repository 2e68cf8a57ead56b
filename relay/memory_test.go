package relay

import (
	"math"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"
)

func TestGCPercent(t *testing.T) {
	tests := []struct {
		name           string
		live           uint64
		isQuiet        bool
		linked, arrive int
		want           int
	}{
		{"nothing is live", 0, false, 0, 0, 400},
		{"small", maxGarbage / 4, false, 500, 0, 400},
		{"medium", maxGarbage / 2, false, 2000, 0, 200},
		{"large", maxGarbage, false, 5000, 0, 100},
		{"huge", 1 << 40, false, 20000, 0, 100},
		{"quiet", maxGarbage / 4, true, 500, 0, 50},
		{"large and quiet", maxGarbage, true, 5000, 0, 50},
		{"the first device", maxGarbage / 4, false, 1, 1, 50},
		{"some of a few", maxGarbage / 4, false, 500, 6, 50},
		{"some of many", maxGarbage, false, 5000, 50, 100},
		{"many", maxGarbage, false, 5000, 51, 50},
	}
	for _, tt := range tests {
		if got := gcPercent(tt.live, tt.isQuiet, tt.linked, uint64(tt.arrive)); got != tt.want {
			t.Errorf("%s: %d %%, want %d", tt.name, got, tt.want)
		}
	}
}

// TestTrimInProportion: what a calm relay leaves unused, and how often it returns memory, are in
// proportion to its live heap.
func TestTrimInProportion(t *testing.T) {
	for _, live := range []uint64{1 << 20, 4 << 20, 24 << 20, 100 << 20} {
		now := time.Now()
		m := memoryTuner{calm: newCalm(), busyAt: now}
		second := func(allocated, unused uint64) bool {
			now = now.Add(time.Second)
			return m.mayTrim(now, allocated, live, unused)
		}
		wait := func(limit time.Duration) time.Duration {
			begin := now
			for !second(0, 1<<40) {
				if now.Sub(begin) > limit {
					t.Fatalf("%d MiB live: nothing was returned in %s", live>>20, limit)
				}
			}
			return now.Sub(begin)
		}
		for range 30 {
			if second(2*maxCalmAllocation, 1<<40) {
				t.Fatalf("%d MiB live: returned under load", live>>20)
			}
		}
		if got := wait(time.Minute); got != minCalm {
			t.Errorf("%d MiB live: returned after %s of calm, want %s", live>>20, got, minCalm)
		}
		interval := time.Duration(live>>20) * time.Second / 2
		if got := wait(2 * interval); got < interval || got > max(time.Second, interval) {
			t.Errorf("%d MiB live: returned again after %s, want %s", live>>20, got, interval)
		}
		now = now.Add(time.Hour)
		if least := max(minTrimSize, live/trimPart); second(0, least-1) || !second(0, least) {
			t.Errorf("%d MiB live: %d bytes are not the least that is returned", live>>20, least)
		}
	}
}

// TestTrimAfterLoad: the end of a load returns memory even if nothing is known to be unused, because
// all of it was live at the last collection, and a part is in a pool.
func TestTrimAfterLoad(t *testing.T) {
	t.Setenv("GOGC", "off") // no collection but those of the tuner
	old := debug.SetGCPercent(-1)
	defer debug.SetGCPercent(old)
	m := newMemoryTuner(func() (int, uint64) { return 0, 0 })
	now := time.Now()
	sink = make([]byte, 32<<20)
	runtime.GC()
	var buffers sync.Pool
	buffers.Put(new([32 << 20]byte))
	m.adjust(now.Add(time.Second)) // busy
	sink = nil
	for end := now.Add(time.Minute); now.Before(end); now = now.Add(adjustInterval) {
		m.adjust(now.Add(time.Second))
	}
	if m.trimmedAt.IsZero() {
		t.Fatal("nothing was returned after a load")
	}
	var stats runtime.MemStats
	if runtime.ReadMemStats(&stats); stats.HeapInuse > 24<<20 {
		t.Errorf("%d bytes in use after a load of 64 MiB", stats.HeapInuse)
	}
}

// TestScrapesAreCalm: large requests that come rarely do not keep a relay from returning memory.
func TestScrapesAreCalm(t *testing.T) {
	m := memoryTuner{calm: newCalm()}
	now := time.Now()
	m.busyAt = now
	for i := range 4 * 60 {
		now = now.Add(adjustInterval)
		allocated := uint64(10 << 10)
		if i%40 == 0 {
			allocated = 6 << 20
		}
		if m.mayTrim(now, allocated, 8<<20, 0) {
			return
		}
	}
	t.Error("6 MiB every 10 s are called a load")
}

// TestMemoryIsReturned: the figures of the runtime make a tuner return memory after a load.
func TestMemoryIsReturned(t *testing.T) {
	t.Setenv("GOGC", "400") // leave this process's percentage alone
	m := newMemoryTuner(func() (int, uint64) { return 0, 0 })
	now := time.Now()
	step := func(garbage int) (trimmed bool) {
		now = now.Add(adjustInterval)
		sink = make([]byte, garbage)
		sink = nil
		m.adjust(now)
		return m.trimmedAt.Equal(now)
	}
	begin := now
	for now.Sub(begin) < 2*minCalm {
		if step(maxCalmAllocation) {
			t.Fatal("memory was returned under load")
		}
	}
	for end := now.Add(2 * minCalm); !step(1 << 10); {
		if now.After(end) {
			t.Skip("a collection came by itself and left nothing to return")
		}
	}
}

// TestNoMemoryTuning: a relay adjusts the garbage collector of its process, unless an option says no.
func TestNoMemoryTuning(t *testing.T) {
	t.Setenv("GOGC", "")
	const before = 123
	percent, limit := debug.SetGCPercent(before), debug.SetMemoryLimit(math.MaxInt64)
	defer func() { debug.SetGCPercent(percent); debug.SetMemoryLimit(limit) }()
	for _, isOff := range []bool{true, false} {
		r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0", NoMemoryTuning: isOff})
		if err != nil {
			t.Fatal(err)
		}
		run(t, r)()
		got, gotLimit := debug.SetGCPercent(before), debug.SetMemoryLimit(math.MaxInt64)
		if (got == before) != isOff || (gotLimit == math.MaxInt64) != isOff {
			t.Errorf("NoMemoryTuning %t: the percentage is %d and was %d; the limit is %d and was none", isOff, got, before, gotLimit)
		}
	}
}

var sink []byte
