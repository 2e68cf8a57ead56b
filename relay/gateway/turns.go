package gateway

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Replays hold pages of the log, so their number is bounded, and shared out: slow readers
// of one identity hold up that one only.
const (
	maxReplays            = 32
	maxReplaysPerIdentity = 8                // of one identity
	replayTimeSlice       = 30 * time.Second // of a replay while others wait; its client connects again
)

var errReplayExpired = errors.New("gateway: others wait to read the log")

// replayLimiter are the clients that read the log, and those that wait for that.
type replayLimiter struct {
	gate slots

	mu         sync.Mutex // protects own and users
	byIdentity map[string]*identitySlots
}

// identitySlots is that of one identity, while it has clients here.
type identitySlots struct {
	slots
	users int
}

// slots lets as many in as free holds.
type slots struct {
	free    chan struct{}
	waiting atomic.Int64
}

func (t *replayLimiter) init() {
	t.gate.free, t.byIdentity = make(chan struct{}, maxReplays), make(map[string]*identitySlots)
}

// replaySlot is one client's.
type replaySlot struct {
	t          *replayLimiter
	identity   string
	s          *identitySlots
	acquiredAt time.Time
}

// acquire waits for a turn, which its caller ends with done. Meanwhile idle is called every
// now and then; its error ends the waiting.
func (t *replayLimiter) acquire(ctx context.Context, who string, every time.Duration, idle func() error) (*replaySlot, error) {
	t.mu.Lock()
	s := t.byIdentity[who]
	if s == nil {
		s = &identitySlots{slots: slots{free: make(chan struct{}, maxReplaysPerIdentity)}}
		t.byIdentity[who] = s
	}
	s.users++
	t.mu.Unlock()
	mine := &replaySlot{t: t, identity: who, s: s}
	if err := s.acquire(ctx, every, idle); err != nil {
		mine.forget()
		return nil, err
	}
	if err := t.gate.acquire(ctx, every, idle); err != nil {
		<-s.free
		mine.forget()
		return nil, err
	}
	mine.acquiredAt = time.Now()
	return mine, nil
}

func (g *slots) acquire(ctx context.Context, every time.Duration, idle func() error) error {
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case g.free <- struct{}{}:
			return nil
		case <-tick.C:
			if err := idle(); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// expired tells that it was long enough, since others wait.
func (m *replaySlot) expired() bool {
	return (m.s.waiting.Load() > 0 || m.t.gate.waiting.Load() > 0) && time.Since(m.acquiredAt) > replayTimeSlice
}

func (m *replaySlot) release() {
	<-m.t.gate.free
	<-m.s.free
	m.forget()
}

func (m *replaySlot) forget() {
	m.t.mu.Lock()
	defer m.t.mu.Unlock()
	if m.s.users--; m.s.users == 0 {
		delete(m.t.byIdentity, m.identity)
	}
}
