package prober

import (
	"time"
)

// netCounters are bytes, packets and errors, in and out.
type netCounters struct {
	bytesIn, packetsIn, errorsIn, bytesOut, packetsOut, errorsOut uint64
}

// sub is what was counted since an earlier reading, never below zero.
func (c netCounters) sub(o netCounters) netCounters {
	return netCounters{
		subFloor(c.bytesIn, o.bytesIn), subFloor(c.packetsIn, o.packetsIn), subFloor(c.errorsIn, o.errorsIn),
		subFloor(c.bytesOut, o.bytesOut), subFloor(c.packetsOut, o.packetsOut), subFloor(c.errorsOut, o.errorsOut),
	}
}

func (c netCounters) add(o netCounters) netCounters {
	return netCounters{
		c.bytesIn + o.bytesIn, c.packetsIn + o.packetsIn, c.errorsIn + o.errorsIn,
		c.bytesOut + o.bytesOut, c.packetsOut + o.packetsOut, c.errorsOut + o.errorsOut,
	}
}

func subFloor(a, b uint64) uint64 { return a - min(a, b) }

// netTotals are counters that only grow, at a moment. Those of one row compare with
// each other and with no others.
type netTotals struct {
	at    time.Time
	epoch *int // nil: there are none
	netCounters
}

// newNetwork is the traffic between two readings of one row, nil if no time passed.
func newNetwork(from, to netTotals) *Network {
	window := to.at.Sub(from.at)
	if window < time.Millisecond {
		return nil
	}
	c := to.sub(from.netCounters)
	perS := func(n uint64) float64 { return round2(float64(n) / window.Seconds()) }
	return &Network{
		WindowMS:       window.Milliseconds(),
		BytesIn:        c.bytesIn,
		BytesOut:       c.bytesOut,
		PacketsIn:      c.packetsIn,
		PacketsOut:     c.packetsOut,
		ErrorsIn:       c.errorsIn,
		ErrorsOut:      c.errorsOut,
		BytesInPerS:    perS(c.bytesIn),
		BytesOutPerS:   perS(c.bytesOut),
		PacketsInPerS:  perS(c.packetsIn),
		PacketsOutPerS: perS(c.packetsOut),
		from:           from,
		to:             to,
	}
}

// netWindow gives one watcher the traffic over its own interval.
type netWindow struct {
	sampled   *Network // as the sampler had it
	delivered *Network // as the watcher got it
}

func (w *netWindow) rebase(m *ModuleReadings) *ModuleReadings {
	if m == nil || m.Network == nil {
		return m
	}
	if n := m.Network; n != w.sampled {
		given := n
		// A row that is not the last one's began anew since.
		if s := w.sampled; s != nil && n.to.epoch != nil && n.to.epoch == s.to.epoch && n.from.at.After(s.to.at) {
			if wide := newNetwork(s.to, n.to); wide != nil && wide.check() == nil {
				given = wide
			}
		}
		w.sampled, w.delivered = n, given
	}
	if w.delivered == m.Network {
		return m
	}
	own := *m
	own.Network = w.delivered
	return &own
}
