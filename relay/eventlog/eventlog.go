// Package eventlog keeps the relay's events on disk: append-only, each one durable before
// its appender is answered, and replayed after a restart (RFC-0005 §12).
//
//	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(stateDir, eventlog.FileName)})
//	err = log.Replay(ctx, 0, rebuild) // before Run: what happened so far
//	go log.Run(ctx)                   // the writer; it ends with ctx
//	seq, err := log.Append(ctx, kernel.Event{Type: "ticket.created", Aggregate: id, Payload: body})
//
// One writer takes all events that wait into one transaction, so that a thousand callers
// share an fsync (group commit). seq starts at unix_ms << 12 of Open, or one above the
// last, whichever is higher, and is consecutive until the next Open; it is also the event
// gateway's id.
//
// Triggers refuse every UPDATE and the DELETE of rows at or above the retention mark,
// which only grows; see docs/eventlog.md for the table and for how a state is rebuilt.
package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// FileName is the log's name in a relay's state directory.
const FileName = "events.db"

// Bounds of a Store.
const (
	MaxAppend      = 256      // events of one Append
	maxBatchEvents = 256      // events of one transaction, unless one Append has more
	maxBatchBytes  = 4 << 20  // payload bytes of one transaction, as above
	maxQueuedBytes = 32 << 20 // payload bytes that wait for their transaction
	ringSize       = 512      // newest events in memory, for readers that follow
	offerInterval  = 100 * time.Millisecond
	eventOverhead  = 256 // what an event is counted as, beside its payload
)

// Options of a Store. Only Path is needed.
type Options struct {
	Path      string           // the database file; made with mode 0600, its directory with 0700
	Logger    *zap.Logger      // default none
	MaxAge    time.Duration    // events older than this go; default 90 days, below 0: never
	MaxBytes  int64            // the oldest events go when the log is larger; default 256 MiB, at least 1 MiB
	MaxQueued int              // events that may wait for the disk, half of them offered; default 8,192
	Now       func() time.Time // the wall clock; default time.Now

	// Snapshot gives events that each say all that is known of their Tenant and Aggregate
	// (an open ticket, who is present), before retention takes the events that said it
	// first. At most 100,000, within 30 s. It is called from a goroutine of its own while
	// appends go on, so it may take locks that are held around Append; it must heed its
	// context, and not append. See docs/eventlog.md for what a replay makes of it. Nil:
	// old events simply go.
	Snapshot func(context.Context) ([]kernel.Event, error)

	// OnCommit sees each group of events once it is durable, in the order of seq and
	// before its appenders are answered. It must be quick, must not append, and must not
	// change or keep the slice.
	OnCommit func([]kernel.Event)
}

// Errors that a caller may decide by.
var (
	ErrNotRunning = errors.New("eventlog: the log's writer does not run; nothing was kept (Run must be running)")
	ErrClosed     = errors.New("eventlog: closed")
	ErrRemoved    = errors.New("eventlog: retention removed events during the replay; begin it again")
	ErrDamaged    = errors.New("eventlog: the event log is damaged")
)

// Stats are what a Store holds now and has done since Open.
type Stats struct {
	Events        int64  // rows
	First         uint64 // the oldest seq that is kept, 0 for none
	Last          uint64 // the newest seq ever given, 0 for none
	Mark          uint64 // what lies below it is gone
	Bytes         int64  // of the database file and its write-ahead log
	Queued        int    // events that wait for their transaction
	Appended      uint64 // events kept, the offered ones and snapshots included
	Offered       uint64 // events given to Offer
	Dropped       uint64 // of those, not kept: queue full, bad form, or the disk refused them
	Commits       uint64 // transactions that kept events
	SharedCommits uint64 // of those, with events of more than one caller
	FailedCommits uint64 // transactions that the disk refused
	Removed       uint64 // events removed by retention
	Snapshots     uint64 // events that Options.Snapshot gave and that were kept
	Recovered     bool   // Open found a log that was not closed, and checked it
	LastError     string // why the newest transaction failed; "" when it did not

	RetentionError string // why the newest retention failed; "" when it did not
}

var _ kernel.Log = (*Store)(nil)

// Store is the event log on disk. One process may hold it; any number may read it with
// OpenReader. Its methods may be called from any goroutine.
type Store struct {
	*Reader
	opts      Options
	log       *zap.Logger
	lock      *os.File
	db        *sql.DB
	conn      *sql.Conn // the writer's; used by Open, then by the goroutine of Run alone
	insertOne *sql.Stmt
	// insertMany inserts putRows rows: a statement costs as much as a few rows.
	insertMany *sql.Stmt
	topic      *fanout.Topic[kernel.Event]
	last       atomic.Uint64

	appendReady chan struct{} // an Append waits
	offerReady  chan struct{} // an Offer waits
	started     chan struct{} // closed when Run has begun for the first time
	retainNow   chan struct{} // nil but in tests: retention looks now
	startSeq    uint64        // the first seq of this Open
	nextSeq     uint64        // the next seq; of Run's goroutine
	retention   retention     // of Run's goroutine

	mu           sync.Mutex // protects the fields below
	state        state
	queue        []*appendRequest
	queuedEvents int // in waiting
	queuedOffers int // of those, offered
	queuedBytes  int // payload bytes in waiting
	stats        Stats
}

