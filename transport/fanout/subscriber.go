package fanout

import (
	"sync"
	"time"
)

const (
	defaultBuffer = 16
	maxBuffer     = 1 << 16
	initialBuffer = 8 // allocated at first; a queue grows to its bound only when its subscriber lags
)

// Overflow decides what happens to a value that finds a subscriber's queue full.
type Overflow uint8

// The choices of a subscriber.
const (
	CloseSubscriber Overflow = iota // the subscriber ends with ErrOverflow; what is queued can still be taken
	DropAndCount                    // the new value is dropped and counted
	Coalesce                        // the oldest value is dropped and counted; see SubscribeOptions.Key
)

// SubscribeOptions of one subscriber. The zero value: 16 values, ends on overflow, live
// values only.
type SubscribeOptions[T any] struct {
	Buffer   int      // values that may be queued; default 16, at most 65,536
	Overflow Overflow // what a full queue does; default CloseSubscriber

	// Key, with Coalesce, makes a new value replace a queued one of the same key in its
	// place, so that a busy key neither grows the queue nor loses its position. It runs
	// under the locks of Publish and Next: it must be quick and must not call the topic.
	Key func(T) string

	// Resume replays the ring's values with sequence numbers above After before the live
	// ones. When values in between are missing (After is older than the ring, or above the
	// last number) the whole ring is replayed, and Missed reports it. The replay does not
	// count against Buffer.
	Resume bool
	After  uint64

	// LastMaxAge, without Resume, queues the newest value at once if it is younger than
	// this. 0: no.
	LastMaxAge time.Duration
}

// Subscriber is one subscriber's side. Next and Ready are for one goroutine at a time; the
// other methods may be called from any.
type Subscriber[T any] struct {
	topic    *Topic[T]
	key      func(T) string
	overflow Overflow
	limit    int
	missed   bool
	index    int           // in topic.subscribers, -1 when not there; protected by topic.mu
	ready    chan struct{} // holds a token while Next would return a value; closed at the end

	mu      sync.Mutex // protects the fields below
	notify  func()     // see Notify
	replay  []T        // taken before the queue
	buf     []T        // the queue: n values from head on, wrapping around
	head, n int
	popped  uint64            // values that left the queue's head so far
	byKey   map[string]uint64 // with key: position, counted as popped + offset from head
	dropped uint64
	err     error
}

// Subscribe adds a subscriber. It always returns one: a subscriber that the topic refuses
// (closed, ErrFull) has ended already, and Err says why.
func (t *Topic[T]) Subscribe(o SubscribeOptions[T]) *Subscriber[T] {
	s := &Subscriber[T]{topic: t, overflow: o.Overflow, limit: o.Buffer, index: -1, ready: make(chan struct{}, 1)}
	if s.limit <= 0 {
		s.limit = defaultBuffer
	}
	s.limit = min(s.limit, maxBuffer)
	s.buf = make([]T, min(s.limit, initialBuffer))
	if o.Key != nil && o.Overflow == Coalesce {
		s.key, s.byKey = o.Key, map[string]uint64{}
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closeErr != nil:
		s.end(t.closeErr)
	case t.opts.MaxSubscribers > 0 && len(t.subscribers) >= t.opts.MaxSubscribers:
		s.end(ErrFull)
	default:
		t.replayLocked(s, o)
		s.index = len(t.subscribers)
		t.subscribers = append(t.subscribers, s)
	}
	return s
}

// replayLocked fills the replay list. Under the topic's lock, what is in the ring now is
// replayed and what is published later is queued.
func (t *Topic[T]) replayLocked(s *Subscriber[T], o SubscribeOptions[T]) {
	switch {
	case o.Resume:
		after := o.After
		if after < t.ringFloor || after > t.seq {
			s.missed, after = true, 0
		}
		for i := range t.ring {
			if e := t.ring[(t.ringHead+i)%len(t.ring)]; e.seq > after {
				s.replay = append(s.replay, e.value)
			}
		}
	case o.LastMaxAge > 0 && !t.lastAt.IsZero() && time.Since(t.lastAt) < o.LastMaxAge:
		s.replay = append(s.replay, t.last)
	}
	s.signalLocked() // without s.mu: no other goroutine has s yet
}

