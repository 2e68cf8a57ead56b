package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

// Retention runs in three phases, on the goroutine of Run except for the snapshot itself:
//
//	idle          checked each minute: is the oldest event older than MaxAge, or the log
//	              larger than MaxBytes? Then limitSeq = the last seq now; nothing above it
//	              is removed in this round.
//	snapshotting  Options.Snapshot returns the state of each aggregate. A snapshot is
//	              stored if no event of its aggregate was committed since it was
//	              requested; the others are requested again, maxSnapshotTries times at
//	              most. A stored snapshot therefore replaces all events before it.
//	removing      in steps of a few ms the mark moves up, and the rows below it are
//	              deleted in the same transaction, until MaxAge and 3/4 of MaxBytes hold
//	              or limitSeq is reached.
//
// A failure in any phase ends the round; the next check begins a new one.
const (
	firstRetention    = 5 * time.Second // after Run began
	retentionInterval = time.Minute
	snapshotTimeout   = 30 * time.Second
	maxSnapshotTries  = 8
	maxSnapshotEvents = 100_000
	maxChanged        = 65_536
	minStepRows       = 32 // rows of a step
	maxStepRows       = 2048
	maxStepTime       = 4 * time.Millisecond // a step that took longer halves the next one
	pauseFactor       = 4                    // the pause after a step is this many times as long as the step
	ageSlackDivisor   = 16                   // retention by age begins MaxAge/16 late, so that snapshots are rare
)

// aggregateKey identifies the aggregate of an event.
type aggregateKey struct{ tenant, aggregate string }

// keyOf returns the aggregate of an event.
func keyOf(e *kernel.Event) aggregateKey { return aggregateKey{e.Tenant, e.Aggregate} }

// retention is the state of one round. It belongs to the goroutine of Run; the snapshot's
// goroutine uses results alone.
type retention struct {
	snapshotting bool
	removing     bool
	limitSeq     uint64
	tries        int
	changed      map[aggregateKey]bool // committed since the snapshot was asked for; nil: none runs, or too many
	wanted       map[aggregateKey]bool // aggregates still without a snapshot; nil: all
	stepRows     int                   // of the next step
	removed      int64
	usedBytes    int64         // at the last step
	results      chan snapshot // holds one
}

// snapshot is the result of Options.Snapshot.
type snapshot struct {
	events []kernel.Event
	err    error
}

// reset ends a round. It drops a result that came too late.
func (k *retention) reset() {
	select {
	case <-k.results:
	default:
	}
	*k = retention{results: k.results}
}

// noteChanges records which aggregates changed while a snapshot is taken.
func (k *retention) noteChanges(events []kernel.Event) {
	for i := range events {
		if k.changed == nil {
			return
		}
		k.changed[keyOf(&events[i])] = true
		if len(k.changed) > maxChanged {
			k.changed = nil
		}
	}
}

// startRetention begins a round if one is due.
func (s *Store) startRetention(ctx context.Context, wg *sync.WaitGroup) {
	if s.retention.snapshotting || s.retention.removing {
		return
	}
	isDue, err := s.retentionDue()
	switch {
	case err != nil:
		s.recordRetention(err)
	case isDue:
		s.retention.limitSeq, s.retention.stepRows = s.Last(), minStepRows
		if s.retention.removing = s.opts.Snapshot == nil; !s.retention.removing {
			s.requestSnapshot(ctx, wg)
		}
	}
}

// retentionDue reports whether the log is too large or its oldest event too old.
func (s *Store) retentionDue() (bool, error) {
	used, err := s.usedBytes()
	if err != nil || used > s.opts.MaxBytes || s.opts.MaxAge < 0 {
		return err == nil && used > s.opts.MaxBytes, err
	}
	var oldest int64
	err = s.queryRow("SELECT created_at FROM events ORDER BY seq LIMIT 1").Scan(&oldest)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	limit := s.opts.MaxAge + s.opts.MaxAge/ageSlackDivisor
	return err == nil && oldest < s.ageNow().Add(-limit).UnixMilli(), err
}

// ageNow is the time from which the age of events is counted: the wall clock, but not later than the
// newest event of earlier runs and the uptime since then. A wall clock that is wrong by a year for an
// hour therefore removes nothing. After a time without the relay, events are kept longer by that time,
// until it is started again; MaxBytes bounds the log all the same.
func (s *Store) ageNow() time.Time {
	now := s.opts.Now()
	if latest := s.ageBase.Add(s.uptime()); latest.Before(now) {
		return latest
	}
	return now
}

// usedBytes returns the size of the log's rows: the pages in use, without the free ones. The
// file does not shrink; SQLite uses its free pages again.
func (s *Store) usedBytes() (bytes int64, err error) {
	err = s.queryRow("SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size").Scan(&bytes)
	return bytes, err
}

// requestSnapshot calls Options.Snapshot in a separate goroutine, which may block on locks
// that are held around Append. Run waits for that goroutine before it returns. Sending the
// result cannot block: results holds one, and one snapshot runs at a time.
func (s *Store) requestSnapshot(ctx context.Context, wg *sync.WaitGroup) {
	s.retention.snapshotting, s.retention.changed = true, map[aggregateKey]bool{}
	s.retention.tries++
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
		defer cancel()
		events, err := s.opts.Snapshot(ctx)
		if err == nil && len(events) > maxSnapshotEvents {
			err = fmt.Errorf("eventlog: a snapshot of %d events; at most %d", len(events), maxSnapshotEvents)
		}
		s.retention.results <- snapshot{events, err}
	})
}

