package history

import (
	"time"

	"go.uber.org/zap"
)

// Retention. A flush removes some thousand rows at most, so that it stays short and a
// clock that is far ahead for an hour empties nothing; what is too old is not shown in
// the meantime. When retention was changed by hand everything beyond goes at once.
//
// Pages of removed rows are used again: the file grows to its bound and stays there.

const anyTS = -1 << 62 / 256 // below every timestamp, early ones included

func (s *Store) retain(d *db) error {
	s.mu.Lock()
	age, most, purge := s.maxAge, s.maxBytes, s.purge
	s.mu.Unlock()

	if now, ok := s.now(); ok && (purge || time.Since(s.tended) >= min(tendEvery, age/10)) {
		if err := d.removeAll(0, now-age.Milliseconds(), purge); err != nil {
			return err
		}
		s.tended = time.Now()
	}
	if err := d.boundEarly(); err != nil {
		return err
	}
	if err := d.shrinkTo(most, purge); err != nil {
		return err
	}
	if purge {
		if err := s.compact(d, most); err != nil {
			return err
		}
		s.mu.Lock()
		s.purge = false
		s.mu.Unlock()
	}
	return nil
}

// walRoom is what the WAL and its index may take of the bound.
const walRoom = 1 << 20

// shrinkTo removes the oldest rows when more is in use than the bound, less what the
// next flush may add.
func (d *db) shrinkTo(most int64, purge bool) error {
	for {
		pages, free, size, err := d.pages()
		if err != nil || (pages-free)*size <= most-walRoom-most/64 {
			return err
		}
		n, err := d.remove(anyTS, 1<<62/256)
		if err != nil || n == 0 || !purge {
			return err
		}
	}
}

func (d *db) pages() (pages, free, size int64, err error) {
	for _, q := range []struct {
		sql string
		to  *int64
	}{{"PRAGMA page_count", &pages}, {"PRAGMA freelist_count", &free}, {"PRAGMA page_size", &size}} {
		if *q.to, err = d.number(q.sql); err != nil {
			return 0, 0, 0, err
		}
	}
	return pages, free, size, nil
}

// removeAll removes rows from..before: once removeAtOnce, or all of them.
func (d *db) removeAll(from, before int64, all bool) error {
	for {
		n, err := d.remove(from, before)
		if err != nil || n == 0 || !all {
			return err
		}
	}
}

// remove removes the oldest rows after from and before before, up to removeAtOnce of
// each table, and tells how many.
func (d *db) remove(from, before int64) (removed int64, err error) {
	for _, q := range []struct {
		sql  string
		from int64
	}{
		{"SELECT ts FROM samples WHERE ts > ? ORDER BY ts LIMIT 1 OFFSET ?", from},
		{"SELECT id >> 8 FROM readings WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?", from << 8},
	} {
		ts, err := d.number(q.sql, q.from, int64(removeAtOnce))
		if err != nil {
			return 0, err
		}
		if ts != 0 {
			before = min(before, ts)
		}
	}
	first, err := d.number("SELECT count(*) FROM (SELECT 1 FROM samples WHERE ts > ? AND ts < ? LIMIT 1)", from, before)
	if err != nil {
		return 0, err
	}
	firstReading, err := d.number("SELECT count(*) FROM (SELECT 1 FROM readings WHERE id > ? AND id < ? LIMIT 1)", from<<8, before<<8)
	if err != nil || first+firstReading == 0 {
		return 0, err // nothing to do is no transaction
	}
	rows := d.rows
	err = d.tx(func() error {
		n, err := d.exec("DELETE FROM samples WHERE ts > ? AND ts < ?", from, before)
		if err != nil {
			return err
		}
		rows -= n
		more, err := d.exec("DELETE FROM readings WHERE id > ? AND id < ?", from<<8, before<<8)
		if err != nil {
			return err
		}
		removed = n + more
		return d.setRows(rows)
	})
	if err == nil {
		d.rows = rows
	}
	return removed, err
}

// boundEarly forgets samples that wait for their time when there are too many.
func (d *db) boundEarly() error {
	first, err := d.number("SELECT ts FROM samples WHERE ts < 0 ORDER BY ts DESC LIMIT 1 OFFSET ?", int64(maxEarly))
	if err != nil || first == 0 {
		return err
	}
	return d.removeAll(anyTS, first+1, true)
}

// compact gives back what the file holds beyond the bound. That needs a copy of what
// stays in the directory for temporary files, so it is done only after a bound was
// lowered.
func (s *Store) compact(d *db, most int64) error {
	pages, _, size, err := d.pages()
	if err != nil || pages*size <= most-walRoom {
		return err
	}
	s.log.Info("history file is made smaller", zap.Int64("bytes", pages*size), zap.Int64("bound", most))
	return d.run("VACUUM")
}
