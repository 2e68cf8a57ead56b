package gateway

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// A replay holds a page of the log while its client reads, so the number of replays is
// bounded, for all clients and for each identity: slow readers of one identity delay only
// that identity.
const (
	maxReplays            = 32
	maxReplaysPerIdentity = 8
	replayTimeSlice       = 30 * time.Second // of one replay while others wait
)

// errReplayExpired ends a stream whose replay has used its time slice; the client
// reconnects and continues from its last event.
var errReplayExpired = errors.New("gateway: others wait to read the log")

// slots is a semaphore that counts its waiters.
type slots struct {
	acquired chan struct{} // one element per acquired slot
	waiting  atomic.Int64
}

func newSlots(n int) *slots { return &slots{acquired: make(chan struct{}, n)} }

// acquire waits for a slot. While it waits it calls onWait at each interval; an error of
// onWait ends the wait.
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

func (s *slots) release() { <-s.acquired }

// replaySlot is the permission to replay: a slot of the identity and one of the gateway.
type replaySlot struct {
	identity, gateway *slots
	acquiredAt        time.Time
}

// acquireReplay waits for both slots. It acquires the identity's slot first, so that a
// subscriber that waits for its own identity does not hold a slot that others could use.
func acquireReplay(ctx context.Context, identity, gateway *slots, interval time.Duration, onWait func() error) (*replaySlot, error) {
	if err := identity.acquire(ctx, interval, onWait); err != nil {
		return nil, err
	}
	if err := gateway.acquire(ctx, interval, onWait); err != nil {
		identity.release()
		return nil, err
	}
	return &replaySlot{identity: identity, gateway: gateway, acquiredAt: time.Now()}, nil
}

// expired reports whether the replay has used its time slice while others wait.
func (r *replaySlot) expired() bool {
	othersWait := r.identity.waiting.Load() > 0 || r.gateway.waiting.Load() > 0
	return othersWait && time.Since(r.acquiredAt) > replayTimeSlice
}

func (r *replaySlot) release() {
	r.gateway.release()
	r.identity.release()
}
