package prober

import (
	"testing"
	"time"
)

// A mock board has a history of plausible figures, which says the same whenever it is asked.
func TestMockHistory(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	hot := 0
	for seed := range uint64(300) {
		h := NewMockHistory(seed, now)
		again := NewMockHistory(seed, now)
		for _, ago := range []time.Duration{0, time.Minute, time.Hour, 24 * time.Hour, 6 * 24 * time.Hour} {
			at := now.Add(-ago)
			for name, limits := range map[string][2]float64{
				"cpu_pct": {0.3, 99.5}, "disk_pct": {5, 95}, "mem_bytes": {1 << 20, 16 << 30}, "memory.used": {1, 16 << 10},
				"load_1m": {0, 4}, "temperature.hottest_c": {30, 100}, "power.throttled": {0, 1},
			} {
				v, ok := h.Value(name, at)
				if same, _ := again.Value(name, at); !ok || v != same || v < limits[0] || v > limits[1] {
					t.Fatalf("board %d: %s %v ago is %v, %v; again %v", seed, name, ago, v, ok, same)
				}
			}
		}
		if _, ok := h.Value("wear.used_pct", now); ok {
			t.Fatal("a mock board has no card that wears")
		}
		// The hot boards are so for a while, and were not before.
		if h.isHot {
			hot++
			before, _ := h.Value("temperature.hottest_c", h.hotSince.Add(-time.Minute))
			after, _ := h.Value("temperature.hottest_c", h.hotSince.Add(20*time.Minute))
			if after < before+10 {
				t.Errorf("board %d lost its fan and went from %v to %v", seed, before, after)
			}
		}
	}
	if hot < 3 || hot > 30 {
		t.Errorf("%d of 300 boards are hot", hot)
	}
}
