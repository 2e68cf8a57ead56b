package history

import "database/sql/driver"

// Age. A sample's age is the uptime that was recorded since, and not the difference of two
// readings of the wall clock: a clock that is wrong for an hour, or a relay's that a board without
// a correct one follows, would make the whole history too old at once. A board that was switched
// off for a year still has its last month.
//
// The file holds how recorded uptime and wall clock belong together, in spans in which the wall
// clock did not jump. Removing is by wall clock still, since the rows are in its order: everything
// before the first row that any span within the age may have.
//
//	uptime   0 ......... 40 d ........... 55 d      the wall clock jumped at 40 d
//	span 1   ts of day 0 + length 40 d
//	span 2                ts of day 39 + length 15 d
//	MaxAge 30 d: the cutoff is min(span 1 at 25 d, start of span 2)

// span is a part of the recorded uptime. All in milliseconds.
type span struct {
	uptime int64 // recorded before it
	length int64
	ts     int64 // of the wall clock at its start; 0: none is known yet
}

const (
	// maxDrift is how far the wall clock may move against the boot's clock within a span, in
	// milliseconds. NTP moves it 10 s in five hours at most.
	maxDrift = 10_000
	// maxSpans bounds the spans in the file. Each restart and each jump adds one.
	maxSpans = 4096
	// saveSpanAfter is how much a span grows, in milliseconds, before the file gets its new length:
	// a flush writes another page for it. What a span had grown since is seen from its rows.
	saveSpanAfter = 3_600_000
)

// The statements of spans.
const (
	createSpans = `CREATE TABLE IF NOT EXISTS spans( -- of recorded uptime, in which the wall clock did not jump
  uptime INTEGER PRIMARY KEY, -- ms recorded before it
  length INTEGER NOT NULL,    -- ms
  ts     INTEGER NOT NULL     -- ms since 1970 at its start
) STRICT;
`
	lastSpan    = "SELECT uptime, length, ts FROM spans ORDER BY uptime DESC LIMIT 1"
	youngSpans  = "SELECT uptime, length, ts FROM spans WHERE uptime + length > ? ORDER BY uptime"
	putSpan     = "INSERT OR REPLACE INTO spans VALUES(?,?,?)"
	dropSpans   = "DELETE FROM spans WHERE uptime + length < ?"
	dropOldest  = "DELETE FROM spans WHERE uptime <= (SELECT uptime FROM spans ORDER BY uptime DESC LIMIT 1 OFFSET ?)"
	nextSpan    = "SELECT min(ts) FROM spans WHERE ts > ?"
	newestUntil = "SELECT max(ts) FROM samples WHERE ts <= ?"
)

// loadSpan reads the span that the file ends with. The rows of a file from before there were
// spans count as recorded without interruption.
func (s *Store) loadSpan(d *db) error {
	if err := d.run(createSpans); err != nil {
		return err
	}
	err := d.each(lastSpan, func(row []driver.Value) bool {
		d.span = spanOf(row)
		return false
	})
	if err != nil {
		return err
	}
	if d.savedLength = d.span.length; d.span.ts != 0 {
		until := d.span.ts + d.span.length + saveSpanAfter
		if next, err := d.number(nextSpan, d.span.ts); err != nil {
			return err
		} else if next != 0 { // rows from there on are of an earlier time with a clock that was ahead
			until = min(until, next-1)
		}
		newest, err := d.number(newestUntil, until)
		d.span.length = max(d.span.length, newest-d.span.ts)
		return err
	}
	now, known := s.now()
	first, err := d.nthTime(samplesTable, 1, maxTS, 0)
	if err != nil || first == 0 || !known {
		return err
	}
	newest, err := d.number(newestUntil, max(now, first))
	if err != nil {
		return err
	}
	d.span = span{length: newest - first, ts: first}
	d.savedLength = d.span.length
	return d.tx(func() error { return d.putSpan(d.span) })
}

// spanOf decodes a row of lastSpan or youngSpans.
func spanOf(row []driver.Value) (p span) {
	p.uptime, _ = row[0].(int64)
	p.length, _ = row[1].(int64)
	p.ts, _ = row[2].(int64)
	return p
}

func (d *db) putSpan(p span) error {
	_, err := d.exec(putSpan, p.uptime, p.length, p.ts)
	return err
}

// currentSpan is the file's last span until now, or a new one if the wall clock has jumped
// against the boot's clock. at is the time by the latter. ok is false while the time is unknown.
func (s *Store) currentSpan(d *db) (p span, at int64, ok bool) {
	now, ok := s.now()
	at = s.mono().Milliseconds()
	passed := max(at-s.spanAt, 0)
	p = d.span
	switch jump := now - (p.ts + p.length + passed); {
	case !ok:
		return p, at, false
	case p.ts != 0 && max(jump, -jump) <= maxDrift:
		p.length += passed
	default: // it began after the last flush, or with the process
		p = span{uptime: p.uptime + p.length, length: passed, ts: now - passed}
	}
	return p, at, true
}

// saveSpan records the uptime until now. It belongs into the transaction of a flush; the caller
// calls keep when that has succeeded. A span that has jumped away is written a last time with its whole
// length, before the new one.
func (s *Store) saveSpan(d *db) (keep func(), err error) {
	p, at, ok := s.currentSpan(d)
	if !ok {
		return func() {}, nil
	}
	s.mu.Lock()
	oldest := p.uptime + p.length - s.maxAge.Milliseconds()
	s.mu.Unlock()
	saved := d.savedLength
	isNew := p.uptime != d.span.uptime || saved == 0
	if isNew || p.length-saved >= saveSpanAfter {
		if saved = p.length; isNew && d.span.ts != 0 {
			err = d.putSpan(d.span) // its length at the end
		}
		if err == nil {
			err = d.putSpan(p)
		}
		if err == nil {
			_, err = d.exec(dropSpans, oldest)
		}
		if err == nil {
			_, err = d.exec(dropOldest, int64(maxSpans))
		}
	}
	return func() { d.span, s.spanAt, d.savedLength = p, at, saved }, err
}

// ageCutoff is the time before which everything was recorded longer ago than the age; minTS when
// nothing was, or while the time is unknown.
func (s *Store) ageCutoff(d *db, ageMS int64) (before int64, err error) {
	p, _, ok := s.currentSpan(d)
	oldest := p.uptime + p.length - ageMS
	if !ok || oldest <= 0 {
		return minTS, nil
	}
	before = p.ts + max(oldest-p.uptime, 0)
	err = d.each(youngSpans, func(row []driver.Value) bool {
		if young := spanOf(row); young.uptime != p.uptime {
			before = min(before, young.ts+max(oldest-young.uptime, 0))
		}
		return true
	}, oldest)
	return before, err
}
