package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

// Retention, in the order of things:
//
//  1. The oldest event is older than MaxAge and some, or the log larger than MaxBytes.
//     asof = the last seq now; nothing above it will be removed.
//  2. Options.Snapshot says what is known of each aggregate. A snapshot is kept if no
//     event about its aggregate was committed since it was asked for; for the others it
//     is asked for again. So a kept snapshot says all that the events before it said.
//  3. In steps of a few ms: the mark moves up, and the rows below it go, in one
//     transaction, until MaxAge and 3/4 of MaxBytes are kept to, or asof is reached.
const (
	retainFirst     = 5 * time.Second
	retainEvery     = time.Minute
	snapshotTime    = 30 * time.Second
	snapshotTries   = 8
	snapshotEvents  = 100_000
	touchedMax      = 65_536
	stepMin         = 32 // rows of a step
	stepMax         = 2048
	stepLong        = 4 * time.Millisecond // a step that took longer makes the next one shorter
	restFactor      = 4                    // after a step, appenders have the disk for this many times as long
	stepsPerRetains = 16                   // retention by age begins MaxAge/16 late, so that snapshots are rare
)

// about is what an event is about.
type about struct{ tenant, aggregate string }

func aboutOf(e *kernel.Event) about { return about{e.Tenant, e.Aggregate} }

// retention is its state, of Run's goroutine alone but for results.
type retention struct {
	asking   bool // a snapshot is asked for or being kept
	removing bool
	asof     uint64
	tries    int
	touched  map[about]bool // committed since it was asked for; nil: nobody asks, or too many
	missing  map[about]bool // those to ask for again; nil: all
	rows     int            // of the next step
	removed  int64
	size     int64         // at the last step
	results  chan snapshot // one; of the goroutine that asks
}

type snapshot struct {
	events []kernel.Event
	err    error
}

// reset forgets what was under way.
func (k *retention) reset() {
	select {
	case <-k.results:
	default:
	}
	*k = retention{results: k.results}
}

// touch notes what was committed while a snapshot is taken.
func (k *retention) touch(events []kernel.Event) {
	for i := range events {
		if k.touched == nil {
			return
		}
		k.touched[aboutOf(&events[i])] = true
		if len(k.touched) > touchedMax {
			k.touched = nil
		}
	}
}

// retain begins a retention if one is due.
func (s *Store) retain(ctx context.Context, wg *sync.WaitGroup) {
	if s.keep.asking || s.keep.removing {
		return
	}
	due, err := s.due()
	if err != nil {
		s.retained(err)
		return
	}
	if !due {
		return
	}
	s.keep.asof, s.keep.rows = s.last.Load(), stepMin
	if s.opts.Snapshot == nil {
		s.keep.removing = true
		return
	}
	s.ask(ctx, wg)
}

// due tells whether the log is too large or its oldest event too old.
func (s *Store) due() (bool, error) {
	size, err := s.size()
	if err != nil || size > s.opts.MaxBytes {
		return err == nil, err
	}
	if s.opts.MaxAge < 0 {
		return false, nil
	}
	var oldest int64
	err = s.conn.QueryRowContext(context.Background(), "SELECT created_at FROM events ORDER BY seq LIMIT 1").Scan(&oldest)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	late := s.opts.MaxAge + s.opts.MaxAge/stepsPerRetains
	return err == nil && oldest < s.opts.Now().Add(-late).UnixMilli(), err
}

// size is what the log's rows take. The file does not shrink; its free pages are used again.
func (s *Store) size() (bytes int64, err error) {
	err = s.conn.QueryRowContext(context.Background(),
		"SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size").Scan(&bytes)
	return bytes, err
}

// ask has Options.Snapshot called, in a goroutine of its own.
func (s *Store) ask(ctx context.Context, wg *sync.WaitGroup) {
	s.keep.asking, s.keep.touched = true, map[about]bool{}
	s.keep.tries++
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, snapshotTime)
		defer cancel()
		events, err := s.opts.Snapshot(ctx)
		if err == nil && len(events) > snapshotEvents {
			err = fmt.Errorf("eventlog: a snapshot of %d events; at most %d", len(events), snapshotEvents)
		}
		s.keep.results <- snapshot{events, err}
	})
}

