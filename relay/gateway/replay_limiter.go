package gateway

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// A replay holds a page of the log while its client reads, so the number of replays is
// bounded, for all clients and for each identity: slow readers of one identity hold up
// that one alone.
const (
	maxReplays            = 32
	maxReplaysPerIdentity = 8
	replayTimeSlice       = 30 * time.Second // of one replay while others wait
)

// errReplayExpired ends a stream whose replay has used its time slice; the client
// reconnects and goes on where it was.
var errReplayExpired = errors.New("gateway: others wait to read the log")

// replayLimiter admits the subscribers that read the log. A subscriber acquires a slot of
// its identity first and one of all second, so an identity's waiting subscribers do not
// hold slots that others could use.
type replayLimiter struct {
	all slots

	mu         sync.Mutex // protects byIdentity and identitySlots.users
	byIdentity map[string]*identitySlots
}

// identitySlots is the slots of one identity. It exists while the identity has users,
// which are subscribers that replay or wait.
type identitySlots struct {
	slots
	users int
}

// slots is a semaphore that counts who waits for it.
type slots struct {
	acquired chan struct{} // one element per acquired slot
	waiting  atomic.Int64
}

func newReplayLimiter() *replayLimiter {
	return &replayLimiter{
		all:        slots{acquired: make(chan struct{}, maxReplays)},
		byIdentity: make(map[string]*identitySlots),
	}
}

// replaySlot is what acquire returns; release gives it back.
type replaySlot struct {
	limiter    *replayLimiter
	identity   string
	own        *identitySlots
	acquiredAt time.Time
}

// acquire waits for a slot. It calls onWait at each interval meanwhile, whose error ends
// the wait.
func (l *replayLimiter) acquire(ctx context.Context, identity string, interval time.Duration, onWait func() error) (*replaySlot, error) {
	l.mu.Lock()
	own := l.byIdentity[identity]
	if own == nil {
		own = &identitySlots{slots: slots{acquired: make(chan struct{}, maxReplaysPerIdentity)}}
		l.byIdentity[identity] = own
	}
	own.users++
	l.mu.Unlock()
	slot := &replaySlot{limiter: l, identity: identity, own: own}
	if err := own.acquire(ctx, interval, onWait); err != nil {
		slot.forget()
		return nil, err
	}
	if err := l.all.acquire(ctx, interval, onWait); err != nil {
		<-own.acquired
		slot.forget()
		return nil, err
	}
	slot.acquiredAt = time.Now()
	return slot, nil
}

func (s *slots) acquire(ctx context.Context, interval time.Duration, onWait func() error) error {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case s.acquired <- struct{}{}:
			return nil
		case <-ticker.C:
			if err := onWait(); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// expired reports whether the replay has used its time slice while others wait.
func (r *replaySlot) expired() bool {
	othersWait := r.own.waiting.Load() > 0 || r.limiter.all.waiting.Load() > 0
	return othersWait && time.Since(r.acquiredAt) > replayTimeSlice
}

func (r *replaySlot) release() {
	<-r.limiter.all.acquired
	<-r.own.acquired
	r.forget()
}

// forget removes the identity's slots with their last user.
func (r *replaySlot) forget() {
	r.limiter.mu.Lock()
	defer r.limiter.mu.Unlock()
	if r.own.users--; r.own.users == 0 {
		delete(r.limiter.byIdentity, r.identity)
	}
}
