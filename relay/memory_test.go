package relay

import (
	"testing"
	"time"
)

func TestGCPercent(t *testing.T) {
	tests := []struct {
		live uint64
		want int
	}{
		{0, 400}, {1, 400}, {maxGarbage / 4, 400}, {maxGarbage / 2, 200}, {maxGarbage, 100}, {10 * maxGarbage, 100}, {1 << 40, 100},
	}
	for _, tt := range tests {
		if got := gcPercent(tt.live); got != tt.want {
			t.Errorf("%d bytes alive: %d %%, want %d", tt.live, got, tt.want)
		}
	}
}

// TestMemoryIsGivenBack checks that a calm relay returns memory after a storm, at
// most once a minute, and that a busy one does not.
func TestMemoryIsGivenBack(t *testing.T) {
	t.Setenv("GOGC", "400") // leave this process's percentage alone
	m := newMemoryTuner(func() uint64 { return 0 })
	now := time.Now()
	second := func(garbage int) (trimmed bool) {
		now = now.Add(time.Second)
		sink = make([]byte, garbage)
		sink = nil
		before := m.trimmedAt
		m.adjust(now)
		return m.trimmedAt != before
	}
	const storm, calm = 4 * minTrimSize, 64 << 10
	for range 3 * minCalmSeconds {
		if second(storm) {
			t.Fatal("memory was given back in a storm")
		}
	}
	after := 0
	for after = 1; !second(calm); after++ {
		if after > 2*minCalmSeconds {
			t.Skip("a collection came by itself and left nothing to give back")
		}
	}
	if after < minCalmSeconds {
		t.Errorf("given back after %d calm seconds, want %d", after, minCalmSeconds)
	}
	second(storm)
	for range minCalmSeconds + 2 {
		if second(calm) {
			t.Fatal("given back again within a minute")
		}
	}
}

// TestMemoryOfABusyRelay: after a load a relay returns what is far more than it uses, although
// there is always some traffic.
func TestMemoryOfABusyRelay(t *testing.T) {
	var m memoryTuner
	now, allocs := time.Now(), uint64(0)
	second := func(rate, unused uint64) bool {
		now = now.Add(time.Second)
		allocs += rate
		return m.mayTrim(now, allocs, unused)
	}
	const busy = 2 * maxCalmAllocation
	if second(2*loadAllocation, 1<<30) {
		t.Error("returned under load")
	}
	for after := 1; !second(busy, minTrimSizeBusy); after++ {
		if after == minCalmSeconds {
			t.Fatal("nothing was returned")
		}
	}
	for range 3 * minCalmSeconds {
		if second(busy, minTrimSizeBusy-1) {
			t.Fatal("what a busy relay will need again was returned")
		}
	}
}

var sink []byte
