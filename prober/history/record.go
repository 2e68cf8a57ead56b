package history

import (
	"context"
	"errors"
	"time"

	"agentctl/prober"
)

const (
	// openDelay is when Record opens the file: soon, so that status tells how it is, but
	// not while the daemon starts.
	openDelay = 2 * time.Second
	// retryInterval is how often a disk that failed is tried again, at most.
	retryInterval = 30 * time.Second
)

// Sampler is where samples come from: a *prober.Prober.
type Sampler interface {
	Interval() time.Duration
	Watch(ctx context.Context, interval time.Duration, fn func(prober.Sample) error) error
}

var _ Sampler = (*prober.Prober)(nil)

// Record keeps the samples of p at its base cadence, and every ten seconds the readings
// of its other modules, and commits them in time, until ctx ends or p stops, and returns
// why. What is unsaved is committed then; a disk that does not answer for ten seconds is
// left behind, and ErrBusy returned as well. One Record runs at a time.
func (s *Store) Record(ctx context.Context, p Sampler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	flushed := make(chan error, 1)
	go func() {
		s.runFlusher(ctx)
		flushed <- s.Flush(context.WithoutCancel(ctx))
	}()
	err := s.watch(ctx, p)
	cancel()
	timer := time.NewTimer(diskTimeout)
	defer timer.Stop()
	select {
	case flushErr := <-flushed:
		if flushErr != nil && !errors.Is(flushErr, ErrClosed) {
			err = errors.Join(err, flushErr)
		}
	case <-timer.C:
		err = errors.Join(err, ErrBusy)
	}
	return err
}

// errIntervalChanged ends a Watch that is to be begun anew.
var errIntervalChanged = errors.New("history: the cadence was changed")

// watch adds samples and what belongs to them, except while recording is off.
func (s *Store) watch(ctx context.Context, p Sampler) error {
	var modules moduleRecorder
	for {
		every := p.Interval()
		round, cancel := context.WithCancel(ctx)
		s.mu.Lock()
		s.restartWatch = cancel // SetRecording ends the round
		paused := s.isPaused
		s.mu.Unlock()

		var err error
		if paused {
			<-round.Done()
		} else {
			err = p.Watch(round, every, func(x prober.Sample) error {
				s.Add(x, modules.record(x)...)
				if p.Interval() != every {
					return errIntervalChanged
				}
				return nil
			})
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, prober.ErrBusy):
			if err := sleep(ctx, retryInterval); err != nil {
				return err
			}
		case err != nil && !errors.Is(err, errIntervalChanged) && !errors.Is(err, context.Canceled):
			return err
		}
	}
}

// runFlusher flushes every interval: sooner when there is much, and a failed disk is
// tried again sooner too.
func (s *Store) runFlusher(ctx context.Context) {
	last := time.Now()
	next := last.Add(openDelay)
	timer := time.NewTimer(openDelay)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
		}
		if s.takeFlushRequest() || !time.Now().Before(next) {
			s.Flush(ctx) // its error is in Stats, and was logged
			last = time.Now()
			next = last.Add(s.flushInterval())
		} else if sooner := last.Add(s.flushInterval()); sooner.Before(next) {
			next = sooner
		}
		timer.Reset(max(0, time.Until(next)))
	}
}

func (s *Store) takeFlushRequest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	hurry := s.flushRequested
	s.flushRequested = false
	return hurry
}

func (s *Store) flushInterval() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault != "" {
		return min(s.flush, retryInterval)
	}
	return s.flush
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
