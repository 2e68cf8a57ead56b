package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"agentctl/relay/kernel"
)

// foundRows selects the rows that were found, in the order of seq. Rows with the same seq are in the
// order in which they were found: sqlitefile reads what SQLite would read before what is behind damage.
const foundRows = `
	SELECT f.seq, f.kind, f.chain, f.tenant,
	       coalesce(w.type, f.type), coalesce(w.aggregate_id, f.aggregate_id),
	       CASE f.kind WHEN 3 THEN w.text || a.text || lower(hex(f.trace)) || f.payload ELSE f.payload END,
	       f.created_at, f.hash
	FROM found f LEFT JOIN words w ON f.kind = 3 AND w.id = f.word LEFT JOIN words a ON f.kind = 3 AND a.id = f.actor
	WHERE (f.kind = 1) = ?
	ORDER BY f.seq, f.rowid`

// candidate is a row that was found. Several may have the same seq, if their page was found several times;
// some of these may be damaged. event.Payload is nil if a part of the row is lost, such as a word or the
// name of its chain.
type candidate struct {
	event kernel.Event
	chain *oldChain // nil: of the first format
	hash  rowHash
}

// write makes the new log from the rows of the temporary database. It reads them with one query in the
// order of seq while it writes, so that the log need not fit into memory.
func (s *salvage) write(ctx context.Context, temporary, target string) (err error) {
	from, closeFrom, err := openScratch(ctx, temporary, "PRAGMA query_only = 1")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeFrom()) }()
	s.conn = from
	s.report.Format = 2
	// If the header does not say the format, rows of the first format without any chain do.
	if s.headerFormat == 1 || s.headerFormat == 0 && s.oldEvents > 0 && len(s.chains) == 0 {
		s.report.Format = 1
		s.logLast = max(s.mark, 1) - 1
	}
	to, closeTo, err := openScratch(ctx, target, newFilePragmas+"; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -4096")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeTo()) }()
	s.report.ID = s.newID()
	if err := createTables(ctx, to, s.report.ID, s.logLast); err != nil {
		return err
	}
	w, err := newWriter(ctx, to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	out := output{s: s, w: w}
	if err := s.choose(ctx, &out); err != nil {
		return err
	}
	// Gaps between two rows are noted already; now those behind the last row of each chain. The ids are
	// sorted, so that the same log gives the same report.
	for _, id := range slices.Sorted(maps.Keys(s.chains)) {
		if c := s.chains[id]; c.hasRow && c.last > max(c.prevSeq, max(c.mark, 1)-1) { // its end is lost
			if err := s.lost(ctx, c, max(c.prevSeq+1, c.mark), c.last); err != nil {
				return err
			}
		}
	}
	s.capLost()
	return out.end(ctx)
}

