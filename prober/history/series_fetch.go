package history

import (
	"context"
	"database/sql/driver"
	"math"
	"time"
)

// fetchSeries reads the next chunk. After an error r has what was complete before it.
func (s *Store) fetchSeries(ctx context.Context, r *seriesReader) error {
	next, part := r.next, r.part.clone()
	return s.readDB(ctx, &r.memoryOnly, func(d *db) error {
		r.next, r.part = next, part.clone() // it may be the second call
		if d != nil {
			defer d.forget(r.samples, r.reads) // their number is not bounded
		}
		return s.fillSeries(ctx, d, r)
	})
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
		// A gap of months costs one search, however short the steps are.
		if isEmpty {
			if r.next, err = s.firstTimeFrom(d, &r.window, upto); err != nil {
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

// add adds a value that stands for n records to a slot; -1 is none. For the last value it has to be
// called once for a slot and step, as addLast does.
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
