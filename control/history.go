package control

import (
	"context"

	"agentctl/prober"
)

// HistoryQuery asks for a window of time: the params of query_history.
type HistoryQuery struct {
	FromMS  int64    `json:"from_ts"`           // included, milliseconds since 1970
	ToMS    int64    `json:"to_ts"`             // included; 0 is now
	Modules []string `json:"modules,omitempty"` // none: those that are started
	StepMS  int64    `json:"step_ms,omitempty"` // above 0: the last record of each bucket of that length
	Limit   int      `json:"limit,omitempty"`   // above 0: at most so many items, the first
}

// History is where query_history finds what was recorded. Query calls fn with the rows
// of the window in ascending order, and returns fn's error. ToMS 0 is now; Modules are
// the server's names (cpu, mem, disk, load, network, temperature, power, wear). It may
// be called by several goroutines at a time. HistoryQuery.Limit is kept by the server.
type History interface {
	Query(ctx context.Context, q HistoryQuery, fn func(HistoryRow) error) error
}

// HistoryRow is what was recorded at a time; in a query with a step, what was recorded
// last in its bucket, each module by itself.
type HistoryRow struct {
	TS       int64
	Sample   *prober.Sample // nil: no sample; not kept after fn returns
	Readings []Reading      // of the other modules; not kept after fn returns
}

// Reading is a figure of a module beyond the sample, such as temperature.hottest_c.
// Flags are 0 and 1.
type Reading struct {
	Key   string
	Value float64
}

// HistoryItem is an item of the answer to query_history. What was not asked for, or was
// not recorded then, is missing.
type HistoryItem struct {
	TS          int64               `json:"ts"`
	CPU         *CPU                `json:"cpu,omitempty"`
	Memory      *Memory             `json:"memory,omitempty"`
	Disk        *Disk               `json:"disk,omitempty"`
	Load        *Load               `json:"load,omitempty"`
	Network     *HistoryNetwork     `json:"network,omitempty"`
	Temperature *HistoryTemperature `json:"temperature,omitempty"`
	Power       *prober.Power       `json:"power,omitempty"`
	Wear        *HistoryWear        `json:"wear,omitempty"`
}

// HistoryNetwork is what is recorded of the module network: means since the record
// before, and how many errors there were since, if any.
type HistoryNetwork struct {
	BytesInPerS  *float64 `json:"bytes_in_per_s,omitempty"`
	BytesOutPerS *float64 `json:"bytes_out_per_s,omitempty"`
	ErrorsIn     *float64 `json:"errors_in,omitempty"`
	ErrorsOut    *float64 `json:"errors_out,omitempty"`
}

// HistoryTemperature is what is recorded of the module temperature.
type HistoryTemperature struct {
	HottestC float64 `json:"hottest_c"`
}

// HistoryWear is what is recorded of the module wear.
type HistoryWear struct {
	UsedPct *float64 `json:"used_pct,omitempty"`
	PreEOL  string   `json:"pre_eol,omitempty"` // normal, warning, urgent
}
