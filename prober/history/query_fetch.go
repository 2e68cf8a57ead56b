package history

import (
	"cmp"
	"database/sql/driver"
	"slices"
	"strconv"
	"strings"
)

// A query fetches in one of two ways. A scan reads the rows from the cursor on. With a step,
// and many rows in the bucket at the cursor, a seek looks up the last rows of each bucket
// instead. Both merge the file with what is unsaved in memory.

// fetch reads the next rows and moves the cursor behind them. d is nil for memory only. An
// error leaves the reader unchanged, so that the call can be repeated.
func (s *Store) fetch(d *db, r *queryReader) error {
	if d != nil && !r.hidesOld { // the rows in memory are young
		before, err := s.ageCutoff(d, r.ageMS)
		if err != nil {
			return err
		}
		r.hidesOld, r.cursor = true, max(r.cursor, before)
	}
	isDense, err := r.isDense(d)
	if err != nil {
		return err
	}
	fetch := s.scan
	if isDense {
		fetch = s.seek
	}
	groups, next, err := fetch(d, r)
	if err != nil {
		return err
	}

	r.rows, r.bucketReadings = r.rows[:0], r.bucketReadings[:0]
	for i := range groups {
		r.addGroup(&groups[i])
	}
	r.cursor = next
	if r.cursor > r.to {
		r.done = true
		r.endBucket()
	}
	return nil
}

// addGroup makes a row of the next group, or with a step adds it to its bucket.
func (r *queryReader) addGroup(g *group) {
	if r.step == 0 {
		r.rows = append(r.rows, *g)
		return
	}
	if r.pending.ts != 0 && r.pending.ts/r.step != g.ts/r.step {
		r.endBucket()
	}
	r.pending.ts = g.ts
	if g.hasSample {
		r.pending.hasSample, r.pending.sample = true, g.sample
	}
	for _, it := range g.readings {
		i, found := slices.BinarySearchFunc(r.pendingReadings, readingKey(it.id), func(it item[int64], k uint8) int { return cmp.Compare(readingKey(it.id), k) })
		if !found {
			r.pendingReadings = slices.Insert(r.pendingReadings, i, it)
		}
		r.pendingReadings[i] = it
	}
}

// endBucket makes a row of the bucket, if there is one.
func (r *queryReader) endBucket() {
	if r.pending.ts == 0 {
		return
	}
	from := len(r.bucketReadings)
	r.bucketReadings = append(r.bucketReadings, r.pendingReadings...)
	r.pending.readings = r.bucketReadings[from:]
	r.rows = append(r.rows, r.pending)
	r.pending, r.pendingReadings = group{}, r.pendingReadings[:0]
}

// bucketEnd is the last millisecond of the bucket of ts, within the window. Buckets do not begin with
// the window, so the first and the last one may be cut.
func (r *queryReader) bucketEnd(ts int64) int64 { return min(ts-ts%r.step+r.step-1, r.to) }

// isDense reports whether the bucket at the cursor has so many rows in the file that
// seeking its last one is cheaper than reading them all. It looks at one bucket only, as
// an estimate for the chunk: both ways return the same rows.
func (r *queryReader) isDense(d *db) (bool, error) {
	if d == nil || r.step == 0 {
		return false, nil
	}
	end := r.bucketEnd(r.cursor)
	for _, t := range r.tables() {
		n := minSeekRows
		if t == readingsTable {
			n *= r.wantedCount
		}
		if ts, err := d.nthTime(t, r.cursor, end, int64(n-1)); ts != 0 || err != nil {
			return ts != 0, err
		}
	}
	return false, nil
}

// tables are those that the query reads.
func (r *queryReader) tables() []*table {
	switch {
	case r.wantedCount == 0 && !r.wantsSamples:
		return nil
	case r.wantedCount == 0:
		return tables[:1]
	case !r.wantsSamples:
		return tables[1:]
	}
	return tables[:]
}

// scan reads rows from the cursor on, about as many as a chunk has.
func (s *Store) scan(d *db, r *queryReader) (groups []group, next int64, err error) {
	to := r.to
	var samples []item[values]
	if r.wantsSamples {
		if samples, to, err = firstItems(s, d, samplesTable, &s.samples, sampleOf, r.cursor, to, r.chunk.samples[:0]); err != nil {
			return nil, 0, err
		}
	}
	var readings []item[int64]
	if r.wantedCount > 0 {
		var upto int64
		if readings, upto, err = firstItems(s, d, readingsTable, &s.readings, readingOf, r.cursor, to, r.chunk.readings[:0]); err != nil {
			return nil, 0, err
		}
		if upto < readingsTable.last(to) {
			to = readingTS(upto) - 1 // of that millisecond some may be missing
		}
		readings = slices.DeleteFunc(readings, func(it item[int64]) bool { return !r.wanted[readingKey(it.id)] })
	}
	return groupByTime(r.chunk.groups[:0], samples, readings, to), to + 1, nil
}

