package history

import (
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"time"

	"agentctl/prober"
)

// values is a sample in the integers the file has. They hold all that the kernel tells:
// it counts memory in KiB and loads in hundredths, and the sampler rounds percents so.
type values struct {
	cpu, disk  int32 // hundredths of a percent
	load       [3]int32
	mem, total int64 // KiB
}

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

// diskUnknown is the disk of a sample that has none.
const diskUnknown = -1

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

// hundredths rounds; what is beyond 21 million stays there.
func hundredths(v float64) int32 {
	return int32(min(math.Round(v*100), math.MaxInt32))
}

// milli is v in thousandths, ok when it is a number. It is kept within 2^53, where
// readers of JSON see it exactly.
func milli(v float64) (_ int64, ok bool) {
	const most = 1 << 53
	return int64(max(-most, min(math.Round(v*1000), most))), !math.IsNaN(v) && !math.IsInf(v, 0)
}

// Readings of other modules lie by time and then by module: in the file next to each
// other as they were written, so that a commit touches few pages.
//
//	id = ts * 256 + key, key 1..255

func readingID(ts int64, key uint8) int64 { return ts<<8 | int64(key) }
func readingTS(id int64) int64            { return id >> 8 }
func readingKey(id int64) uint8           { return uint8(id) }

// Samples taken while the time is unknown have ids below zero: a slot for each boot,
// and in it the milliseconds of that boot's clock. A time that becomes known moves them
// by one addition.
//
//	id = (slot - slots) * 2^42 + mono_ms
const (
	slots      = 1 << 12
	slotWidth  = 1 << 42 // 139 years
	memorySlot = 0       // this boot, as long as it has none in the file
)

func slotBase(slot int64) int64 { return (slot - slots) * slotWidth }

func undatedID(slot int64, mono time.Duration) int64 {
	return slotBase(slot) + max(0, min(mono.Milliseconds(), slotWidth-1))
}

// processBootID names this process, where the machine's start has no name.
func processBootID() string { return "process-" + rand.Text() }