// offer queues v, or does what Overflow says; false when the subscriber overflowed and has
// ended. The caller holds the topic's lock, which protects st.
func (s *Subscriber[T]) offer(v T, st *Stats) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return true // Close is about to remove it
	}
	var key string
	if s.key != nil {
		key = s.key(v)
		if at, isQueued := s.byKey[key]; isQueued {
			s.buf[(s.head+int(at-s.popped))%len(s.buf)] = v
			st.Queued++
			st.Coalesced++
			return true
		}
	}
	if s.n == s.limit {
		s.dropped++
		st.Dropped++
		switch s.overflow {
		case CloseSubscriber:
			st.Overflowed++
			s.endLocked(ErrOverflow)
			return false
		case DropAndCount:
			return true
		}
		s.popLocked()
	}
	s.pushLocked(v)
	if s.key != nil {
		s.byKey[key] = s.popped + uint64(s.n-1)
	}
	st.Queued++
	s.signalLocked()
	if s.notify != nil {
		s.notify()
	}
	return true
}

func (s *Subscriber[T]) pushLocked(v T) {
	if s.n == len(s.buf) {
		bigger := make([]T, min(2*len(s.buf), s.limit))
		k := copy(bigger, s.buf[s.head:])
		copy(bigger[k:], s.buf[:s.head])
		s.buf, s.head = bigger, 0
	}
	s.buf[(s.head+s.n)%len(s.buf)] = v
	s.n++
}

func (s *Subscriber[T]) popLocked() T {
	var zero T
	v := s.buf[s.head]
	s.buf[s.head] = zero // for the garbage collector
	if s.key != nil {
		delete(s.byKey, s.key(v))
	}
	s.head = (s.head + 1) % len(s.buf)
	s.n--
	s.popped++
	return v
}

// signalLocked puts a token into ready while a value is queued, and removes it otherwise. The
// end of the subscriber closes the channel, so it stays ready.
func (s *Subscriber[T]) signalLocked() {
	switch {
	case s.err != nil, s.notify != nil:
	case s.n > 0 || len(s.replay) > 0:
		select {
		case s.ready <- struct{}{}:
		default:
		}
	default:
		select {
		case <-s.ready:
		default:
		}
	}
}

// Ready returns a channel from which a receive succeeds while a value is queued or the
// subscriber has ended. It may succeed without a value, which is harmless. It never blocks
// while a value is queued: after Next took one of several, Ready is ready again.
func (s *Subscriber[T]) Ready() <-chan struct{} { return s.ready }

// Notify makes the subscriber call fn instead of using Ready: now, after each value that is
// queued, and at the end. fn runs under locks of the topic: it must be quick, and call neither
// the topic nor the subscriber.
func (s *Subscriber[T]) Notify(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notify = fn
	fn()
}

// Next takes the oldest queued value. When ok is false there was none: if Err is nil, the
// caller waits for Ready, else the subscriber has ended.
func (s *Subscriber[T]) Next() (v T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(s.replay) > 0:
		v, s.replay[0] = s.replay[0], v // v is zero here, for the garbage collector
		if s.replay = s.replay[1:]; len(s.replay) == 0 {
			s.replay = nil
		}
	case s.n > 0:
		v = s.popLocked()
	default:
		s.signalLocked()
		return v, false
	}
	s.signalLocked()
	return v, true
}

// Err returns why the subscriber ended: ErrOverflow, ErrFull, ErrClosed or the cause given
// to Topic.Close; nil while it is open. Values may still be queued after the end.
func (s *Subscriber[T]) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Dropped returns the number of values that this subscriber lost.
func (s *Subscriber[T]) Dropped() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}

// Missed reports whether, with Resume, the ring lacked values after After.
func (s *Subscriber[T]) Missed() bool { return s.missed }

// Close removes the subscriber from the topic and discards its queue. It may be called more
// than once.
func (s *Subscriber[T]) Close() {
	s.topic.mu.Lock()
	s.topic.removeLocked(s)
	s.topic.mu.Unlock()

	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(ErrClosed)
	clear(s.buf)
	clear(s.byKey)
	s.replay, s.head, s.n = nil, 0, 0
}

func (s *Subscriber[T]) end(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(cause)
}

func (s *Subscriber[T]) endLocked(cause error) {
	if s.err == nil {
		s.err = cause
		close(s.ready)
		if s.notify != nil {
			s.notify()
		}
	}
}
