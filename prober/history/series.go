package history

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
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
// until fn returns; start is the begin of the step. Series holds no lock while fn runs.
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
	// one a column or key has, -1 for none.
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

func (p *seriesPart) clone() seriesPart {
	return seriesPart{p.hasRecord, slices.Clone(p.values), slices.Clone(p.counts)}
}

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

// fetchSeries reads the next chunk. After an error r has what was complete before it.
func (s *Store) fetchSeries(ctx context.Context, r *seriesReader) error {
	if !r.memoryOnly {
		err := s.lock(ctx)
		if err == nil {
			defer s.unlock()
			next, part := r.next, r.part.clone()
			err = s.withDB(func(d *db) error {
				defer d.forget(r.samples, r.reads)  // their number is not bounded
				r.next, r.part = next, part.clone() // it may be the second file; see withDB
				if err := s.rebase(d); err != nil {
					return err
				}
				return s.fillSeries(ctx, d, r)
			})
			if err != nil && ctx.Err() == nil {
				r.next, r.part = next, part
			}
		}
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrClosed):
			return err
		case !errors.Is(err, ErrBusy):
			s.setFault(err)
		}
		r.memoryOnly = true
	}
	if err := s.rebase(nil); err != nil {
		return err
	}
	return s.fillSeries(ctx, nil, r)
}

// fillSeries reads steps until the chunk is full, its time is over, or the window ends. d is
// nil for memory only.
func (s *Store) fillSeries(ctx context.Context, d *db, r *seriesReader) error {
	r.starts, r.values = r.starts[:0], r.values[:0]
	for begin := time.Now(); r.next < r.q.EndMS && len(r.starts) < maxSeriesChunk && time.Since(begin) < maxSeriesHold; {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		start := r.next - (r.next-r.q.FromMS)%r.q.StepMS
		end := min(start+r.q.StepMS, r.q.EndMS) // of the step
		upto := end
		if r.q.Aggregate != AggregateLast {
			upto = min(end, r.next+maxSpan)
		}
		isEmpty, err := s.addSpan(d, r, r.next, upto-1)
		if err != nil {
			return err
		}
		r.next = upto
		if isEmpty {
			if r.next, err = s.firstSeriesTime(d, r, upto); err != nil {
				return err
			}
		}
		if r.next >= end { // the step is complete
			if r.part.hasRecord {
				r.endStep(start)
			}
			r.part.reset()
		}
	}
	return nil
}

// firstSeriesTime is the time of the first record from a time on, or the end of the window.
func (s *Store) firstSeriesTime(d *db, r *seriesReader, from int64) (int64, error) {
	if from >= r.q.EndMS {
		return r.q.EndMS, nil
	}
	if d != nil {
		return s.firstTimeFrom(d, &r.window, from)
	}
	first := r.q.EndMS
	s.mu.Lock()
	defer s.mu.Unlock()
	if unsaved := s.samples.between(from, r.window.to); r.window.wantsSamples && len(unsaved) > 0 {
		first = unsaved[0].id
	}
	if unsaved := s.readings.between(readingsTable.first(from), readingsTable.last(r.window.to)); r.window.wantedCount > 0 && len(unsaved) > 0 {
		first = min(first, readingTS(unsaved[0].id))
	}
	return first, nil
}

// endStep makes the values of a step.
func (r *seriesReader) endStep(start int64) {
	r.starts = append(r.starts, start)
	for i := range r.metrics {
		m := &r.metrics[i]
		v, n := r.part.values[r.slots[i]], r.part.counts[r.slots[i]]
		if n > 0 && r.q.Aggregate == AggregateMean {
			v = int64(math.Round(float64(v) / float64(n)))
		}
		if n == 0 {
			r.values = append(r.values, math.NaN())
		} else {
			r.values = append(r.values, m.convert(v))
		}
	}
}

