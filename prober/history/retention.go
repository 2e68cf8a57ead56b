package history

import (
	"time"

	"go.uber.org/zap"
)

// Retention. Rows go when they are older than MaxAge (uptime.go), and the oldest ones when the
// file is full (MaxBytes). A quarter of an hour of rows is removed at a time, so that few flushes
// write pages for it; what is too old is hidden from queries meanwhile. After SetRetention a flush
// removes everything beyond the new bounds and shrinks the file (applyRetention).
//
// The pages of removed rows are reused: the file grows to its bound and stays there.

const (
	// walReserve is what the WAL and its index may take of MaxBytes.
	walReserve = 1 << 20
	// maxUndated bounds the samples in the file whose time is not known: 28 hours of one a second. A
	// board that never gets the time keeps the newest ones; queries show those of the file once it does.
	maxUndated = 100_000
	// maxRemoved bounds the rows of each table that one transaction of applyRetention removes.
	maxRemoved = 4096

	// removeAfter is how long rows beyond the age stay, at most, and minRemoved how many are removed
	// at a time at least: removing a few with each flush would write the oldest pages, too, each time.
	removeAfter = 15 * time.Minute
	minRemoved  = 1000

	minTS = -1 << 62 >> keyBits // below every time, undated ones included
)

// retentionCutoff is the time before which rows are to be removed: those beyond the age,
// or maxTS, for the oldest whatever their age, when the file is full. It is minTS when
// there is nothing to remove.
func (s *Store) retentionCutoff(d *db) (before int64, err error) {
	s.mu.Lock()
	age, limit := s.maxAge, s.maxBytes
	s.mu.Unlock()
	isFull, err := d.isFull(limit)
	if err != nil {
		return 0, err
	}
	if isFull {
		return maxTS, nil
	}
	before, err = s.ageCutoff(d, age.Milliseconds())
	if err != nil || before == minTS {
		return minTS, err
	}
	// Only once the oldest row is removeAfter beyond the age. For a short age that would be long, so
	// it is a 64th of the age there.
	for _, t := range tables {
		if first, err := d.nthTime(t, 1, maxTS, 0); err != nil || first != 0 && first < before-min(age/64, removeAfter).Milliseconds() {
			return before, err
		}
	}
	return minTS, nil
}

// isFull reports whether more of the file is in use than limit, less what the next flush
// may add.
func (d *db) isFull(limit int64) (bool, error) {
	pages, size, err := d.pages()
	if err != nil {
		return false, err
	}
	free, err := d.number("PRAGMA freelist_count")
	return (pages-free)*size > limit-walReserve-limit/64, err
}

// pages is the size of the file: the number of pages and the bytes of each.
func (d *db) pages() (pages, size int64, err error) {
	if pages, err = d.number("PRAGMA page_count"); err == nil {
		size, err = d.number("PRAGMA page_size")
	}
	return pages, size, err
}

// remove deletes the oldest rows before a time, about limit of each table, and returns how
// many. When all may go that includes undated ones, which are older than anything. The
// caller has a transaction.
func (d *db) remove(before, limit int64) (removed int64, err error) {
	if before == minTS {
		return 0, nil
	}
	from := int64(1)
	if before == maxTS {
		from = minTS
	}
	for _, t := range tables {
		ts, err := d.nthTime(t, from, maxTS, limit)
		if err != nil {
			return 0, err
		}
		if ts != 0 {
			before = min(before, ts)
		}
	}
	return d.removeFromAll(from, before-1)
}

// limitUndated removes the oldest undated rows when there are too many.
func (d *db) limitUndated() error {
	undated, err := d.number("SELECT ts FROM samples WHERE ts < 0 ORDER BY ts DESC LIMIT 1 OFFSET ?", int64(maxUndated))
	if err != nil || undated == 0 {
		return err
	}
	return d.tx(func() error {
		_, err := d.removeFromAll(minTS, undated)
		return err
	})
}

// removeFromAll deletes the rows of from..to in both tables and returns how many.
func (d *db) removeFromAll(from, to int64) (removed int64, err error) {
	for _, t := range tables {
		n, err := d.removeRange(t, from, to)
		if err != nil {
			return 0, err
		}
		removed += n
	}
	return removed, nil
}

// applyRetention removes everything beyond the bounds and makes the file smaller, if
// SetRetention was called.
func (s *Store) applyRetention(d *db) error {
	s.mu.Lock()
	isPending, limit := s.purgePending, s.maxBytes
	s.mu.Unlock()
	if !isPending {
		return nil
	}
	for removed := int64(1); removed > 0; {
		before, err := s.retentionCutoff(d)
		if err != nil {
			return err
		}
		removed = 0
		if before == minTS {
			break
		}
		if err := d.tx(func() (err error) {
			removed, err = d.remove(before, maxRemoved)
			return err
		}); err != nil {
			return err
		}
	}
	// VACUUM needs space for a copy in the directory for temporary files, so it runs in no
	// other case.
	pages, size, err := d.pages()
	if err == nil && pages*size > limit-walReserve {
		s.log.Info("history file is made smaller", zap.Int64("bytes", pages*size), zap.Int64("bound", limit))
		err = d.run("VACUUM")
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.purgePending = false
	s.mu.Unlock()
	return nil
}
