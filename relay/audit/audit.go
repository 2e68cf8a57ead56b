// Package audit is the audit log of a relay: who asked for what, and what was decided.
//
//	log, err := audit.Open(audit.Options{Dir: stateDir})
//	go log.Run(ctx)
//	log.Write(&record)                 // never waits for the disk
//	err = log.Commit(ctx, &record)     // on the disk when it returns nil
//
// It writes two files of the state directory, both 0600, one JSON object a line:
//
//	audit.jsonl     decisions about known identities: one line each
//	refusals.jsonl  refusals of callers without a valid token: one line for each address
//	                and minute, so that strangers cannot push decisions out of the log
//
//	{"ts":"2026-01-02T03:04:05.678Z","tenant":"default","actor":"ci","address":"192.0.2.7",
//	 "tool":"sys.….snapshot","node_id":"…","decision":"allow","trace_id":"…"}
//	{"ts":"2026-01-02T03:04:05.678Z","until":"…","address":"192.0.2.9","count":935,
//	 "reasons":{"no_token":935},"trace_id":"…"}
//
// Empty members are left out. Arguments and results are not in it, so that the files hold no
// data of boards or callers.
//
// Write is for decisions about calls: it does not wait for the disk, so it can lose records, and counts
// them. Commit is for administrative changes, which are not made if they cannot be recorded. LocalChange
// is for commands that change the state directory themselves, whether the relay runs or not.
//
// Records wait in a bounded queue, in which every identity has a share (queue.go), until one
// goroutine writes them (writer.go). A record that finds no space is lost and counted. A line is
// in the file within 200 ms and synced within about a second after that: a power cut loses at
// most what is younger, and the death of the process what is younger than 200 ms. What was
// committed is never lost.
//
// audit.go has the interface, line.go the form of a line, file.go the files and their rotation,
// refusals.go the table of refusals, local.go what commands write.
package audit

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// Names of the files in the state directory. Older parts have a number: audit.jsonl.1 is the
// newest of them.
const (
	Store            = "audit" // the name of the store in package storage
	FileName         = "audit.jsonl"
	RefusalsFileName = "refusals.jsonl"
)

// Defaults and bounds of Options.
const (
	DefaultMaxAge   = 90 * 24 * time.Hour
	DefaultMaxBytes = 256 << 20
	MinBytes        = 1 << 20
	MaxBytes        = 64 << 30
)

// maxRefusalBytes bounds refusals.jsonl with its older parts.
const maxRefusalBytes = 32 << 20

// Times of the log. Each sync waits for the disk, so many lines share a write and several writes share a
// sync. A caller of Commit is a person or a script that can try again, so its timeout is short.
const (
	writeInterval  = 200 * time.Millisecond // a record waits at most so long for a healthy disk
	syncInterval   = time.Second
	commitTimeout  = 2 * time.Second // of Commit
	closeTimeout   = time.Second     // for the last writes at the end
	reportInterval = time.Minute     // between two calls of Options.OnLost
)

var (
	// ErrHung is returned by Run and Close when the disk does not answer. The writer's
	// goroutine is left behind: a write that hangs cannot be canceled.
	ErrHung = errors.New("audit: the disk does not answer; the writer is left behind")

	errNotWritten = errors.New("the audit log cannot be written") // around the next, in the errors of Commit
	errBusy       = errors.New("too many administrative changes wait for the disk")
	errTimeout    = errors.New("the disk did not answer in time")
	errStopped    = errors.New("the relay is stopping")
)

// Options configure a Log.
type Options struct {
	Dir string // the state directory
	// MaxBytes bounds audit.jsonl with its older parts; 0: DefaultMaxBytes. At least MinBytes.
	MaxBytes int64
	// MaxAge is how long decisions are kept, if MaxBytes allows it; 0: DefaultMaxAge, below 0:
	// for ever. Whole parts are removed, so that some lines stay an eighth longer. It is counted
	// from the relay's uptime, not from a clock that may jump (aging).
	MaxAge time.Duration
	Logger *zap.Logger    // nil: none
	Watch  *storage.Watch // sees the operations on the disk and losses; nil: none
	// OnLost is called when records were lost, with their number since the last call, at most
	// once a minute. It runs in the goroutine of Run and must not block.
	OnLost func(lost []Loss)
}

