// Package fanout delivers values from one publisher to many bounded subscribers.
//
// A Topic publishes values; each Subscriber has its own queue:
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
//			return // the topic closed, or this subscriber fell behind
//		}
//	}
//
// Publish never waits for a subscriber and copies only the value itself: all subscribers
// share what a slice or pointer points to, so the publisher must not change it afterwards.
// Each subscriber chooses what happens when its queue is full (Overflow). A topic with a
// ring lets a subscriber resume: the values after the sequence number it names and the
// live ones are joined under one lock, without a gap or a repeat.
package fanout

import (
	"errors"
	"sync"
	"time"
)

// Reasons for the end of a Subscriber, and for a refused PublishAt.
var (
	ErrClosed   = errors.New("fanout: closed")
	ErrOverflow = errors.New("fanout: subscriber fell behind")
	ErrFull     = errors.New("fanout: too many subscribers")
	ErrOrder    = errors.New("fanout: sequence number is not above the last one")
)

// Options of a Topic. The zero value has no ring and numbers values from 1.
type Options struct {
	Ring           int    // values kept for subscribers that resume; 0: none
	FirstSeq       uint64 // sequence number of the first value; 0: 1
	MaxSubscribers int    // at a time, more are refused with ErrFull; 0: no bound
}

// Stats are counters since the topic was made, and the present number of Subscribers.
type Stats struct {
	Subscribers int
	Published   uint64
	Queued      uint64 // values put into a queue
	Dropped     uint64 // values that a subscriber lost, whatever its Overflow
	Coalesced   uint64 // values replaced in a queue by a newer one of the same key
	Overflowed  uint64 // subscribers ended with ErrOverflow
}

// Topic is the publishing side. The zero value is ready for use; a Topic must not be
// copied after first use. All methods may be called from any goroutine.
type Topic[T any] struct {
	opts Options

	mu          sync.Mutex // protects the fields below; taken before any Subscriber.mu
	subscribers []*Subscriber[T]
	closeErr    error // why the topic ended, nil while it is open
	seq         uint64
	ring        []entry[T] // grows to Options.Ring, then wraps at ringHead
	ringHead    int        // index of the oldest entry once the ring is full
	ringFloor   uint64     // values up to this number are not in the ring
	last        T
	lastAt      time.Time // zero before the first value
	stats       Stats
}

type entry[T any] struct {
	seq   uint64
	value T
}

// New makes a topic with a ring, a first number or a bound on subscribers.
func New[T any](o Options) *Topic[T] {
	first := max(o.FirstSeq, 1)
	return &Topic[T]{opts: o, seq: first - 1, ringFloor: first - 1}
}

// Publish queues v for every subscriber under the next sequence number and returns that
// number, or 0 when the topic is closed.
func (t *Topic[T]) Publish(v T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closeErr != nil {
		return 0
	}
	t.publishLocked(t.seq+1, v)
	return t.seq
}

// PublishAt is Publish with the caller's sequence number, such as that of an event log. It
// must be above every earlier one (ErrOrder); numbers may have gaps.
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
	for i := 0; i < len(t.subscribers); {
		if s := t.subscribers[i]; s.offer(v, &t.stats) {
			i++
		} else {
			t.removeLocked(s) // the last subscriber moves to i
		}
	}
}

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

// Len returns the present number of subscribers.
func (t *Topic[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.subscribers)
}

// Stats returns the counters.
func (t *Topic[T]) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.stats
	st.Subscribers = len(t.subscribers)
	return st
}

// Close ends every subscriber, and every later one, with cause (nil: ErrClosed). Queued
// values can still be taken. Only the first call has an effect.
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
	for _, s := range t.subscribers {
		s.index = -1
		s.end(cause)
	}
	t.subscribers, t.ring = nil, nil
}

// Last returns the newest value and when it was published; ok is false before the first one.
func (t *Topic[T]) Last() (v T, at time.Time, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last, t.lastAt, !t.lastAt.IsZero()
}

// removeLocked removes s from the list by putting the last subscriber in its place.
func (t *Topic[T]) removeLocked(s *Subscriber[T]) {
	if s.index < 0 {
		return
	}
	n := len(t.subscribers) - 1
	moved := t.subscribers[n]
	t.subscribers[s.index], moved.index = moved, s.index
	t.subscribers[n] = nil
	t.subscribers = t.subscribers[:n]
	s.index = -1
}
