package kernel

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"agentctl/manifest"
)

// When a plugin's breaker opens, and for how long. Faults are panics, timeouts, internal
// errors and answers that break the plugin's schema; refusals are none.
const (
	breakerInRow    = 5                // faults in a row
	breakerOfMany   = 20               // or half of at least so many calls
	breakerWindow   = 30 * time.Second // counted over this time
	breakerFirst    = time.Second      // then nothing is asked for this long
	breakerLongest  = time.Minute      // doubled after each failed try, up to this
	breakerRetryMin = 50 * time.Millisecond
)

// breaker keeps calls from a plugin that fails. It exists from the plugin's first fault
// until a try after an open time succeeds, so healthy plugins have none.
type breaker struct {
	cb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	backoff time.Duration
	made    time.Time
	opened  atomic.Int64 // nanoseconds after made
	outcome atomic.Int32 // of its try, after which another breaker or none takes its place
}

// Outcomes of a breaker's try.
const (
	tryFailed = 1
	tryWorked = 2
)

// newBreaker makes a closed breaker, or with trip one that opens at its first fault.
func newBreaker(backoff time.Duration, trip bool) *breaker {
	b := &breaker{backoff: backoff, made: time.Now()}
	b.cb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Interval: breakerWindow,
		Timeout:  backoff,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return trip || c.ConsecutiveFailures >= breakerInRow ||
				(c.Requests >= breakerOfMany && 2*c.TotalFailures >= c.Requests)
		},
		IsExcluded: func(err error) bool { return errors.Is(err, context.Canceled) },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			switch {
			case from == gobreaker.StateHalfOpen && to == gobreaker.StateClosed:
				b.outcome.Store(tryWorked)
			case from == gobreaker.StateHalfOpen:
				b.outcome.Store(tryFailed)
			case to == gobreaker.StateOpen:
				b.opened.Store(int64(time.Since(b.made)))
			}
		},
	})
	return b
}

// faulty notes the first fault of a plugin.
func (l *loaded) faulty(fault error) {
	l.breaker.CompareAndSwap(nil, newBreaker(breakerFirst, false))
	if b := l.breaker.Load(); b != nil {
		if done, err := b.cb.Allow(); err == nil {
			done(fault)
		}
	}
}

// allow asks whether the plugin may be called; judged reports how that went.
func (b *breaker) allow(l *loaded) (judged func(fault error), err error) {
	done, err := b.cb.Allow()
	if err != nil {
		return nil, &manifest.Error{Code: manifest.Internal, Message: "this plugin failed repeatedly and is left alone for a while; retry later",
			RetryAfterMS: b.remaining().Milliseconds(), Reason: "breaker"}
	}
	return func(fault error) {
		done(fault)
		switch b.outcome.Load() {
		case tryWorked:
			l.breaker.CompareAndSwap(b, nil)
		case tryFailed:
			next := newBreaker(min(2*b.backoff, breakerLongest), true)
			if done, err := next.cb.Allow(); err == nil {
				done(errBudget) // any fault: it opens
			}
			l.breaker.CompareAndSwap(b, next)
		}
	}, nil
}

// remaining is how long the breaker stays open.
func (b *breaker) remaining() time.Duration {
	open := time.Since(b.made) - time.Duration(b.opened.Load())
	return max(b.backoff-open, breakerRetryMin)
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