// Log is an open audit log. Its methods may be called by several goroutines. Records may be written from
// Open to Close. Between the end of Run and Close they wait in the queue, and Close writes them.
//
// The lock order is ioMu, then that of the queue or of the refusals. If the disk hangs, the goroutine
// that writes keeps ioMu for as long as that lasts; so Write, Commit and Stats do not take it.
type Log struct {
	opt      Options
	queue    queue
	refusals refusals
	wake     chan struct{} // capacity 1: the writer has something to do at once
	queued   chan struct{} // capacity 1: the queue is no longer empty

	ioMu   sync.Mutex // protects writer and its files; held across operations on the disk
	writer writer
	closed atomic.Bool
	hung   atomic.Bool // Run gave the writer up

	lines        atomic.Uint64
	losses       losses
	reportedLost uint64 // of Run
}

// Open opens the files for appending. Nothing is written before Run or Close. An error is one of the disk,
// or says that something else than a regular file has the name; a relay does not start then.
func Open(o Options) (*Log, error) {
	if o.MaxBytes == 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	if o.MaxAge == 0 {
		o.MaxAge = DefaultMaxAge
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.MaxBytes < MinBytes {
		return nil, fmt.Errorf("audit: at least %d bytes", MinBytes)
	}
	l := &Log{opt: o, wake: make(chan struct{}, 1), queued: make(chan struct{}, 1)}
	l.writer = writer{
		log:       l,
		decisions: newRotatingFile(filepath.Join(o.Dir, FileName), o.MaxBytes, o.MaxAge, o.Watch),
		refusals:  newRotatingFile(filepath.Join(o.Dir, RefusalsFileName), maxRefusalBytes, o.MaxAge, o.Watch),
		lastTaken: time.Now(),
	}
	l.refusals.reset()
	if err := l.writer.decisions.open(); err != nil {
		return nil, err
	}
	if err := l.writer.refusals.open(); err != nil {
		_ = l.writer.decisions.close()
		return nil, err
	}
	o.Watch.SetProbe(l.probe)
	return l, nil
}

// Write appends a record. It does not wait for the disk, and allocates nothing in the common case.
// A record without a tenant is about a caller without a valid identity, and is counted in
// refusals.jsonl; except that of a plugin, whose consent may be for all tenants or for none.
func (l *Log) Write(r *kernel.Record) {
	if r.Tenant == "" && !strings.HasPrefix(r.Actor, kernel.PluginActor) {
		l.refusals.add(r)
		return
	}
	// The first record of an empty queue starts the timer of the writer. Many of them make it write at
	// once, so that a burst finds space in the queue.
	reason, queued := l.queue.add(r)
	switch {
	case reason != noLoss:
		l.losses.add(reason, classOf(r), 1)
	case queued%wakeAt == 0:
		signal(l.wake)
	case queued == 1:
		signal(l.queued)
	}
}

// Commit writes a record and returns once it is on the disk, or after at most 2 s with a
// *storage.Error, or with the error of ctx. A record that failed may be in the file all the
// same, so commit what is about to be done, and its outcome afterwards. At most maxCommits wait for the
// writer; a further one fails at once.
func (l *Log) Commit(ctx context.Context, r *kernel.Record) error {
	c := &commit{entry: entry{record: *r, unixNano: time.Now().UnixNano()}, done: make(chan error, 1)}
	if err := l.queue.addCommit(c); err != nil {
		reason := lostFull
		if errors.Is(err, errStopped) {
			reason = lostStopped
		}
		l.loseCommit(reason, r)
		return storageError(err)
	}
	signal(l.wake)
	// The commit waits for lines before it, so it may be slow although no write is. Its error is not
	// given to op, because the write that failed has reported it.
	op := l.opt.Watch.Begin("commit")
	defer op.End(nil)
	timer := time.NewTimer(commitTimeout)
	defer timer.Stop()
	var err error
	select {
	case err = <-c.done:
		if err == nil {
			return nil
		}
	case <-timer.C:
		err = errTimeout
	case <-ctx.Done():
		c.abandoned.Store(true)
		return ctx.Err()
	}
	c.abandoned.Store(true)
	l.loseCommit(lostStorage, r)
	return storageError(err)
}

// loseCommit counts a commit that failed. A change that was only about to begin is not made then,
// so that nothing is lost.
func (l *Log) loseCommit(reason lossReason, r *kernel.Record) {
	if r.Decision != kernel.Begun {
		l.losses.add(reason, classAdmin, 1)
	}
}

// storageError is what the callers of Commit get: a fault of the store, which says so to clients. Slow is
// what a retry in some seconds may solve: too many callers wait, or the relay is stopping.
func storageError(err error) error {
	kind := storage.Classify(err)
	switch {
	case errors.Is(err, errTimeout):
		kind = storage.Hung
	case errors.Is(err, errBusy), errors.Is(err, errStopped):
		kind = storage.Slow
	case errors.Is(err, errLarge):
		kind = storage.Full
	case kind == "":
		kind = storage.Failing
	}
	return &storage.Error{Store: Store, Kind: kind, Err: fmt.Errorf("%w: %w", errNotWritten, err)}
}

// probe finds out whether the disk takes lines again, by a sync: nothing is written.
func (l *Log) probe(ctx context.Context) error {
	c := &commit{isProbe: true, done: make(chan error, 1)}
	if err := l.queue.addCommit(c); err != nil {
		return nil // the queue is full of commits, whose results show how the disk is
	}
	signal(l.wake)
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
		c.abandoned.Store(true)
		return ctx.Err()
	}
}

