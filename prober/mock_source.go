package prober

import (
	"math"
	"math/rand/v2"
	"time"
)

// mockSource simulates a board. cpu varies around a base and rises now and then for up to
// a minute of work; memory follows it; load is what the kernel would compute from it; the
// disk fills slowly.
type mockSource struct {
	rng     *rand.Rand
	last    time.Time
	cores   float64
	total   uint64  // bytes of memory
	baseCPU float64 // percent of cpu when nothing happens

	cpu, mem, disk float64 // percent
	load           [3]float64
	workLeft       float64 // seconds of work that are left
	diskGrowth     float64 // percent of disk an hour
}

var _ Source = (*mockSource)(nil)

// NewMockSource makes up the readings of a board, for demonstrations and load
// tests: SIMULATED figures that look plausible and move smoothly at any cadence.
// Boards with the same seed have the same size and begin with the same readings.
func NewMockSource(seed uint64) Source {
	return newMockSource(seed)
}

func newMockSource(seed uint64) *mockSource {
	// PCG has a state of two words; the second one is the same for all boards.
	rng := rand.New(rand.NewPCG(seed, 0x6167656e7463746c))
	boards := [...]struct {
		cores float64
		mib   uint64
	}{{1, 427}, {4, 905}, {4, 1848}, {4, 3791}, {4, 8063}}
	b := boards[rng.IntN(len(boards))]
	m := &mockSource{
		rng:        rng,
		cores:      b.cores,
		total:      b.mib << 20,
		baseCPU:    3 + 22*rng.Float64(),
		mem:        20 + 40*rng.Float64(),
		disk:       15 + 60*rng.Float64(),
		diskGrowth: 0.05 + 0.3*rng.Float64(),
	}
	m.cpu = m.baseCPU
	for i := range m.load {
		m.load[i] = m.cores * m.baseCPU / 100
	}
	return m
}

// Read moves the board by the time that passed since the last Read.
func (m *mockSource) Read(s *Sample) error {
	now := time.Now()
	if !m.last.IsZero() {
		m.step(now.Sub(m.last).Seconds())
	}
	m.last = now

	s.CPUPct = round2(m.cpu)
	s.MemTotalBytes = m.total
	s.MemBytes = uint64(m.mem/100*float64(m.total)) &^ 4095 // whole pages
	s.DiskPct = round2(m.disk)
	s.Load1, s.Load5, s.Load15 = round2(m.load[0]), round2(m.load[1]), round2(m.load[2])
	return nil
}

// step moves the board by dt seconds.
func (m *mockSource) step(dt float64) {
	// Work comes about every five minutes and stays up to a minute.
	m.workLeft -= dt
	if m.workLeft <= 0 && m.rng.Float64() < 1-math.Exp(-dt/300) {
		m.workLeft = 10 + 50*m.rng.Float64()
	}
	target := m.baseCPU
	if m.workLeft > 0 {
		target = 60 + m.baseCPU
	}
	// The noise of an hour asleep is not larger than that of some seconds.
	noise := math.Sqrt(min(dt, 10)) * m.rng.NormFloat64()
	m.cpu = clamp(approach(m.cpu, target, dt, 4)+1.2*noise, 0.3, 99.5)
	m.mem = clamp(approach(m.mem, 30+m.cpu/2, dt, 120)+0.1*noise, 8, 94)
	m.disk += m.diskGrowth * dt / 3600
	if m.disk > 90 {
		m.disk = 20 // as after a clean-up
	}
	for i, minutes := range [...]float64{1, 5, 15} {
		m.load[i] = approach(m.load[i], m.cores*m.cpu/100, dt, 60*minutes)
	}
}

// Close does nothing.
func (m *mockSource) Close() error { return nil }

// approach moves v towards target as a first-order lag of tau seconds does in dt seconds.
func approach(v, target, dt, tau float64) float64 {
	return target + (v-target)*math.Exp(-dt/tau)
}

func clamp(v, lo, hi float64) float64 { return min(max(v, lo), hi) }
