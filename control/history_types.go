package control

import (
	"context"

	"agentctl/prober"
)

// HistoryQuery asks for a window of time: the params of query_history.
type HistoryQuery struct {
	FromMS int64 `json:"from_ts"` // included, milliseconds since 1970
	ToMS   int64 `json:"to_ts"`   // included; 0 is now
	// Modules are names of modules; none: those that are started.
	Modules []string `json:"modules,omitempty"`
	// StepMS above 0 asks for the last record of each bucket of that length.
	StepMS int64 `json:"step_ms,omitempty"`
	// Limit above 0 asks for at most so many items, the first ones.
	Limit int `json:"limit,omitempty"`
}

// History is where query_history finds what was recorded. Query calls fn with the rows of
// the window in ascending order, and returns fn's error. ToMS 0 is now; Modules are names of
// prober.Module. Several goroutines may call it at a time. The server enforces
// HistoryQuery.Limit.
type History interface {
	Query(ctx context.Context, q HistoryQuery, fn func(HistoryRow) error) error
}

// HistoryRow is what was recorded at a time; in a query with a step, what was recorded
// last in its bucket, each module by itself.
type HistoryRow struct {
	TS       int64
	Sample   *prober.Sample   // nil: no sample; not kept after fn returns
	Readings []prober.Reading // of optional modules; not kept after fn returns
}

// HistoryItem is an item of the answer to query_history: values by the key of the sensor
// catalogue. Flags are 0 and 1, states an index in prober.EOLStates. What was not asked
// for, or was not recorded then, is missing.
type HistoryItem struct {
	TS     int64 // milliseconds since 1970
	Values map[string]float64
}