// signal puts a token into a channel of capacity 1.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run writes what is queued until ctx ends, and then what is left. When the disk hangs at the
// end it returns ErrHung after a second. Another goroutine writes, so that Run can report losses and end
// while a write hangs.
func (l *Log) Run(ctx context.Context) error {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() { // not waited for if the disk hangs
		defer close(ended)
		l.runWriter(stop)
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			l.report()
		}
	}
	close(stop)
	err := waitClosed(ended)
	l.hung.Store(err != nil)
	return err
}

// waitClosed waits for the last writes.
func waitClosed(ended <-chan struct{}) error {
	timer := time.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case <-ended:
		return nil
	case <-timer.C:
		return ErrHung
	}
}

// report reports lost records: to the monitor as they come, to OnLost once a minute. The problem
// stays until a restart, because a lost line cannot be made up for.
func (l *Log) report() {
	if n := l.Stats().Lost; n != l.reportedLost {
		l.reportedLost = n
		l.opt.Watch.Report("lost", storage.Problem{Kind: storage.Lost, Warning: true,
			Detail: fmt.Sprintf("%d lines since the relay was started", n)})
	}
	if l.opt.OnLost == nil {
		return
	}
	if lost := l.losses.unreported(time.Now()); len(lost) > 0 {
		l.opt.OnLost(lost)
	}
}

// Close writes what is queued and closes the files. Records that come later are lost. It may be
// called more than once, and is called after Run. It waits for the disk for a second at most, then returns
// ErrHung, and leaves the files to the goroutine that hangs. What is queued then counts as lost.
func (l *Log) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	defer func() { l.losses.addQueued(l.queue.close()) }()
	if l.hung.Load() {
		return nil // Run has said so
	}
	var failed error // read only after ended
	ended := make(chan struct{})
	go func() { // not waited for if the disk hangs
		defer close(ended)
		l.ioMu.Lock()
		defer l.ioMu.Unlock()
		l.writer.pass(true, true)
		l.writer.giveUp()
		failed = errors.Join(l.writer.decisions.close(), l.writer.refusals.close())
	}()
	if err := waitClosed(ended); err != nil {
		return err
	}
	return failed
}

// Flush writes and syncs what is queued, refusals included, and waits for the disk. Only tests use it.
func (l *Log) Flush() {
	l.ioMu.Lock()
	defer l.ioMu.Unlock()
	l.writer.pass(true, true)
}

// Stats are counters since the start.
type Stats struct {
	Lines uint64 // that were written, to both files
	Lost  uint64 // records that were not
	// Losses says why records were lost, and whose: all combinations, in a fixed order.
	Losses []Loss
	// Refusals counts refused requests without a valid identity.
	Refusals uint64
}

// Stats returns the counters. It waits for no disk.
func (l *Log) Stats() Stats {
	s := Stats{Lines: l.lines.Load(), Losses: l.losses.all(), Refusals: l.refusals.total.Load()}
	for _, loss := range s.Losses {
		s.Lost += loss.Lines
	}
	return s
}
