package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"agentctl/prober"
)

// A query reads in chunks, so that neither its memory nor the time for which it keeps the flusher from
// the file grows with the window:
//
//	newQueryReader ──> fetchNext: diskToken taken, the next chunk read into rows, token returned
//	       ┌──────────────┘   ▲
//	       └──> emit: fn ─────┘   with no lock held; until the cursor is past the window
//
// Between two chunks the file may change. The cursor is a time and not a row, so nothing that is added
// or removed behind it makes a row appear twice.

// Query asks for a window of time.
type Query struct {
	FromMS, ToMS int64 // both included, milliseconds since 1970; ToMS 0 is now
	// StepMS above 0 asks for the last record of each bucket of that length. Buckets begin
	// at multiples of it since 1970; empty ones are left out.
	StepMS int64
	// Modules are names of modules, or keys of readings, or what comes before a dot in
	// them. Modules that are not optional stand for the whole sample. None: everything.
	Modules []string
	Limit   int // above 0: at most so many rows, the first
}

// Row is what was recorded at a time. With a step it is what was recorded last in its
// bucket, each sensor by itself, and TSMS the time of the newest of them.
type Row struct {
	TSMS      int64
	HasSample bool
	Sample    prober.Sample    // valid when HasSample; memory sizes in whole KiB
	Modules   []prober.Reading // sorted by key; valid until fn returns
}

const (
	// chunkSamples, chunkReadings and chunkBuckets bound what is read before fn is called.
	// chunkReadings is more than the readings of one millisecond, so each scan advances.
	chunkSamples  = 256
	chunkReadings = 1024
	chunkBuckets  = 256
	// maxSeekSpan bounds the time of a chunk of buckets, milliseconds, for the readings that are
	// searched in it.
	maxSeekSpan = int64(6 * time.Hour / time.Millisecond)
	// minSeekRows is how many rows a bucket has when seeking becomes cheaper than reading.
	minSeekRows = 10
	// maxTS is beyond every clock.
	maxTS = 1 << 53
)

// Query calls fn with the rows of a window, in ascending order, and returns fn's error if
// there is one. It holds no lock while fn runs, and a few hundred rows in memory at most.
// Rows older than the retention are not shown. When the disk cannot be read, the rows in
// memory are returned and Stats shows the fault.
//
// When samples are asked for and the window is empty, fn gets the newest sample since the
// start, whatever its time.
//
// Repeating a query with ToMS the time of its last row returns the same rows, whatever was
// added and saved meanwhile. Exceptions: rows may have become older than the retention; and
// when the clock was set back or first became known, or the disk failed, rows may have
// changed. So a caller that counts in one pass and writes in another must accept fewer or
// more rows. The newest sample that stands for an empty window lies outside it.
func (s *Store) Query(ctx context.Context, q Query, fn func(Row) error) error {
	r, err := s.newQueryReader(q)
	if err != nil {
		return err
	}
	c := new(chunk)
	r.chunk, r.rows, r.bucketReadings, r.pendingReadings, r.out = c, c.rows[:0], c.bucketReadings[:0], c.pendingReadings[:0], c.out[:0]
	for !r.done {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.fetchNext(ctx, r); err != nil {
			return err
		}
		if more, err := r.emit(fn); err != nil || !more {
			return err
		}
	}
	if r.emitted > 0 || !r.wantsSamples {
		return nil
	}
	s.mu.Lock()
	latest, id := s.latest, s.latestID
	s.mu.Unlock()
	if id == 0 {
		return nil
	}
	v, _ := valuesOf(&latest) // Add accepted it
	return fn(Row{TSMS: latest.TSMS, HasSample: true, Sample: v.sample(latest.TSMS)})
}

// queryReader is a query in progress. Between two calls of fetch it keeps the rows that are
// ready for fn and the bucket that the next chunk may continue.
type queryReader struct {
	// cursor is the next time to read and to the last one. step is the length of buckets,
	// 0 for none.
	cursor, to, step int64
	limit, emitted   int

	// The query asks for samples, and for the readings whose key is in wanted.
	wantsSamples bool
	wanted       [256]bool
	wantedCount  int

	// memoryOnly is set when the disk did not answer. It stays set, so that the rest of the
	// query does not wait again.
	memoryOnly bool
	done       bool

	// hidesOld is set when the cursor is past what is older than ageMS.
	ageMS    int64
	hidesOld bool

	// rows are ready for fn; with a step their readings are in bucketReadings.
	rows           []group
	bucketReadings []item[int64]
	// pending is a bucket that may not be complete; its ts is 0 when there is none. Its
	// readings are in pendingReadings, by key.
	pending         group
	pendingReadings []item[int64]

	out []prober.Reading // reused for each row

	chunk *chunk // nil in a reader that does not fetch
}

