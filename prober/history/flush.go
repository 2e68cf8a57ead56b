package history

import (
	"context"
	"os"
	"runtime"
	"slices"
)

// Flush commits what is unsaved and removes what is too old or too much. An error says
// why it could not; nothing is lost by that yet.
func (s *Store) Flush(ctx context.Context) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()
	stop := measureWrites()
	err := s.withDB(func(d *db) error {
		if err := s.rebase(d); err != nil {
			return err
		}
		if err := s.save(d); err != nil {
			return err
		}
		if err := d.limitUndated(); err != nil {
			return err
		}
		return s.purgeAll(d)
	})
	s.recordWrites(stop())
	s.setFault(err)
	return err
}

// recordWrites adds what was written, and looks how large the file is.
func (s *Store) recordWrites(n int64) {
	var size int64
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if info, err := os.Stat(s.path + suffix); err == nil {
			size += info.Size()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addWrittenLocked(n)
	s.stats.Bytes = size
	if s.db != nil {
		s.stats.Rows = s.db.rows
	}
}

const (
	insertSample  = "INSERT OR IGNORE INTO samples VALUES(?,?,?,?,?,?,?,?)"
	insertReading = "INSERT OR IGNORE INTO readings VALUES(?,?)"
	insertKey     = "INSERT OR IGNORE INTO keys VALUES(?,?)"
	insertBoot    = "INSERT INTO boots VALUES(?,?)"
	lastBoot      = "SELECT max(id) FROM boots"
)

// save commits what is unsaved, in one transaction that first removes about as much as
// it adds if there is too much: the pages that become free are used again at once, so
// they are written once. Rows the file has already stay as they are: a commit that
// failed half way and is repeated changes nothing.
func (s *Store) save(d *db) error {
	s.mu.Lock()
	samples, readings := slices.Clone(s.samples.items), slices.Clone(s.readings.items)
	upto := s.seq
	s.mu.Unlock()
	before, err := s.retentionCutoff(d)
	if err != nil || len(samples)+len(readings) == 0 && before == minTS {
		return err
	}
	slot, used := d.slot, d.used
	err = d.tx(func() (err error) {
		if _, err := d.remove(before, int64(2*max(len(samples), len(readings), 100))); err != nil {
			return err
		}
		if slot == 0 && (hasUndated(samples) || hasUndated(readings)) {
			if slot, err = s.addBoot(d); err != nil {
				return err
			}
		}
		return d.insert(samples, readings, slot)
	})
	if err != nil {
		d.used = used
		return err
	}
	d.slot = slot
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples.removeSaved(upto)
	s.readings.removeSaved(upto)
	s.flushRequested = s.flushRequested && s.purgePending // what asked for haste is saved
	if ms, ok := s.now(); ok {
		s.stats.LastFlushMS = ms
	}
	return nil
}

// insert adds rows, those without a time to a boot's slot.
func (d *db) insert(samples []item[values], readings []item[int64], slot int64) error {
	rebase := slotBase(slot) - slotBase(memorySlot)
	for i := range samples {
		it := &samples[i]
		if it.id < 0 {
			it.id += rebase
		}
		n, err := d.exec(insertSample, it.id, int64(it.v.cpu), it.v.mem, it.v.total, int64(it.v.disk), int64(it.v.load[0]), int64(it.v.load[1]), int64(it.v.load[2]))
		if err != nil {
			return err
		}
		d.rows += n
	}
	for _, it := range readings {
		if key := readingKey(it.id); !d.used[key] {
			if _, err := d.exec(insertKey, int64(key), byID[key].Key); err != nil {
				return err
			}
			d.used[key] = true
		}
		if it.id < 0 {
			it.id += rebase << 8
		}
		if _, err := d.exec(insertReading, it.id, it.v); err != nil {
			return err
		}
	}
	return nil
}

// hasUndated tells whether some of items, which are sorted, have no time.
func hasUndated[T any](items []item[T]) bool { return len(items) > 0 && items[0].id < 0 }

// addBoot gives this boot a slot. Boots whose time never came to be known are forgotten
// when all slots are used.
func (s *Store) addBoot(d *db) (int64, error) {
	last, err := d.number(lastBoot)
	if err != nil {
		return 0, err
	}
	if last >= slots-1 {
		for _, q := range []string{"DELETE FROM samples WHERE ts < 0", "DELETE FROM readings WHERE id < 0", "DELETE FROM boots"} {
			if _, err := d.exec(q); err != nil {
				return 0, err
			}
		}
		last = 0
	}
	_, err = d.exec(insertBoot, last+1, s.bootID)
	return last + 1, err
}

// rebase gives the samples of this boot that wait for the time theirs, once it is known.
func (s *Store) rebase(d *db) error {
	now, ok := s.now()
	if !ok {
		return nil
	}
	start := now - s.mono().Milliseconds() // the time at which the boot's clock was zero
	if d != nil && d.slot != 0 {
		if err := d.rebase(start); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples.rebase(start - slotBase(memorySlot))
	s.readings.rebase((start - slotBase(memorySlot)) << 8)
	s.hasUndated = d == nil && s.hasUndated
	return nil
}

// rebase is Store.rebase for what is in the file.
func (d *db) rebase(start int64) error {
	from := slotBase(d.slot)
	to, by := from+slotWidth-1, start-from
	err := d.tx(func() error {
		for _, q := range []struct {
			move, drop   string
			from, to, by int64
			counts       bool
		}{
			{"UPDATE OR IGNORE samples SET ts = ts + ? WHERE ts BETWEEN ? AND ?", "DELETE FROM samples WHERE ts BETWEEN ? AND ?", from, to, by, true},
			{"UPDATE OR IGNORE readings SET id = id + ? WHERE id BETWEEN ? AND ?", "DELETE FROM readings WHERE id BETWEEN ? AND ?", from << 8, to<<8 | 255, by << 8, false},
		} {
			if _, err := d.exec(q.move, q.by, q.from, q.to); err != nil {
				return err
			}
			n, err := d.exec(q.drop, q.from, q.to) // their millisecond is taken
			if err != nil {
				return err
			}
			if q.counts {
				d.rows -= n
			}
		}
		_, err := d.exec("DELETE FROM boots WHERE id = ?", d.slot)
		return err
	})
	if err == nil {
		d.slot = 0
	}
	return err
}

// measureWrites tells, when what it returns is called, how many bytes this goroutine sent
// to the disk in between.
func measureWrites() (stop func() int64) {
	runtime.LockOSThread() // the kernel counts by thread
	before := threadWrites()
	return func() int64 {
		defer runtime.UnlockOSThread()
		return max(0, threadWrites()-before)
	}
}
