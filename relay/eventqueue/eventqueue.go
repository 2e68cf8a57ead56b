// Package eventqueue keeps events in memory while the event log cannot store them, so that a fault of
// the disk loses none: alerts and changes of presence wait in their order, and are written
// afterwards. What does not fit is counted, and an event "log.gap" says how many events of which type
// are missing, and from when until when.
//
//	q := eventqueue.New(eventqueue.Options{Log: log, Watch: watch})
//	q.Offer(event)   // never waits
//	go q.Run(ctx)    // writes what waits; at the end one last attempt
//
// A Queue is a kernel.Log, and passes Append, Replay and Last to the log that it was made for, the log
// below. The errors of Append say what is wrong with the disk. Events about calls, and those that the
// gateway publishes, do not wait here, since a busy relay has thousands a second: they are offered to
// the log below. If that refuses them, or accepts and then does not store them (Dropped), they are
// counted in a gap as well.
//
// Events that wait are written in the order in which they came. The gap of a tenant is queued as an event
// right before the next event of the tenant that is accepted, or as soon as nothing else waits: a reader
// of the log finds it where the missing events would be. Everything is in memory: if the relay is killed
// during a fault of the disk, the events that wait are lost, and so are the gaps.
package eventqueue

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// gapType is the type of the event that says what the log lacks. Its payload is a Gap.
const gapType = "log.gap"

// Bounds of a Queue. A tenant holds at most half of the events and bytes. A batch has as many events as
// one Append of the event log may have (eventlog.MaxAppend).
const (
	maxEvents = 32_768
	maxBytes  = 16 << 20 // payloads and eventOverhead
	maxGaps   = 1024     // tenants with a gap at once; the others share the gap of no tenant
	maxTypes  = 32       // types of one gap that are counted separately; the others count as "other"

	eventOverhead = 256 // bytes that an event counts in addition to its payload
	batchEvents   = 256 // of one Append
	batchBytes    = 1 << 20
)

// Times of Run.
const (
	gatherInterval = 100 * time.Millisecond // so that events share a transaction
	retryInterval  = time.Second            // after an Append that failed
	finalTimeout   = time.Second            // of the last attempt, when Run ends
)

// Gap is the payload of a gapType event.
type Gap struct {
	Counts map[string]uint64 `json:"counts"` // events that are missing, by type
	FromMS int64             `json:"from_ms"`
	ToMS   int64             `json:"to_ms"`
}

// Options configure a Queue.
type Options struct {
	Log    kernel.Log     // nil: the relay runs without its event log; nothing is kept
	Store  string         // name of the log's store, for errors
	Watch  *storage.Watch // of the log's store; may be nil
	Logger *zap.Logger    // default none
}

// Stats are present sizes and counters since New.
type Stats struct {
	Waiting int    // events
	Bytes   int    // of them
	Lost    uint64 // events that were not kept: a gap reports them, but for those that the log refused
	// Unreported are those of Lost whose gap is not written, nor waits to be.
	Unreported uint64
}

// Queue is a kernel.Log in front of another one. An event for which it has no space is counted in a Gap;
// one that the log itself refuses is logged. Its methods may be called from any goroutine, but Run only
// once.
type Queue struct {
	opt    Options
	log    *zap.Logger
	queued chan struct{} // holds one signal: something waits

	// How many of the next events are written one by one, since the log has refused the batch that they
	// were in; used by Run.
	singles int

	mu      sync.Mutex // a leaf lock; protects the fields below
	waiting []kernel.Event
	bytes   int
	tenants map[string]share // with waiting events
	gaps    map[string]*Gap  // by tenant, of events that were lost since its last one that was queued
	lost    uint64
	pushed  uint64 // events that were ever added to waiting
	removed uint64 // of those, the ones that have left it
}

// share is what waits of one tenant.
type share struct{ events, bytes int }

var (
	_ kernel.Log           = (*Queue)(nil)
	_ kernel.FaultReporter = (*Queue)(nil)
)

// New makes a Queue. It starts no goroutine. Events that are offered before Run wait, or go to the log
// below if they pass through.
func New(o Options) *Queue {
	return &Queue{opt: o, log: cmp.Or(o.Logger, zap.NewNop()), queued: make(chan struct{}, 1),
		tenants: make(map[string]share), gaps: make(map[string]*Gap)}
}

// Fault implements kernel.FaultReporter. Without a log it is storage.Missing, which is not retryable.
func (q *Queue) Fault() error {
	if q.opt.Log == nil {
		return &storage.Error{Store: q.opt.Store, Kind: storage.Missing}
	}
	return q.opt.Watch.Err()
}

