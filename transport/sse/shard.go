package sse

import (
	"container/heap"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/transport/netpoll"
)

// Intervals of a shard's sweep.
const (
	activeInterval = time.Second           // between checks of the identities that can end
	retryInterval  = 50 * time.Millisecond // between writes to a blocked connection that is not polled
)

// sweepSlack is how early a sweep may run in a round that has another reason: with an event a
// second, no timer wakes the shard.
const sweepSlack = activeInterval / 4

// timerSlack is how early a stream's Check may be due. A stream with events at a steady interval
// then moves it rarely and is never woken by it.
const timerSlack = 2 * time.Second

// Stream is an open stream that a Shard serves. Its owner sets the exported fields and calls
// Shard.Add; from then on its Writer belongs to the shard's goroutine.
type Stream struct {
	*Writer
	Handler Handler
	Active  func() error // fails when the subscriber's identity has ended; called once a second; nil: it cannot end

	shard   *Shard
	events  atomic.Uint32 // what the shard has not handled yet; not 0: it is in Shard.notified
	pollKey uint64        // of Engine.polled; 0: not polled
	isOpen  bool          // after add and before end
	isRetry bool          // blocked and not polled: sweep tries again
	input   int           // bytes that the client has sent
	index   int           // in Shard.streams
	due     time.Time     // when Check is called
	dueMark time.Duration // Writer.checkAt, from which due was computed
}

// Handler is the owner of a stream. Its methods run in the goroutine of the stream's shard and
// must not block.
type Handler interface {
	// OnReady is called after Shard.Add, after Stream.Wake, and when the connection accepts
	// bytes again. dropped is how many events policy Drop has dropped until the queue was empty.
	// An error ends the stream.
	OnReady(dropped uint64) error
	// OnEnd is called once, when the stream has ended: it calls Close. It is called within
	// Stream.Send too.
	OnEnd(err error)
}

// Feed is what a shard publishes itself. In each round of its goroutine it calls Take, then adds
// the streams that were added until then, then calls Deliver, and then ends the streams of
// clients that have closed.
type Feed interface {
	Take()
	Deliver()
}

// Bits of Stream.events.
const (
	eventAdded    uint32 = 1 << iota // Shard.Add
	eventWoken                       // Stream.Wake, or the connection is writable again
	eventReadable                    // the client has sent something
	eventClosed                      // the client has closed, or the connection broke
)

// Shard is one goroutine that serves its part of an Engine's streams. Other goroutines put
// streams into notified and wake it.
type Shard struct {
	engine *Engine
	feed   Feed
	wake   chan struct{} // holds a token while there may be work

	mu       sync.Mutex // protects the fields below; a leaf
	notified []*Stream
	ended    bool // run has ended

	// Of the shard's goroutine alone.
	streams  dueHeap
	spare    []*Stream // an empty slice for notified
	scratch  []*Stream
	input    [64]byte
	expiring int // streams whose identity can end
	retries  int // streams with isRetry
	sweepAt  time.Time
}

// Add hands a stream over to the shard. It fails with ErrDraining when Engine.Run has ended; the
// stream is still the caller's then.
func (s *Shard) Add(st *Stream) error {
	st.shard = s
	if !s.notify(st, eventAdded) {
		return ErrDraining
	}
	return nil
}

// Signal starts a round, because the shard's Feed has something to publish.
func (s *Shard) Signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Wake makes the shard call OnReady. It may be called from any goroutine, after Add.
func (st *Stream) Wake() { st.shard.notify(st, eventWoken) }

// notify passes what has happened to a stream on to the shard's goroutine.
func (s *Shard) notify(st *Stream, what uint32) bool {
	if st.events.Or(what) != 0 {
		return true // it is in notified
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.notified = append(s.notified, st)
	s.Signal()
	return true
}

// run serves until ctx ends, then ends all streams.
func (s *Shard) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	s.mu.Lock()
	s.ended = false
	s.mu.Unlock()
	for ctx.Err() == nil {
		timer.Reset(time.Until(s.nextTimer()))
		select {
		case <-ctx.Done():
		case <-s.wake:
		case <-timer.C:
		}
		s.step()
	}
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.step() // adds what was added until then
	for len(s.streams) > 0 {
		s.end(s.streams[0], ErrDraining)
	}
}

// step is one round. Clients that have closed come last, so that what was published before is
// counted as delivered to them.
func (s *Shard) step() {
	if s.feed != nil {
		s.feed.Take()
	}
	s.mu.Lock()
	notified := s.notified
	s.notified = s.spare
	s.mu.Unlock()
	closed := s.scratch[:0]
	for i, st := range notified {
		notified[i] = nil // for the garbage collector
		if s.handle(st, st.events.Swap(0)) {
			closed = append(closed, st)
		}
	}
	s.spare = notified[:0]
	if s.feed != nil {
		s.feed.Deliver()
	}
	for _, st := range closed {
		s.end(st, ErrPeerClosed)
	}
	clear(closed)
	s.scratch = closed
	now := time.Now()
	s.checkDue(now)
	if s.retries > 0 && s.sweepAt.After(now) || s.sweepAt.After(now.Add(sweepSlack)) {
		return
	}
	s.sweep(now)
}