// firstItems appends the first items of from..to to a list, about as many as it has space for, from the
// file and from memory, and returns the id up to which they are complete.
func firstItems[T any](s *Store, d *db, t *table, b *buffer[T], decode func([]driver.Value) item[T], from, to int64, items []item[T]) (_ []item[T], upto int64, err error) {
	first, upto, limit := t.first(from), t.last(to), cap(items)
	if d != nil {
		err := d.each(t.scan, func(row []driver.Value) bool {
			items = append(items, decode(row))
			return len(items) < limit
		}, first, upto)
		if err != nil {
			return nil, 0, err
		}
		if len(items) == limit {
			upto = items[limit-1].id
		}
	}
	// Only items up to the last one of the file: a later one may have others of the file before it.
	s.mu.Lock()
	unsaved := b.between(first, upto)
	if len(unsaved) > limit {
		unsaved = unsaved[:limit]
		upto = unsaved[limit-1].id
	}
	items = append(items, unsaved...)
	s.mu.Unlock()
	return mergeByID(items), upto, nil
}

// groupByTime appends groups of samples and readings up to a time. Both lists are sorted by id.
// The groups share the array of readings.
func groupByTime(groups []group, samples []item[values], readings []item[int64], to int64) []group {
	for len(samples) > 0 || len(readings) > 0 {
		g := group{ts: maxTS}
		if len(samples) > 0 {
			g.ts = samples[0].id
		}
		if len(readings) > 0 {
			g.ts = min(g.ts, readingTS(readings[0].id))
		}
		if g.ts > to {
			break
		}
		if len(samples) > 0 && samples[0].id == g.ts {
			g.hasSample, g.sample, samples = true, samples[0].v, samples[1:]
		}
		n := 0
		for n < len(readings) && readingTS(readings[n].id) == g.ts {
			n++
		}
		g.readings, readings = readings[:n], readings[n:]
		groups = append(groups, g)
	}
	return groups
}

// mergeByID sorts items, those of the file before those of memory, and keeps the first of
// each id: it is what the file has, or will have. After the clock went back, an id may be in both.
func mergeByID[T any](items []item[T]) []item[T] {
	byID := func(a, b item[T]) int { return cmp.Compare(a.id, b.id) }
	if !slices.IsSortedFunc(items, byID) {
		slices.SortStableFunc(items, byID)
	}
	return slices.CompactFunc(items, func(a, b item[T]) bool { return a.id == b.id })
}

// A bucket's last sample, and the readings of its last time, for the buckets from ?1 to ?4; ?2 is the
// end of the first one and ?3 their length. One statement for all: to start one costs as much as
// several seeks.
const (
	lastSamples = "WITH RECURSIVE bucket(first, last) AS (" +
		"VALUES(?1, ?2) UNION ALL SELECT last + 1, min(last + ?3, ?4) FROM bucket WHERE last < ?4) " +
		"SELECT samples.* FROM bucket CROSS JOIN samples ON ts = (SELECT max(ts) FROM samples WHERE ts BETWEEN first AND last)"
	lastReadings = "WITH RECURSIVE bucket(last, ts) AS (" +
		"SELECT ?2, (SELECT max(id) >> 8 FROM readings WHERE id BETWEEN ?1 << 8 AND ?2 << 8 | 255) UNION ALL " +
		"SELECT min(last + ?3, ?4), (SELECT max(id) >> 8 FROM readings WHERE id BETWEEN (last + 1) << 8 AND min(last + ?3, ?4) << 8 | 255) " +
		"FROM bucket WHERE last < ?4) " +
		"SELECT id, value FROM bucket CROSS JOIN readings ON id BETWEEN ts << 8 AND ts << 8 | 255"
)

// seek finds the last rows of the next buckets.
func (s *Store) seek(d *db, r *queryReader) (groups []group, next int64, err error) {
	end := r.bucketEnd(r.cursor)
	last := min(end+min(chunkBuckets-1, maxSeekSpan/r.step)*r.step, r.to)
	samples := r.chunk.samples[:0]
	if r.wantsSamples {
		err := d.each(lastSamples, func(row []driver.Value) bool {
			samples = append(samples, sampleOf(row))
			return true
		}, r.cursor, end, r.step, last)
		if err != nil {
			return nil, 0, err
		}
		s.mu.Lock()
		samples = mergeByID(append(samples, s.samples.between(r.cursor, last)...))
		s.mu.Unlock()
	}
	readings := r.chunk.readings[:0]
	if r.wantedCount > 0 {
		if readings, err = r.seekReadings(d, end, last); err != nil {
			return nil, 0, err
		}
		s.mu.Lock()
		for _, it := range s.readings.between(readingsTable.first(r.cursor), readingsTable.last(last)) {
			if r.wanted[readingKey(it.id)] {
				readings = append(readings, it)
			}
		}
		s.mu.Unlock()
		readings = mergeByID(readings)
	}
	if groups = groupByTime(r.chunk.groups[:0], samples, readings, last); len(groups) > 0 {
		return groups, last + 1, nil
	}
	next, err = s.firstTimeFrom(d, r, last+1)
	return nil, next, err
}

