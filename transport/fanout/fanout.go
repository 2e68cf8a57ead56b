// Package fanout delivers values from one publisher to many bounded readers.
//
// A Topic takes values; each Sub is one reader with a queue of its own:
//
//	var t fanout.Topic[[]byte]
//	sub := t.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
//	defer sub.Close()
//	for {
//		select {
//		case <-ctx.Done():
//			return
//		case <-sub.Ready():
//		}
//		for v, ok := sub.Next(); ok; v, ok = sub.Next() {
//			use(v)
//		}
//		if err := sub.Err(); err != nil {
//			return // the topic closed, or this reader fell behind
//		}
//	}
//
// Publish never waits for a reader and copies nothing but the value itself: all
// readers share what a slice or pointer points to, so a published value is never
// changed again. What happens when a reader's queue is full is that reader's own
// choice (Overflow). A topic with a ring lets a reader resume: the values after
// the number it names and the live ones are joined under one lock, without a gap
// or a repeat.
package fanout

import (
	"errors"
	"sync"
	"time"
)

// Reasons for the end of a Sub, and for a refused PublishAt.
var (
	ErrClosed   = errors.New("fanout: closed")
	ErrOverflow = errors.New("fanout: reader fell behind")
	ErrFull     = errors.New("fanout: too many readers")
	ErrOrder    = errors.New("fanout: sequence number is not above the last one")
)

// Overflow says what happens to a value that finds its reader's queue full.
type Overflow uint8

const (
	CloseSubscriber Overflow = iota // the reader ends with ErrOverflow; what is queued stays readable
	DropAndCount                    // the new value is dropped and counted
	Coalesce                        // the oldest value makes room and is counted; see SubscribeOptions.Key
)

// Options of a Topic. The zero value has no ring and numbers values from 1.
type Options struct {
	Ring           int    // values kept for readers that resume; 0: none
	FirstSeq       uint64 // number of the first value; 0: 1
	MaxSubscribers int    // readers at a time, more are refused with ErrFull; 0: no bound
}

// Stats are counters since the topic began, but Readers, which is now.
type Stats struct {
	Subscribers int
	Published   uint64
	Queued      uint64 // values put into a reader's queue
	Dropped     uint64 // values a reader lost, whichever way
	Coalesced   uint64 // values replaced in a queue by a newer one of the same key
	Overflowed  uint64 // readers ended with ErrOverflow
}

// Topic is the publishing side. The zero value is ready for use; a Topic must
// not be copied after that. All methods may be called from any goroutine.
type Topic[T any] struct {
	opts Options

	mu        sync.Mutex // protects the fields below; taken before any Sub.mu
	subs      []*Subscriber[T]
	closeErr  error // why the topic ended, nil while it lives
	seq       uint64
	ringFloor uint64 // values up to this number are not in the ring
	ring      []entry[T]
	ringHead  int // index of the oldest entry once the ring is full
	last      T
	lastAt    time.Time // zero before the first value
	stats     Stats
}

type entry[T any] struct {
	seq uint64
	val T
}

// New makes a topic with a ring, a first number or a bound on readers.
func New[T any](o Options) *Topic[T] {
	t := &Topic[T]{opts: o}
	if o.FirstSeq > 0 {
		t.seq = o.FirstSeq - 1
	}
	t.ringFloor = t.seq
	return t
}

// Publish gives v the next number and queues it for every reader. It returns
// the number, or 0 when the topic is closed.
func (t *Topic[T]) Publish(v T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closeErr != nil {
		return 0
	}
	t.publishLocked(t.seq+1, v)
	return t.seq
}

// PublishAt is Publish with a number from outside, such as an event log's. It
// must be above every earlier one (ErrOrder); numbers may have holes.
func (t *Topic[T]) PublishAt(seq uint64, v T) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closeErr != nil {
		return t.closeErr
	}
	if seq <= t.seq {
		return ErrOrder
	}
	t.publishLocked(seq, v)
	return nil
}

func (t *Topic[T]) publishLocked(seq uint64, v T) {
	t.seq = seq
	t.last, t.lastAt = v, time.Now()
	t.stats.Published++
	t.appendRingLocked(entry[T]{seq, v})
	for i := 0; i < len(t.subs); {
		s := t.subs[i]
		if s.filter != nil && !s.filter(v) {
			i++
			continue
		}
		switch s.offer(v) {
		case queued:
			t.stats.Queued++
		case replaced:
			t.stats.Queued++
			t.stats.Coalesced++
		case displaced:
			t.stats.Queued++
			t.stats.Dropped++
		case refused:
			t.stats.Dropped++
		case overflowed:
			t.stats.Dropped++
			t.stats.Overflowed++
			t.removeLocked(s) // the last reader moves to i
			continue
		}
		i++
	}
}

// appendRingLocked puts e into the ring; the ring grows only as values come.
func (t *Topic[T]) appendRingLocked(e entry[T]) {
	switch {
	case t.opts.Ring <= 0:
		t.ringFloor = e.seq
	case len(t.ring) < t.opts.Ring:
		t.ring = append(t.ring, e)
	default:
		t.ringFloor = t.ring[t.ringHead].seq
		t.ring[t.ringHead] = e
		t.ringHead = (t.ringHead + 1) % len(t.ring)
	}
}

// Last returns the newest value and when it was published; ok is false before
// the first one. SubscribeOptions.LastMaxAge hands it to a joining reader without a race.
func (t *Topic[T]) Last() (v T, at time.Time, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last, t.lastAt, !t.lastAt.IsZero()
}

// Len is the number of readers now.
func (t *Topic[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.subs)
}

// Stats returns the counters.
func (t *Topic[T]) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.stats
	st.Subscribers = len(t.subs)
	return st
}

// Close ends every reader, and every later one, with cause (nil: ErrClosed).
// Subscribers can still take what is queued. Only the first call has an effect.
func (t *Topic[T]) Close(cause error) {
	if cause == nil {
		cause = ErrClosed
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closeErr != nil {
		return
	}
	t.closeErr = cause
	for _, s := range t.subs {
		s.index = -1
		s.end(cause)
	}
	t.subs = nil
	t.ring = nil
}

// removeLocked takes s off the list by putting the last reader in its place.
func (t *Topic[T]) removeLocked(s *Subscriber[T]) {
	if s.index < 0 {
		return
	}
	n := len(t.subs) - 1
	moved := t.subs[n]
	t.subs[s.index], moved.index = moved, s.index
	t.subs[n] = nil
	t.subs = t.subs[:n]
	s.index = -1
}
