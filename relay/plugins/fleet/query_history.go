package fleet

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A board computes its values itself, by system.history: one value for each step of the window, of raw
// samples or of what it has aggregated before. Two things can go differently from a single answer:
//
//	the board answers a part, and a cursor      the next page is asked for (readHistory)
//	one step takes it longer than a call may    the same step in smaller ones, put together here
//	                                            (askHistory)
//
// Boards are not trusted: an answer with other steps, times or metrics than were asked for is errBadHistory,
// and a value that a metric cannot have is none (metric.possible).

// maxHistoryPages bounds the pages of an answer that are read of one board: a board with a slow card
// reads in two seconds what it can, and leaves the rest to the next page.
const maxHistoryPages = 4

// historyRequest asks one board for n values of each metric: one for each step from a time on, up to
// an end.
type historyRequest struct {
	metrics   []int
	from, to  int64 // ms since 1970; to is not included
	step      int64 // ms
	aggregate string
}

// points is how many values a metric has: the last step may be shorter.
func (h *historyRequest) points() int { return int((h.to - h.from + h.step - 1) / h.step) }

// names are the names of the metrics in system.history, each once: mem_pct is made of the same values as
// mem_bytes.
func (h *historyRequest) names() (names []string) {
	for _, m := range h.metrics {
		for _, name := range metrics[m].recorded() {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// recorded are the names in system.history from which a metric is made.
func (m *metric) recorded() []string {
	if m.history == "" { // mem_pct
		return []string{"mem_bytes", "mem_total_bytes"}
	}
	return []string{m.history}
}

// fromRecorded makes a metric's value of recorded ones; NaN if it is not known or not possible.
func (m *metric) fromRecorded(v [2]float64) float64 {
	value := v[0]
	switch m.key {
	case "mem_pct":
		value = math.Round(1000*v[0]/v[1]) / 10
	case "wear_pre_eol":
		value++ // the history counts from 0
	}
	return m.possible(value)
}

// recordedValue is a value of system.history; null is NaN.
type recordedValue float64

// UnmarshalJSON implements json.Unmarshaler.
func (v *recordedValue) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*v = recordedValue(math.NaN())
		return nil
	}
	f, err := strconv.ParseFloat(string(b), 64)
	*v = recordedValue(f)
	return err
}

// historyPage is an answer of system.history. Its schema has been checked.
type historyPage struct {
	FromMS  int64                      `json:"from_ms"`
	StepMS  int64                      `json:"step_ms"`
	Metrics map[string][]recordedValue `json:"metrics"`
	Next    string                     `json:"next_cursor"`
}

// askHistory returns the values of each metric of h, NaN where a board has none: h.points of each.
// A board that cannot read a step in time is asked for smaller ones, which are put together.
func (p *Plugin) askHistory(ctx context.Context, r *kernel.Request, tool string, h *historyRequest) ([][]float64, error) {
	values, err := p.readHistory(ctx, r, tool, h)
	if e := manifest.AsError(err); err == nil || e.Code != manifest.DeadlineExceeded || e.Reason != "device" || h.points() > 1 {
		return values, err
	}
	// A day has parts of two hours. A question with more than one step is not split (above): then the board
	// has no value.
	const parts = 12
	small := *h
	small.step = (h.step + parts - 1) / parts
	if values, err = p.readHistory(ctx, r, tool, &small); err != nil {
		return nil, err
	}
	for i := range values {
		values[i] = []float64{foldValues(values[i], h.aggregate)}
	}
	return values, nil
}

// readHistory reads the pages of one question.
func (p *Plugin) readHistory(ctx context.Context, r *kernel.Request, tool string, h *historyRequest) ([][]float64, error) {
	names := h.names()
	recorded := make(map[string][]float64, len(names))
	for _, name := range names {
		recorded[name] = nans(h.points())
	}
	cursor := ""
	for range maxHistoryPages {
		page, err := p.readHistoryPage(ctx, r, tool, h, names, cursor)
		if err != nil {
			return nil, err
		}
		first, ok := page.fits(h, names)
		if !ok {
			return nil, errBadHistory
		}
		for _, name := range names {
			for i, v := range page.Metrics[name] {
				recorded[name][first+i] = float64(v)
			}
		}
		if cursor = page.Next; cursor == "" {
			return h.convert(recorded), nil
		}
	}
	return nil, errSlowHistory
}

// readHistoryPage reads the page at a cursor, "" for the first one. The kernel has checked the answer against
// the tool's schema, but not whether it fits the question.
func (p *Plugin) readHistoryPage(ctx context.Context, r *kernel.Request, tool string, h *historyRequest, names []string, cursor string) (*historyPage, error) {
	args, err := json.Marshal(struct {
		FromMS    int64    `json:"from_ms"`
		ToMS      int64    `json:"to_ms"`
		StepMS    int64    `json:"step_ms"`
		Metrics   []string `json:"metrics"`
		Aggregate string   `json:"aggregate"`
		Cursor    string   `json:"cursor,omitempty"`
	}{h.from, h.to, h.step, names, h.aggregate, cursor})
	if err != nil {
		return nil, err
	}
	res, err := p.callWhenFree(ctx, r, tool, args)
	if err != nil {
		return nil, err
	}
	page := new(historyPage)
	if json.Unmarshal(res.Structured, page) != nil {
		return nil, errBadHistory
	}
	return page, nil
}

// callWhenFree is callBoard for a tool that the board serves a few times a second only: it waits for
// the next second, once, if others have asked a moment ago.
func (p *Plugin) callWhenFree(ctx context.Context, r *kernel.Request, tool string, args []byte) (*kernel.Result, error) {
	res, err := p.callBoard(ctx, r, tool, args)
	if e := manifest.AsError(err); err == nil || e.Code != manifest.RateLimited {
		return res, err
	}
	wait := time.NewTimer(time.Second)
	defer wait.Stop()
	select {
	case <-wait.C:
		return p.callBoard(ctx, r, tool, args)
	case <-ctx.Done():
		return nil, err
	}
}

// fits reports whether a page answers the question, and the index of its first value. A page begins at a
// step of the question, has all of its metrics with equally many values, and none beyond the end.
func (a *historyPage) fits(h *historyRequest, names []string) (first int, ok bool) {
	offset := a.FromMS - h.from
	if a.StepMS != h.step || offset < 0 || offset%h.step != 0 || offset/h.step > int64(h.points()) {
		return 0, false
	}
	first = int(offset / h.step)
	for _, name := range names {
		list, has := a.Metrics[name]
		if !has || len(list) != len(a.Metrics[names[0]]) || first+len(list) > h.points() {
			return 0, false
		}
	}
	return first, true
}

// convert makes the values of the metrics of recorded ones.
func (h *historyRequest) convert(recorded map[string][]float64) [][]float64 {
	values := make([][]float64, len(h.metrics))
	for i, index := range h.metrics {
		m := &metrics[index]
		values[i] = make([]float64, h.points())
		var from [2][]float64
		for j, name := range m.recorded() {
			from[j] = recorded[name]
		}
		for j := range values[i] {
			v := [2]float64{from[0][j]}
			if from[1] != nil {
				v[1] = from[1][j]
			}
			values[i][j] = m.fromRecorded(v)
		}
	}
	return values
}

// foldValues makes one value of those of consecutive steps; NaN if all are. A mean of means counts each step
// once, however many samples it has: steps of a window are equally long but for the last.
func foldValues(list []float64, aggregate string) float64 {
	n, result := 0, math.NaN()
	for _, v := range list {
		switch {
		case math.IsNaN(v):
			continue
		case n == 0, aggregate == aggregateLast, aggregate == aggregateMin && v < result, aggregate == aggregateMax && v > result:
			result = v
		case aggregate == aggregateMean:
			result += v
		}
		n++
	}
	if aggregate == aggregateMean && n > 0 {
		result /= float64(n)
	}
	return result
}

// nans returns n unknown values.
func nans(n int) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = math.NaN()
	}
	return list
}

