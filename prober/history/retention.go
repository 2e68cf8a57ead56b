package history

import "go.uber.org/zap"

// Retention. A flush removes about as many rows as it adds, and a clock that is far
// ahead for an hour empties nothing; what is too old is not shown in the meantime. When
// retention was changed by hand everything beyond goes at once.
//
// Pages of removed rows are used again: the file grows to its bound and stays there.

const (
	// walReserve is what the WAL and its index may take of the bound.
	walReserve = 1 << 20
	// maxUndated bounds the samples in the file that wait for the time.
	maxUndated = 100_000
	// maxRemoved bounds a transaction that only removes.
	maxRemoved = 4096

	minTS = -1 << 62 / 256 // below every timestamp, early ones included
)

// retentionCutoff is the time before which rows are to be removed: those beyond the age, or,
// when there is too much, all but the newest. It is minTS when there is nothing to remove.
func (s *Store) retentionCutoff(d *db) (before int64, err error) {
	s.mu.Lock()
	age, most := s.maxAge, s.maxBytes
	s.mu.Unlock()
	full, err := d.isFull(most)
	if err != nil {
		return 0, err
	}
	if full {
		return maxTS, nil
	}
	now, ok := s.now()
	if !ok {
		return minTS, nil
	}
	before = now - age.Milliseconds()
	for _, q := range []string{"SELECT min(ts) FROM samples WHERE ts > 0", "SELECT min(id) >> 8 FROM readings WHERE id > 0"} {
		if first, err := d.number(q); err != nil || first != 0 && first < before {
			return before, err
		}
	}
	return minTS, nil
}

// isFull tells whether more of the file is in use than the bound, less what the next
// flush may add.
func (d *db) isFull(most int64) (bool, error) {
	pages, size, err := d.pages()
	if err != nil {
		return false, err
	}
	free, err := d.number("PRAGMA freelist_count")
	return (pages-free)*size > most-walReserve-most/64, err
}

// pages is how large the file is.
func (d *db) pages() (pages, size int64, err error) {
	if pages, err = d.number("PRAGMA page_count"); err == nil {
		size, err = d.number("PRAGMA page_size")
	}
	return pages, size, err
}

// remove removes the oldest rows before a time, up to about atOnce of each table, and
// tells how many. When all may go that includes those of boots without a time, which
// are older than anything. The caller has a transaction.
func (d *db) remove(before, atOnce int64) (removed int64, err error) {
	if before == minTS {
		return 0, nil
	}
	var from int64
	if before == maxTS {
		from = minTS
	}
	for _, q := range []struct {
		sql  string
		from int64
	}{
		{"SELECT ts FROM samples WHERE ts > ? ORDER BY ts LIMIT 1 OFFSET ?", from},
		{"SELECT id >> 8 FROM readings WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?", from << 8},
	} {
		ts, err := d.number(q.sql, q.from, atOnce)
		if err != nil {
			return 0, err
		}
		if ts != 0 {
			before = min(before, ts)
		}
	}
	samples, err := d.exec("DELETE FROM samples WHERE ts > ? AND ts < ?", from, before)
	if err != nil {
		return 0, err
	}
	d.rows -= samples
	readings, err := d.exec("DELETE FROM readings WHERE id > ? AND id < ?", from<<8, before<<8)
	return samples + readings, err
}

// limitUndated forgets samples that wait for their time when there are too many.
func (d *db) limitUndated() error {
	first, err := d.number("SELECT ts FROM samples WHERE ts < 0 ORDER BY ts DESC LIMIT 1 OFFSET ?", int64(maxUndated))
	if err != nil || first == 0 {
		return err
	}
	return d.tx(func() error {
		n, err := d.exec("DELETE FROM samples WHERE ts <= ?", first)
		if err != nil {
			return err
		}
		d.rows -= n
		_, err = d.exec("DELETE FROM readings WHERE id < ?", (first+1)<<8)
		return err
	})
}

// purgeAll removes everything beyond retention and makes the file smaller, if retention
// was changed by hand.
func (s *Store) purgeAll(d *db) error {
	s.mu.Lock()
	purge, most := s.purgePending, s.maxBytes
	s.mu.Unlock()
	if !purge {
		return nil
	}
	for {
		before, err := s.retentionCutoff(d)
		if err != nil {
			return err
		}
		removed := int64(0)
		if before != minTS {
			err = d.tx(func() error {
				removed, err = d.remove(before, maxRemoved)
				return err
			})
		}
		if err != nil {
			return err
		}
		if removed == 0 {
			break
		}
	}
	// This needs a copy of what stays in the directory for temporary files, so it is not
	// done but for this.
	pages, size, err := d.pages()
	if err == nil && pages*size > most-walReserve {
		s.log.Info("history file is made smaller", zap.Int64("bytes", pages*size), zap.Int64("bound", most))
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
