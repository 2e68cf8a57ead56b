package gateway

import (
	"errors"
	"sync"
	"sync/atomic"
)

// What slow subscribers may cost. What waits for them is shared, but each may hold other
// events, so it is counted as if nothing were.
const (
	maxTotalQueued = 128 << 20 // bytes that wait for all subscribers together
	identityShare  = 4         // of places and of what waits one identity has a quarter at most
)

// errCrowded ends a stream for which nothing more can wait; its client resumes.
var errCrowded = errors.New("gateway: too much waits for slow subscribers")

// quotas are those of the identities that have streams here.
type quotas struct {
	maxBytes int64 // bytes of all
	waiting  atomic.Int64

	mu         sync.Mutex // protects own and the streams in it
	byIdentity map[string]*quota
}

// quota is what one identity has: open streams, and bytes that wait for them.
type quota struct {
	quotas   *quotas
	identity string
	shared   bool // by everybody with the same token, or without one: no quarter
	streams  int
	waiting  atomic.Int64
}

// acquireStream counts a stream in; nil when the identity has as many as it may.
func (a *quotas) acquireStream(who string, shared bool, most int) *quota {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.byIdentity[who]
	if o == nil {
		if a.byIdentity == nil {
			a.byIdentity = make(map[string]*quota)
		}
		o = &quota{quotas: a, identity: who, shared: shared}
		a.byIdentity[who] = o
	}
	if !shared && o.streams >= most {
		return nil
	}
	o.streams++
	return o
}

func (o *quota) releaseStream() {
	o.quotas.mu.Lock()
	defer o.quotas.mu.Unlock()
	if o.streams--; o.streams == 0 {
		delete(o.quotas.byIdentity, o.identity)
	}
}

// hold counts bytes that will wait; false when they may not.
func (o *quota) hold(n int) bool {
	all, own := o.quotas.waiting.Add(int64(n)), o.waiting.Add(int64(n))
	if all <= o.quotas.maxBytes && (o.shared || own <= o.quotas.maxBytes/identityShare) {
		return true
	}
	o.release(n)
	return false
}

func (o *quota) release(n int) {
	o.waiting.Add(int64(-n))
	o.quotas.waiting.Add(int64(-n))
}
