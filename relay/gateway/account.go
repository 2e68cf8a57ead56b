package gateway

import (
	"errors"
	"sync"
	"sync/atomic"
)

// What slow subscribers may cost. What waits for them is shared, but each may hold other
// events, so it is counted as if nothing were.
const (
	maxWaiting = 128 << 20 // bytes that wait for all subscribers together
	ownShare   = 4         // of places and of what waits one identity has a quarter at most
)

// errCrowded ends a stream for which nothing more can wait; its client resumes.
var errCrowded = errors.New("gateway: too much waits for slow subscribers")

// accounts are those of the identities that have streams here.
type accounts struct {
	most    int64 // bytes of all
	waiting atomic.Int64

	mu  sync.Mutex // protects own and the streams in it
	own map[string]*account
}

// account is what one identity has: open streams, and bytes that wait for them.
type account struct {
	all     *accounts
	who     string
	shared  bool // by everybody with the same token, or without one: no quarter
	streams int
	waiting atomic.Int64
}

// enter counts a stream in; nil when the identity has as many as it may.
func (a *accounts) enter(who string, shared bool, most int) *account {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.own[who]
	if o == nil {
		if a.own == nil {
			a.own = make(map[string]*account)
		}
		o = &account{all: a, who: who, shared: shared}
		a.own[who] = o
	}
	if !shared && o.streams >= most {
		return nil
	}
	o.streams++
	return o
}

func (o *account) leave() {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	if o.streams--; o.streams == 0 {
		delete(o.all.own, o.who)
	}
}

// hold counts bytes that will wait; false when they may not.
func (o *account) hold(n int) bool {
	all, own := o.all.waiting.Add(int64(n)), o.waiting.Add(int64(n))
	if all <= o.all.most && (o.shared || own <= o.all.most/ownShare) {
		return true
	}
	o.release(n)
	return false
}

func (o *account) release(n int) {
	o.waiting.Add(int64(-n))
	o.all.waiting.Add(int64(-n))
}