// addSpan adds the records of from..to, a part of one step, and reports whether there are none.
func (s *Store) addSpan(d *db, r *seriesReader, from, to int64) (isEmpty bool, err error) {
	if r.q.Aggregate == AggregateLast {
		return s.addLast(d, r, from, to)
	}
	n := int64(0)
	if d != nil && r.window.wantsSamples {
		err := d.each(r.samples, func(row []driver.Value) bool {
			n += r.addRow(row, 0)
			return false
		}, from, to)
		if err != nil {
			return false, err
		}
	}
	if d != nil && r.window.wantedCount > 0 {
		err := d.each(r.reads, func(row []driver.Value) bool {
			n += r.addRow(row, len(r.part.values)-r.window.wantedCount)
			return false
		}, readingsTable.first(from), readingsTable.last(to))
		if err != nil {
			return false, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.window.wantsSamples {
		for _, it := range s.samples.between(from, to) {
			n++
			r.addSample(&it.v)
		}
	}
	if r.window.wantedCount > 0 {
		for _, it := range s.readings.between(readingsTable.first(from), readingsTable.last(to)) {
			n++
			r.add(r.keys[readingKey(it.id)], it.v, 1)
		}
	}
	r.part.hasRecord = r.part.hasRecord || n > 0
	return n == 0, nil
}

// addRow adds a row of a statement: how many records there are, and for each slot from first on
// the value and its count.
func (r *seriesReader) addRow(row []driver.Value, first int) (n int64) {
	n, _ = row[0].(int64)
	for i := 1; i < len(row); i += 2 {
		v, _ := row[i].(int64)
		count, _ := row[i+1].(int64)
		r.add(first+i/2, v, count)
	}
	return n
}

// addSample adds the wanted columns of a sample.
func (r *seriesReader) addSample(v *values) {
	for c := range sampleColumns {
		if n, known := sampleColumns[c].of(v); known {
			r.add(r.columns[c], n, 1)
		}
	}
}

// add adds a value that stands for n records to a slot; -1 is none.
func (r *seriesReader) add(slot int, v, n int64) {
	if slot < 0 || n == 0 {
		return
	}
	p := &r.part
	switch {
	case r.q.Aggregate == AggregateMean:
		p.values[slot] += v
	case p.counts[slot] == 0, r.q.Aggregate == AggregateMin && v < p.values[slot], r.q.Aggregate == AggregateMax && v > p.values[slot]:
		p.values[slot] = v
	}
	p.counts[slot] += n
}

// addLast takes the last record of each metric in from..to, which is a whole step.
func (s *Store) addLast(d *db, r *seriesReader, from, to int64) (isEmpty bool, err error) {
	var g group
	if d != nil {
		if g, err = s.lastInBucket(d, &r.window, from, to); err != nil {
			return false, err
		}
	} else {
		g = s.lastUnsaved(&r.window, from, to)
	}
	if g.hasSample {
		r.addSample(&g.sample)
	}
	for _, it := range g.readings {
		r.add(r.keys[readingKey(it.id)], it.v, 1)
	}
	r.part.hasRecord = g.ts != 0
	return g.ts == 0, nil
}

// lastUnsaved is lastInBucket for memory only.
func (s *Store) lastUnsaved(r *queryReader, from, to int64) (g group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if unsaved := s.samples.between(from, to); r.wantsSamples && len(unsaved) > 0 {
		last := unsaved[len(unsaved)-1]
		g = group{ts: last.id, hasSample: true, sample: last.v}
	}
	last := map[uint8]int{}
	for _, it := range s.readings.between(readingsTable.first(from), readingsTable.last(to)) {
		k := readingKey(it.id)
		if !r.wanted[k] {
			continue
		}
		if i, known := last[k]; known {
			g.readings[i] = it
		} else {
			last[k] = len(g.readings)
			g.readings = append(g.readings, it)
		}
		g.ts = max(g.ts, readingTS(it.id))
	}
	return g
}
