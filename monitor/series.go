package monitor

import (
	"context"
	"errors"
	"time"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/term"
)

// SeriesSource reads what a board behind a relay has recorded: it calls fn with the start of
// each step of [from, to) that has a value, and the last values of the step by sensor key.
// Times are milliseconds since 1970.
type SeriesSource func(ctx context.Context, from, to, step int64, keys []string, fn func(ts int64, values map[string]float64) error) error

// maxSeriesRecords is about how many records an export without a step has: ten pages of the
// board.
const maxSeriesRecords = 14_400

// minSeriesStep is the least step that a board has, in ms.
const minSeriesStep = 1000

// DefaultStep returns the step, in ms, for an export of a board's window for which nobody has
// chosen one. Every record would be too many over a slow link.
func DefaultStep(fromMS, toMS int64) int64 {
	return max(minSeriesStep, term.NiceStep(time.Duration((toMS-fromMS)/maxSeriesRecords)*time.Millisecond).Milliseconds())
}

// errLimit ends a series after the records that were asked for.
var errLimit = errors.New("monitor: enough records")

// HistoryEach implements HistorySource. Steps begin at multiples of their length since 1970,
// as a daemon's do; ts is the start of the step, or of the window in the first one.
func (s SeriesSource) HistoryEach(ctx context.Context, q control.HistoryQuery, fn func(control.HistoryItem) error) error {
	step := max(q.StepMS, minSeriesStep)
	if q.StepMS == 0 {
		step = DefaultStep(q.FromMS, q.ToMS)
	}
	n := 0
	err := s(ctx, q.FromMS-q.FromMS%step, q.ToMS+1, step, sensorKeys(q.Modules), func(ts int64, values map[string]float64) error {
		if err := fn(control.HistoryItem{TS: max(ts, q.FromMS), Values: values}); err != nil {
			return err
		}
		if n++; n == q.Limit {
			return errLimit
		}
		return nil
	})
	if errors.Is(err, errLimit) {
		return nil
	}
	return err
}

// sensorKeys returns the keys of the recorded sensors of modules; none: of all.
func sensorKeys(modules []string) []string {
	set := prober.AllModules
	if len(modules) > 0 {
		set = 0
		for _, name := range modules {
			if m, ok := prober.ModuleByName(name); ok {
				set |= prober.SetOf(m)
			}
		}
	}
	var keys []string
	sensors := prober.Sensors()
	for i := range sensors {
		s := &sensors[i]
		if s.Key != "" && set.Has(s.Module) && (!s.Module.IsOptional() || s.Record.ID != 0) {
			keys = append(keys, s.Key)
		}
	}
	return keys
}
