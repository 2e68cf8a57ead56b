package history

// Stats is the condition of a Store.
type Stats struct {
	// State is "ok", or "degraded:" and the fault: full, read-only, corrupt, busy (another
	// program has the file, or the disk does not answer), io, foreign, newer, fault.
	State string
	Path  string
	Bytes int64 // size of the file, its WAL and index, at the last flush
	Rows  int64 // samples in the file
	// WrittenToday is how many bytes this process sent to the disk for the file since 0:00
	// UTC, with the WAL and without the filesystem's journal.
	WrittenToday int64
	LastFlushMS  int64  // when samples were last committed, trusted wall clock; 0 for never
	Unsaved      int    // samples in memory only
	Dropped      uint64 // samples and readings lost: memory was full, or they were invalid
	Repeated     uint64 // samples and readings whose millisecond was taken
	Quarantined  uint64 // corrupt files
	LastError    string // it stays after recovery
	LastErrorMS  int64
}

// Stats returns the current condition. It does not access the disk.
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

// msPerDay is the length of a UTC day. Days are counted without leap seconds, as Unix time
// does.
const msPerDay = 24 * 60 * 60 * 1000

// addWrittenLocked adds to the bytes of the day. While the time is unknown no new day
// begins. What was written before the first known time counts for that day.
func (s *Store) addWrittenLocked(n int64) {
	if ms, ok := s.now(); ok && ms/msPerDay != s.statsDay {
		if s.statsDay != 0 {
			s.stats.WrittenToday = 0
		}
		s.statsDay = ms / msPerDay
	}
	s.stats.WrittenToday += n
}