// handleSnapshot appends the events of a snapshot, and requests another one for the
// aggregates that have changed since the request.
func (s *Store) handleSnapshot(ctx context.Context, wg *sync.WaitGroup, snap snapshot) {
	k, err := &s.retention, snap.err
	if err == nil && k.changed == nil {
		err = errors.New("eventlog: too many changes while a snapshot was taken")
	}
	var current []kernel.Event
	stale := map[aggregateKey]bool{}
	for i := range snap.events {
		switch key := keyOf(&snap.events[i]); {
		case k.wanted != nil && !k.wanted[key]: // kept in an earlier try
		case k.changed[key]:
			stale[key] = true
		default:
			current = append(current, snap.events[i])
		}
	}
	if err == nil {
		err = s.appendSnapshot(current)
	}
	switch {
	case err == nil && len(stale) == 0:
		*k = retention{removing: true, limitSeq: k.limitSeq, stepRows: k.stepRows, results: k.results}
		return
	case err == nil && k.tries < maxSnapshotTries:
		k.wanted = stale
		s.requestSnapshot(ctx, wg)
		return
	case err == nil:
		err = fmt.Errorf("eventlog: %d aggregates change faster than they can be snapshotted", len(stale))
	}
	k.reset()
	if ctx.Err() == nil {
		s.recordRetention(fmt.Errorf("no snapshot, so no old events were removed: %w", err))
	}
}

// appendSnapshot keeps events in batches. It runs on the writer's goroutine, so no other
// event is committed between the check of changed and the snapshot.
func (s *Store) appendSnapshot(events []kernel.Event) error {
	for len(events) > 0 {
		r, err := newAppendRequest(events[:min(len(events), maxBatchEvents)])
		if err != nil {
			return err
		}
		events = events[len(r.events):]
		if s.commit([]*appendRequest{r}); r.err != nil {
			return r.err
		}
		s.mu.Lock()
		s.stats.Snapshots += uint64(len(r.events))
		s.mu.Unlock()
	}
	return nil
}

// removeStep removes some of the oldest rows. The number of rows adapts to the disk, so
// that a step takes about maxStepTime and appenders wait for no longer. more reports that
// there are others, to be removed after the pause. There is no pause when the log grows
// faster than it shrinks.
func (s *Store) removeStep() (pause time.Duration, more bool) {
	began := time.Now()
	n, err := s.removeOldest()
	k := &s.retention
	k.removed += n
	if n == 0 || err != nil {
		s.recordRetention(err)
		k.reset()
		return 0, false
	}
	took := time.Since(began)
	if took > maxStepTime {
		k.stepRows = max(k.stepRows/2, minStepRows)
	} else {
		k.stepRows = min(k.stepRows*2, maxStepRows)
	}
	if k.usedBytes > s.opts.MaxBytes/4*5 {
		return 0, true
	}
	return pauseFactor * took, true
}

// recordRetention records how a round ended. An error does not stop the writer: the log grows
// until a later round succeeds.
func (s *Store) recordRetention(err error) {
	text := ""
	if err = explain(s.opts.Path, err); err != nil {
		text = err.Error()
	}
	s.mu.Lock()
	s.stats.RetentionError = text
	mark := s.stats.Mark
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("event log: retention failed, will retry", zap.Error(err))
		return
	}
	s.log.Info("event log: old events removed", zap.Int64("events", s.retention.removed), zap.Uint64("mark", mark))
}

// removeOldest moves the mark and deletes the rows below it, in one transaction: a reader
// that sees the old mark sees all rows from it on.
func (s *Store) removeOldest() (removed int64, err error) {
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
		return s.queryRow("SELECT coalesce(min(seq), 0) FROM events").Scan(&first)
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

// nextMark returns the mark of the next step, 0 when there is nothing to remove. While the
// log is too large, all rows up to limitSeq may be removed, else only rows that are too old.
func (s *Store) nextMark() (mark uint64, err error) {
	used, err := s.usedBytes()
	if err != nil {
		return 0, err
	}
	s.retention.usedBytes = used
	cutoff := int64(math.MinInt64) // rows created before it are removed
	switch {
	case used > s.opts.MaxBytes/4*3:
		cutoff = math.MaxInt64
	case s.opts.MaxAge >= 0:
		cutoff = s.ageNow().Add(-s.opts.MaxAge).UnixMilli()
	}
	err = s.conn.QueryRowContext(context.Background(), `WITH step AS (SELECT seq, created_at FROM events WHERE seq <= ? ORDER BY seq LIMIT ?)
		SELECT coalesce(max(seq) + 1, 0) FROM step WHERE seq < coalesce((SELECT min(seq) FROM step WHERE created_at >= ?), 1 << 62)`,
		int64(s.retention.limitSeq), s.retention.stepRows, cutoff).Scan(&mark)
	return mark, err
}
