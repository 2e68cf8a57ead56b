package kernel

import (
	"cmp"
	"slices"
)

// PluginFigures are the counters of a plugin, for metrics. The boards are one row together: their
// number has no small bound.
type PluginFigures struct {
	Name     string `json:"name"`    // BoardFigures for all boards
	Plugins  int    `json:"plugins"` // 1, or the number of boards
	Up       int    `json:"up"`      // of those: neither down nor refused by a breaker
	InFlight int64  `json:"in_flight"`
	Calls    int64  `json:"calls"`
	Errors   int64  `json:"errors"` // of the calls, with panics and timeouts
	Panics   int64  `json:"panics"`
	Timeouts int64  `json:"timeouts"`
	Failures int    `json:"failures"` // of Health
}

// BoardFigures is the name of the row of all boards. No plugin can have it.
const BoardFigures = "devices"

// MaxPluginFigures bounds the rows of PluginFigures.
const MaxPluginFigures = 128

// PluginFigures returns the figures of all boards together, and then those of the other plugins,
// ascending by name. The counters of the boards include those that are gone; they begin at the start
// or at the last ResetCounters. Those of another plugin begin when it is loaded.
func (k *Kernel) PluginFigures() []PluginFigures {
	boards := PluginFigures{Name: BoardFigures}
	var rows []PluginFigures
	k.mu.RLock()
	boards.add(&k.unloadedBoards)
	for _, l := range k.plugins {
		if l.isDevice() {
			boards.add(&l.counts)
			boards.Plugins++
			boards.Up++ // without a link it is not loaded
			continue
		}
		f := PluginFigures{Name: l.manifest.Name, Plugins: 1}
		f.add(&l.counts)
		i := l.info()
		if f.Failures = i.Failures; i.State == StateLoaded || i.State == StateHalfOpen {
			f.Up = 1
		}
		rows = append(rows, f)
	}
	k.mu.RUnlock()
	slices.SortFunc(rows, func(a, b PluginFigures) int { return cmp.Compare(a.Name, b.Name) })
	return append([]PluginFigures{boards}, rows[:min(len(rows), MaxPluginFigures-1)]...)
}

func (f *PluginFigures) add(c *counters) {
	f.InFlight += max(c.inFlight.Load(), 0) // below 0: retired
	f.Calls += c.calls.Load()
	f.Errors += c.errors.Load()
	f.Panics += c.panics.Load()
	f.Timeouts += c.timeouts.Load()
}
