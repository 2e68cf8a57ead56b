package history

import (
	"cmp"
	"database/sql/driver"
	"slices"
)

const (
	selectSamples     = "SELECT * FROM samples WHERE ts BETWEEN ? AND ? ORDER BY ts LIMIT ?"
	selectLastSample  = "SELECT * FROM samples WHERE ts BETWEEN ? AND ? ORDER BY ts DESC LIMIT 1"
	selectReadings    = "SELECT id, value FROM readings WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
	selectReadingsRev = "SELECT id, value FROM readings WHERE id BETWEEN ? AND ? ORDER BY id DESC"
	selectNth         = "SELECT ts FROM samples WHERE ts BETWEEN ? AND ? ORDER BY ts LIMIT 1 OFFSET ?"
	selectNthReading  = "SELECT id >> 8 FROM readings WHERE id BETWEEN ? AND ? ORDER BY id LIMIT 1 OFFSET ?"
)

// fetch fetches what comes next and moves the cursor behind it. d is nil for memory
// only. An error leaves the reader as it was, so that it can be tried again.
func (s *Store) fetch(d *db, r *queryReader) error {
	dense, err := s.isDense(d, r)
	if err != nil {
		return err
	}
	fetch := s.scan
	if dense {
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

// addGroup takes the next group: a row of its own, or part of a bucket.
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

// bucketEnd is the last millisecond of the bucket of ts, within the window.
func (r *queryReader) bucketEnd(ts int64) int64 { return min(ts-ts%r.step+r.step-1, r.to) }

// isDense tells whether the bucket at the cursor has so many rows in the file that looking
// for its last one is cheaper than reading them all.
func (s *Store) isDense(d *db, r *queryReader) (bool, error) {
	if d == nil || r.step == 0 {
		return false, nil
	}
	end := r.bucketEnd(r.cursor)
	if r.wantsSamples {
		ts, err := d.number(selectNth, r.cursor, end, int64(minSeekRows-1))
		if ts != 0 || err != nil {
			return ts != 0, err
		}
	}
	if r.wantedCount == 0 {
		return false, nil
	}
	ts, err := d.number(selectNthReading, r.cursor<<8, end<<8|255, int64(minSeekRows*max(1, r.wantedCount)-1))
	return ts != 0, err
}

// scan reads what is at the cursor, row by row.
func (s *Store) scan(d *db, r *queryReader) (groups []group, next int64, err error) {
	to := r.to
	var samples []item[values]
	if r.wantsSamples {
		if samples, to, err = firstItems(s, d, &s.samples, selectSamples, sampleOf, r.cursor, to, chunkSamples); err != nil {
			return nil, 0, err
		}
	}
	var readings []item[int64]
	if r.wantedCount > 0 {
		all := to<<8 | 255
		var upto int64
		if readings, upto, err = firstItems(s, d, &s.readings, selectReadings, readingOf, r.cursor<<8, all, chunkReadings); err != nil {
			return nil, 0, err
		}
		if upto < all {
			to = readingTS(upto) - 1 // those of that millisecond may not all be there
		}
		readings = slices.DeleteFunc(readings, func(it item[int64]) bool { return !r.wanted[readingKey(it.id)] })
	}
	return groupByTime(samples, readings, to), to + 1, nil
}

// firstItems is the first items with ids from..to, about as many as most, from the file and
// from memory, and the id up to which they are all.
func firstItems[T any](s *Store, d *db, b *buffer[T], sql string, of func([]driver.Value) item[T], from, to int64, most int) (got []item[T], upto int64, err error) {
	if d != nil {
		err := d.each(sql, func(row []driver.Value) bool {
			got = append(got, of(row))
			return true
		}, from, to, int64(most))
		if err != nil {
			return nil, 0, err
		}
		if len(got) == most {
			to = got[most-1].id
		}
	}
	s.mu.Lock()
	unsaved := b.between(from, to)
	if len(unsaved) > most {
		unsaved = unsaved[:most]
		to = unsaved[most-1].id
	}
	got = append(got, unsaved...)
	s.mu.Unlock()
	return mergeByID(got), to, nil
}

// groupByTime makes groups of samples and readings up to a time.
func groupByTime(samples []item[values], readings []item[int64], to int64) []group {
	groups := make([]group, 0, max(len(samples), len(readings)))
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
// each id: it is what the file has, or will have.
func mergeByID[T any](items []item[T]) []item[T] {
	byID := func(a, b item[T]) int { return cmp.Compare(a.id, b.id) }
	if !slices.IsSortedFunc(items, byID) {
		slices.SortStableFunc(items, byID)
	}
	return slices.CompactFunc(items, func(a, b item[T]) bool { return a.id == b.id })
}

// seek finds the last rows of the buckets from the cursor on.
func (s *Store) seek(d *db, r *queryReader) (groups []group, next int64, err error) {
	next = r.cursor
	for next <= r.to && len(groups) < chunkBuckets {
		end := r.bucketEnd(next)
		g, err := s.lastInBucket(d, r, next, end)
		if err != nil {
			return nil, 0, err
		}
		next = end + 1
		if g.ts != 0 {
			groups = append(groups, g)
		} else if next, err = s.firstTimeFrom(d, r, next); err != nil {
			return nil, 0, err
		}
	}
	return groups, next, nil
}

// lastInBucket is the last sample of from..to and the last reading of each name; its ts is 0
// when there is neither.
func (s *Store) lastInBucket(d *db, r *queryReader, from, to int64) (g group, err error) {
	if r.wantsSamples {
		var last item[values]
		err = d.each(selectLastSample, func(row []driver.Value) bool {
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
	last := map[uint8]item[int64]{}
	left := 0 // keys that may be found; one that never was recorded must not have all be read
	for k, want := range r.wanted {
		if want && d.used[k] {
			left++
		}
	}
	err = d.each(selectReadingsRev, func(row []driver.Value) bool {
		it := readingOf(row)
		k := readingKey(it.id)
		if _, known := last[k]; !known && r.wanted[k] {
			last[k] = it
			left--
		}
		return left > 0
	}, from<<8, to<<8|255)
	if err != nil {
		return g, err
	}
	s.mu.Lock()
	for _, it := range s.readings.between(from<<8, to<<8|255) {
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

// firstTimeFrom is the time of the first row from a time on, and behind the window when
// there is none.
func (s *Store) firstTimeFrom(d *db, r *queryReader, from int64) (int64, error) {
	first := r.to + 1
	if r.wantsSamples {
		ts, err := d.number(selectNth, from, r.to, int64(0))
		if err != nil {
			return 0, err
		}
		if ts != 0 {
			first = ts
		}
	}
	if r.wantedCount > 0 {
		ts, err := d.number(selectNthReading, from<<8, r.to<<8|255, int64(0))
		if err != nil {
			return 0, err
		}
		if ts != 0 {
			first = min(first, ts)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if unsaved := s.samples.between(from, r.to); r.wantsSamples && len(unsaved) > 0 {
		first = min(first, unsaved[0].id)
	}
	if unsaved := s.readings.between(from<<8, r.to<<8|255); r.wantedCount > 0 && len(unsaved) > 0 {
		first = min(first, readingTS(unsaved[0].id))
	}
	return first, nil
}

func sampleOf(row []driver.Value) (it item[values]) {
	n := func(i int) int64 { v, _ := row[i].(int64); return v }
	it.id = n(0)
	it.v = values{
		cpu: int32(n(1)), mem: n(2), total: n(3), disk: int32(n(4)),
		load: [3]int32{int32(n(5)), int32(n(6)), int32(n(7))},
	}
	return it
}

func readingOf(row []driver.Value) (it item[int64]) {
	it.id, _ = row[0].(int64)
	it.v, _ = row[1].(int64)
	return it
}
