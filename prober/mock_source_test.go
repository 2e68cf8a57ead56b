package prober

import (
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// A week of a mock board, at two cadences: every reading is a valid frame, none
// jumps, and the board does something.
func TestMockBoard(t *testing.T) {
	for _, every := range []time.Duration{time.Second, time.Minute} {
		for seed := range uint64(8) {
			synctest.Test(t, func(t *testing.T) {
				src := NewMockSource(seed)
				defer src.Close()
				var before, s Sample
				var lo, hi float64 = 100, 0
				for i := range 10_000 {
					if err := src.Read(&s); err != nil {
						t.Fatal(err)
					}
					if err := s.checkReadings(); err != nil {
						t.Fatalf("seed %d, reading %d: %v", seed, i, err)
					}
					lo, hi = min(lo, s.CPUPct), max(hi, s.CPUPct)
					if i > 0 && every == time.Second {
						mem := math.Abs(float64(s.MemBytes)-float64(before.MemBytes)) / float64(s.MemTotalBytes)
						if d := math.Abs(s.CPUPct - before.CPUPct); d > 25 || mem > 0.03 {
							t.Fatalf("seed %d, reading %d: jumped from %+v to %+v", seed, i, before, s)
						}
						if s.MemTotalBytes != before.MemTotalBytes {
							t.Fatalf("seed %d: the memory was changed", seed)
						}
					}
					before = s
					time.Sleep(every)
				}
				if hi-lo < 20 {
					t.Errorf("seed %d: cpu_pct stays within %v..%v", seed, lo, hi)
				}
			})
		}
	}
}

func TestMockBoardsDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := map[float64]uint64{}
		for seed := range uint64(20) {
			var s, again Sample
			if NewMockSource(seed).Read(&s) != nil || NewMockSource(seed).Read(&again) != nil || s != again {
				t.Errorf("seed %d: %+v, then %+v", seed, s, again)
			}
			if other, ok := seen[s.CPUPct]; ok {
				t.Errorf("seeds %d and %d begin with the same reading", seed, other)
			}
			seen[s.CPUPct] = seed
		}
	})
}
