package daemon

import (
	"context"
	"math"
	"time"

	"agentctl/handlers"
	"agentctl/prober"
)

// mockHistory is the history of a mock board, which is computed when it is asked for.
type mockHistory struct{ *prober.MockHistory }

var _ handlers.Recorded = mockHistory{}

// mockStepSamples is how many values of a step a mock board looks at. Steps of up to two minutes have
// one every ten seconds at least.
const mockStepSamples = 12

// Series implements handlers.Recorded.
func (m mockHistory) Series(ctx context.Context, q handlers.HistoryQuery, fn func(start int64, values []float64) error) error {
	oldest := m.MockHistory.Oldest().UnixMilli()
	values := make([]float64, len(q.Metrics))
	for start := q.FromMS; start < q.EndMS; start += q.StepMS {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		end := min(start+q.StepMS, q.EndMS)
		if end <= oldest {
			continue
		}
		for i, name := range q.Metrics {
			values[i] = m.aggregate(name, q.Aggregate, max(start, oldest), end)
		}
		if err := fn(start, values); err != nil {
			return err
		}
	}
	return nil
}

// aggregate is the value of a metric that stands for a step; NaN if the board does not have it.
func (m mockHistory) aggregate(name, aggregate string, start, end int64) float64 {
	if aggregate == "last" {
		return m.value(name, end-1)
	}
	result, sum := math.NaN(), 0.0
	for i := range int64(mockStepSamples) {
		v := m.value(name, start+(end-start)*i/mockStepSamples)
		sum += v
		switch {
		case i == 0, aggregate == "min" && v < result, aggregate == "max" && v > result:
			result = v
		}
	}
	if aggregate == "mean" {
		return math.Round(100*sum/mockStepSamples) / 100
	}
	return result
}

func (m mockHistory) value(name string, ms int64) float64 {
	if v, ok := m.Value(name, time.UnixMilli(ms)); ok {
		return v
	}
	return math.NaN()
}

// Oldest implements handlers.Recorded.
func (m mockHistory) Oldest(context.Context) int64 { return m.MockHistory.Oldest().UnixMilli() }
