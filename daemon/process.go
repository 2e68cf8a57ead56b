package daemon

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// A daemon that has its process for itself works for some tenth of a millisecond each second. The
// defaults of Go's runtime are for servers: they cost such a process more than its own work does.

const (
	// gcPercent makes the heap 2 MB at most before it is collected. A query allocates more than the
	// daemon does in an hour without one.
	gcPercent = 50
	// returnAfter is how much is allocated, in bytes, until memory is returned again: by a few commands,
	// or by the daemon alone in some minutes.
	returnAfter = 256 << 10
)

// TuneProcess sets what the Go runtime does for a process that only runs a Daemon; see
// Options.OwnsProcess. It is called first thing, because it may execute the program again.
// GOMAXPROCS and GOGC in the environment win.
//
// The heap profile is off. Nothing reads it, and its samples are spread over a table of 1.4 MB.
//
// One processor: with more, each sample wakes threads that find nothing to do, which doubles the
// wake-ups and costs a third of the CPU. A system call that hangs does not hold the processor: the
// runtime gives it to another thread.
func TuneProcess() {
	RelaxTimers()
	runtime.MemProfileRate = 0
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// memoryReturner returns memory to the system that the start, a query or an export needed: the
// daemon would keep it otherwise, and the next collection may be minutes away.
type memoryReturner struct {
	allocated uint64 // bytes since the start, when memory was last returned
	sample    [1]metrics.Sample
}

// poll returns memory if enough was allocated since the last time. release drops buffers first.
func (m *memoryReturner) poll(release func()) {
	m.sample[0].Name = "/gc/heap/allocs:bytes"
	metrics.Read(m.sample[:])
	now := m.sample[0].Value.Uint64()
	if m.allocated != 0 && now-m.allocated < returnAfter {
		return
	}
	release()
	debug.FreeOSMemory()
	unmapProgram()
	metrics.Read(m.sample[:])
	m.allocated = m.sample[0].Value.Uint64()
}
