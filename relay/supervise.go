package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
)

// Back-off between restarts of a part.
const (
	minRestartDelay = 100 * time.Millisecond
	maxRestartDelay = 10 * time.Second
	steadyAfter     = time.Minute // a part that ran this long starts over with no crashes
)

// ErrGivenUp is what Run returns when a part crashed more often than Options.MaxRestarts.
var ErrGivenUp = errors.New("given up")

// supervise runs a part until ctx ends. It restarts the part when it returns early or
// panics, with a growing, randomized delay, and gives up after maxRestarts in a row: the
// error then ends the relay, whose service manager may know better.
//
//	running ── ctx ends ──────────────────> nil
//	        └─ returns early, or panics ──> back-off ──> running
//	                                    └─> ErrGivenUp, after maxRestarts
func supervise(ctx context.Context, log *zap.Logger, name string, maxRestarts int, run func(context.Context) error) error {
	for crashes := 0; ; {
		started := time.Now()
		err := runRecovered(ctx, run)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(started) >= steadyAfter {
			crashes = 0
		}
		if crashes >= maxRestarts {
			return fmt.Errorf("the part %s was %w after %d restarts: %w", name, ErrGivenUp, crashes, err)
		}
		delay := min(minRestartDelay<<min(crashes, 16), maxRestartDelay) // 16: the shift stays in 63 bits
		delay = delay/2 + rand.N(delay/2)
		crashes++
		log.Error("part crashed and is restarted", zap.String("part", name), zap.Int("restart", crashes), zap.Duration("after", delay), zap.Error(err))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
	}
}

// every calls fn at each interval until ctx ends. A tick that falls into a slow fn is
// dropped, not queued (time.Ticker).
func every(ctx context.Context, interval time.Duration, fn func()) {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			fn()
		}
	}
}

// runRecovered converts a panic and an early return into errors, so that both count as a
// crash. It recovers panics of run's own goroutine only.
func runRecovered(ctx context.Context, run func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	if err = run(ctx); err == nil {
		err = errors.New("ended before it was stopped")
	}
	return err
}
