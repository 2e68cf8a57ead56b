package history

// Stats tells how a Store is.
type Stats struct {
	State        string // "ok", or "degraded:" and why: full, read-only, corrupt, busy (another program has the file, or the disk does not answer), io, foreign, newer, fault
	Path         string
	Bytes        int64  // size of the file and what belongs to it, at the last flush
	Rows         int64  // samples in the file
	WrittenToday int64  // bytes this process sent to the disk for it since 0:00 UTC, the WAL included, the filesystem's own journal not
	LastFlushMS  int64  // when samples were last committed, trusted wall clock; 0 for never
	Unsaved      int    // samples in memory only
	Dropped      uint64 // samples and readings lost: memory was full, or they made no sense
	Repeated     uint64 // samples and readings of a millisecond that had one
	Quarantined  uint64 // corrupt files
	LastError    string // kept when things are well again
	LastErrorMS  int64
}

// Stats does not touch the disk.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Path, st.State, st.Unsaved = s.path, "ok", len(s.samples.items)
	switch {
	case s.fault != "":
		st.State = "degraded:" + s.fault
	case s.lockedForLocked() >= diskTimeout:
		st.State = "degraded:busy"
	}
	if ms, ok := s.now(); ok && ms/msPerDay != s.statsDay {
		st.WrittenToday = 0
	}
	return st
}

const msPerDay = 24 * 60 * 60 * 1000

// addWrittenLocked adds to the bytes of the day. While the time is unknown the day
// goes on.
func (s *Store) addWrittenLocked(n int64) {
	if ms, ok := s.now(); ok && ms/msPerDay != s.statsDay {
		if s.statsDay != 0 {
			s.stats.WrittenToday = 0
		}
		s.statsDay = ms / msPerDay
	}
	s.stats.WrittenToday += n
}