// possible is a value that the metric can have, else NaN. A board that reports anything else is not
// believed: one impossible value would hide all others in a mean or a maximum.
func (m *metric) possible(v float64) float64 {
	low, high := 0.0, 1e16
	switch m.key {
	case "cpu_pct", "mem_pct", "disk_pct", "wear_pct":
		high = 100
	case "temperature_c":
		low, high = -60, 150
	case "under_voltage", "freq_capped", "throttled", "soft_temp_limit":
		high = 1
	case "wear_pre_eol":
		low, high = 1, 3
	}
	// NaN is in no range and stays NaN.
	if v >= low && v <= high {
		return v
	}
	return math.NaN()
}

// A change is when a board's value left the usual: the beginning of its latest run at or beyond a level.
type change struct {
	begin, end time.Time // end is zero if the run lasts
	isOlder    bool      // the run began before the first value
}

// findChange finds the latest run of values that are at or beyond level; up: above it. Unknown values
// do not end a run: a board does not cool down while it is off. It goes from the newest value back: first to
// the end of the run, then to its beginning. from and step are milliseconds; ok is false if there is no run.
func findChange(values []float64, from, step int64, level float64, up bool) (c change, ok bool) {
	beyond := func(v float64) bool { return up && v >= level || !up && v <= level }
	at := func(i int) time.Time { return time.UnixMilli(from + int64(i)*step) }
	last := len(values) - 1
	for ; last >= 0 && !beyond(values[last]); last-- {
		if !math.IsNaN(values[last]) {
			c.end = at(last)
		}
	}
	if last < 0 {
		return change{}, false
	}
	first := last
	c.isOlder = true
	for i := last - 1; i >= 0; i-- {
		if beyond(values[i]) {
			first = i
		} else if !math.IsNaN(values[i]) {
			c.isOlder = false
			break
		}
	}
	c.begin = at(first)
	return c, true
}
