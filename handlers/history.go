package handlers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"time"

	"agentctl/manifest"
)

// Bounds of a page of system.history.
const (
	maxPoints   = 1500     // values of a metric, as in the schema
	maxPageSize = 60 << 10 // bytes of the result; a message on the link has 64 KiB
	// pageTime is how long reading a page may take: the two seconds that a handler has, without
	// the time for encoding the page. What is not read by then is on the next page.
	pageTime = 1800 * time.Millisecond
	// pageReserve is the time for encoding where the caller's deadline is shorter.
	pageReserve = 200 * time.Millisecond
)

// HistoryQuery asks Recorded for one value of each metric for each step from FromMS to EndMS, which
// is not included. Metrics are keys of the sensor catalogue or fields of a metric frame; Aggregate
// is last, mean, min or max. Times are milliseconds since 1970.
type HistoryQuery struct {
	FromMS, EndMS, StepMS int64
	Metrics               []string
	Aggregate             string
}

// Recorded is what History uses of a *history.Store.
type Recorded interface {
	// Series calls fn with each step that has a record, in ascending order: its begin, and
	// for each metric a value or NaN. When ctx ends it returns ctx's error after it has
	// called fn with the steps that were complete.
	Series(ctx context.Context, q HistoryQuery, fn func(start int64, values []float64) error) error
	// Oldest is the time of the first record, or a time in the far future when there is none.
	Oldest(ctx context.Context) int64
}

// History answers system.history: query with one page of recorded values. Use NewHistory.
type History struct {
	recorded Recorded
	clock    Clock
}

var _ Handler = (*History)(nil)

// NewHistory returns the handler of system.history.
func NewHistory(r Recorded, clock Clock) *History { return &History{r, clock} }

// Capability is query; few calls at a time, since each reads the disk.
func (h *History) Capability() manifest.Capability { return manifest.History() }

// Call answers one query with one page; E_INTERNAL while the clock is not set, because what
// was recorded has no time until then.
func (h *History) Call(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, Stream, error) {
	now, err := h.clock.now()
	if err != nil {
		return nil, nil, err
	}
	in := historyInput{Aggregate: "last"}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, nil, err
	}
	timed, cancel := pageContext(ctx)
	defer cancel()
	p, end, err := h.newPage(timed, &in, now)
	if err != nil {
		return nil, nil, err
	}
	if err := h.fill(ctx, timed, p, &in, end); err != nil {
		return nil, nil, err
	}
	return p.encode(in.Metrics, end), nil, nil
}

// pageContext returns a context that ends in time for encoding the page. When it ends before ctx,
// the handler answers with what it has.
func pageContext(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := time.Now().Add(pageTime)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-pageReserve).Before(limit) {
		limit = deadline.Add(-pageReserve)
	}
	return context.WithDeadline(ctx, limit)
}

// historyInput is the input of query, system.history.query.input@1.0.0.
type historyInput struct {
	FromMS    int64    `json:"from_ms"`
	ToMS      int64    `json:"to_ms"`
	StepMS    int64    `json:"step_ms"`
	Metrics   []string `json:"metrics"`
	Aggregate string   `json:"aggregate"`
	Cursor    string   `json:"cursor"`
}

// newPage returns an empty page and the end of the window, which is the present time at most. The
// page begins at the cursor, or where more than a page of empty steps would follow, with the first
// step that has a record. Either is a whole number of steps after from_ms, so that all pages of a
// window have the same steps.
func (h *History) newPage(ctx context.Context, in *historyInput, now int64) (p *page, end int64, err error) {
	end = now + 1
	if in.ToMS != 0 {
		if in.ToMS <= in.FromMS {
			return nil, 0, manifest.E(manifest.ManifestInvalid, "argument to_ms: not after from_ms")
		}
		end = min(end, in.ToMS)
	}
	start := in.FromMS
	if in.Cursor != "" {
		start, err = strconv.ParseInt(in.Cursor, 10, 64)
		if err != nil || start < in.FromMS || (start-in.FromMS)%in.StepMS != 0 {
			return nil, 0, manifest.E(manifest.ManifestInvalid, "argument cursor: not of a page with these arguments")
		}
	}
	if empty := (min(h.recorded.Oldest(ctx), end) - start) / in.StepMS; empty > maxPoints {
		start += empty * in.StepMS
	}
	return &page{start: start, step: in.StepMS, columns: make([][]byte, len(in.Metrics)), size: pageOverhead(in.Metrics)}, end, nil
}

