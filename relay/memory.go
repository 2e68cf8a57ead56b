package relay

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"syscall"
	"time"
)

// The relay's memory. Messages of MCP clients make much garbage and leave little behind,
// so the heap of a small relay may grow to five times what lives before it is collected:
// that is memory traded for time. With thousands of idle devices the same factor would
// cost hundreds of megabytes and save nothing, so the growth is bounded by gcRoom, and
// the heap at least doubles. While devices arrive by the hundred it may grow by half
// only: what they leave behind lies between what stays, and no collection closes the
// gaps. What a storm has left in whole pages is given back to the system when the relay
// is calm; the runtime alone would keep most of it.
const (
	tendEvery = time.Second

	gcRoom     = 32 << 20 // bytes of garbage before a collection
	gcMost     = 400      // percent of what lives, see debug.SetGCPercent
	gcLeast    = 100
	gcStorm    = 50
	stormSize  = 100     // arrivals in a second
	gcNoticed  = 10      // a smaller change of the percentage is not worth a call
	calmBytes  = 1 << 20 // allocated in a second at most, in a calm relay
	calmAfter  = 5       // calm seconds before memory is given back
	worthBytes = 16 << 20
	worthEvery = time.Minute // a collection of 5,000 devices takes 50 ms of CPU
)

// tuneGC sets what stays as it is. GOGC and GOMEMLIMIT in the environment win.
func tuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcMost)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit())
	}
}

// memoryLimit is three quarters of the machine's memory.
func memoryLimit() int64 {
	var si syscall.Sysinfo_t
	if syscall.Sysinfo(&si) != nil {
		return math.MaxInt64
	}
	return int64(uint64(si.Totalram) * uint64(si.Unit) / 4 * 3)
}

// gcPercent is the growth for a heap of that many living bytes.
func gcPercent(live uint64) int {
	return int(min(gcMost, max(gcLeast, gcRoom*100/max(live, 1))))
}

// memory is what the relay looks at, each second.
type memory struct {
	arrivals  func() uint64 // devices since the start
	samples   []metrics.Sample
	arrived   uint64 // arrivals, when last looked
	percent   int    // in force; 0: the environment's
	allocated uint64 // bytes since the start, when last looked
	calm      int    // seconds
	trimmed   time.Time
}

func newMemory(arrivals func() uint64) *memory {
	m := &memory{arrivals: arrivals, samples: []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}}
	if os.Getenv("GOGC") == "" {
		m.percent = gcMost
	}
	return m
}

// tend keeps the heap in proportion until ctx ends.
func (m *memory) tend(ctx context.Context) {
	t := time.NewTicker(tendEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			m.look(now)
		}
	}
}

func (m *memory) look(now time.Time) {
	metrics.Read(m.samples)
	live, allocs, objects, free := m.value(0), m.value(1), m.value(2), m.value(3)
	p, arrived := gcPercent(live), m.arrivals()
	if arrived-m.arrived >= stormSize {
		p = gcStorm
	}
	m.arrived = arrived
	if m.percent != 0 && (p >= m.percent+gcNoticed || p <= m.percent-gcNoticed) {
		m.percent = p
		debug.SetGCPercent(p)
	}
	if m.calm++; allocs-m.allocated > calmBytes {
		m.calm = 0
	}
	m.allocated = allocs
	garbage := objects - min(live, objects)
	if m.calm >= calmAfter && garbage+free >= worthBytes && now.Sub(m.trimmed) >= worthEvery {
		m.trimmed = now
		debug.FreeOSMemory()
	}
}

func (m *memory) value(i int) uint64 {
	if m.samples[i].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return m.samples[i].Value.Uint64()
}