// nextTimer returns when checkDue or sweep has something to do.
func (s *Shard) nextTimer() time.Time {
	at := time.Now().Add(time.Hour)
	if len(s.streams) > 0 {
		at = s.streams[0].due
	}
	if s.expiring+s.retries > 0 && s.sweepAt.Before(at) {
		at = s.sweepAt
	}
	return at
}

// handle does what the events of one stream ask for. It reports whether the client has closed.
func (s *Shard) handle(st *Stream, what uint32) (closed bool) {
	if what&eventAdded != 0 {
		s.add(st)
	}
	if !st.isOpen {
		return false
	}
	closed = what&eventClosed != 0 || what&(eventAdded|eventReadable) != 0 && st.pollKey != 0 && s.discardInput(st)
	dropped, err := st.Flush()
	if err == nil {
		err = st.Handler.OnReady(dropped)
	}
	if err != nil {
		s.end(st, err)
		return false
	}
	s.update(st)
	return closed
}

// add takes a stream over from whoever opened it.
func (s *Shard) add(st *Stream) {
	st.isOpen = true
	if st.Active != nil {
		if s.expiring++; s.expiring == 1 && s.retries == 0 {
			s.sweepAt = time.Now().Add(activeInterval)
		}
	}
	st.startPings()
	st.setDue()
	heap.Push(&s.streams, st)
	if err := s.engine.watch(st); err != nil {
		s.end(st, err)
	}
}

// end takes a stream off the shard and ends it. It may be called again.
func (s *Shard) end(st *Stream, err error) {
	if !st.isOpen {
		return
	}
	st.isOpen = false
	heap.Remove(&s.streams, st.index)
	if st.Active != nil {
		s.expiring--
	}
	s.update(st)
	s.engine.unwatch(st)
	st.Handler.OnEnd(err)
}

// Send is Writer.Send that ends the stream when it fails. The stream's handler and its shard's
// feed call it.
func (st *Stream) Send(b []byte, events int) (taken bool, err error) {
	if taken, err = st.Writer.Send(b, events); err != nil {
		st.shard.end(st, err)
		return taken, err
	}
	st.shard.update(st)
	return taken, nil
}

// update makes sweep flush a blocked stream that is not polled, and moves the time of its Check.
func (s *Shard) update(st *Stream) {
	if isRetry := st.pollKey == 0 && st.isOpen && st.Blocked(); isRetry != st.isRetry {
		st.isRetry = isRetry
		if !isRetry {
			s.retries--
		} else if s.retries++; s.retries == 1 {
			s.sweepAt = time.Now().Add(retryInterval)
		}
	}
	if st.isOpen && (st.checkAt < st.dueMark || st.checkAt-st.dueMark > timerSlack) {
		st.setDue()
		heap.Fix(&s.streams, st.index)
	}
}

func (st *Stream) setDue() {
	st.dueMark = st.checkAt
	st.due = time.Now().Add(st.checkAt - st.now())
}

// checkDue calls Check of all streams that are due.
func (s *Shard) checkDue(now time.Time) {
	if len(s.streams) == 0 || s.streams[0].due.After(now) {
		return
	}
	for len(s.streams) > 0 {
		st := s.streams[0]
		if st.due.After(now.Add(st.pingSlack())) {
			return
		}
		if st.dueMark < st.checkAt { // events have moved it
			st.setDue()
		} else if err := st.Check(); err != nil {
			s.end(st, err)
			continue
		} else {
			st.setDue()
			s.update(st)
		}
		heap.Fix(&s.streams, st.index)
	}
}

// sweep ends the streams of identities that have ended, and flushes streams that need a retry.
// It visits all streams, so it runs only while one of them needs it, and once a second unless
// there are retries.
func (s *Shard) sweep(now time.Time) {
	s.sweepAt = now.Add(time.Hour)
	if s.expiring+s.retries == 0 {
		return
	}
	all := append(s.scratch[:0], s.streams...)
	for _, st := range all {
		if st.Active != nil {
			if err := st.Active(); err != nil {
				s.end(st, err)
				continue
			}
		}
		if st.isRetry {
			s.handle(st, 0)
		}
	}
	clear(all)
	s.scratch = all[:0]
	s.sweepAt = now.Add(activeInterval)
	if s.retries > 0 {
		s.sweepAt = now.Add(retryInterval)
	}
}

// discardInput reads what a client has sent, and reports whether that was the end, or too much.
// Nothing is expected from a client, but the end of TLS and its key updates come as input.
func (s *Shard) discardInput(st *Stream) (closed bool) {
	st.raw.nonblock.OnReadable(false)
	for st.input < maxInput {
		n, err := st.conn.Read(s.input[:])
		if st.input += n; err != nil {
			return !errors.Is(err, netpoll.ErrWouldBlock)
		}
	}
	return true
}

// dueHeap orders streams by due, the first of which is at index 0; see container/heap.
type dueHeap []*Stream

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }

func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *dueHeap) Push(x any) {
	st := x.(*Stream)
	st.index = len(*h)
	*h = append(*h, st)
}

// Pop implements heap.Interface.
func (h *dueHeap) Pop() any {
	old := *h
	n := len(old) - 1
	st := old[n]
	old[n] = nil
	*h = old[:n]
	return st
}
