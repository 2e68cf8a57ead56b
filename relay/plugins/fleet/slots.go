package fleet

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of the boards that are asked at the same time, by all callers of a tenant together.
const (
	maxAsked = 64 // that have been asked for less than slowAfter
	// slowAfter is when a board no longer counts against maxAsked, so that a few silent boards do not
	// keep a call from all others. maxSlow bounds how many there are of these.
	slowAfter = 200 * time.Millisecond
	maxSlow   = 512
)

// askSlots are the slots of all tenants. The zero value is ready.
type askSlots struct {
	mu      sync.Mutex // protects tenants and their users; a leaf
	tenants map[string]*tenantSlots
}

// tenantSlots are the slots of a tenant, from the first to the last of its calls that ask boards.
//
// A board that answers at once holds a fast slot for some milliseconds. One that hangs would hold it for
// seconds, and 64 of those would stop the questions of the whole tenant; so a call that takes longer
// exchanges its fast slot for a slow one, of which there are more, and the next board is asked.
type tenantSlots struct {
	users      int
	fast, slow chan struct{}
}

// enter returns the slots of a tenant. leave has to follow.
func (s *askSlots) enter(tenant string) *tenantSlots {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tenants[tenant]
	if t == nil {
		if s.tenants == nil {
			s.tenants = make(map[string]*tenantSlots)
		}
		t = &tenantSlots{fast: make(chan struct{}, maxAsked), slow: make(chan struct{}, maxSlow)}
		s.tenants[tenant] = t
	}
	t.users++
	return t
}

// leave ends what enter began. The slots of a tenant that nobody uses are dropped.
func (s *askSlots) leave(tenant string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.tenants[tenant]; t.users == 1 {
		delete(s.tenants, tenant)
	} else {
		t.users--
	}
}

// each calls ask with 0 to n-1 as slots become free, each with a context that ends after timeout, and
// returns when all of these calls have. started is how many there were: fewer than n if ctx ended. A
// panic of ask becomes one of each, which the kernel turns into an error: in a separate goroutine
// it would end the relay.
func (s *askSlots) each(ctx context.Context, tenant string, n int, timeout time.Duration, ask func(ctx context.Context, i int)) (started int) {
	t := s.enter(tenant)
	defer s.leave(tenant)
	var wg sync.WaitGroup
	var panicked atomic.Bool
	defer func() {
		if wg.Wait(); panicked.Load() {
			panic("fleet: a call of a board panicked")
		}
	}()
	for ; started < n && ctx.Err() == nil; started++ {
		i, l := started, &askLease{slots: t}
		select {
		case t.fast <- struct{}{}: // before the goroutine starts, so that the slots bound goroutines too
		case <-ctx.Done():
			return started
		}
		wg.Go(func() {
			l.begin()
			defer l.release()
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			defer func() {
				if recover() != nil {
					panicked.Store(true)
				}
			}()
			ask(ctx, i)
		})
	}
	return started
}

// askLease holds one slot from before a board is asked until it has answered:
//
//	fast ── slowAfter ──> slow, if one is free; else it stays fast
//	fast or slow ── release ──> done
//
// mu makes sure that a lease which ends at the moment of its move gives back the slot that it has.
type askLease struct {
	slots *tenantSlots
	timer *time.Timer

	mu             sync.Mutex // protects the fields below
	isSlow, isDone bool
}

// begin starts the time after which the lease moves.
func (l *askLease) begin() { l.timer = time.AfterFunc(slowAfter, l.move) }

// move exchanges the fast slot for a slow one. Without a free one the board goes on to count as fast, which
// bounds all boards that are asked by maxAsked and maxSlow together.
func (l *askLease) move() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isDone {
		return
	}
	select {
	case l.slots.slow <- struct{}{}:
		l.isSlow = true
		<-l.slots.fast
	default:
	}
}

// release gives back the slot.
func (l *askLease) release() {
	l.timer.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isDone = true
	if l.isSlow {
		<-l.slots.slow
	} else {
		<-l.slots.fast
	}
}
