// Package eventlog keeps the relay's events on disk: append-only, each one durable before
// its Append returns, and replayed after a restart (RFC-0005 §12).
//
//	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(stateDir, eventlog.FileName)})
//	err = log.Replay(ctx, 0, rebuild) // before Run: rebuild state from what happened so far
//	go log.Run(ctx)                   // the writer; it ends with ctx
//	seq, err := log.Append(ctx, kernel.Event{Type: "ticket.created", Aggregate: id, Payload: body})
//
// # Writing
//
// Append and Offer put requests into one bounded queue; Run takes them in batches and
// commits each batch in one transaction, so that a thousand callers share an fsync (group
// commit). Append returns when its batch is durable, Offer returns at once. After a commit
// the events go to the in-memory ring, then Last moves, then Append returns.
//
// # Sequence numbers
//
// seq starts at unix_ms << 12 of Open, or one above the last, whichever is higher, and is
// consecutive until the next Open. It is also the event gateway's id. The jump at Open
// makes a client of an older log file notice that it cannot resume.
//
// # Reading
//
// Replay and Select read the disk in pages and end at the seq that was the last when they
// began. Follow continues from there with the events that are committed later (follow.go).
//
// # Retention
//
// Old rows are deleted from the front of a chain only: everything below its retention mark is gone,
// and everything from the mark on is complete. Triggers enforce that the mark only grows
// and that no other row is changed or deleted. Options.Snapshot lets the owner write the
// state of the deleted events again (retention.go). docs/eventlog.md has the file format.
//
// # Life of a Store
//
// Open locks the file, converts a log of the first format, refuses one that is damaged or not the expected
// one, and checks the rows of state. Until Run begins nobody writes, and Replay reads pages without
// SQLite. Run is the one writer; at its end it commits what is queued and refuses new events. Close comes
// last. After kill -9 or a power cut, SQLite has the transactions whose commit was synced. Nothing else
// has to be recovered, since events and their chains change in one transaction.
//
// # Files
//
//	eventlog.go                options, statistics, Open and Close
//	append.go, commit.go       the queue in front of Run, and a batch on its way to the disk
//	writer.go                  the rows, chains and words of a batch
//	class.go, chain.go         what a class and a chain are, and the hash of a row
//	schema.go, database.go     tables and triggers; opening the file, and errors
//	space.go, retention.go     the bound of the files; what is removed, and when
//	read.go, newest.go         reading in pages, forward and backward
//	follow.go                  reading the log, and then each event as it is committed
//	table.go, table_verify.go  reading and checking state at a start, without SQLite
//	verify.go                  checking the chains
//	probe.go, lockfile.go      a write that shows whether the disk works; the lock for one writer
//	migrate.go                 a log of the first format
//	salvage.go                 a new log from a damaged one; salvage_write.go writes it
package eventlog

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
	"agentctl/sqlitefile"
	"agentctl/transport/fanout"
)

// FileName is the log's name in a relay's state directory.
const FileName = "events.db"

// Defaults of Options.
const (
	DefaultMaxAge   = 90 * 24 * time.Hour
	DefaultMaxBytes = 256 << 20
)

// Bounds of a Store.
const (
	MaxAppend      = 256      // events of one Append
	maxBatchEvents = 512      // events of one transaction: at most half of followBuffer
	maxQueuedBytes = 32 << 20 // payload bytes that wait for their transaction
	ringSize       = 512      // newest events in memory, for followers
	offerInterval  = 100 * time.Millisecond
	eventOverhead  = 256 // bytes that an event counts in addition to its payload
)

