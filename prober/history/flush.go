package history

import (
	"context"
	"os"
	"runtime"
	"slices"
)

// When samples are committed. Each commit costs flash far more than the bytes it holds, so
// samples collect in memory and a flush commits them in one transaction: every Flush
// interval, or earlier when much is unsaved, when undated samples can get their time, or
// when retention was changed. The goroutine of Record flushes (runFlusher); Flush and Close
// may be called beside it.
//
// A flush gives undated samples their time, commits what is unsaved, bounds what is undated,
// and applies a changed retention. While the disk fails, samples stay in memory up to
// maxUnsaved and the flush is repeated, every 30 s at most.

// Flush commits what is unsaved and removes what is beyond retention. After an error
// everything is still in memory.
func (s *Store) Flush(ctx context.Context) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()
	stop := measureWrites()
	err := s.withDB(func(d *db) error {
		// Before save, so that what is unsaved goes into the file with its time and is not moved later.
		if err := s.rebase(d); err != nil {
			return err
		}
		if err := s.save(d); err != nil {
			return err
		}
		if err := d.limitUndated(); err != nil {
			return err
		}
		return s.applyRetention(d)
	})
	s.recordWrites(stop())
	s.setFault(err)
	return err
}

// recordWrites adds what was written, and reads how large the file is. The holder of diskToken calls it:
// Stat may hang with the disk, and Stats must not.
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

// The statements of a flush. IGNORE keeps the row that has the millisecond already.
const (
	insertSample  = "INSERT OR IGNORE INTO samples VALUES(?,?,?,?,?,?,?,?)"
	insertReading = "INSERT OR IGNORE INTO readings VALUES(?,?)"
	insertKey     = "INSERT OR IGNORE INTO keys VALUES(?,?)"
	insertBoot    = "INSERT INTO boots VALUES(?,?)"
	lastBoot      = "SELECT max(id) FROM boots"
)

// save commits what is unsaved in one transaction, which first removes old rows if there
// are too many: the pages that become free are reused at once, so they are written once.
// Rows that the file has already stay unchanged, so that a failed commit can be repeated.
func (s *Store) save(d *db) error {
	s.mu.Lock()
	samples, readings := slices.Clone(s.samples.items), slices.Clone(s.readings.items)
	upto := s.seq
	s.mu.Unlock()
	before, err := s.retentionCutoff(d)
	if err != nil || len(samples)+len(readings) == 0 && before == minTS {
		return err
	}
	// What the transaction changes of d is set once it has committed, or put back if it has not.
	slot, used, keepSpan := d.slot, d.used, func() {}
	err = d.tx(func() (err error) {
		if keepSpan, err = s.saveSpan(d); err != nil {
			return err
		}
		// Twice as many as are added: a file beyond its bound gets below it again.
		if _, err := d.remove(before, int64(max(2*len(samples), 2*len(readings), minRemoved))); err != nil {
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
	keepSpan()
	// Items that were added during the commit have a higher seq, and stay.
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples.removeSaved(upto)
	s.readings.removeSaved(upto)
	s.flushRequested = s.flushRequested && s.purgePending
	if ms, ok := s.now(); ok {
		s.stats.LastFlushMS = ms
	}
	return nil
}

// insert adds rows, undated ones to a boot's slot.
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
			it.id += rebase << keyBits
		}
		if _, err := d.exec(insertReading, it.id, it.v); err != nil {
			return err
		}
	}
	return nil
}

// hasUndated reports whether some of items, which are sorted, have no time.
func hasUndated[T any](items []item[T]) bool { return len(items) > 0 && items[0].id < 0 }

// addBoot gives this boot a slot. When all slots are used, the rows of boots whose time was
// never known are deleted.
func (s *Store) addBoot(d *db) (int64, error) {
	last, err := d.number(lastBoot)
	if err != nil {
		return 0, err
	}
	if last >= slots-1 {
		if _, err := d.removeFromAll(minTS, -1); err != nil {
			return 0, err
		}
		if _, err := d.exec("DELETE FROM boots"); err != nil {
			return 0, err
		}
		last = 0
	}
	_, err = d.exec(insertBoot, last+1, s.bootID)
	return last + 1, err
}

// rebase gives the undated samples of this boot their time, once that is known. d is nil
// for memory only.
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
	s.readings.rebase((start - slotBase(memorySlot)) << keyBits)
	s.hasUndated = d == nil && s.hasUndated
	return nil
}

// rebase moves what is in the file, and frees this boot's slot.
func (d *db) rebase(start int64) error {
	base := slotBase(d.slot)
	err := d.tx(func() error {
		for _, t := range tables {
			if err := d.moveRange(t, base, base+slotWidth-1, start-base); err != nil {
				return err
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

// measureWrites starts to count the bytes that this goroutine sends to the disk; stop
// returns them.
func measureWrites() (stop func() int64) {
	runtime.LockOSThread() // the kernel counts by thread
	before := threadWrites()
	return func() int64 {
		defer runtime.UnlockOSThread()
		return max(0, threadWrites()-before)
	}
}