// seekReadings finds the last reading of each key in the buckets up to last; end is that of the first
// one. Most keys are recorded together. Only where one is missing at the last time of a bucket, the
// rows of the chunk are searched for it: a key has no index.
func (r *queryReader) seekReadings(d *db, end, last int64) (readings []item[int64], err error) {
	readings = r.chunk.readings[:0]
	var newest, found [256]int // by key: 1 + its index in readings, and the buckets that have it
	buckets, ts := 0, int64(0)
	add := func(row []driver.Value) bool {
		it := readingOf(row)
		k := readingKey(it.id)
		if readingTS(it.id) != ts {
			ts = readingTS(it.id)
			buckets++
		}
		switch i := newest[k] - 1; {
		case !r.wanted[k]:
		case i >= 0 && readingTS(readings[i].id)/r.step == ts/r.step:
			readings[i] = it
		default:
			readings = append(readings, it)
			newest[k] = len(readings)
			found[k]++
		}
		return true
	}
	if err := d.each(lastReadings, add, r.cursor, end, r.step, last); err != nil {
		return nil, err
	}
	var missing []string
	for k := range r.wanted {
		if r.wanted[k] && d.used[k] && found[k] < buckets {
			missing = append(missing, strconv.Itoa(k))
		}
	}
	if len(missing) == 0 {
		return readings, nil
	}
	clear(newest[:])
	search := "SELECT id, value FROM readings WHERE id BETWEEN ? AND ? AND id & 255 IN (" + strings.Join(missing, ",") + ")"
	defer d.forget(search) // their number is not bounded
	return readings, d.each(search, add, readingsTable.first(r.cursor), readingsTable.last(last))
}

// lastInBucket is the last sample of from..to and the last reading of each key; its ts is 0
// when there is neither.
func (s *Store) lastInBucket(d *db, r *queryReader, from, to int64) (g group, err error) {
	if r.wantsSamples {
		var last item[values]
		err = d.each(samplesTable.reverse, func(row []driver.Value) bool {
			last = sampleOf(row)
			return false
		}, from, to)
		if err != nil {
			return g, err
		}
		s.mu.Lock()
		if unsaved := s.samples.between(from, to); len(unsaved) > 0 && unsaved[len(unsaved)-1].id > last.id {
			last = unsaved[len(unsaved)-1]
		}
		s.mu.Unlock()
		g = group{ts: last.id, hasSample: last.id != 0, sample: last.v}
	}
	if r.wantedCount == 0 {
		return g, nil
	}
	first, end := readingsTable.first(from), readingsTable.last(to)
	last := map[uint8]item[int64]{}
	left := 0 // keys that may be found: for one that was never recorded all rows would be read
	for k, isWanted := range r.wanted {
		if isWanted && d.used[k] {
			left++
		}
	}
	err = d.each(readingsTable.reverse, func(row []driver.Value) bool {
		it := readingOf(row)
		k := readingKey(it.id)
		if _, known := last[k]; !known && r.wanted[k] {
			last[k] = it
			left--
		}
		return left > 0
	}, first, end)
	if err != nil {
		return g, err
	}
	s.mu.Lock()
	for _, it := range s.readings.between(first, end) {
		if k := readingKey(it.id); r.wanted[k] && it.id > last[k].id {
			last[k] = it
		}
	}
	s.mu.Unlock()
	for _, it := range last {
		g.readings = append(g.readings, it)
		g.ts = max(g.ts, readingTS(it.id))
	}
	return g, nil
}

// firstTimeFrom is the time of the first row from a time on, or the first millisecond after the
// window when there is none. d is nil for memory only.
func (s *Store) firstTimeFrom(d *db, r *queryReader, from int64) (int64, error) {
	first := r.to + 1
	if d != nil {
		for _, t := range r.tables() {
			ts, err := d.nthTime(t, from, r.to, 0)
			if err != nil {
				return 0, err
			}
			if ts != 0 {
				first = min(first, ts)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if unsaved := s.samples.between(from, r.to); r.wantsSamples && len(unsaved) > 0 {
		first = min(first, unsaved[0].id)
	}
	if unsaved := s.readings.between(readingsTable.first(from), readingsTable.last(r.to)); r.wantedCount > 0 && len(unsaved) > 0 {
		first = min(first, readingTS(unsaved[0].id))
	}
	return first, nil
}

// sampleOf decodes a row of samples. The schema is STRICT, so the columns are integers.
func sampleOf(row []driver.Value) (it item[values]) {
	n := func(i int) int64 { v, _ := row[i].(int64); return v }
	it.id = n(0)
	it.v = values{
		cpu: int32(n(1)), mem: n(2), total: n(3), disk: int32(n(4)),
		load: [3]int32{int32(n(5)), int32(n(6)), int32(n(7))},
	}
	return it
}

// readingOf decodes a row of readings.
func readingOf(row []driver.Value) (it item[int64]) {
	it.id, _ = row[0].(int64)
	it.v, _ = row[1].(int64)
	return it
}