// keepSnapshot appends what a snapshot says, and asks again for what has changed meanwhile.
func (s *Store) keepSnapshot(ctx context.Context, wg *sync.WaitGroup, snap snapshot) {
	k := &s.keep
	if snap.err == nil && k.touched == nil {
		snap.err = errors.New("eventlog: too much happened while a snapshot was taken")
	}
	var still []kernel.Event
	changed := map[about]bool{}
	for i := range snap.events {
		switch a := aboutOf(&snap.events[i]); {
		case k.touched[a]:
			if k.missing == nil || k.missing[a] {
				changed[a] = true
			}
		case k.missing == nil || k.missing[a]:
			still = append(still, snap.events[i])
		}
	}
	if snap.err == nil {
		snap.err = s.appendSnapshot(still)
	}
	switch {
	case snap.err == nil && len(changed) == 0:
		s.keep = retention{removing: true, asof: k.asof, rows: k.rows, results: k.results}
	case snap.err == nil && k.tries < snapshotTries:
		k.missing = changed
		s.ask(ctx, wg)
	default: // the next look begins anew
		if snap.err == nil {
			snap.err = fmt.Errorf("eventlog: %d aggregates change faster than they can be snapshotted", len(changed))
		}
		k.reset()
		if ctx.Err() == nil {
			s.retained(fmt.Errorf("no snapshot, so nothing old was removed: %w", snap.err))
		}
	}
}

// appendSnapshot keeps events in groups, before anything else is committed.
func (s *Store) appendSnapshot(events []kernel.Event) error {
	for len(events) > 0 {
		r, err := prepare(events[:min(len(events), groupEvents)])
		if err != nil {
			return err
		}
		events = events[len(r.events):]
		if s.commit([]*request{r}); r.err != nil {
			return r.err
		}
		s.mu.Lock()
		s.stats.Snapshots += uint64(len(r.events))
		s.mu.Unlock()
	}
	return nil
}

// removeStep removes some of the oldest rows. more tells that there are others, to be
// removed after the rest: none when the log grows faster than it is taken from.
func (s *Store) removeStep() (rest time.Duration, more bool) {
	began := time.Now()
	n, err := s.tryRemove()
	s.keep.removed += n
	if n == 0 || err != nil {
		s.retained(err)
		s.keep.reset()
		return 0, false
	}
	took := time.Since(began)
	if took > stepLong {
		s.keep.rows = max(s.keep.rows/2, stepMin)
	} else {
		s.keep.rows = min(s.keep.rows*2, stepMax)
	}
	if s.keep.size > s.opts.MaxBytes/4*5 {
		return 0, true
	}
	return restFactor * took, true
}

// retained notes how a retention ended.
func (s *Store) retained(err error) {
	err = explain(s.opts.Path, err)
	s.mu.Lock()
	s.stats.RetentionError = ""
	if err != nil {
		s.stats.RetentionError = err.Error()
	}
	mark := s.stats.Mark
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("event log: retention failed, it is tried again", zap.Error(err))
		return
	}
	s.log.Info("event log: old events removed", zap.Int64("events", s.keep.removed), zap.Uint64("mark", mark))
}

func (s *Store) tryRemove() (removed int64, err error) {
	mark, err := s.nextMark()
	if err != nil || mark == 0 {
		return 0, err
	}
	ctx := context.Background()
	var first uint64
	err = s.tx(func() error {
		if _, err := s.conn.ExecContext(ctx, "UPDATE retention SET mark = ?", int64(mark)); err != nil {
			return err
		}
		r, err := s.conn.ExecContext(ctx, "DELETE FROM events WHERE seq < ?", int64(mark))
		if err != nil {
			return err
		}
		if removed, err = r.RowsAffected(); err != nil {
			return err
		}
		return s.conn.QueryRowContext(ctx, "SELECT coalesce(min(seq), 0) FROM events").Scan(&first)
	})
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Mark, s.stats.First = mark, first
	s.stats.Events -= removed
	s.stats.Removed += uint64(removed)
	return removed, nil
}

// nextMark is the mark of the next step, 0 when there is nothing to remove.
func (s *Store) nextMark() (mark uint64, err error) {
	size, err := s.size()
	if err != nil {
		return 0, err
	}
	s.keep.size = size
	large := size > s.opts.MaxBytes/4*3
	cutoff := s.opts.Now().Add(-s.opts.MaxAge).UnixMilli()
	rows, err := s.conn.QueryContext(context.Background(), "SELECT seq, created_at FROM events WHERE seq <= ? ORDER BY seq LIMIT ?", int64(s.keep.asof), s.keep.rows)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var seq uint64
		var created int64
		if err := rows.Scan(&seq, &created); err != nil {
			return 0, err
		}
		if !large && (s.opts.MaxAge < 0 || created >= cutoff) {
			break
		}
		mark = seq + 1
	}
	return mark, rows.Err()
}
