package prober

import (
	"time"
)

// netCounters are the counters of an interface, in the order of /proc/net/dev.
type netCounters [6]uint64

// Indices of netCounters.
const (
	bytesIn = iota
	packetsIn
	errorsIn
	bytesOut
	packetsOut
	errorsOut
)

// sub is what was counted since an earlier reading, never below zero.
func (c netCounters) sub(earlier netCounters) netCounters {
	for i := range c {
		c[i] -= min(c[i], earlier[i])
	}
	return c
}

// add returns the sum of two counters.
func (c netCounters) add(o netCounters) netCounters {
	for i := range c {
		c[i] += o[i]
	}
	return c
}

// netTotals are counters that never decrease, at a moment. They can be compared with
// totals of the same epoch: a new epoch begins when the sum is made of other interfaces.
type netTotals struct {
	at    time.Time
	epoch *int // nil: there are none
	netCounters
}

// newNetwork is the traffic between two totals of one epoch, nil if no time passed.
func newNetwork(from, to netTotals) *Network {
	window := to.at.Sub(from.at)
	if window < time.Millisecond {
		return nil
	}
	c := to.sub(from.netCounters)
	perS := func(counter int) float64 { return round2(float64(c[counter]) / window.Seconds()) }
	return &Network{
		WindowMS:       window.Milliseconds(),
		BytesIn:        c[bytesIn],
		BytesOut:       c[bytesOut],
		PacketsIn:      c[packetsIn],
		PacketsOut:     c[packetsOut],
		ErrorsIn:       c[errorsIn],
		ErrorsOut:      c[errorsOut],
		BytesInPerS:    perS(bytesIn),
		BytesOutPerS:   perS(bytesOut),
		PacketsInPerS:  perS(packetsIn),
		PacketsOutPerS: perS(packetsOut),
		from:           from,
		to:             to,
	}
}

// netWindow converts the traffic of the sampler's interval to that of a watcher's.
type netWindow struct {
	sampled   *Network // the newest one of the sampler
	delivered *Network // what the watcher got for it
}

// rebase returns m with the traffic since the last call. A Network that was sampled
// between two calls is included, as long as the epoch is the same.
func (w *netWindow) rebase(m *ModuleReadings) *ModuleReadings {
	if m == nil || m.Network == nil {
		return m
	}
	if n := m.Network; n != w.sampled {
		delivered := n
		if s := w.sampled; s != nil && n.to.epoch != nil && n.to.epoch == s.to.epoch && n.from.at.After(s.to.at) {
			if wide := newNetwork(s.to, n.to); wide != nil && wide.check() == nil {
				delivered = wide
			}
		}
		w.sampled, w.delivered = n, delivered
	}
	if w.delivered == m.Network {
		return m
	}
	rebased := *m
	rebased.Network = w.delivered
	return &rebased
}
