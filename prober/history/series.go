package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/prober"
)

// A Series is what another machine asks for: evenly spaced values of some metrics. For a mean,
// a minimum or a maximum, SQLite aggregates the integer columns of one step at a time, so that
// each row is read once and no row reaches this package. For the last value it seeks the end
// of each step and reads little else.

// Aggregates of SeriesQuery.
const (
	AggregateLast = "last"
	AggregateMean = "mean"
	AggregateMin  = "min"
	AggregateMax  = "max"
)

// SeriesQuery asks for one value of each metric per step. The steps begin at FromMS; the last
// one may be cut by EndMS, which is not included. Times are milliseconds since 1970.
type SeriesQuery struct {
	FromMS, EndMS, StepMS int64
	Metrics               []string // see MetricNames
	Aggregate             string
}

// ErrMetric reports a query for a metric that the history does not have.
var ErrMetric = errors.New("history: no such metric")

const (
	// maxSpan bounds what one statement aggregates: 3,600 rows at one sample a second. A
	// statement cannot be interrupted, and a small board reads some 50,000 rows a second.
	maxSpan = int64(time.Hour / time.Millisecond)
	// maxSeriesHold bounds for how long a series keeps the flusher from the file.
	maxSeriesHold = 50 * time.Millisecond
	// maxSeriesChunk bounds the steps that are in memory before fn is called.
	maxSeriesChunk = 256
)

// metric is a metric by its place in the file: a column of samples, or a key of readings.
type metric struct {
	column  int // in sampleColumns; -1: a reading
	key     uint8
	convert func(v int64) float64 // from the integers of the file
}

// sampleColumns are the expressions of the columns, and the same of a sample in memory. A
// value that is not known is NULL, which aggregates skip.
var sampleColumns = [...]struct {
	sql string
	of  func(v *values) (n int64, known bool)
}{
	{"cpu", func(v *values) (int64, bool) { return int64(v.cpu), true }},
	{"mem", func(v *values) (int64, bool) { return v.mem, true }},
	{"mem_total", func(v *values) (int64, bool) { return v.total, true }},
	{"nullif(disk,-1)", func(v *values) (int64, bool) { return int64(v.disk), v.disk != diskUnknown }},
	{"load_1m", func(v *values) (int64, bool) { return int64(v.load[0]), true }},
	{"load_5m", func(v *values) (int64, bool) { return int64(v.load[1]), true }},
	{"load_15m", func(v *values) (int64, bool) { return int64(v.load[2]), true }},
}

// columnOfFrame maps the fields of a metric frame (RFC-0009 §5.1) to sampleColumns.
var columnOfFrame = map[string]int{"cpu_pct": 0, "mem_bytes": 1, "mem_total_bytes": 2, "disk_pct": 3, "load_1m": 4, "load_5m": 5, "load_15m": 6}

// metrics are those of all recorded sensors, by name.
var metrics = func() map[string]metric {
	all := make(map[string]metric)
	percent := func(v int64) float64 { return float64(v) / 100 }
	sensors := prober.Sensors()
	for i := range sensors {
		s := &sensors[i]
		column, isColumn := columnOfFrame[s.Frame]
		switch {
		case isColumn && s.Unit == "MiB":
			all[s.Frame] = metric{column: column, convert: func(v int64) float64 { return float64(v << 10) }}
			all[s.Key] = metric{column: column, convert: func(v int64) float64 { return float64(v >> 10) }}
		case isColumn:
			all[s.Frame] = metric{column: column, convert: percent}
			all[s.Key] = metric{column: column, convert: percent}
		case s.Record.ID != 0:
			all[s.Key] = metric{column: -1, key: s.Record.ID, convert: func(v int64) float64 { return float64(v) / 1000 }}
		}
	}
	return all
}()

// MetricNames returns the names that a SeriesQuery may have: the fields of a metric frame, in
// the frame's units, and the keys of the sensor catalogue, in those of its exports.
func MetricNames() []string {
	var names []string
	sensors := prober.Sensors()
	for i := range sensors {
		for _, name := range []string{sensors[i].Frame, sensors[i].Key} {
			if _, ok := metrics[name]; ok {
				names = append(names, name)
			}
		}
	}
	return names
}