// chunk is the memory of a query in progress, where the lists of its reader begin. It is one object: a
// list that begins empty grows through many of the runtime's size classes, and each size class keeps
// memory for later, however seldom it is used.
type chunk struct {
	samples         [chunkSamples]item[values]
	readings        [chunkReadings]item[int64]
	groups          [chunkReadings]group
	rows            [chunkBuckets]group
	bucketReadings  [chunkReadings]item[int64]
	pendingReadings [64]item[int64]
	out             [64]prober.Reading
}

// group is what was recorded at one time.
type group struct {
	ts        int64
	hasSample bool
	sample    values
	readings  []item[int64]
}

// newQueryReader checks a query.
func (s *Store) newQueryReader(q Query) (*queryReader, error) {
	now, known := s.now()
	s.mu.Lock()
	age, closed := s.maxAge, s.closed
	s.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if q.StepMS < 0 {
		return nil, fmt.Errorf("history: a step of %d ms", q.StepMS)
	}
	to := min(q.ToMS, maxTS)
	if to == 0 {
		if to = now; !known {
			to = maxTS // everything in the file is older
		}
	}
	if q.FromMS > to && q.ToMS != 0 { // a window until now may begin in the future: the caller's clock may be ahead
		return nil, fmt.Errorf("%w: from %d to %d", ErrRange, q.FromMS, to)
	}
	r := &queryReader{cursor: max(q.FromMS, 1), to: to, step: min(q.StepMS, maxTS), limit: q.Limit, ageMS: age.Milliseconds()}
	r.wantsSamples = len(q.Modules) == 0 || slices.ContainsFunc(q.Modules, func(name string) bool {
		m, ok := prober.ModuleByName(name)
		return ok && !m.IsOptional()
	})
	for _, s := range recordable {
		if len(q.Modules) == 0 || slices.ContainsFunc(q.Modules, func(name string) bool {
			m, ok := prober.ModuleByName(name)
			return ok && m == s.Module || s.Key == name
		}) {
			r.wanted[s.Record.ID] = true
			r.wantedCount++
		}
	}
	r.done = r.cursor > r.to
	return r, nil
}

// fetchNext fetches more rows: none, when a bucket has not ended yet.
func (s *Store) fetchNext(ctx context.Context, r *queryReader) error {
	return s.readDB(ctx, &r.memoryOnly, func(d *db) error { return s.fetch(d, r) })
}

// readDB calls read with the database, or with nil if the disk does not answer: the records in memory
// have to do then, and memoryOnly stays set for the rest of the query. read may be called twice, with
// the second file (withDB) or with nil after it failed.
func (s *Store) readDB(ctx context.Context, memoryOnly *bool, read func(d *db) error) error {
	rebased := func(d *db) error {
		if err := s.rebase(d); err != nil {
			return err
		}
		return read(d)
	}
	if !*memoryOnly {
		err := s.lock(ctx)
		if err == nil {
			defer s.unlock()
			err = s.withDB(rebased)
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
		*memoryOnly = true
	}
	return rebased(nil)
}

// emit calls fn with the rows that are ready, and reports whether fn may have more.
func (r *queryReader) emit(fn func(Row) error) (more bool, err error) {
	for i := range r.rows {
		g := &r.rows[i]
		row := Row{TSMS: g.ts, HasSample: g.hasSample}
		if g.hasSample {
			row.Sample = g.sample.sample(g.ts)
		}
		r.out = r.out[:0]
		for _, it := range g.readings {
			r.out = append(r.out, prober.Reading{Key: byID[readingKey(it.id)].Key, Value: float64(it.v) / 1000})
		}
		slices.SortFunc(r.out, func(a, b prober.Reading) int { return strings.Compare(a.Key, b.Key) })
		if len(r.out) > 0 {
			row.Modules = r.out
		}
		r.emitted++
		if err := fn(row); err != nil {
			return false, err
		}
		if r.emitted == r.limit {
			return false, nil
		}
	}
	return true, nil
}
