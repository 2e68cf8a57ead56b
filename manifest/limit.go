package manifest

import (
	"sync"
	"sync/atomic"
	"time"
)

// Limit enforces a capability's Constraints exactly: at most RateLimitRPS starts in any
// window, and at most MaxConcurrency calls in flight. A token bucket would admit nearly twice
// the rate in its first second; a ring of the last starts does not.
type Limit struct {
	rate, maxInFlight int32
	window            time.Duration
	use               atomic.Pointer[limitUse] // nil before the first Acquire, since most capabilities of most devices are never called
}

// limitUse is what a Limit has admitted.
type limitUse struct {
	mu       sync.Mutex // protects the fields below
	starts   []int64    // ring of the last rate starts, ns since epoch, 0: none
	next     int        // index of the oldest start
	inFlight int
}

// RelayWindow and DeviceWindow are the windows of the rate on the two ends of a link. The
// device's is a little shorter, so that jitter on the link cannot make it refuse a call that
// the relay rightly admitted.
const (
	RelayWindow  = time.Second
	DeviceWindow = 900 * time.Millisecond
)

// epoch is the zero of limitUse.starts: a time.Time would be three times as large.
var epoch = time.Now()

// NewLimit returns the limit of one capability.
func NewLimit(c Constraints, window time.Duration) *Limit {
	return &Limit{rate: int32(max(c.RateLimitRPS, 1)), window: window, maxInFlight: int32(max(c.MaxConcurrency, 1))}
}

// Acquire admits one call, or returns E_RATE_LIMITED, with RetryAfterMS when the rate is the
// reason. The caller ends every admitted call with Release.
func (l *Limit) Acquire(now time.Time) error {
	u := l.use.Load()
	if u == nil {
		l.use.CompareAndSwap(nil, &limitUse{starts: make([]int64, l.rate)}) // or another call was first
		u = l.use.Load()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.inFlight >= int(l.maxInFlight) {
		return &Error{Code: RateLimited, Message: "too many calls of this capability are in flight; wait for one to end", Reason: "concurrency"}
	}
	start, oldest := int64(now.Sub(epoch)), u.starts[u.next]
	if wait := l.window - time.Duration(start-oldest); wait > 0 && oldest != 0 {
		return &Error{Code: RateLimited, Message: "this capability's rate limit is used up; retry later",
			RetryAfterMS: max(1, wait.Milliseconds()), Reason: "rate"}
	}
	u.starts[u.next] = start
	u.next = (u.next + 1) % len(u.starts)
	u.inFlight++
	return nil
}

// Release ends a call that Acquire admitted. Its start still counts for the rate until the
// window has passed.
func (l *Limit) Release() {
	u := l.use.Load()
	if u == nil {
		return
	}
	u.mu.Lock()
	if u.inFlight > 0 {
		u.inFlight--
	}
	u.mu.Unlock()
}
