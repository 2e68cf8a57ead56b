package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"agentctl/relay/kernel"
)

// A request passes through these states:
//
//	queued    in Store.queue. Its caller may still withdraw it (cancelQueued). It fails if the disk hangs
//	          or Run ends (failQueuedLocked)
//	taken     part of the batch that Run commits. The outcome is not known before the transaction ends: a
//	          caller whose context ends earlier gets an error that says so
//	answered  done is closed. An offer has no answer, but Options.OnDrop reports it if it was not stored
//
// If the queue is full, callers get an error at once, which they can pass to their clients. So a slow disk
// costs a bounded amount of memory.

// appendRequest is the events of one caller, which are stored all or not at all. While it
// is in the queue, Store.mu protects the queue's reference to it; once taken it belongs to
// the goroutine of Run until done is closed.
type appendRequest struct {
	events     []kernel.Event
	offer      [1]kernel.Event // events of an offer
	bytes      int
	offered    bool
	isSnapshot bool          // of retention: it may use the reserve (reserveSpace)
	done       chan struct{} // closed when last and err are set; nil when offered
	last       uint64
	err        error
}

// tenant is whose share of the queue the request takes: that of its first event. A batch of eventqueue,
// or of snapshots, can have events of several tenants.
func (r *appendRequest) tenant() string { return r.events[0].Tenant }

// queueShare is what waits for one tenant.
type queueShare struct{ events, bytes int }

// newAppendRequest makes the request of a caller. It copies the events, since a caller that gave up may
// reuse its slices while Run writes them. Offer does not copy, by the contract of kernel.Log.
func newAppendRequest(events []kernel.Event) (*appendRequest, error) {
	r := &appendRequest{events: slices.Clone(events)}
	for i := range r.events {
		r.events[i].Payload = bytes.Clone(r.events[i].Payload)
	}
	return r, r.check()
}

// check checks the events, and makes their payloads compact. It runs in the caller's goroutine, so that
// the writer has less to do. The payload that it leaves is stored and hashed byte for byte.
func (r *appendRequest) check() error {
	for i := range r.events {
		e := &r.events[i]
		switch err := e.Check(); {
		case err != nil:
			return err
		case !isText(e.Tenant) || !isText(e.Aggregate):
			return fmt.Errorf("eventlog: the tenant and aggregate_id of a %s event must be UTF-8 without NUL", e.Type)
		case !utf8.Valid(e.Payload):
			return fmt.Errorf("eventlog: the payload of a %s event must be UTF-8", e.Type)
		}
		switch { // event streams and ndjson need a payload on one line
		case len(e.Payload) == 0:
			e.Payload = json.RawMessage("{}")
		case !isOneLine(e.Payload): // most are compact
			var b bytes.Buffer
			if err := json.Compact(&b, e.Payload); err != nil {
				return err
			}
			e.Payload = b.Bytes()
		}
		r.bytes += len(e.Payload) + eventOverhead
	}
	return nil
}

// isOneLine reports whether a payload has no white space, not even in a string. It searches one byte at a
// time, as that is a vector instruction, and bytes.ContainsAny is not.
func isOneLine(payload []byte) bool {
	return bytes.IndexByte(payload, ' ') < 0 && bytes.IndexByte(payload, '\n') < 0 &&
		bytes.IndexByte(payload, '\t') < 0 && bytes.IndexByte(payload, '\r') < 0
}