// Append implements kernel.Log. It appends to the log below and does not wait behind what is
// queued here: its events are of other aggregates. While the disk has hung for storage.HungAfter it
// fails at once; a wait that ends with ctx says that the disk was the reason. A full log is reported as
// the fault of the disk that made it full, if there is one: the caller learns the cause, not the effect.
func (q *Queue) Append(ctx context.Context, events ...kernel.Event) (uint64, error) {
	if q.opt.Log == nil {
		return 0, q.Fault()
	}
	if err := q.opt.Watch.Stuck(storage.HungAfter); err != nil {
		return 0, err
	}
	last, err := q.opt.Log.Append(ctx, events...)
	if errors.Is(err, kernel.ErrLogFull) { // the queue of the log is full because of the fault
		if fault := q.Fault(); fault != nil {
			return 0, fault
		}
	}
	return last, storage.TimedOut(q.opt.Store, err)
}

// Replay implements kernel.Log. Without a log there is nothing to replay.
func (q *Queue) Replay(ctx context.Context, after uint64, fn func(kernel.Event) error, types ...string) error {
	if q.opt.Log == nil {
		return nil
	}
	return q.opt.Log.Replay(ctx, after, fn, types...)
}

// ReplayPresence implements kernel.PresenceReplayer.
func (q *Queue) ReplayPresence(ctx context.Context, fn func(kernel.Event) error) error {
	if q.opt.Log == nil {
		return nil
	}
	return kernel.ReplayPresence(ctx, q.opt.Log, fn)
}

// Last implements kernel.Log.
func (q *Queue) Last() uint64 {
	if q.opt.Log == nil {
		return 0
	}
	return q.opt.Log.Last()
}

// Offer implements kernel.Log: it never waits. false: the event is not kept. A gap will say so, unless
// there is no log, or the event would wait here and is malformed (kernel.Event.Check).
func (q *Queue) Offer(e kernel.Event) bool {
	if q.opt.Log == nil {
		return false
	}
	if e.CreatedMS == 0 {
		e.CreatedMS = time.Now().UnixMilli() // the log would stamp it when the disk takes it
	}
	if passesThrough(e.Type) {
		if q.opt.Log.Offer(e) {
			return true
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		q.addGapLocked(&e)
		return false
	}
	if e.Check() != nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	size, s := len(e.Payload)+eventOverhead, q.tenants[e.Tenant]
	if len(q.waiting) >= maxEvents || q.bytes+size > maxBytes || s.events >= maxEvents/2 || s.bytes+size > maxBytes/2 {
		q.addGapLocked(&e)
		return false
	}
	q.flushGapLocked(e.Tenant)
	q.pushLocked(e)
	q.signal()
	return true
}

// passesThrough reports whether an event is one of those that do not wait here: types "call" and "event",
// and those that begin with one of these and a dot.
func passesThrough(typ string) bool {
	group, _, _ := strings.Cut(typ, ".")
	return group == "call" || group == "event"
}

// pushLocked queues an event without checking the bounds.
func (q *Queue) pushLocked(e kernel.Event) {
	size := len(e.Payload) + eventOverhead
	s := q.tenants[e.Tenant]
	q.tenants[e.Tenant] = share{s.events + 1, s.bytes + size}
	q.waiting = append(q.waiting, e)
	q.pushed++
	q.bytes += size
}

// addGapLocked counts an event that is not kept. Beyond maxGaps, further tenants share the gap of the
// relay itself, whose tenant is "".
func (q *Queue) addGapLocked(e *kernel.Event) {
	q.lost++
	tenant := e.Tenant
	g := q.gaps[tenant]
	if g == nil && len(q.gaps) >= maxGaps {
		tenant = ""
		g = q.gaps[""]
	}
	if g == nil {
		g = &Gap{Counts: make(map[string]uint64), FromMS: e.CreatedMS}
		q.gaps[strings.Clone(tenant)] = g
	}
	typ := e.Type
	if _, known := g.Counts[typ]; !known && len(g.Counts) >= maxTypes {
		typ = "other"
	}
	g.Counts[typ]++
	g.FromMS, g.ToMS = min(g.FromMS, e.CreatedMS), max(g.ToMS, e.CreatedMS)
	q.signal()
}

// flushGapLocked queues the gap of a tenant, if it has one, so that it comes before the next event of
// the tenant. The queue may exceed its bounds by one event for each gap.
func (q *Queue) flushGapLocked(tenant string) {
	g := q.gaps[tenant]
	if g == nil {
		return
	}
	delete(q.gaps, tenant)
	payload, _ := json.Marshal(g) // a map and numbers: cannot fail
	q.pushLocked(kernel.Event{Tenant: tenant, Type: gapType, Aggregate: q.opt.Store, Payload: payload, CreatedMS: g.ToMS})
}

// Dropped counts events that the log below accepted and did not store: the next gap reports them.
func (q *Queue) Dropped(events []kernel.Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range events {
		q.addGapLocked(&events[i])
	}
}

func (q *Queue) signal() {
	select {
	case q.queued <- struct{}{}:
	default:
	}
}

// Run writes what waits until ctx ends, and then tries once more. It logs how many events the disk did
// not take then: they are lost. It gathers events for gatherInterval before each batch, retries after
// retryInterval if one fails, and does not pause between batches while a full one waits.
func (q *Queue) Run(ctx context.Context) error {
	if q.opt.Log == nil {
		<-ctx.Done()
		return nil
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for {
		select {
		case <-ctx.Done():
			q.finish()
			return nil
		case <-q.queued:
		}
		pause := gatherInterval
		for {
			timer.Reset(pause)
			select {
			case <-ctx.Done():
				q.finish()
				return nil
			case <-timer.C:
			}
			more, err := q.writeBatch(ctx)
			if err == nil && !more {
				break
			}
			switch pause = gatherInterval; {
			case err != nil:
				pause = retryInterval
			case q.Stats().Waiting >= batchEvents:
				pause = 0
			}
		}
	}
}

// finish makes one last attempt, which ends with the first error. If finalTimeout ends an Append, its
// events may be stored all the same, and the number in the log is too high.
func (q *Queue) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), finalTimeout)
	defer cancel()
	for more := true; more; {
		var err error
		if more, err = q.writeBatch(ctx); err != nil {
			break
		}
	}
	if n := q.Stats().Waiting; n > 0 {
		q.log.Error("events are lost: the event log did not take them before the relay stopped", zap.Int("events", n))
	}
}