// Options of a Store. Only Path is needed.
type Options struct {
	Path      string           // the database file; made with mode 0600, its directory with 0700
	Logger    *zap.Logger      // default none
	Expect    Expect           // what the file must be; the zero value accepts any log, and none
	MaxAge    time.Duration    // older events are removed, see ageNow; default 90 days, below 0: never
	MaxBytes  int64            // of all files of the log together; default 256 MiB, at least 1 MiB
	MaxQueued int              // events that wait for the disk, see enqueueLocked; default 16,384
	Now       func() time.Time // the wall clock; default time.Now
	Watch     *storage.Watch   // sees the disk operations; default none

	// Quotas of each tenant. MaxTenantBytes bounds all events of one tenant, unless it is the
	// only one that has any; default half of MaxBytes. State and Calls are narrower bounds of
	// one class; their zero values add none.
	MaxTenantBytes int64
	State, Calls   Quota

	// Snapshot returns events that each contain the complete state of one Tenant and
	// Aggregate (an open ticket, a present agent), before retention removes events of
	// ClassState that led to it: at most 100,000, within 30 s. It runs in its own goroutine while
	// appends continue, so it may take locks that are held around Append; it must obey its
	// context, and must not append. Nil: old events are removed without a snapshot.
	Snapshot func(context.Context) ([]kernel.Event, error)

	// onCommit is called by the goroutine of Run after each batch, before its Append returns: in tests.
	onCommit func([]kernel.Event)

	// maxChains is the constant of that name; tests set a lower one.
	maxChains int

	// OnDrop is called with events that Offer accepted and that were not stored after all, from
	// the goroutine of Run, or of Close for what was left. It must be quick, must not append, and
	// must not keep the slice.
	OnDrop func([]kernel.Event)
}

// Quota bounds the events of one class of one tenant.
type Quota struct {
	MaxAge   time.Duration // 0: Options.MaxAge
	MaxBytes int64         // 0: no separate bound
}

// Expect is what the owner of a log has recorded about it elsewhere. The file itself cannot show that it
// is yesterday's copy, or that it was made because the old one had gone.
type Expect struct {
	Exists bool   // there is a log: a missing or empty file is an error
	ID     string // of the log (Store.ID); "" for any
	Last   uint64 // the log has reached this seq
}

// checkFile refuses a missing or empty file, before SQLite or createFile makes one.
func (x *Expect) checkFile(path string) error {
	if !x.Exists && x.ID == "" && x.Last == 0 {
		return nil
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ErrMissing
	case err == nil && info.Size() == 0:
		return ErrEmpty
	}
	return err
}

// check refuses another log, and one that lacks events. A log may be ahead of the record, which is not
// written at each commit.
func (x *Expect) check(id string, last uint64) error {
	switch {
	case x.ID != "" && x.ID != id:
		return fmt.Errorf("%w: it is log %s, and log %s was recorded", ErrForeign, id, x.ID)
	case last < x.Last:
		return fmt.Errorf("%w: its last event is %d, and %d was recorded", ErrOlder, last, x.Last)
	}
	return nil
}

// Errors of Open if the file is not what Options.Expect says.
var (
	ErrMissing = errors.New("the event log is missing")
	ErrEmpty   = errors.New("the event log is empty")
	ErrOlder   = errors.New("the event log is older than it was")
	ErrForeign = errors.New("it is another event log")
)

// Errors that callers test with errors.Is.
var (
	ErrNotRunning = errors.New("eventlog: not running, so nothing was stored; Run must be running")
	ErrClosed     = errors.New("eventlog: closed")
	ErrInUse      = errors.New("another relay is using it") // from Open
	ErrRemoved    = errors.New("eventlog: retention removed events during the replay; begin it again")

	// ErrStalled is a fault of the disk that may end.
	ErrStalled error = &storage.Error{Store: FileName, Kind: storage.Hung, Err: errors.New("eventlog: the disk has not finished a write for 10 s, nothing was kept; see dmesg, and: agentctl relay status")}

	// ErrDamaged is a fault of the disk that waiting does not end.
	ErrDamaged error = &storage.Error{Store: FileName, Kind: storage.Damaged, Err: errors.New("eventlog: the event log is damaged")}
)

// Stats are present sizes of a Store and counters since Open.
type Stats struct {
	Events        int64  // rows
	First         uint64 // the oldest seq that is kept, 0 for none
	Last          uint64 // the newest seq ever given, 0 for none
	Mark          uint64 // no event from it on was removed
	Bytes         int64  // of the files, as of the newest commit
	Calls         int64  // of Events, those of ClassCalls
	CallBytes     int64  // that they use, about
	StateBytes    int64  // that the others use, about
	Tenants       int    // that have had events
	Queued        int    // events that wait for their transaction
	Appended      uint64 // events kept, the offered ones and snapshots included
	Offered       uint64 // events given to Offer
	Dropped       uint64 // of those, not stored: queue full, malformed, or the disk failed
	Commits       uint64 // transactions that kept events
	SharedCommits uint64 // of those, with events of more than one caller
	FailedCommits uint64 // transactions that the disk refused
	Removed       uint64 // events removed by retention
	Snapshots     uint64 // events of Options.Snapshot that were stored
	Recovered     bool   // Open found a log that was not closed, and checked it
	LastError     string // why the newest transaction failed; "" when it did not

	RetentionError string // why the newest retention failed; "" when it did not

	// Pinned: a reader of another program has kept the write-ahead log from being reused since
	// then, so that it grows; the zero time if none does. Offered calls are dropped meanwhile.
	Pinned time.Time
	// OverBound: the files are larger than Options.MaxBytes.
	OverBound bool

	Verification Verification // of the newest check of the chains
}