// isText reports whether SQLite and Postgres store a string unchanged as TEXT.
func isText(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// Append implements kernel.Log. It keeps at most MaxAppend events in one transaction, with
// compact payloads, and returns the last seq. Errors: ErrNotRunning, kernel.ErrLogFull, ErrStalled
// or an error of the disk (nothing was kept; a later Append may succeed). When ctx ends
// before the transaction began, nothing is kept; when it ends later, the error says that
// the events may have been.
func (s *Store) Append(ctx context.Context, events ...kernel.Event) (last uint64, err error) {
	if len(events) == 0 {
		return s.Last(), nil
	}
	if len(events) > MaxAppend {
		return 0, fmt.Errorf("eventlog: %d events at once; append at most %d", len(events), MaxAppend)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	r, err := newAppendRequest(events)
	if err != nil {
		return 0, err
	}
	r.done = make(chan struct{})
	s.mu.Lock()
	err = s.enqueueLocked(r)
	s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	select {
	case <-r.done:
		return r.last, r.err
	case <-ctx.Done():
		if s.cancelQueued(r) {
			return 0, fmt.Errorf("eventlog: the disk did not take the events in time, nothing was kept: %w", ctx.Err())
		}
		return 0, fmt.Errorf("eventlog: canceled during the commit, the events may have been kept: %w", ctx.Err())
	}
}

// Offer implements kernel.Log. It does not wait: an offered event is durable within
// 200 ms on a disk that keeps up, of which it waits offerInterval for others to share its transaction.
// An event that is not stored, for whatever reason, counts in Stats.Dropped. Offers may be made before
// Run begins.
func (s *Store) Offer(e kernel.Event) bool {
	r := &appendRequest{offer: [1]kernel.Event{e}, offered: true}
	r.events = r.offer[:]
	err := r.check()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Offered++
	if err == nil {
		err = s.enqueueLocked(r)
	}
	if err != nil {
		s.stats.Dropped++
	}
	return err == nil
}

// enqueueLocked adds a request to the queue, or fails when it is full: back-pressure is an error
// that the caller sees at once (kernel.ErrLogFull), and not a wait of unknown length. An
// Append larger than the bounds is accepted by an empty queue. A tenant gets at most half of the
// queue, and its offers a quarter, so that it cannot crowd out the others; all offers together get
// half, so that they cannot crowd out callers that wait. The first request of a tenant in the queue may
// exceed the tenant's share.
func (s *Store) enqueueLocked(r *appendRequest) error {
	share := s.queuedBy[r.tenant()]
	events, size := share.events+len(r.events), share.bytes+r.bytes
	switch {
	case s.state == stateClosed:
		return ErrClosed
	case s.state == stateEnded, s.state == stateIdle && !r.offered:
		return ErrNotRunning
	case s.stalled && !r.offered:
		return ErrStalled
	case s.queuedEvents > 0 && (s.queuedEvents+len(r.events) > s.opts.MaxQueued || s.queuedBytes+r.bytes > maxQueuedBytes),
		share.events > 0 && (events > s.opts.MaxQueued/2 || size > maxQueuedBytes/2),
		r.offered && (s.queuedOffers >= max(s.opts.MaxQueued/2, 1) || share.events > 0 && events > s.opts.MaxQueued/4):
		return kernel.ErrLogFull
	}
	s.queuedEvents += len(r.events)
	s.queuedBytes += r.bytes
	if r.offered {
		s.queuedOffers++
	}
	s.queuedBy[r.tenant()] = queueShare{events, size}
	s.queue = append(s.queue, r)
	switch {
	case !r.offered, s.queuedOffers%maxBatchEvents == 0: // a whole batch of offers waits for no more
		signal(s.appendReady)
	case s.queuedOffers == 1: // the others find it waiting
		signal(s.offerReady)
	}
	return nil
}

// signal puts a token into a channel that holds one. A receiver that wakes handles
// everything that is queued, so further tokens would add nothing.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// subtractQueuedLocked takes a request off the sizes of the queue.
func (s *Store) subtractQueuedLocked(r *appendRequest) {
	s.queuedEvents -= len(r.events)
	s.queuedBytes -= r.bytes
	if r.offered {
		s.queuedOffers--
	}
	share := s.queuedBy[r.tenant()]
	share.events -= len(r.events)
	share.bytes -= r.bytes
	if share.events == 0 {
		delete(s.queuedBy, r.tenant())
	} else {
		s.queuedBy[r.tenant()] = share
	}
}

// cancelQueued removes a request whose transaction has not begun. It returns false when Run has
// taken the request, or has already answered it.
func (s *Store) cancelQueued(r *appendRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.queue, r)
	if i >= 0 {
		s.queue = slices.Delete(s.queue, i, i+1)
		s.subtractQueuedLocked(r)
	}
	return i >= 0
}

// takeBatch removes the oldest requests from the queue, appends and offers in the order of arrival: as
// many as one transaction may have, and at least one unless the queue is empty. A request is not split,
// since its events are kept all or none. more reports that it left some.
func (s *Store) takeBatch() (batch []*appendRequest, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, events, size := 0, 0, 0
	for _, r := range s.queue {
		events, size = events+len(r.events), size+r.bytes
		if n > 0 && (events > maxBatchEvents || size > s.space.maxBatch) {
			break
		}
		n++
		s.subtractQueuedLocked(r)
	}
	batch = slices.Clone(s.queue[:n])
	s.queue = slices.Delete(s.queue, 0, n)
	return batch, len(s.queue) > 0
}

// dropQueueLocked refuses all queued requests: appends get ErrNotRunning. It returns the offers, for
// dropped, which takes the lock itself.
func (s *Store) dropQueueLocked() (offers []*appendRequest) {
	s.failQueuedLocked(ErrNotRunning)
	offers, s.queue = s.queue, nil
	for _, r := range offers {
		s.subtractQueuedLocked(r)
	}
	return offers
}

// failQueuedLocked answers the appends of the queue with an error; offers stay in it.
func (s *Store) failQueuedLocked(err error) {
	s.queue = slices.DeleteFunc(s.queue, func(r *appendRequest) bool {
		if r.offered {
			return false
		}
		s.subtractQueuedLocked(r)
		r.err = err
		close(r.done)
		return true
	})
}

// stallTimeout is how long a write may take before callers of Append are no longer kept waiting for
// it. It does not end the write, which the kernel does not allow. Callers whose events are being written
// wait on, until their contexts end: nobody knows yet whether the events are stored.
const stallTimeout = 10 * time.Second

// stall is called when a write has taken stallTimeout: the appends that wait behind it fail, and so do
// new ones until it is over. Offers go on waiting in the queue.
func (s *Store) stall() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writingSince.IsZero() || time.Since(s.writingSince) < stallTimeout {
		return // the write is over, or the next one has begun
	}
	s.stalled = true
	s.failQueuedLocked(ErrStalled)
}

// beginWrite and endWrite enclose what the goroutine of Run does on the disk.
func (s *Store) beginWrite() {
	s.mu.Lock()
	s.writingSince = time.Now()
	s.mu.Unlock()
	s.stallTimer.Reset(stallTimeout)
}

func (s *Store) endWrite() {
	s.stallTimer.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writingSince, s.stalled = time.Time{}, false
}
