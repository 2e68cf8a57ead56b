package history

import (
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"time"

	"agentctl/prober"
)

// values is a sample in the integers of the file. They lose nothing: the kernel counts
// memory in KiB and loads in hundredths, and the sampler rounds percentages to hundredths.
type values struct {
	cpu, disk  int32 // hundredths of a percent
	load       [3]int32
	mem, total int64 // KiB
}

// valuesOf converts a sample. One whose time or disk is not known is accepted.
func valuesOf(x *prober.Sample) (values, error) {
	if err := x.Check(); err != nil && !errors.Is(err, prober.ErrClock) && !errors.Is(err, prober.ErrDisk) {
		return values{}, fmt.Errorf("history: %w", err)
	}
	disk := hundredths(x.DiskPct)
	if x.DiskErr != nil {
		disk = diskUnknown
	}
	return values{
		cpu:   hundredths(x.CPUPct),
		disk:  disk,
		load:  [3]int32{hundredths(x.Load1), hundredths(x.Load5), hundredths(x.Load15)},
		mem:   int64(x.MemBytes >> 10),
		total: int64(x.MemTotalBytes >> 10),
	}, nil
}

// diskUnknown is stored for a sample whose disk is not known. The schema has no NULLs.
const diskUnknown = -1

// sample is the reverse of valuesOf.
func (v *values) sample(ts int64) prober.Sample {
	x := prober.Sample{
		TSMS:          ts,
		CPUPct:        float64(v.cpu) / 100,
		MemBytes:      uint64(v.mem) << 10,
		MemTotalBytes: uint64(v.total) << 10,
		DiskPct:       float64(v.disk) / 100,
		Load1:         float64(v.load[0]) / 100,
		Load5:         float64(v.load[1]) / 100,
		Load15:        float64(v.load[2]) / 100,
	}
	if v.disk < 0 {
		x.DiskPct, x.DiskErr = 0, prober.ErrDisk
	}
	return x
}

// hundredths rounds, and limits to what 32 bits hold.
func hundredths(v float64) int32 {
	return int32(min(math.Round(v*100), math.MaxInt32))
}

// milli is v in thousandths, ok when it is a number. It is limited to 2^53, which JSON
// readers represent exactly.
func milli(v float64) (_ int64, ok bool) {
	const limit = 1 << 53
	return int64(max(-limit, min(math.Round(v*1000), limit))), !math.IsNaN(v) && !math.IsInf(v, 0)
}

// A reading is identified by time and sensor (Record.ID, 1..255), so that readings are in
// the file in the order in which they were written and a commit touches few pages:
//
//	id = ts * 256 + key
const keyBits = 8

func readingID(ts int64, key uint8) int64 { return ts<<keyBits | int64(key) }
func readingTS(id int64) int64            { return id >> keyBits }
func readingKey(id int64) uint8           { return uint8(id) }

// Undated samples, which were taken while the time was unknown, have ids below zero: a slot
// for each boot, and in it the milliseconds of that boot's clock. Once the time is known one
// addition moves them.
//
//	id = (slot - slots) * 2^42 + mono_ms
const (
	// slots bounds the boots in the file whose time is not known. All slots together are 2^54 ms, so
	// that the id of a reading, 256 times that, fits 64 bits (minTS).
	slots = 1 << 12
	// slotWidth is 139 years in milliseconds, which no boot's clock reaches.
	slotWidth = 1 << 42
	// memorySlot is that of unsaved samples. A flush moves them to the boot's slot.
	memorySlot = 0
)

// slotBase is the id of a slot's first millisecond. It is negative for every slot.
func slotBase(slot int64) int64 { return (slot - slots) * slotWidth }

// undatedID is the id of an undated sample, by the boot's clock.
func undatedID(slot int64, mono time.Duration) int64 {
	return slotBase(slot) + max(0, min(mono.Milliseconds(), slotWidth-1))
}

// processBootID stands for the boot id where the kernel has none.
func processBootID() string { return "process-" + rand.Text() }