var _ kernel.Log = (*Store)(nil)

// Event is one event of the log, as the kernel has it.
type Event = kernel.Event

// Store is the event log on disk. One process may hold it; any number may read it with
// OpenReader. Its methods may be called from any goroutine.
//
// The goroutine of Run owns the write connection, nextSeq and retention. mu is a leaf
// lock: nothing blocks while it is held. Replays use other connections (Reader), so that a slow one does
// not delay commits: in WAL mode a reader does not block the writer.
type Store struct {
	*Reader
	opts Options
	log  *zap.Logger
	// What Open has opened, closed in reverse: the lock file, the database file, the write connection with
	// its pool, the prepared statements, the Reader.
	files    []io.Closer
	file     *os.File  // the database, for table
	conn     *sql.Conn // the write connection; used by Open, then by Run alone
	w        *writer   // as conn
	topic    *fanout.Topic[kernel.Event]
	last     atomic.Uint64
	newestMS atomic.Int64 // the latest CreatedMS of the last events, 0 without any
	bytes    atomic.Int64 // of the files

	appendReady chan struct{} // holds one signal: an Append is queued
	offerReady  chan struct{} // holds one signal: an Offer is queued
	started     chan struct{} // closed when Run has begun for the first time
	startOnce   sync.Once
	retainNow   chan struct{}        // nil except in tests: check retention now
	probes      chan chan error      // see probe
	ageBase     time.Time            // the newest event of earlier runs, or when there was none the time of Open
	uptime      func() time.Duration // since Open, by the monotonic clock
	startSeq    uint64               // the first seq of this Open
	nextSeq     uint64               // Run's
	events      []kernel.Event       // Run's: memory of a batch
	retention   retention            // Run's
	space       fileSpace            // Run's
	stallTimer  *time.Timer          // calls stall

	tableMu sync.RWMutex // held while table is replayed
	table   *stateTable  // nil once Run has begun, or when SQLite has to read the file

	mu           sync.Mutex // protects the fields below
	state        state
	marks        map[chainKey]uint64 // of chains that have lost rows
	droppedLast  uint64              // the newest seq of chains that are gone
	queue        []*appendRequest
	queuedBy     map[string]queueShare // what waits, by tenant
	queuedEvents int
	queuedOffers int // of queuedEvents, offered
	queuedBytes  int // payload bytes and overhead
	stats        Stats
	writingSince time.Time // when the present write began, zero between writes
	stalled      bool      // the present write has taken stallTimeout
}

// state of a Store. Run moves idle or ended to running and back to ended; Close moves
// idle or ended to closed.
type state uint8

const (
	stateIdle    state = iota // before Run: offers are queued, appends refused
	stateRunning              // Run writes
	stateEnded                // after Run: both are refused
	stateClosed
)