// writeBatch writes the oldest events that wait, and reports whether there are more. They stay
// in the queue until they are durable. Only Run calls it, so nobody else removes events. A batch can have
// events of several tenants, since their order is kept. The event log counts it for the tenant of the first
// one: while the log is full, the events of a tenant that filled it hold up those of others behind them.
func (q *Queue) writeBatch(ctx context.Context) (more bool, err error) {
	limit := batchEvents
	if q.singles > 0 {
		q.singles--
		limit = 1
	}
	batch := q.nextBatch(limit)
	if len(batch) == 0 {
		return false, nil
	}
	// Without a deadline while the relay runs: the events of an Append that was given up may be
	// stored all the same, and the retry would write them twice.
	if _, err = q.opt.Log.Append(ctx, batch...); err != nil {
		if ctx.Err() == nil && storage.Classify(err) == "" && !errors.Is(err, kernel.ErrLogFull) {
			// The disk works, and the log refuses one of these events. The others must not
			// wait for it: they are written one by one, and it is left out.
			if len(batch) > 1 {
				q.singles = len(batch)
				return true, nil
			}
			q.log.Error("the event log refuses an event", zap.String("type", batch[0].Type), zap.Error(err))
			q.remove(1, true)
			return true, nil
		}
		return true, fmt.Errorf("write events that waited: %w", err)
	}
	return q.remove(len(batch), false), nil
}

// Mark returns a number for Wait: how many events were ever queued. With the two a reader waits until
// the log has what was offered before it asked.
func (q *Queue) Mark() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pushed
}

// Wait returns when no event that was queued before Mark waits any more, or with the error of ctx. It
// polls, since a condition variable has no timeout; gatherInterval is longer than its tick.
func (q *Queue) Wait(ctx context.Context, mark uint64) error {
	tick := time.NewTicker(gatherInterval / 4)
	defer tick.Stop()
	for {
		q.mu.Lock()
		isDone := q.removed >= mark
		q.mu.Unlock()
		if isDone {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// nextBatch returns the oldest events, at most limit and about batchBytes. It queues the gaps first if
// nothing else waits: no later event of their tenants would.
func (q *Queue) nextBatch(limit int) []kernel.Event {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		for tenant := range maps.Clone(q.gaps) {
			q.flushGapLocked(tenant)
		}
	}
	n, size := 0, 0
	for n < min(len(q.waiting), limit) && (n == 0 || size < batchBytes) {
		size += len(q.waiting[n].Payload) + eventOverhead
		n++
	}
	return q.waiting[:n:n] // only Run removes, and nobody writes to these
}

// remove removes the oldest n events and reports whether more wait. lost: they are not kept.
func (q *Queue) remove(n int, lost bool) (more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.waiting[:n] {
		e := &q.waiting[i]
		size := len(e.Payload) + eventOverhead
		q.bytes -= size
		s := q.tenants[e.Tenant]
		if s.events--; s.events == 0 {
			delete(q.tenants, e.Tenant)
		} else {
			q.tenants[e.Tenant] = share{s.events, s.bytes - size}
		}
		if lost {
			q.lost++
		}
	}
	q.removed += uint64(n)
	clear(q.waiting[:n])
	if q.waiting = q.waiting[n:]; len(q.waiting) == 0 {
		q.waiting = nil // free the array
	}
	return len(q.waiting) > 0 || len(q.gaps) > 0
}

// Stats returns present sizes and counters.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := Stats{Waiting: len(q.waiting), Bytes: q.bytes, Lost: q.lost}
	for _, g := range q.gaps {
		for _, n := range g.Counts {
			s.Unreported += n
		}
	}
	return s
}