type state uint8

const (
	stateIdle    state = iota // queuedOffers wait, appends are refused
	stateRunning              // Run writes
	stateEnded                // both are refused
	stateClosed
)

// Open opens the log, or makes it. A log that was not closed is checked whole. What Open
// found is logged: how many events, and the last seq.
func Open(o Options) (_ *Store, err error) {
	o.defaults()
	s := &Store{opts: o, log: o.Logger, appendReady: make(chan struct{}, 1), offerReady: make(chan struct{}, 1), started: make(chan struct{})}
	s.retention.results = make(chan snapshot, 1)
	defer func() {
		if err != nil {
			s.closeFiles()
			err = explain(o.Path, err)
		}
	}()
	began := time.Now()
	if s.stats.Recovered, err = s.openWriter(); err != nil {
		return nil, err
	}
	if s.Reader, err = newReader(o.Path, "_query_only=1"); err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	s.topic = fanout.New[kernel.Event](fanout.Options{Ring: ringSize, FirstSeq: s.last.Load() + 1})
	s.log.Info("event log open", zap.String("path", o.Path), zap.Int64("events", s.stats.Events),
		zap.Uint64("first", s.stats.First), zap.Uint64("last", s.last.Load()), zap.Int64("bytes", fileBytes(o.Path)),
		zap.Bool("recovered", s.stats.Recovered), zap.Duration("after", time.Since(began)))
	return s, nil
}

func (o *Options) defaults() {
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.MaxAge == 0 {
		o.MaxAge = 90 * 24 * time.Hour
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 256 << 20
	}
	o.MaxBytes = max(o.MaxBytes, 1<<20)
	if o.MaxQueued <= 0 {
		o.MaxQueued = 8192
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// load reads what the log holds and where its numbers go on.
func (s *Store) load() error {
	last, err := s.readLast()
	if err != nil {
		return err
	}
	err = s.conn.QueryRowContext(context.Background(), "SELECT count(*), coalesce(min(seq), 0), (SELECT mark FROM retention) FROM events").
		Scan(&s.stats.Events, &s.stats.First, &s.stats.Mark)
	if err != nil {
		return err
	}
	s.last.Store(last)
	s.startSeq = firstSeq(last, s.opts.Now())
	s.nextSeq = s.startSeq
	return nil
}

// firstSeq is where numbers begin after last. A clock beyond 2039 would make numbers that
// JSON readers cannot hold (2^53); then, as with a clock that went back, they go on.
func firstSeq(last uint64, now time.Time) uint64 {
	if ms := now.UnixMilli(); ms > 0 && ms < 1<<41 && uint64(ms)<<12 > last {
		return uint64(ms) << 12
	}
	return last + 1
}

// readLast is the newest seq ever given, also when its row is gone.
func (s *Store) readLast() (last uint64, err error) {
	err = s.conn.QueryRowContext(context.Background(),
		"SELECT max(mark - 1, coalesce((SELECT max(seq) FROM events), 0), 0) FROM retention").Scan(&last)
	return last, err
}

// Last implements kernel.Log: the newest seq that is durable.
func (s *Store) Last() uint64 { return s.last.Load() }

// Started is closed once Run has begun: from then on Append may be called.
func (s *Store) Started() <-chan struct{} { return s.started }

// StartSeq is the first seq that this Open gives, or gave.
func (s *Store) StartSeq() uint64 { return s.startSeq }

// First is the oldest seq that is kept, 0 for none.
func (s *Store) First() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats.First
}

// CanResume tells whether the log has everything behind seq after, so that a reader who saw
// that one can go on without a gap: nothing of it was removed, and it is not above Last.
func (s *Store) CanResume(after uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return after+1 >= s.stats.Mark && after <= s.last.Load()
}

// Stats returns the counters.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	st := s.stats
	st.Queued = s.queuedEvents
	s.mu.Unlock()
	st.Last = s.last.Load()
	st.Bytes = fileBytes(s.opts.Path)
	return st
}

// Close closes the log. Run must have ended. Offers that still wait are dropped.
func (s *Store) Close() error {
	s.mu.Lock()
	switch s.state {
	case stateRunning:
		s.mu.Unlock()
		return errors.New("eventlog: Close while Run runs; end its context first")
	case stateClosed:
		s.mu.Unlock()
		return nil
	}
	s.state = stateClosed
	s.dropQueueLocked()
	s.mu.Unlock()
	s.topic.Close(ErrClosed)
	return s.closeFiles()
}

func (s *Store) closeFiles() error {
	var errs []error
	if s.Reader != nil {
		errs = append(errs, s.Reader.Close())
	}
	if s.insertMany != nil {
		errs = append(errs, s.insertMany.Close())
	}
	if s.insertOne != nil {
		errs = append(errs, s.insertOne.Close())
	}
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	if s.db != nil {
		errs = append(errs, s.db.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close event log %s: %w", s.opts.Path, err)
	}
	return nil
}