// errPageFull ends Series when the page is full. It does not leave fill: a full page is an answer.
var errPageFull = errors.New("handlers: the page is full")

// fill reads values until the page is full, the window ends or timed does, which is pageContext of
// ctx. A page that is not complete is an answer, as long as it has one step.
func (h *History) fill(ctx, timed context.Context, p *page, in *historyInput, end int64) error {
	pageEnd := min(end, p.start+maxPoints*p.step)
	q := HistoryQuery{FromMS: p.start, EndMS: pageEnd, StepMS: p.step, Metrics: in.Metrics, Aggregate: in.Aggregate}
	err := error(nil)
	if p.start < end {
		err = h.recorded.Series(timed, q, func(start int64, values []float64) error {
			if !p.skipTo(start) || !p.add(values) {
				return errPageFull
			}
			return nil
		})
	}
	switch {
	case err == nil:
		p.skipTo(pageEnd)
		return nil
	case errors.Is(err, errPageFull):
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case timed.Err() == nil:
		return manifest.E(manifest.Internal, "the history cannot be read; on the board try: agentctl status")
	case p.points == 0: // a caller that repeats the page would not get further
		return manifest.E(manifest.DeadlineExceeded, "one step takes too long to read; ask with a smaller step_ms")
	}
	return nil
}

// page is a page that is being filled. Its columns are JSON already: values are encoded once, and the
// size of the result is known at each step.
type page struct {
	start, step int64    // of the first value, and to the next
	points      int      // values of each metric so far
	columns     [][]byte // of each metric: its values, each followed by a comma
	size        int      // bytes of the result so far
	row         []byte   // reused by add
}

// pageOverhead returns the greatest length of a result without values, in bytes.
func pageOverhead(metrics []string) int {
	n := len(`{"from_ms":,"step_ms":,"metrics":{},"next_cursor":""}`) + 3*len("253402300799999")
	for _, name := range metrics {
		n += len(name) + len(`"":[],`)
	}
	return n
}

// next returns the time of the step after the last one.
func (p *page) next() int64 { return p.start + int64(p.points)*p.step }

// skipTo adds null for each step before a time, and reports whether all of them fitted.
func (p *page) skipTo(until int64) bool {
	empty := len("null,") * len(p.columns)
	for p.next() < until {
		if p.points == maxPoints || p.size+empty > maxPageSize {
			return false
		}
		for i := range p.columns {
			p.columns[i] = append(p.columns[i], "null,"...)
		}
		p.points++
		p.size += empty
	}
	return true
}

// add adds the values of the next step, and reports whether they fitted.
func (p *page) add(values []float64) bool {
	p.row = p.row[:0]
	for _, v := range values {
		if math.IsNaN(v) {
			p.row = append(p.row, "null,"...)
		} else {
			p.row = append(appendNumber(p.row, v), ',')
		}
	}
	if p.points == maxPoints || p.size+len(p.row) > maxPageSize {
		return false
	}
	p.points++
	p.size += len(p.row)
	row := p.row
	for i := range p.columns {
		n := bytes.IndexByte(row, ',') + 1
		p.columns[i] = append(p.columns[i], row[:n]...)
		row = row[n:]
	}
	return true
}

// encode returns the result, with a cursor if the window, which ends at end, continues after it.
func (p *page) encode(metrics []string, end int64) []byte {
	b := make([]byte, 0, p.size)
	b = strconv.AppendInt(append(b, `{"from_ms":`...), p.start, 10)
	b = strconv.AppendInt(append(b, `,"step_ms":`...), p.step, 10)
	b = append(b, `,"metrics":{`...)
	for i, name := range metrics {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, '"'), name...), `":[`...)
		if c := p.columns[i]; len(c) > 0 {
			b = append(b, c[:len(c)-1]...)
		}
		b = append(b, ']')
	}
	b = append(b, '}')
	if next := p.next(); next < end {
		b = strconv.AppendInt(append(b, `,"next_cursor":"`...), next, 10)
		b = append(b, '"')
	}
	return append(b, '}')
}
