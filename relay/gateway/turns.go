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
	maxReplays    = 32
	maxOwnReplays = 8                // of one identity
	turnTime      = 30 * time.Second // of a replay while others wait; its client connects again
)

var errTurn = errors.New("gateway: others wait to read the log")

// turns are the clients that read the log, and those that wait for that.
type turns struct {
	gate gate

	mu  sync.Mutex // protects own and users
	own map[string]*share
}

// share is that of one identity, while it has clients here.
type share struct {
	gate
	users int
}

// gate lets as many in as free holds.
type gate struct {
	free    chan struct{}
	waiting atomic.Int64
}

func (t *turns) init() {
	t.gate.free, t.own = make(chan struct{}, maxReplays), make(map[string]*share)
}

// turn is one client's.
type turn struct {
	t     *turns
	who   string
	s     *share
	began time.Time
}

// take waits for a turn, which its caller ends with done. Meanwhile idle is called every
// now and then; its error ends the waiting.
func (t *turns) take(ctx context.Context, who string, every time.Duration, idle func() error) (*turn, error) {
	t.mu.Lock()
	s := t.own[who]
	if s == nil {
		s = &share{gate: gate{free: make(chan struct{}, maxOwnReplays)}}
		t.own[who] = s
	}
	s.users++
	t.mu.Unlock()
	mine := &turn{t: t, who: who, s: s}
	if err := s.enter(ctx, every, idle); err != nil {
		mine.leave()
		return nil, err
	}
	if err := t.gate.enter(ctx, every, idle); err != nil {
		<-s.free
		mine.leave()
		return nil, err
	}
	mine.began = time.Now()
	return mine, nil
}

func (g *gate) enter(ctx context.Context, every time.Duration, idle func() error) error {
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

// over tells that it was long enough, since others wait.
func (m *turn) over() bool {
	return (m.s.waiting.Load() > 0 || m.t.gate.waiting.Load() > 0) && time.Since(m.began) > turnTime
}

func (m *turn) done() {
	<-m.t.gate.free
	<-m.s.free
	m.leave()
}

func (m *turn) leave() {
	m.t.mu.Lock()
	defer m.t.mu.Unlock()
	if m.s.users--; m.s.users == 0 {
		delete(m.t.own, m.who)
	}
}