// Oldest returns the time of the first record that is young enough to be kept, in milliseconds
// since 1970, and a time beyond every clock when there is none. What cannot be read counts as
// not recorded.
func (s *Store) Oldest(ctx context.Context) int64 {
	s.mu.Lock()
	age := s.maxAge.Milliseconds()
	s.mu.Unlock()
	first := int64(maxTS)
	if s.lock(ctx) == nil {
		err := s.withDB(func(d *db) error {
			first = maxTS // it may be the second file; see withDB
			if err := s.rebase(d); err != nil {
				return err
			}
			before, err := s.ageCutoff(d, age)
			for _, t := range tables {
				if err != nil {
					break
				}
				var ts int64
				if ts, err = d.nthTime(t, max(before, 1), maxTS, 0); ts != 0 {
					first = min(first, ts)
				}
			}
			return err
		})
		s.unlock()
		if err != nil && !errors.Is(err, ErrClosed) {
			s.setFault(err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if unsaved := s.samples.between(1, maxTS); len(unsaved) > 0 {
		first = min(first, unsaved[0].id)
	}
	if unsaved := s.readings.between(1, readingsTable.last(maxTS)); len(unsaved) > 0 {
		first = min(first, readingTS(unsaved[0].id))
	}
	return first
}

// Series calls fn with each step that has a record, in ascending order, and returns fn's error
// if there is one. values has one value for each metric, NaN where there is none, and is valid
// until fn returns; start is the start of the step. Series holds no lock while fn runs.
//
// When ctx ends, fn has been called with all steps that were complete. When the disk cannot be
// read, the records in memory are used and Stats shows the fault. Undated records have no
// place in a series until the time is known.
//
// A mean is rounded to the precision of the file. A sample whose millisecond the file has
// already counts until the next flush.
func (s *Store) Series(ctx context.Context, q SeriesQuery, fn func(start int64, values []float64) error) error {
	r, err := newSeriesReader(q)
	if err != nil {
		return err
	}
	for r.next < q.EndMS {
		err := s.fetchSeries(ctx, r)
		for i := range r.starts {
			if err := fn(r.starts[i], r.values[i*len(r.metrics):(i+1)*len(r.metrics)]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// seriesReader is a series in progress.
type seriesReader struct {
	q       SeriesQuery
	metrics []metric
	samples string // the statement that aggregates samples
	reads   string // the same for readings
	window  queryReader

	// A slot is a distinct column or key: those of columns first, then those of keys, both in
	// the order of the statements. slots has that of each metric; columns and keys say which
	// one a column or key has, -1 for none. Two metrics may share one: mem_bytes and memory.used
	// are one column in two units.
	slots   []int
	columns [len(sampleColumns)]int
	keys    [256]int

	// next is the first millisecond that was not read, and part what was read of its step.
	next int64
	part seriesPart
	// starts and values are the steps of the last chunk, ready for fn.
	starts []int64
	values []float64
	// memoryOnly is set when the disk did not answer, so that the rest does not wait again.
	memoryOnly bool
}

// seriesPart aggregates one step. Its lists are by slot.
type seriesPart struct {
	hasRecord bool
	values    []int64 // the sum, or the least, greatest or last value
	counts    []int64 // records behind it
}

// clone copies what a fetch changes, so that a fetch that failed can be repeated.
func (p *seriesPart) clone() seriesPart {
	return seriesPart{p.hasRecord, slices.Clone(p.values), slices.Clone(p.counts)}
}

// reset empties the part for the next step.
func (p *seriesPart) reset() {
	p.hasRecord = false
	clear(p.values)
	clear(p.counts)
}

// newSeriesReader checks a query and writes its statements.
func newSeriesReader(q SeriesQuery) (*seriesReader, error) {
	if q.StepMS <= 0 || q.FromMS < 0 || q.EndMS > maxTS {
		return nil, fmt.Errorf("history: a series from %d to %d by %d ms", q.FromMS, q.EndMS, q.StepMS)
	}
	r := &seriesReader{q: q, next: q.FromMS}
	r.window.to = q.EndMS - 1
	for i := range r.columns {
		r.columns[i] = -1
	}
	isWanted := [len(sampleColumns)]bool{}
	for _, name := range q.Metrics {
		m, ok := metrics[name]
		if !ok {
			return nil, ErrMetric
		}
		r.metrics = append(r.metrics, m)
		if m.column >= 0 {
			isWanted[m.column], r.window.wantsSamples = true, true
		} else {
			r.window.wanted[m.key] = true
		}
	}
	var columns, keys []string
	for c := range sampleColumns {
		if isWanted[c] {
			r.columns[c] = len(columns)
			columns = append(columns, aggregateSQL(q.Aggregate, sampleColumns[c].sql, ""))
		}
	}
	for k := range r.window.wanted {
		r.keys[k] = -1
		if r.window.wanted[k] {
			r.keys[k] = len(columns) + len(keys)
			keys = append(keys, aggregateSQL(q.Aggregate, "value", " FILTER (WHERE id & 255 = "+strconv.Itoa(k)+")"))
		}
	}
	r.window.wantedCount = len(keys)
	for i := range r.metrics {
		if m := &r.metrics[i]; m.column >= 0 {
			r.slots = append(r.slots, r.columns[m.column])
		} else {
			r.slots = append(r.slots, r.keys[m.key])
		}
	}
	n := len(columns) + len(keys)
	r.part = seriesPart{values: make([]int64, n), counts: make([]int64, n)}
	r.samples = "SELECT count(*)," + strings.Join(columns, ",") + " FROM samples WHERE ts BETWEEN ? AND ?"
	r.reads = "SELECT count(*)," + strings.Join(keys, ",") + " FROM readings WHERE id BETWEEN ? AND ?"
	return r, nil
}

// aggregateSQL is a value and how many records are behind it. Where no column can be NULL that
// is count(*), which SQLite computes once for all.
func aggregateSQL(aggregate, expr, filter string) string {
	function, count := "sum", "count(*)"
	if aggregate == AggregateMin || aggregate == AggregateMax {
		function = aggregate
	}
	if strings.HasPrefix(expr, "nullif") {
		count = "count(" + expr + ")"
	}
	return function + "(" + expr + ")" + filter + "," + count + filter
}
