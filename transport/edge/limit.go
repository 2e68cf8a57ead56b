package edge

import (
	"container/list"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limiter limits the rate of each key, such as a caller or a tenant. It has one token bucket
// per key, for at most maxKeys keys.
type Limiter struct {
	maxKeys int
	evict   bool

	mu    sync.Mutex // protects the fields below
	keys  map[string]*list.Element
	order list.List // of *keyBucket, the one used last in front
}

type keyBucket struct {
	key    string
	bucket *rate.Limiter
}

// NewLimiter makes a Limiter of at most maxKeys keys. evict decides what happens when a new
// key arrives and the Limiter is full. With evict it drops the least recently used key,
// which starts over with a full burst if it is used again. Without evict it drops every key
// whose bucket is full again, which loses nothing, and refuses the new key if there is no
// such bucket.
func NewLimiter(maxKeys int, evict bool) *Limiter {
	return &Limiter{maxKeys: maxKeys, evict: evict, keys: make(map[string]*list.Element)}
}

// Bucket returns key's token bucket, or nil when the Limiter refuses the key. A new bucket
// gets rps tokens per second and the given burst.
func (l *Limiter) Bucket(key string, rps float64, burst int, now time.Time) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.keys[key]; e != nil {
		l.order.MoveToFront(e)
		return e.Value.(*keyBucket).bucket
	}
	if len(l.keys) >= l.maxKeys && !l.evictLocked(now) {
		return nil
	}
	b := &keyBucket{key, rate.NewLimiter(rate.Limit(rps), burst)}
	l.keys[key] = l.order.PushFront(b)
	return b.bucket
}

// evictLocked frees a place for a new key, as NewLimiter says, and reports whether it could. Without
// evict its time grows with the number of keys. mu is held.
func (l *Limiter) evictLocked(now time.Time) bool {
	if l.evict {
		l.dropLocked(l.order.Back())
		return true
	}
	for e := l.order.Front(); e != nil; {
		next := e.Next()
		if b := e.Value.(*keyBucket).bucket; b.TokensAt(now) >= float64(b.Burst()) {
			l.dropLocked(e)
		}
		e = next
	}
	return len(l.keys) < l.maxKeys
}

func (l *Limiter) dropLocked(e *list.Element) {
	delete(l.keys, l.order.Remove(e).(*keyBucket).key)
}

// Take takes a token of key's bucket and returns 0, or returns how long to wait for one.
func (l *Limiter) Take(key string, rps float64, burst int, now time.Time) (wait time.Duration) {
	b := l.Bucket(key, rps, burst, now)
	switch {
	case b == nil:
		return time.Second
	case b.AllowN(now, 1):
		return 0
	}
	return untilToken(b, now)
}

// Wait returns what Take returns, and takes nothing: for callers that Charge only what failed.
func (l *Limiter) Wait(key string, rps float64, burst int, now time.Time) (wait time.Duration) {
	b := l.Bucket(key, rps, burst, now)
	switch {
	case b == nil:
		return time.Second
	case b.TokensAt(now) >= 1:
		return 0
	}
	return untilToken(b, now)
}

// untilToken returns the time until a bucket has a token.
func untilToken(b *rate.Limiter, now time.Time) time.Duration {
	missing := 1 - b.TokensAt(now)
	// At least a millisecond, because 0 means that there is a token.
	return max(time.Millisecond, time.Duration(missing/float64(b.Limit())*float64(time.Second)))
}

// Charge takes n more tokens from key's bucket. The balance may become negative: Take then
// refuses the key until the tokens have been refilled.
func (l *Limiter) Charge(key string, n int, now time.Time) {
	l.mu.Lock()
	e := l.keys[key]
	l.mu.Unlock()
	if e == nil {
		return
	}
	b := e.Value.(*keyBucket).bucket
	for n > 0 { // one reservation takes at most a burst
		k := min(n, b.Burst())
		b.ReserveN(now, k)
		n -= k
	}
}
