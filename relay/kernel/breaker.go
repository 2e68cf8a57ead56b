package kernel

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"agentctl/manifest"
)

// A plugin's breaker has these states:
//
//	none       no fault yet: nothing is counted and nothing is refused
//	closed     made by the first fault; counts faults over breakerWindow
//	open       refuses calls with RetryAfterMS, for its back-off
//	half-open  lets one call try: a success removes the breaker, a fault replaces it by
//	           an open one with twice the back-off
//
// Faults are panics, timeouts, internal errors and answers that break the plugin's schema.
// Refusals are not faults, and a call whose caller left says nothing either way.
const (
	breakerConsecutive = 5                // consecutive faults that open it
	breakerMinCalls    = 20               // or: half of at least so many calls were faults
	breakerWindow      = 30 * time.Second // over which both are counted
	breakerMinBackoff  = time.Second
	breakerMaxBackoff  = time.Minute
	breakerMinRetry    = 50 * time.Millisecond // smallest RetryAfterMS
)

// breaker refuses calls to a plugin that fails. It exists from the plugin's first fault
// until a trial call succeeds, so that a healthy plugin costs one atomic load a call.
type breaker struct {
	cb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	backoff time.Duration
	created time.Time
	opened  atomic.Int64 // nanoseconds after created
	trial   atomic.Int32 // the result of the half-open state's call
}

// Results of a breaker's trial call. After one the breaker is replaced or removed.
const (
	trialFailed    = 1
	trialSucceeded = 2
)

// newBreaker makes a closed breaker. With trip it opens at its first fault.
func newBreaker(backoff time.Duration, trip bool) *breaker {
	b := &breaker{backoff: backoff, created: time.Now()}
	b.cb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Interval: breakerWindow,
		Timeout:  backoff,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return trip || c.ConsecutiveFailures >= breakerConsecutive ||
				(c.Requests >= breakerMinCalls && 2*c.TotalFailures >= c.Requests)
		},
		IsExcluded: func(err error) bool { return errors.Is(err, context.Canceled) },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			switch {
			case from == gobreaker.StateHalfOpen && to == gobreaker.StateClosed:
				b.trial.Store(trialSucceeded)
			case from == gobreaker.StateHalfOpen:
				b.trial.Store(trialFailed)
			case to == gobreaker.StateOpen:
				b.opened.Store(int64(time.Since(b.created)))
			}
		},
	})
	return b
}

// fail counts a fault outside of allow.
func (b *breaker) fail(fault error) {
	if done, err := b.cb.Allow(); err == nil {
		done(fault)
	}
}

// recordFault counts a fault of a plugin that had no breaker when the call began.
func (l *loaded) recordFault(fault error) {
	l.breaker.CompareAndSwap(nil, newBreaker(breakerMinBackoff, false))
	if b := l.breaker.Load(); b != nil {
		b.fail(fault)
	}
}

// allow refuses the call, or returns the function to call with its fault, nil for none.
func (b *breaker) allow(l *loaded) (finish func(fault error), err error) {
	done, err := b.cb.Allow()
	if err != nil {
		return nil, &manifest.Error{Code: manifest.Internal, Reason: "breaker", RetryAfterMS: b.remaining().Milliseconds(),
			Message: "this plugin failed repeatedly and its calls are refused for a while; retry later"}
	}
	return func(fault error) {
		done(fault)
		switch b.trial.Load() {
		case trialSucceeded:
			l.breaker.CompareAndSwap(b, nil)
		case trialFailed:
			next := newBreaker(min(2*b.backoff, breakerMaxBackoff), true)
			next.fail(errBudget) // any fault opens it
			l.breaker.CompareAndSwap(b, next)
		}
	}, nil
}

// remaining is how long the breaker stays open.
func (b *breaker) remaining() time.Duration {
	open := time.Since(b.created) - time.Duration(b.opened.Load())
	return max(b.backoff-open, breakerMinRetry)
}

// state is the plugin's state in introspection.
func (l *loaded) state() string {
	if b := l.breaker.Load(); b != nil {
		switch b.cb.State() {
		case gobreaker.StateOpen:
			return StateOpen
		case gobreaker.StateHalfOpen:
			return StateHalfOpen
		}
	}
	return StateLoaded
}
