package fanout

import (
	"sync"
	"time"
)

const (
	defaultBuffer = 16
	maxBuffer     = 1 << 16
	initialBuffer = 8 // slots made at once; a queue grows to its bound only when its reader lags
)

// SubscribeOptions of one reader. The zero value: 16 values, end on overflow, live only.
type SubscribeOptions[T any] struct {
	Buffer   int      // values that may wait; default 16, at most 65,536
	Overflow Overflow // what a full queue does; default CloseSubscriber

	// Key, with Coalesce, makes a new value replace a waiting one of the same key
	// in its place, so that a busy key neither grows the queue nor loses its turn.
	// Filter selects the values of this reader. Both run under the locks of
	// Publish and Next: they must be quick and must not call the topic.
	Key    func(T) string
	Filter func(T) bool

	// Resume replays the ring's values numbered above After before the live
	// ones. When values are missing between (After is older than the ring, or
	// above the last number) the whole ring is replayed and Joined says so.
	// The replay is a list of its own, as long as the ring at most; it does not
	// count against Buffer.
	Resume bool
	After  uint64

	// LastMaxAge, without Resume, gives the joiner the newest value at once if it
	// is younger than this. 0: no.
	LastMaxAge time.Duration
}

// Joined says where a reader came in.
type Joined struct {
	Missed bool   // Resume: the ring could not give everything after After
	Oldest uint64 // number of the oldest value in the ring; Next when it is empty
	Next   uint64 // the next value's number is this or above
	Replay int    // values replayed, the LastMaxAge one included
}

// Subscriber is one reader's side. Next, Take and Ready are for one goroutine at a
// time; the other methods may be called from any.
type Subscriber[T any] struct {
	topic  *Topic[T]
	filter func(T) bool
	key    func(T) string
	policy Overflow
	limit  int
	joined Joined
	index  int           // place in topic.subs, -1 when off it; protected by topic.mu
	ready  chan struct{} // holds a token while Next would give something; closed at the end

	mu      sync.Mutex // protects the fields below
	replay  []T        // read before the queue
	buf     []T        // the queue: n values from head on, round the end
	head, n int
	popped  uint64            // values that left the queue's head so far
	byKey   map[string]uint64 // with key: position counted as taken + offset from head
	dropped uint64
	err     error
}

// Subscribe adds a reader. It never fails to return one: a reader that the topic
// refuses (closed, ErrFull) has ended already and says why in Err.
func (t *Topic[T]) Subscribe(o SubscribeOptions[T]) *Subscriber[T] {
	s := &Subscriber[T]{
		topic: t, filter: o.Filter, policy: o.Overflow, limit: o.Buffer,
		index: -1, ready: make(chan struct{}, 1),
	}
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
	if t.closeErr != nil {
		s.end(t.closeErr)
		return s
	}
	if t.opts.MaxSubscribers > 0 && len(t.subs) >= t.opts.MaxSubscribers {
		s.end(ErrFull)
		return s
	}
	t.replayLocked(s, o)
	s.index = len(t.subs)
	t.subs = append(t.subs, s)
	return s
}

// replayLocked fills the replay list. The topic's lock makes the seam: what is in
// the ring now is replayed, what comes later is queued.
func (t *Topic[T]) replayLocked(s *Subscriber[T], o SubscribeOptions[T]) {
	s.joined = Joined{Oldest: t.seq + 1, Next: t.seq + 1}
	if len(t.ring) > 0 {
		s.joined.Oldest = t.ring[t.ringHead].seq
	}
	switch {
	case o.Resume:
		after := o.After
		if after < t.ringFloor || after > t.seq {
			s.joined.Missed, after = true, 0
		}
		for i := range t.ring {
			e := t.ring[(t.ringHead+i)%len(t.ring)]
			if e.seq > after && (s.filter == nil || s.filter(e.val)) {
				s.replay = append(s.replay, e.val)
			}
		}
	case o.LastMaxAge > 0 && !t.lastAt.IsZero() && time.Since(t.lastAt) < o.LastMaxAge:
		if s.filter == nil || s.filter(t.last) {
			s.replay = append(s.replay, t.last)
		}
	}
	s.joined.Replay = len(s.replay)
	if len(s.replay) > 0 {
		s.ready <- struct{}{} // room for one, and nobody else has s yet
	}
}

// outcome of offering a value to one reader.
type outcome uint8

const (
	queued     outcome = iota
	replaced           // took the place of a waiting value of its key
	displaced          // the oldest waiting value was dropped for it
	refused            // dropped
	overflowed         // dropped, and the reader has ended
	ended              // the reader had ended
)

func (s *Subscriber[T]) offer(v T) outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return ended
	}
	var key string
	if s.key != nil {
		key = s.key(v)
		if at, waiting := s.byKey[key]; waiting {
			s.buf[(s.head+int(at-s.popped))%len(s.buf)] = v
			return replaced
		}
	}
	out := queued
	if s.n == s.limit {
		switch s.policy {
		case DropAndCount:
			s.dropped++
			return refused
		case Coalesce:
			s.popLocked()
			s.dropped++
			out = displaced
		default:
			s.dropped++
			s.endLocked(ErrOverflow)
			return overflowed
		}
	}
	s.pushLocked(v)
	if s.key != nil {
		s.byKey[key] = s.popped + uint64(s.n-1)
	}
	s.signalLocked()
	return out
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
	s.buf[s.head] = zero // let go of what the value points to
	if s.key != nil {
		delete(s.byKey, s.key(v))
	}
	s.head = (s.head + 1) % len(s.buf)
	s.n--
	s.popped++
	return v
}

// signalLocked makes the token in ready tell the truth: there while a value
// waits, gone when none does. The end closes the channel, so it stays ready.
func (s *Subscriber[T]) signalLocked() {
	switch {
	case s.err != nil:
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

func (s *Subscriber[T]) nextLocked() (v T, ok bool) {
	if len(s.replay) > 0 {
		var zero T
		v, s.replay[0] = s.replay[0], zero
		if s.replay = s.replay[1:]; len(s.replay) == 0 {
			s.replay = nil
		}
		return v, true
	}
	if s.n == 0 {
		return v, false
	}
	return s.popLocked(), true
}

// Ready can be received from while a value waits or the reader has ended. A
// token that is received for nothing is possible and harmless; one that is
// missing is not: after taking a single value of many, Ready is ready again.
func (s *Subscriber[T]) Ready() <-chan struct{} { return s.ready }

// Next takes the oldest waiting value. Without one ok is false: the reader waits
// for Ready, or has come to its end when Err is not nil.
func (s *Subscriber[T]) Next() (v T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok = s.nextLocked()
	s.signalLocked()
	return v, ok
}

// Take fills dst with the oldest waiting values and returns how many there were.
func (s *Subscriber[T]) Take(dst []T) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < len(dst) {
		v, ok := s.nextLocked()
		if !ok {
			break
		}
		dst[n] = v
		n++
	}
	s.signalLocked()
	return n
}

// Err is why the reader ended: ErrOverflow, ErrFull, ErrClosed or the cause given
// to Topic.Close; nil while it lives. Values may still wait after the end.
func (s *Subscriber[T]) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Dropped counts the values this reader lost.
func (s *Subscriber[T]) Dropped() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}

// Joined says where this reader came in.
func (s *Subscriber[T]) Joined() Joined { return s.joined }

// Close takes the reader off the topic and lets go of what waits. It may be
// called more than once.
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
	}
}
