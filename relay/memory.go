package relay

import (
	"context"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"syscall"
	"time"
)

// How the relay sizes its heap. Messages of MCP clients make much garbage and leave little
// behind, so the heap of a small relay may grow to five times what is live before a
// collection: that trades memory for CPU. With thousands of idle devices the same factor
// would cost hundreds of megabytes and save nothing, so the growth is bounded by
// maxGarbage, but the heap at least doubles. While devices arrive by the hundred it grows
// by half only: what an arrival leaves behind lies between what stays, and no collection
// closes those gaps. When the relay is calm, it returns whole free pages to the system;
// the runtime alone would keep most of them.
const (
	adjustInterval = time.Second

	maxGarbage         = 32 << 20 // bytes before a collection
	maxGCPercent       = 400      // of the live heap, see debug.SetGCPercent
	minGCPercent       = 100
	stormGCPercent     = 50
	minStormArrivals   = 100     // devices in a second
	minGCPercentChange = 10      // a smaller change is not worth a call
	maxCalmAllocation  = 1 << 20 // bytes a second in a calm relay
	minCalmSeconds     = 5       // before memory is returned
	minTrimSize        = 16 << 20
	minTrimInterval    = time.Minute // a collection with 5,000 devices takes 50 ms of CPU
	// After a load, such as a flood, less is worth returning, and sooner.
	minTrimSizeAfterLoad     = 2 << 20
	minTrimIntervalAfterLoad = 10 * time.Second
	loadAllocation           = 48 << 20 // bytes a second
	// A relay that is never calm returns what is far more than it uses, once a load is over.
	minTrimSizeBusy = 64 << 20
)

// tuneGC sets what does not change. GOGC and GOMEMLIMIT in the environment win.
func tuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(maxGCPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit())
	}
}

// tuneScheduler lets two goroutines run at a time on a machine with one CPU, where Go runs one. It
// would look at sockets and timers only between goroutines of a long queue; with large requests in
// that queue, a small one waits for half a second. The kernel shares the CPU among threads by the
// millisecond. GOMAXPROCS in the environment wins.
func tuneScheduler() {
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) == 1 {
		runtime.GOMAXPROCS(2)
	}
}

// memoryLimit is three quarters of the machine's memory, in bytes: the rest is for the page
// cache that SQLite relies on, kernel socket buffers and other processes. It does not know
// the limit of a container; GOMEMLIMIT does.
func memoryLimit() int64 {
	var si syscall.Sysinfo_t
	if syscall.Sysinfo(&si) != nil {
		return math.MaxInt64
	}
	return int64(uint64(si.Totalram) * uint64(si.Unit) / 4 * 3)
}

// gcPercent returns the growth in percent for a heap of that many live bytes: as much as
// maxGarbage, but within minGCPercent..maxGCPercent. 8 MiB live give 400, 16 MiB 200, and
// 32 MiB or more give 100.
func gcPercent(live uint64) int {
	return int(min(maxGCPercent, max(minGCPercent, maxGarbage*100/max(live, 1))))
}

// memoryTuner adjusts the garbage collector to load; its fields belong to run's goroutine.
type memoryTuner struct {
	arrivals    func() uint64 // devices accepted since the start
	samples     []metrics.Sample
	arrived     uint64 // arrivals at the last adjust
	percent     int    // GC percent in force; 0: GOGC decides
	allocated   uint64 // bytes since the start, at the last adjust
	calmSeconds int    // in a row
	lessSeconds int    // the same, without a load
	hadLoad     bool   // since the last trim
	trimmedAt   time.Time
}

// newMemoryTuner makes a tuner that leaves GOGC alone if it is set; arrivals counts the
// devices accepted since the start.
func newMemoryTuner(arrivals func() uint64) *memoryTuner {
	m := &memoryTuner{arrivals: arrivals, samples: []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}}
	if os.Getenv("GOGC") == "" {
		m.percent = maxGCPercent
	}
	return m
}

// run adjusts the collector until ctx ends.
func (m *memoryTuner) run(ctx context.Context) {
	every(ctx, adjustInterval, func() { m.adjust(time.Now()) })
}

// adjust reads the heap's figures and chooses the growth of the next cycle. The percentage
// changes by steps of at least minGCPercentChange, since each change stops the world.
//
// It returns memory to the system when all three hold: no more than maxCalmAllocation was
// allocated in each of the last minCalmSeconds, at least minTrimSize can be returned, and
// the last time was minTrimInterval ago. After a load both bounds are lower. A relay that is busy
// but under no load returns minTrimSizeBusy and more.
func (m *memoryTuner) adjust(now time.Time) {
	metrics.Read(m.samples)
	live, allocs, objects, free := uint64Of(&m.samples[0]), uint64Of(&m.samples[1]), uint64Of(&m.samples[2]), uint64Of(&m.samples[3])
	p, arrived := gcPercent(live), m.arrivals()
	if arrived-m.arrived >= minStormArrivals {
		p = stormGCPercent
	}
	m.arrived = arrived
	if m.percent != 0 && (p >= m.percent+minGCPercentChange || p <= m.percent-minGCPercentChange) {
		m.percent = p
		debug.SetGCPercent(p)
	}
	if m.mayTrim(now, allocs, objects-min(live, objects)+free) {
		debug.FreeOSMemory()
	}
}

// mayTrim reports whether memory is to be returned now, and notes that it was. It is called each
// second, with the bytes allocated since the start and those that can be returned.
func (m *memoryTuner) mayTrim(now time.Time, allocs, unused uint64) bool {
	rate := allocs - m.allocated
	m.allocated = allocs
	m.calmSeconds++
	m.lessSeconds++
	if rate > maxCalmAllocation {
		m.calmSeconds = 0
	}
	if rate > loadAllocation {
		m.lessSeconds, m.hadLoad = 0, true
	}
	size, interval := uint64(minTrimSize), minTrimInterval
	if m.hadLoad {
		size, interval = minTrimSizeAfterLoad, minTrimIntervalAfterLoad
	}
	isCalm := m.calmSeconds >= minCalmSeconds && unused >= size
	isExcess := m.lessSeconds >= minCalmSeconds && unused >= minTrimSizeBusy
	if !isCalm && !isExcess || now.Sub(m.trimmedAt) < interval {
		return false
	}
	m.trimmedAt, m.hadLoad = now, false
	return true
}

// uint64Of returns the value of a runtime metric, 0 if this runtime does not have it.
func uint64Of(s *metrics.Sample) uint64 {
	if s.Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return s.Value.Uint64()
}
