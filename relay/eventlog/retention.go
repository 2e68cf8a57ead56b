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
	firstRetention    = 5 * time.Second
	retentionInterval = time.Minute
	snapshotTimeout   = 30 * time.Second
	maxSnapshotTries  = 8
	maxSnapshotEvents = 100_000
	maxChanged        = 65_536
	minStepRows       = 32 // stepRows of a step
	maxStepRows       = 2048
	maxStepTime       = 4 * time.Millisecond // a step that took longer makes the next one shorter
	pauseFactor       = 4                    // after a step, appenders have the disk for this many times as long
	ageSlackDivisor   = 16                   // retention by age begins MaxAge/16 late, so that snapshots are rare
)

// aggregateKey is what an event is about.
type aggregateKey struct{ tenant, aggregate string }

func keyOf(e *kernel.Event) aggregateKey { return aggregateKey{e.Tenant, e.Aggregate} }

// retention is its state, of Run's goroutine alone but for results.
type retention struct {
	snapshotting bool // a snapshot is asked for or being kept
	removing     bool
	limitSeq     uint64
	tries        int
	changed      map[aggregateKey]bool // committed since it was asked for; nil: nobody asks, or too many
	wanted       map[aggregateKey]bool // those to ask for again; nil: all
	stepRows     int                   // of the next step
	removed      int64
	usedBytes    int64         // at the last step
	results      chan snapshot // one; of the goroutine that asks
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

// noteChanges notes what was committed while a snapshot is taken.
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

// startRetention begins a retention if one is due.
func (s *Store) startRetention(ctx context.Context, wg *sync.WaitGroup) {
	if s.retention.snapshotting || s.retention.removing {
		return
	}
	due, err := s.retentionDue()
	if err != nil {
		s.recordRetention(err)
		return
	}
	if !due {
		return
	}
	s.retention.limitSeq, s.retention.stepRows = s.last.Load(), minStepRows
	if s.opts.Snapshot == nil {
		s.retention.removing = true
		return
	}
	s.requestSnapshot(ctx, wg)
}

// retentionDue tells whether the log is too large or its oldest event too old.
func (s *Store) retentionDue() (bool, error) {
	size, err := s.usedBytes()
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
	late := s.opts.MaxAge + s.opts.MaxAge/ageSlackDivisor
	return err == nil && oldest < s.opts.Now().Add(-late).UnixMilli(), err
}

// usedBytes is what the log's rows take. The file does not shrink; its free pages are used again.
func (s *Store) usedBytes() (bytes int64, err error) {
	err = s.conn.QueryRowContext(context.Background(),
		"SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size").Scan(&bytes)
	return bytes, err
}

// requestSnapshot has Options.Snapshot called, in a goroutine of its own.
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

// handleSnapshot appends what a snapshot says, and asks again for what has changed meanwhile.
func (s *Store) handleSnapshot(ctx context.Context, wg *sync.WaitGroup, snap snapshot) {
	k := &s.retention
	if snap.err == nil && k.changed == nil {
		snap.err = errors.New("eventlog: too much happened while a snapshot was taken")
	}
	var still []kernel.Event
	changed := map[aggregateKey]bool{}
	for i := range snap.events {
		switch a := keyOf(&snap.events[i]); {
		case k.changed[a]:
			if k.wanted == nil || k.wanted[a] {
				changed[a] = true
			}
		case k.wanted == nil || k.wanted[a]:
			still = append(still, snap.events[i])
		}
	}
	if snap.err == nil {
		snap.err = s.appendSnapshot(still)
	}
	switch {
	case snap.err == nil && len(changed) == 0:
		s.retention = retention{removing: true, limitSeq: k.limitSeq, stepRows: k.stepRows, results: k.results}
	case snap.err == nil && k.tries < maxSnapshotTries:
		k.wanted = changed
		s.requestSnapshot(ctx, wg)
	default: // the next look begins anew
		if snap.err == nil {
			snap.err = fmt.Errorf("eventlog: %d aggregates change faster than they can be snapshotted", len(changed))
		}
		k.reset()
		if ctx.Err() == nil {
			s.recordRetention(fmt.Errorf("no snapshot, so nothing old was removed: %w", snap.err))
		}
	}
}

// appendSnapshot keeps events in groups, before anything else is committed.
func (s *Store) appendSnapshot(events []kernel.Event) error {
	for len(events) > 0 {
		r, err := prepare(events[:min(len(events), maxBatchEvents)])
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

// removeStep removes some of the oldest rows. more tells that there are others, to be
// removed after the rest: none when the log grows faster than it is taken from.
func (s *Store) removeStep() (rest time.Duration, more bool) {
	began := time.Now()
	n, err := s.removeOldest()
	s.retention.removed += n
	if n == 0 || err != nil {
		s.recordRetention(err)
		s.retention.reset()
		return 0, false
	}
	took := time.Since(began)
	if took > maxStepTime {
		s.retention.stepRows = max(s.retention.stepRows/2, minStepRows)
	} else {
		s.retention.stepRows = min(s.retention.stepRows*2, maxStepRows)
	}
	if s.retention.usedBytes > s.opts.MaxBytes/4*5 {
		return 0, true
	}
	return pauseFactor * took, true
}

// recordRetention notes how a retention ended.
func (s *Store) recordRetention(err error) {
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
	s.log.Info("event log: old events removed", zap.Int64("events", s.retention.removed), zap.Uint64("mark", mark))
}

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
	size, err := s.usedBytes()
	if err != nil {
		return 0, err
	}
	s.retention.usedBytes = size
	large := size > s.opts.MaxBytes/4*3
	cutoff := s.opts.Now().Add(-s.opts.MaxAge).UnixMilli()
	rows, err := s.conn.QueryContext(context.Background(), "SELECT seq, created_at FROM events WHERE seq <= ? ORDER BY seq LIMIT ?", int64(s.retention.limitSeq), s.retention.stepRows)
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
