package prober

import (
	"math"
	"time"
)

// MockHistory is what a mock board has recorded of itself: SIMULATED figures that are computed from the
// time, so that thousands of boards have a history and none of them memory for it.
type MockHistory struct {
	seed    uint64
	board   mockSource // its size and its figures at begin
	begin   time.Time
	ambient float64 // degrees Celsius of an idle board
	// A board in thirty has lost its fan at hotSince, so that a fleet has something to find.
	isHot    bool
	hotSince time.Time
}

// mockHistoryAge is how far back a mock board remembers.
const mockHistoryAge = 7 * 24 * time.Hour

// hotRise is how much warmer a board without its fan becomes, degrees Celsius: enough that it is an
// outlier among boards of chance at any time of a day.
const hotRise = 35

// NewMockHistory makes up the history of the mock board with that seed, from a week before now on.
func NewMockHistory(seed uint64, now time.Time) *MockHistory {
	h := &MockHistory{seed: seed, board: *newMockSource(seed), begin: now}
	h.board.rng = nil
	h.ambient = 36 + 14*h.random(0, 0)
	h.isHot = h.random(1, 0) < 1.0/30
	h.hotSince = now.Add(-time.Duration((1 + 20*h.random(2, 0)) * float64(time.Hour)))
	return h
}

// Oldest is the time of the first record.
func (h *MockHistory) Oldest() time.Time { return h.begin.Add(-mockHistoryAge) }

// Value is the figure of a sensor at a time, by its field in a metric frame or its key in the
// catalogue; ok is false for what a mock board does not have. It may be called concurrently.
func (h *MockHistory) Value(name string, at time.Time) (v float64, ok bool) {
	cpu := h.cpu(at)
	switch name {
	case "cpu_pct", "cpu.usage_percent":
		return round2(cpu), true
	case "mem_bytes":
		return math.Floor(h.memory(cpu, at)), true
	case "mem_total_bytes":
		return float64(h.board.total), true
	case "memory.used":
		return math.Floor(h.memory(cpu, at) / (1 << 20)), true
	case "memory.total":
		return float64(h.board.total >> 20), true
	case "disk_pct", "disk.usage_percent":
		return round2(clamp(h.board.disk+h.board.diskGrowth*at.Sub(h.begin).Hours(), 5, 95)), true
	case "load_1m", "load_5m", "load_15m", "load.load_1m", "load.load_5m", "load.load_15m":
		return round2(h.board.cores * cpu / 100), true
	case "temperature.hottest_c":
		return math.Round(10*h.temperature(cpu, at)) / 10, true
	case "power.throttled":
		if h.temperature(cpu, at) >= 80 {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// cpu varies around the base of the board, and now and then it works for some minutes.
func (h *MockHistory) cpu(at time.Time) float64 {
	cpu := h.board.baseCPU + 3*h.noise(3, at, 5*time.Minute)
	if slot := at.Unix() / 300; h.random(4, slot) < 0.08 {
		cpu += 60 * h.random(5, slot)
	}
	return clamp(cpu, 0.3, 99.5)
}

// memory is the bytes in use.
func (h *MockHistory) memory(cpu float64, at time.Time) float64 {
	return clamp(h.board.mem+cpu/4+4*h.noise(6, at, time.Hour), 8, 94) / 100 * float64(h.board.total)
}

func (h *MockHistory) temperature(cpu float64, at time.Time) float64 {
	c := h.ambient + cpu/8 + 2*h.noise(7, at, 30*time.Minute)
	if h.isHot && !at.Before(h.hotSince) {
		c += hotRise * (1 - math.Exp(-at.Sub(h.hotSince).Minutes()/5))
	}
	return c
}

// noise is a smooth random curve in -1..1 with a random value for each period.
func (h *MockHistory) noise(channel uint64, at time.Time, period time.Duration) float64 {
	slot, rest := at.UnixMilli()/period.Milliseconds(), at.UnixMilli()%period.Milliseconds()
	a, b := h.random(channel, slot), h.random(channel, slot+1)
	x := float64(rest) / float64(period.Milliseconds())
	return 2*(a+(b-a)*x*x*(3-2*x)) - 1
}

// random is a number in 0..1 that depends on the board, on what it is for, and on a time: the
// finalizer of SplitMix64.
func (h *MockHistory) random(channel uint64, slot int64) float64 {
	z := h.seed*0x9e3779b97f4a7c15 + channel*0xd1b54a32d192ed03 + uint64(slot)*0x8cb92ba72f3d8dd7
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return float64((z^z>>31)>>11) / (1 << 53)
}
