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

	"golang.org/x/time/rate"
)

// How the relay sizes its heap. Messages of MCP clients make much garbage and leave little
// behind, so the heap of a small relay may grow to five times what is live before a
// collection: that trades memory for CPU. With thousands of idle devices the same factor
// would cost hundreds of megabytes and save nothing, so the growth is bounded by
// maxGarbage, but the heap at least doubles. While devices arrive it grows by half only: what
// an arrival leaves behind lies between what is freed, and no collection closes those gaps.
// A quiet relay is prepared for that.
//
// A calm relay returns free memory to the system; the runtime alone would keep most of it,
// because it collects too rarely to notice that a load is over.
//
// A collection takes about 2 ms of CPU for each MiB of the live heap. What is worth one is
// therefore a part of the live heap, and the time between two is in proportion to it: a device
// costs the same in a fleet of any size, and returning memory costs 0.4 % of a core at most,
// or twice as much if loads come and go.
//
// Two words for little load, which differ in what they are compared with:
//
//	quiet   allocates little for the size of its heap: the heap may grow by half only
//	calm    allocates little in bytes: free memory is returned to the system
const (
	adjustInterval = 250 * time.Millisecond

	maxGarbage         = 32 << 20 // bytes before a collection
	maxGCPercent       = 400      // of the live heap, see debug.SetGCPercent
	minGCPercent       = 100
	arrivalGCPercent   = 50
	minGCPercentChange = 10  // a smaller change is not worth a call
	arrivalPart        = 100 // of the linked devices: when as many arrive in a second
	quietPart          = 64  // of the live heap: a quiet relay allocates less in a second

	maxCalmAllocation = 1 << 20                // bytes a second in a calm relay,
	calmBurst         = 8 << 20                // and at once: a scrape of /metrics is no load
	minCalm           = 15 * time.Second       // before a relay counts as quiet or calm: a load may have pauses
	trimPart          = 8                      // of the live heap is returned at least,
	minTrimSize       = 512 << 10              // and this many bytes
	trimInterval      = 500 * time.Millisecond // between two times, for each MiB of the live heap
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

// gcPercent returns the growth in percent for a heap of that many live bytes, in a relay that
// is quiet or not, and to which arrivals of the linked devices come in a second. It is as much as
// maxGarbage, but within minGCPercent..maxGCPercent: 8 MiB live give 400, 16 MiB 200,
// and 32 MiB or more give 100.
func gcPercent(live uint64, isQuiet bool, linked int, arrivals uint64) int {
	if isQuiet || arrivals > uint64(linked/arrivalPart) {
		return arrivalGCPercent
	}
	return int(min(maxGCPercent, max(minGCPercent, maxGarbage*100/max(live, 1))))
}

// memoryTuner adjusts the garbage collector to load; its fields belong to run's goroutine.
type memoryTuner struct {
	devices   func() (linked int, accepted uint64)
	samples   []metrics.Sample
	accepted  uint64        // devices since the start, at the last adjust
	allocated uint64        // bytes since the start, at the last adjust
	percent   int           // GC percent in force; 0: GOGC decides
	calm      *rate.Limiter // allows the bytes that a calm relay allocates
	loadedAt  time.Time     // when the relay was last not quiet
	busyAt    time.Time     // when the relay was last not calm
	trimmedAt time.Time     // when memory was last returned to the system
}

// newMemoryTuner makes a tuner that leaves GOGC alone if it is set. devices counts those that are
// linked, and those accepted since the start.
func newMemoryTuner(devices func() (linked int, accepted uint64)) *memoryTuner {
	m := &memoryTuner{devices: devices, calm: newCalm(), loadedAt: time.Now(), busyAt: time.Now(), samples: []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}}
	metrics.Read(m.samples)
	m.allocated = uint64Of(&m.samples[1])
	if os.Getenv("GOGC") == "" {
		m.percent = maxGCPercent
		m.setPercent(arrivalGCPercent)
	}
	return m
}

func newCalm() *rate.Limiter { return rate.NewLimiter(maxCalmAllocation, calmBurst) }

// run adjusts the collector until ctx ends.
func (m *memoryTuner) run(ctx context.Context) {
	every(ctx, adjustInterval, func() { m.adjust(time.Now()) })
}

// adjust reads the heap's figures, chooses the growth of the next cycle, and returns memory to
// the system if that is due.
func (m *memoryTuner) adjust(now time.Time) {
	metrics.Read(m.samples)
	live, allocs, objects, free := uint64Of(&m.samples[0]), uint64Of(&m.samples[1]), uint64Of(&m.samples[2]), uint64Of(&m.samples[3])
	linked, accepted := m.devices()
	const perSecond = uint64(time.Second / adjustInterval)
	allocated, arrivals := allocs-m.allocated, perSecond*(accepted-m.accepted)
	m.allocated, m.accepted = allocs, accepted
	if perSecond*allocated >= live/quietPart {
		m.loadedAt = now
	}
	m.setPercent(gcPercent(live, now.Sub(m.loadedAt) >= minCalm, linked, arrivals))
	isFirst := m.isFirstTrim()
	if m.mayTrim(now, allocated, live, objects-min(live, objects)+free) {
		if isFirst { // a sync.Pool keeps the buffers of the load for two collections
			runtime.GC()
		}
		debug.FreeOSMemory()
	}
}

// setPercent changes the percentage by steps of at least minGCPercentChange, since each change
// stops the world.
func (m *memoryTuner) setPercent(p int) {
	if m.percent != 0 && (p >= m.percent+minGCPercentChange || p <= m.percent-minGCPercentChange) {
		m.percent = p
		debug.SetGCPercent(p)
	}
}

// isFirstTrim reports whether no memory was returned since the last load.
func (m *memoryTuner) isFirstTrim() bool { return m.trimmedAt.Before(m.busyAt) }

// mayTrim reports whether memory is to be returned now, and notes that it was. allocated is how
// many bytes the relay allocated since the last time, live how many are live, and unused how many
// can be returned as far as is known: what died since the last collection still counts as live. A load
// may end right after a collection, and a calm relay would come to the next one only when the
// runtime forces it, so the first time after a load does not ask how much is unused.
func (m *memoryTuner) mayTrim(now time.Time, allocated, live, unused uint64) bool {
	if !m.calm.AllowN(now, int(min(allocated, math.MaxInt32))) {
		m.busyAt = now
	}
	if now.Sub(m.busyAt) < minCalm || !m.isFirstTrim() && unused < max(minTrimSize, live/trimPart) || now.Sub(m.trimmedAt) < trimInterval*time.Duration(live>>20) {
		return false
	}
	m.trimmedAt = now
	return true
}

// uint64Of returns the value of a runtime metric, 0 if this runtime does not have it.
func uint64Of(s *metrics.Sample) uint64 {
	if s.Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return s.Value.Uint64()
}