// Open opens the log, or makes it. It logs how many events it found, and the last seq. The goroutines
// that check the events of state end before it returns.
//
// The error is ErrInUse, ErrDamaged, one of those of Expect, or one of the disk; its text has the path and
// the next step (explain). A log that is refused keeps its events.
func Open(o Options) (_ *Store, err error) {
	o.setDefaults()
	s := &Store{opts: o, log: o.Logger, appendReady: make(chan struct{}, 1), probes: make(chan chan error), offerReady: make(chan struct{}, 1), started: make(chan struct{}),
		queuedBy: make(map[string]queueShare)}
	s.stallTimer = time.AfterFunc(stallTimeout, s.stall)
	s.stallTimer.Stop()
	s.retention.results = make(chan snapshot, 1)
	defer func() {
		if err != nil {
			err = explain(o.Path, errors.Join(err, s.closeFiles()))
		}
	}()
	began := time.Now()
	if s.stats.Recovered, err = s.openWriter(); err != nil {
		return nil, err
	}
	if s.Reader, err = newReader(o.Path, sqlitefile.DSN(o.Path, fmt.Sprintf("_query_only=1&_busy_timeout=%d&_pragma=cache_size(-128)", busyTimeoutMS)), 2); err != nil {
		return nil, err
	}
	s.files = append(s.files, s.Reader)
	if err := s.load(); err != nil {
		return nil, err
	}
	// Before all rows are checked, which can take seconds.
	if err := o.Expect.check(s.w.logID, s.Last()); err != nil {
		return nil, err
	}
	if err := s.verifyState(); err != nil {
		return nil, err
	}
	// The ring begins empty after the last event on disk. Followers read older events from the disk.
	s.topic = fanout.New[kernel.Event](fanout.Options{Ring: ringSize, FirstSeq: s.Last() + 1})
	o.Watch.SetProbe(s.probe)
	s.log.Info("event log open", zap.String("path", o.Path), zap.Int64("events", s.stats.Events),
		zap.Uint64("first", s.stats.First), zap.Uint64("last", s.Last()), zap.Int64("bytes", s.bytes.Load()), zap.String("id", s.ID()),
		zap.Bool("recovered", s.stats.Recovered), zap.Duration("after", time.Since(began)))
	return s, nil
}

