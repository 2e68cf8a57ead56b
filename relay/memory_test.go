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
		{0, 400}, {1, 400}, {gcRoom / 4, 400}, {gcRoom / 2, 200}, {gcRoom, 100}, {10 * gcRoom, 100}, {1 << 40, 100},
	}
	for _, tt := range tests {
		if got := gcPercent(tt.live); got != tt.want {
			t.Errorf("%d bytes alive: %d %%, want %d", tt.live, got, tt.want)
		}
	}
}

// After a storm a calm relay gives memory back, once a minute at most, and a busy one never.
func TestMemoryIsGivenBack(t *testing.T) {
	t.Setenv("GOGC", "400") // leave this process's percentage alone
	m := newMemory(func() uint64 { return 0 })
	now := time.Now()
	second := func(garbage int) (trimmed bool) {
		now = now.Add(time.Second)
		sink = make([]byte, garbage)
		sink = nil
		before := m.trimmed
		m.look(now)
		return m.trimmed != before
	}
	const storm, calm = 4 * worthBytes, 64 << 10
	for range 3 * calmAfter {
		if second(storm) {
			t.Fatal("memory was given back in a storm")
		}
	}
	after := 0
	for after = 1; !second(calm); after++ {
		if after > 2*calmAfter {
			t.Skip("a collection came by itself and left nothing to give back")
		}
	}
	if after < calmAfter {
		t.Errorf("given back after %d calm seconds, want %d", after, calmAfter)
	}
	second(storm)
	for range calmAfter + 2 {
		if second(calm) {
			t.Fatal("given back again within a minute")
		}
	}
}

var sink []byte
