package eventlog

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// The files of a log together stay within Options.MaxBytes. This holds between two runs of retention too,
// since the log may share a small disk with others. Exceptions are below.
//
//	database         at most maxPages: SQLite refuses a page beyond (max_page_count). reserveSpace
//	                 deletes old calls before a transaction that would not fit.
//	write-ahead log  at most maxWAL: SQLite begins it again at a quarter, without giving its
//	                 blocks back, since a commit into a file that grows takes longer. A
//	                 transaction adds no more than about a quarter. While a reader of another
//	                 program keeps its snapshot, it cannot begin again; offered calls are
//	                 dropped then, and only what is appended lets it grow.
//	its index        (-shm) 32 KiB for each 16 MiB of that
const (
	minBytes        = 1 << 20
	minWAL          = 256 << 10
	maxWAL          = 16 << 20
	shmBytes        = 64 << 10
	pinnedAfter     = time.Second           // the write-ahead log could not be emptied for so long
	pinnedRetry     = 50 * time.Millisecond // between two tries to empty it
	reserveDivisor  = 16                    // of the database, 1/16 is not for the tenant that has most events
	overBoundFactor = 5                     // Append is refused when the files have 5/4 of MaxBytes
)

// Fill levels of the database at which retention by size begins and ends. The pages above the high level
// take what is appended while rows are removed.
const (
	highLevelEighths = 7
	lowLevelEighths  = 6
)

// fileSpace is what the goroutine of Run knows of the files. checkpoint moves the write-ahead log between
// three states:
//
//	normal  it is below half of its bound, or could be emptied
//	busy    a reader prevents that (busySince); Run tries again each pinnedRetry
//	pinned  busy for pinnedAfter, or three quarters full: offered calls are dropped, and retention waits
type fileSpace struct {
	maxPages  int64 // of the database
	maxWAL    int64 // bytes
	maxBatch  int   // bytes of the events of one transaction, unless one Append has more
	usedPages int64 // without free ones
	freePages int64 // an estimate: what is left of maxPages
	filePages int64 // of the database file

	pinned       time.Time // Stats.Pinned
	busySince    time.Time // readers have prevented checkpoints since then; zero: not the last one
	retryAt      time.Time // of a checkpoint that a reader prevented
	checkNow     bool      // retention is to be checked before the next interval is over
	nextRound    time.Time // requestRound does nothing before
	callsDamaged bool      // the table of calls cannot be written, that of state can
}

// initSpace divides MaxBytes: a sixteenth is for the write-ahead log (minWAL to maxWAL), shmBytes for its
// index, and the rest for the database. The settings belong to the connection and are not in the file.
func (s *Store) initSpace() error {
	r := &s.space
	r.maxWAL = min(max(s.opts.MaxBytes/16, minWAL), maxWAL)
	r.maxBatch = int(r.maxWAL / 4)
	r.maxPages = (s.opts.MaxBytes - r.maxWAL - shmBytes) / pageSize
	if err := s.exec(fmt.Sprintf("PRAGMA max_page_count = %d; PRAGMA journal_size_limit = %d; PRAGMA wal_autocheckpoint = %d", r.maxPages, r.maxWAL/2, r.maxWAL/4/pageSize)); err != nil {
		return err
	}
	s.checkpoint()
	return s.readSpace()
}

// readSpace reads how full the database is. The file is larger than maxPages after MaxBytes was
// made smaller, until retention has removed enough. SQLite uses the pages of deleted rows again, so used
// pages count and not the size of the file.
func (s *Store) readSpace() error {
	r := &s.space
	var free int64
	op := s.opts.Watch.Begin("read")
	err := s.queryRow("SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count").Scan(&r.filePages, &free)
	op.End(explain(s.opts.Path, err))
	r.usedPages = r.filePages - free
	r.freePages = r.maxPages - r.usedPages
	return err
}