// setDefaults replaces zero values.
func (o *Options) setDefaults() {
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	o.MaxAge = cmp.Or(o.MaxAge, DefaultMaxAge)
	o.MaxBytes = max(cmp.Or(o.MaxBytes, DefaultMaxBytes), minBytes)
	o.MaxTenantBytes = cmp.Or(o.MaxTenantBytes, o.MaxBytes/2)
	o.maxChains = cmp.Or(o.maxChains, maxChains)
	if o.MaxQueued <= 0 {
		o.MaxQueued = 16_384
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// load reads the number of rows, the first and the last seq and the retention mark, and chooses
// the seq at which this Open continues.
func (s *Store) load() error {
	last, err := s.readLast()
	if err != nil {
		return err
	}
	s.last.Store(last)
	s.startSeq = firstSeq(last, s.opts.Now())
	s.nextSeq = s.startSeq
	var newest int64
	for _, table := range []Class{ClassState, ClassCalls} {
		var ms int64
		err := s.queryRow(fmt.Sprintf("SELECT coalesce(max(created_at), 0) FROM (SELECT created_at FROM %s ORDER BY seq DESC LIMIT %d)", table, newestWindow)).Scan(&ms)
		if err != nil && !isDamagedCalls(table, err) {
			return err
		}
		newest = max(newest, ms)
	}
	s.newestMS.Store(newest)
	opened := time.Now()
	s.uptime = func() time.Duration { return time.Since(opened) }
	if s.ageBase = s.opts.Now(); newest != 0 {
		s.ageBase = time.UnixMilli(newest)
	}
	if err := s.initSpace(); err != nil {
		return err
	}
	return s.refreshStats()
}

// refreshStats takes the sizes of the log and its marks from the writer, after Open and after rows
// were removed. In between, recordCommit adds what each commit stores. It reads the disk before it
// takes mu, which must not be held across that.
func (s *Store) refreshStats() error {
	var first, dropped uint64
	if err := s.queryRow("SELECT last FROM log").Scan(&dropped); err != nil {
		return err
	}
	for _, table := range []Class{ClassState, ClassCalls} {
		var seq uint64
		if err := s.queryRow("SELECT coalesce(min(seq), 0) FROM " + string(table)).Scan(&seq); err != nil && !isDamagedCalls(table, err) {
			return err
		}
		if first == 0 || seq > 0 && seq < first {
			first = seq
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &s.stats
	st.First, st.Events, st.Calls, st.StateBytes, st.CallBytes = first, 0, 0, 0, 0
	s.droppedLast, st.Mark = dropped, dropped+1
	s.marks = make(map[chainKey]uint64)
	tenants := make(map[string]bool)
	for key, c := range s.w.chains {
		tenants[c.tenant] = true
		st.Events += c.rows
		if c.class == ClassCalls {
			st.Calls, st.CallBytes = st.Calls+c.rows, st.CallBytes+c.bytes
		} else {
			st.StateBytes += c.bytes
		}
		if c.mark > 0 {
			s.marks[key] = c.mark
			st.Mark = max(st.Mark, c.mark)
		}
	}
	st.Tenants = len(tenants)
	return nil
}

// isDamagedCalls reports whether an error is damage that keeps no relay from starting: what it replays
// is state. The check in the background reports it.
func isDamagedCalls(table Class, err error) bool { return table == ClassCalls && isDamage(err) }

// ID returns the id of this log: 32 hexadecimal digits, chosen at random when it was made. A copy
// of the file has the same one.
func (s *Store) ID() string { return s.w.logID }

// firstSeq returns the first number after last. A clock beyond 2039 would yield numbers above
// 2^53, which JavaScript cannot represent; then, as with a clock that was set back, the
// numbers continue from last.
func firstSeq(last uint64, now time.Time) uint64 {
	if ms := now.UnixMilli(); ms > 0 && ms < 1<<41 && uint64(ms)<<12 > last {
		return uint64(ms) << 12
	}
	return last + 1
}

// lastQuery selects the newest seq ever given, also when its row is gone.
const lastQuery = `SELECT max(last, (SELECT coalesce(max(last), 0) FROM chains)) FROM log`

// readLast returns the newest seq ever given, also when its row is gone.
func (s *Store) readLast() (last uint64, err error) {
	err = s.queryRow(lastQuery).Scan(&last)
	return last, err
}

// newestWindow is how many of the last events are searched for the newest time. Their times are in
// order unless the clock was wrong.
const newestWindow = 10_000

// Newest is the latest time of the last events, those of earlier runs included; the zero time if
// there are none. A wall clock that is before it has been set back, or was ahead when they were
// written.
func (s *Store) Newest() time.Time {
	if ms := s.newestMS.Load(); ms != 0 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// Last implements kernel.Log: it returns the newest seq that is durable.
func (s *Store) Last() uint64 { return s.last.Load() }

// Started is closed once Run has begun: from then on Append may be called.
func (s *Store) Started() <-chan struct{} { return s.started }

// StartSeq returns the first seq of this Open. Events below it are older, so a publisher that
// restarts can distinguish its events from old ones.
func (s *Store) StartSeq() uint64 { return s.startSeq }

// CanResume reports whether a reader of q that has seen seq after can continue without a gap: no
// event of its tenants and classes behind it was removed, and it is not above Last. It may be too strict,
// since little is known about removed events: not their types and aggregates, and of chains that are gone
// only the newest seq.
func (s *Store) CanResume(after uint64, q Query) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if after > s.Last() || after < s.droppedLast {
		return false
	}
	if after+1 >= s.stats.Mark {
		return true
	}
	for key, mark := range s.marks {
		if mark > after+1 && q.selectsChain(key.tenant, key.class) {
			return false
		}
	}
	return true
}

// Stats returns the counters. It does not touch the disk: checkpoint has measured Bytes.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	st := s.stats
	st.Queued = s.queuedEvents
	s.mu.Unlock()
	st.Last = s.Last()
	st.Bytes = s.bytes.Load()
	st.OverBound = st.Bytes > s.opts.MaxBytes
	return st
}

// Close closes the log and drops offers that are still queued. Run must have ended. A
// second Close does nothing.
func (s *Store) Close() error {
	s.mu.Lock()
	was := s.state
	var dropped []*appendRequest
	if was != stateRunning {
		s.state = stateClosed
		dropped = s.dropQueueLocked()
	}
	s.mu.Unlock()
	s.dropped(dropped)
	switch was {
	case stateRunning:
		return errors.New("eventlog: Close while Run is running; end its context first")
	case stateClosed:
		return nil
	}
	s.topic.Close(ErrClosed)
	return s.closeFiles()
}

// closeFiles closes the files that Open has opened so far, the lock file last: another relay must
// not begin while the database is open here.
func (s *Store) closeFiles() (err error) {
	for _, f := range slices.Backward(s.files) {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		err = fmt.Errorf("close event log %s: %w", s.opts.Path, err)
	}
	return err
}
