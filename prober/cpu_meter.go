package prober

// cpuTimes are ticks of all CPUs together. In a Sample they are cumulative and never
// decrease; they are zero when the Source has none.
type cpuTimes struct{ busy, idle uint64 }

func (t cpuTimes) total() uint64 { return t.busy + t.idle }

// pctSince is the busy share between an earlier reading and t, 0..100 with two
// decimals; ok is false when no time has passed between them.
func (t cpuTimes) pctSince(earlier cpuTimes) (pct float64, ok bool) {
	total := t.total() - earlier.total()
	if t.total() <= earlier.total() || t.busy < earlier.busy {
		return 0, false
	}
	return min(100, round2(100*float64(t.busy-earlier.busy)/float64(total))), true
}

// minTicks is the shortest window a percentage is taken over: with fewer, one
// tick is worth more than 12 % and two watchers a millisecond apart would read
// 0 or 100.
const minTicks = 8

// cpuMeter converts the kernel's counters to percentages. Its zero value is ready. Readings that are
// less than minTicks apart are measured from the start of the window before, so that each percentage is
// over minTicks at least.
//
// The first reading has no predecessor and gives the mean since boot, as top and vmstat do:
// a second reading shortly after would mostly measure the start of this process.
type cpuMeter struct {
	raw             cpuTimes // as last read
	cumulative      cpuTimes // grows by what raw grew
	windowStart     cpuTimes // where the current window began
	prevWindowStart cpuTimes // where the window before it began
	pct             float64
}

// add takes a reading of the counters and returns the percentage and the cumulative times.
//
// Counters can decrease: iowait at any time, all of them when a container is moved or a
// CPU is unplugged. A part that decreased counts as no progress; without any progress the
// last percentage is returned.
func (m *cpuMeter) add(raw cpuTimes) (float64, cpuTimes) {
	if raw.busy > m.raw.busy {
		m.cumulative.busy += raw.busy - m.raw.busy
	}
	if raw.idle > m.raw.idle {
		m.cumulative.idle += raw.idle - m.raw.idle
	}
	m.raw = raw

	from := m.windowStart
	if m.cumulative.total()-m.windowStart.total() >= minTicks {
		m.prevWindowStart, m.windowStart = m.windowStart, m.cumulative
	} else {
		from = m.prevWindowStart
	}
	if pct, ok := m.cumulative.pctSince(from); ok {
		m.pct = pct
	}
	return m.pct, m.cumulative
}