// needPages estimates the pages that a transaction may add: of its rows, words and chains. It estimates
// too much rather than too little: a transaction that SQLite refuses for its size fails as a whole.
func needPages(bytes int) int64 { return int64(bytes)*5/4/pageSize + 16 }

// reserveSpace prepares the files for a batch. It returns the requests that are to be stored: offered
// calls are dropped while the write-ahead log cannot be emptied. kernel.ErrLogFull: the files have no
// space left, and retention can free none now.
func (s *Store) reserveSpace(batch []*appendRequest) ([]*appendRequest, error) {
	r := &s.space
	if !r.pinned.IsZero() || r.callsDamaged {
		rest, calls := splitCalls(batch)
		s.dropped(calls)
		if batch = rest; len(batch) == 0 {
			s.checkpoint()
			return nil, nil
		}
		if !r.pinned.IsZero() && s.bytes.Load() > s.opts.MaxBytes/4*overBoundFactor {
			s.checkpoint()
			return batch, fmt.Errorf("%w: its files have %d MiB, more than the %d allowed, because a program that reads them has not finished (fuser -v %s)",
				kernel.ErrLogFull, s.bytes.Load()>>20, s.opts.MaxBytes>>20, s.opts.Path)
		}
	}
	size := 0
	for _, req := range batch {
		size += req.bytes
	}
	if size > int(r.maxWAL/2) {
		return batch, fmt.Errorf("eventlog: %d bytes at once; append at most %d", size, r.maxWAL/2)
	}
	need := needPages(size)
	// Far from full, the estimate freePages is enough; the file is not read. A removal corrects it.
	if r.freePages-need > r.maxPages/4 {
		r.freePages -= need
		return batch, nil
	}
	reserve := r.maxPages / reserveDivisor
	for { // each round removes rows, or is the last one
		if err := s.readSpace(); err != nil {
			return batch, explain(s.opts.Path, err)
		}
		if r.usedPages > r.maxPages/8*highLevelEighths {
			s.requestRound()
		}
		if r.freePages >= need+reserve {
			r.freePages -= need
			return batch, nil
		}
		if n, err := s.removeNow(); err != nil {
			return batch, explain(s.opts.Path, err)
		} else if n > 0 {
			continue
		}
		// Nothing can be removed now: retention has to write snapshots first, or may remove nothing.
		full := fmt.Errorf("%w: its files have the %d MiB allowed, and old events are still being removed", kernel.ErrLogFull, s.opts.MaxBytes>>20)
		batch = s.refuseLargest(batch, full)
		if r.freePages < need {
			return batch, full
		}
		r.freePages -= need
		return batch, nil
	}
}

// refuseLargest refuses the requests of the tenant that has most events, and returns the others: what
// is left of the log is for those who have not filled it. Snapshots pass: without them no state can be
// removed, and the log would stay full.
func (s *Store) refuseLargest(batch []*appendRequest, err error) (rest []*appendRequest) {
	sizes := make(map[string]int64)
	largest := ""
	for _, c := range s.w.chains {
		sizes[c.tenant] += c.bytes
		if sizes[c.tenant] > sizes[largest] {
			largest = c.tenant
		}
	}
	for _, req := range batch {
		if req.tenant() == largest && !req.isSnapshot {
			s.answer([]*appendRequest{req}, err)
			continue
		}
		rest = append(rest, req)
	}
	return rest
}

// splitCalls separates the offered calls of a batch from the rest. Calls that were appended stay: their
// callers wait for an answer.
func splitCalls(batch []*appendRequest) (rest, calls []*appendRequest) {
	for _, req := range batch {
		if req.offered && classOf(req.events[0].Type) == ClassCalls {
			calls = append(calls, req)
		} else {
			rest = append(rest, req)
		}
	}
	return rest, calls
}