// choose passes the events of the old log to out, each seq once.
func (s *salvage) choose(ctx context.Context, out *output) error {
	rows, err := s.conn.QueryContext(ctx, foundRows, s.report.Format == 1)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	var same []candidate // all with one seq
	for rows.Next() {
		var c candidate
		var kind int
		var chain int64
		var payload sql.NullString
		var hash []byte
		e := &c.event
		if err := rows.Scan(&e.Seq, &kind, &chain, &e.Tenant, &e.Type, &e.Aggregate, &payload, &e.CreatedMS, &hash); err != nil {
			return err
		}
		e.Payload = []byte(payload.String)
		if len(same) > 0 && same[0].event.Seq != e.Seq {
			if err := s.take(ctx, same, out); err != nil {
				return err
			}
			same = same[:0]
		}
		if kind != 1 {
			if c.chain = s.chains[chain]; c.chain == nil || !c.chain.hasName || !payload.Valid || len(hash) != hashSize {
				c.event.Payload = nil // a part of it is lost
			} else {
				e.Tenant, c.hash = c.chain.tenant, rowHash(hash)
			}
		}
		if len(same) < 16 { // copies of a page are few
			same = append(same, c)
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return s.take(ctx, same, out)
}

// take chooses one of the rows with one seq: the one whose hash fits, else the first one that is whole.
func (s *salvage) take(ctx context.Context, same []candidate, out *output) error {
	best, fits := -1, false
	for i := 0; i < len(same) && !fits; i++ {
		c := &same[i]
		switch {
		case s.isBelowMark(c):
			return nil // retention has removed it
		case !c.isWhole():
		case c.chain != nil && c.chain.follows(s, &c.event, c.hash):
			best, fits = i, true
		case best < 0:
			best = i
		}
	}
	if best < 0 {
		if len(same) > 0 {
			s.report.Unreadable++
		}
		return nil
	}
	c := &same[best]
	if err := s.noteGap(ctx, c, fits); err != nil {
		return err
	}
	if fits {
		s.report.Verified++
	} else {
		s.report.Unverified++
	}
	return out.add(ctx, c)
}

// isBelowMark reports whether a row is one that retention has removed: its page was free, and not
// overwritten yet.
func (s *salvage) isBelowMark(c *candidate) bool {
	if c.chain == nil {
		return s.report.Format == 1 && c.event.Seq < s.mark
	}
	return c.event.Seq < c.chain.mark
}

// isWhole reports whether every part of a row was found, and has the form of an event.
func (c *candidate) isWhole() bool {
	return c.event.Payload != nil && checkSalvaged(&c.event) && (c.chain == nil || classOf(c.event.Type) == c.chain.class)
}

// noteGap records which events may be missing before the one that is taken. fits says that its hash
// follows from the event before: then none is missing.
func (s *salvage) noteGap(ctx context.Context, c *candidate, fits bool) error {
	seq, ch := c.event.Seq, c.chain
	if ch == nil {
		// In the first format there are no hashes. But numbers are consecutive while a relay runs,
		// and begin at a multiple of 4,096 when it starts.
		start := seq &^ (1<<12 - 1)
		next := s.report.Last + 1
		if s.report.Last == 0 { // the first one
			next = max(s.mark, start)
		}
		if seq != next && seq != start {
			s.addLost(LostRange{From: next, To: seq - 1, AtMost: seq - next})
		}
		return nil
	}
	if from := max(ch.prevSeq+1, ch.mark); !fits && from < seq && (ch.hasPrev || ch.hasRow) {
		if err := s.lost(ctx, ch, from, seq-1); err != nil {
			return err
		}
	}
	ch.prev, ch.hasPrev, ch.prevSeq = c.hash, true, seq
	ch.found++
	return nil
}

// follows reports whether an event has the hash that it must have behind the row before it.
func (c *oldChain) follows(s *salvage, e *kernel.Event, hash rowHash) bool {
	prev := c.prev
	switch {
	case c.hasPrev:
	case c.hasRow:
		prev = c.anchor
	case s.logID != "":
		prev = chainStart(s.logID, c.tenant, c.class)
	default:
		return false
	}
	return s.hash.next(prev, e) == hash
}

// lost records a range of a chain in which events may be missing, unless every number in it was
// found, in whatever chain: numbers are consecutive over all chains. They jump at each start of the relay
// (firstSeq); if that is in the range, AtMost is far too high, and capLost lowers it if it can.
func (s *salvage) lost(ctx context.Context, c *oldChain, from, to uint64) error {
	if from > to || from > math.MaxInt64 || to > math.MaxInt64 {
		return nil
	}
	var found uint64
	if err := s.conn.QueryRowContext(ctx, "SELECT count(DISTINCT seq) FROM found WHERE seq BETWEEN ? AND ?", int64(from), int64(to)).Scan(&found); err != nil {
		return err
	}
	if n := to - from + 1; found < n {
		s.addLost(LostRange{c.tenant, c.class, from, to, n - found, c})
	}
	return nil
}

// capLost bounds the ranges of each chain by the number of rows that it lacks, which is in the table
// chains. A chain that lacks none has a row that was changed, and no range.
func (s *salvage) capLost() {
	s.report.Lost = slices.DeleteFunc(s.report.Lost, func(r LostRange) bool {
		return r.chain != nil && r.chain.hasRow && r.chain.rows <= r.chain.found
	})
	for i := range s.report.Lost {
		if r := &s.report.Lost[i]; r.chain != nil && r.chain.hasRow {
			r.AtMost = min(r.AtMost, uint64(r.chain.rows-r.chain.found))
		}
	}
}

// addLost keeps the first maxLostRanges ranges, and counts the others.
func (s *salvage) addLost(r LostRange) {
	if len(s.report.Lost) < maxLostRanges {
		s.report.Lost = append(s.report.Lost, r)
	} else {
		s.report.LostMore++
	}
}

// output collects events into transactions of the new log.
type output struct {
	s      *salvage
	w      *writer
	batch  []kernel.Event
	newest int64 // the latest CreatedMS
}

// add adds an event to the batch. A new chain needs its own mark, but the writer gives all chains of a batch
// the mark newMark: so the batch before it is written first, and the chain is made here.
func (o *output) add(ctx context.Context, c *candidate) error {
	if ch := c.chain; ch != nil && ch.isNew {
		// What retention has removed stays removed: a chain begins with its mark.
		if err := o.flush(ctx); err != nil {
			return err
		}
		ch.isNew, o.w.newMark = false, ch.mark
		if _, err := o.w.chain(ctx, ch.tenant, ch.class); err != nil {
			return err
		}
	} else if ch == nil {
		o.w.newMark = o.s.mark
	}
	r := &o.s.report
	if r.First == 0 {
		r.First = c.event.Seq
	}
	r.Last = c.event.Seq
	r.Events++
	o.newest = max(o.newest, c.event.CreatedMS)
	o.batch = append(o.batch, c.event)
	if len(o.batch) == salvageBatch {
		return o.flush(ctx)
	}
	return nil
}

func (o *output) flush(ctx context.Context) error {
	err := insertPage(ctx, o.w, o.batch)
	o.batch = o.batch[:0]
	return err
}

// end writes the last event. Its seq is above all that were given, as the log, its chains and the relay's
// record say: the relay would refuse a log that is behind its record, and could give a number twice. A
// chain whose last is more than 2^40 above the others counts as damaged: three days by firstSeq.
func (o *output) end(ctx context.Context) error {
	last := max(o.s.report.Last, o.s.opts.Last, o.s.logLast)
	for _, c := range o.s.chains {
		if c.hasRow && c.last <= last+1<<40 { // else damaged
			last = max(last, c.last)
		}
	}
	now := time.Now().UnixMilli()
	if o.newest > 0 && now < o.newest {
		now = o.newest
	}
	e := o.s.salvagedEvent(last+1, now)
	if err := o.flush(ctx); err != nil { // events of the batch may have another mark
		return err
	}
	o.w.newMark = 0
	o.s.report.Last = e.Seq
	o.batch = append(o.batch, e)
	return o.flush(ctx)
}
