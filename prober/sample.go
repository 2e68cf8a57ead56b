package prober

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// MinTSMS is the earliest ts_ms a frame may carry (2023-11-14; RFC-0009 §5.1).
// A board without a battery-backed clock boots below it.
const MinTSMS = 1_700_000_000_000

// maxBytes bounds memory sizes: above it an integer is no longer exact in the
// JSON readers that keep numbers as float64.
const maxBytes = 1 << 53

// ErrClock means that a sample is valid except for its time. It may be recorded with its
// Mono, and must not be sent.
var ErrClock = errors.New("the clock is not set yet (before 2023-11-14)")

// ErrDisk means that a sample is valid except for disk_pct, which is not known. It may be
// recorded, and is not a frame.
var ErrDisk = errors.New("the disk usage is not known")

// Source is where readings come from: the machine, a mock board, a test.
//
// Read sets everything but TSMS and Mono. It is called from one goroutine at a time, so it
// may keep the CPU counters of the previous reading, and should return within milliseconds.
// It returns an error when there is no reading, and never invents one. Close is called
// once, after the last Read.
type Source interface {
	Read(*Sample) error
	Close() error
}

// Sample is the readings of one tick: the frame of RFC-0009 §5.1 without the node_id, which
// the sender adds, and with Modules, which no frame has.
type Sample struct {
	TSMS   int64   `json:"ts_ms"`   // trusted wall clock, milliseconds since 1970
	CPUPct float64 `json:"cpu_pct"` // busy share of all CPUs together, 0..100
	// MemBytes is MemTotal - MemAvailable; MemTotalBytes is at least 1.
	MemBytes      uint64 `json:"mem_bytes"`
	MemTotalBytes uint64 `json:"mem_total_bytes"`
	// DiskPct is used / (used + available to users), 0..100, as df computes it.
	DiskPct float64 `json:"disk_pct"`
	Load1   float64 `json:"load_1m"`
	Load5   float64 `json:"load_5m"`
	Load15  float64 `json:"load_15m"`

	// Modules are the readings of optional modules, nil when there are none.
	Modules *ModuleReadings `json:"modules,omitempty"`

	// DiskErr is why DiskPct is 0 and not known; it wraps ErrDisk.
	DiskErr error `json:"-"`

	// Mono is when the sample began, on the monotonic clock, since New.
	Mono time.Duration `json:"-"`

	// cpu lets each watcher compute the mean over its interval.
	cpu cpuTimes
}

// Reading is one value of a sensor, by the key of the catalogue. Flags are 0 and 1, states
// are an index in EOLStates.
type Reading struct {
	Key   string
	Value float64
}

// Check reports whether s may be sent as a frame: each number is in the range of RFC-0009
// §5.1. The error wraps ErrDisk when the disk did not answer, else ErrClock when only the
// time is wrong.
func (s *Sample) Check() error {
	if err := s.checkReadings(); err != nil {
		return err
	}
	if s.DiskErr != nil {
		return fmt.Errorf("disk_pct: %w", s.DiskErr)
	}
	if s.TSMS < MinTSMS {
		return fmt.Errorf("ts_ms %d: %w", s.TSMS, ErrClock)
	}
	return nil
}

// checkReadings is Check without the clock.
func (s *Sample) checkReadings() error {
	for _, f := range [...]struct {
		name   string
		v, max float64
	}{
		{"cpu_pct", s.CPUPct, 100},
		{"disk_pct", s.DiskPct, 100},
		{"load_1m", s.Load1, math.MaxFloat64},
		{"load_5m", s.Load5, math.MaxFloat64},
		{"load_15m", s.Load15, math.MaxFloat64},
	} {
		// Written so that NaN, which compares false with everything, fails.
		if !(f.v >= 0 && f.v <= f.max) {
			return fmt.Errorf("%s is %v, outside 0..%g", f.name, f.v, f.max)
		}
	}
	if s.MemTotalBytes < 1 || s.MemTotalBytes > maxBytes {
		return fmt.Errorf("mem_total_bytes is %d, outside 1..%d", s.MemTotalBytes, uint64(maxBytes))
	}
	if s.MemBytes > s.MemTotalBytes {
		return fmt.Errorf("mem_bytes is %d, more than the total of %d", s.MemBytes, s.MemTotalBytes)
	}
	return nil
}

// round2 keeps two decimals: more is noise, and each costs every frame bytes. History stores hundredths,
// so it loses nothing (history.values).
func round2(v float64) float64 { return math.Round(v*100) / 100 }