// checkpoint copies the write-ahead log into the database and empties it, if it has grown to half of
// its bound although SQLite begins it again at a quarter: after a large transaction, or because of a
// reader. It does not wait for readers: transactions would have to wait as well. It is called after each
// commit and each removal, and measures the files for Stats.
func (s *Store) checkpoint() {
	r := &s.space
	op := s.opts.Watch.Begin("stat") // which a disk that hangs holds as well
	wal := fileSize(s.opts.Path + "-wal")
	s.bytes.Store(wal + fileSize(s.opts.Path) + fileSize(s.opts.Path+"-shm"))
	op.End(nil)
	if wal < r.maxWAL/2 {
		r.busySince = time.Time{}
		s.setPinned(time.Time{})
		return
	}
	if time.Now().Before(r.retryAt) {
		return
	}
	busy, err := s.truncateWAL()
	if err == nil && !busy {
		r.busySince = time.Time{}
		s.setPinned(time.Time{})
		s.bytes.Store(fileBytes(s.opts.Path))
		return
	}
	now := time.Now()
	if r.retryAt = now.Add(pinnedRetry); r.busySince.IsZero() {
		r.busySince = now
	}
	if wal >= r.maxWAL/4*3 || now.Sub(r.busySince) >= pinnedAfter {
		s.setPinned(r.busySince)
	}
}

// truncateWAL runs a checkpoint; busy reports that a reader prevented it. The busy timeout is 0 meanwhile:
// otherwise SQLite would wait for readers that long, and appenders behind it.
func (s *Store) truncateWAL() (busy bool, err error) {
	if err := s.exec("PRAGMA busy_timeout = 0"); err != nil {
		return false, err
	}
	var state, frames, copied int
	op := s.opts.Watch.Begin("checkpoint")
	err = s.queryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&state, &frames, &copied)
	op.End(explain(s.opts.Path, err))
	if err == nil {
		busy = state != 0
	}
	_, err2 := s.conn.ExecContext(context.Background(), fmt.Sprintf("PRAGMA busy_timeout = %d", busyTimeoutMS))
	if err == nil {
		err = err2
	}
	return busy, err
}

// setPinned records since when the write-ahead log cannot be emptied, and logs changes.
func (s *Store) setPinned(since time.Time) {
	was := s.space.pinned
	if was.IsZero() == since.IsZero() {
		return
	}
	s.space.pinned = since
	s.mu.Lock()
	s.stats.Pinned = since
	s.mu.Unlock()
	if since.IsZero() {
		s.opts.Watch.Resolve("pinned")
		s.log.Info("event log: its write-ahead log could be emptied again", zap.Duration("after", time.Since(was)))
	} else {
		s.opts.Watch.Report("pinned", storage.Problem{Kind: storage.Lost, Warning: true,
			Detail: "a program that reads the event log has not finished, so its write-ahead log grows and events about calls are dropped; find it with: fuser -v " + s.opts.Path})
		s.log.Warn("event log: a program that reads it has not finished, so its write-ahead log grows; events about calls are dropped",
			zap.Int64("bytes", s.bytes.Load()), zap.String("find it with", "fuser -v "+s.opts.Path))
	}
}

// shrink gives free pages at the end of the database file back, after MaxBytes was made smaller:
// some at a time, since each page that moves passes through the write-ahead log. SQLite cannot set
// max_page_count below the size of the file, so the bound is set again once the file is smaller.
func (s *Store) shrink() error {
	r := &s.space
	free := r.filePages - r.usedPages
	n := min(r.filePages-r.maxPages, free, r.maxWAL/8/pageSize)
	if n <= 0 {
		return nil
	}
	if err := s.exec(fmt.Sprintf("PRAGMA incremental_vacuum(%d)", n)); err != nil {
		return err
	}
	s.checkpoint()
	return s.exec(fmt.Sprintf("PRAGMA max_page_count = %d", r.maxPages))
}

// truncateFiles empties the write-ahead log if no reader prevents it. The pages that shrink has freed
// leave the file of the database with a checkpoint, and without new events there would be none.
func (s *Store) truncateFiles() {
	if _, err := s.truncateWAL(); err != nil {
		s.recordRetention(ClassState, err)
	}
	s.bytes.Store(fileBytes(s.opts.Path))
}
