package history

import (
	"context"
	"errors"
	"time"

	"agentctl/prober"
)

const (
	// openDelay is when Record first flushes and so opens the file: soon, for status to
	// show its condition, but not while the daemon starts.
	openDelay = 2 * time.Second
	// retryInterval is how often a failed disk is retried, at most.
	retryInterval = 30 * time.Second
)

// Sampler is where samples come from: a *prober.Prober.
type Sampler interface {
	Interval() time.Duration
	Watch(ctx context.Context, interval time.Duration, fn func(prober.Sample) error) error
}

var _ Sampler = (*prober.Prober)(nil)

// Record records the samples of p at its base cadence, and every ten seconds the readings
// of its optional modules, until ctx ends or p stops, and returns why. It starts one
// goroutine, the flusher, which commits them and makes a last commit at the end. When the
// disk does not answer then for ten seconds, the flusher is left behind and the error wraps
// ErrBusy as well. At most one Record runs at a time.
func (s *Store) Record(ctx context.Context, p Sampler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The last flush begins when ctx has ended, so it does not use ctx.
	flushed := make(chan error, 1)
	go func() {
		s.runFlusher(ctx)
		flushed <- s.Flush(context.WithoutCancel(ctx))
	}()
	err := s.watch(ctx, p)
	cancel()
	select {
	case flushErr := <-flushed:
		if flushErr != nil && !errors.Is(flushErr, ErrClosed) {
			err = errors.Join(err, flushErr)
		}
	case <-time.After(diskTimeout):
		err = errors.Join(err, ErrBusy)
	}
	return err
}

// errIntervalChanged ends a Watch, for a new one to begin.
var errIntervalChanged = errors.New("history: the cadence was changed")

// watch adds samples and their readings, except while recording is off. A Watch ends, and
// a new one begins, when the cadence changes or SetRecording is called.
func (s *Store) watch(ctx context.Context, p Sampler) error {
	var modules moduleRecorder
	for {
		every := p.Interval()
		round, cancel := context.WithCancel(ctx)
		s.mu.Lock()
		s.restartWatch = cancel
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
			select { // too many watchers
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(retryInterval):
			}
		case err != nil && !errors.Is(err, errIntervalChanged) && !errors.Is(err, context.Canceled):
			return err
		}
	}
}

// runFlusher flushes at the interval, and earlier when it is requested. It is the flusher
// goroutine until ctx ends. After a failed flush, and after SetFlush, the interval may be shorter
// than when next was computed.
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
			s.Flush(ctx) // its error is logged, and in Stats
			last = time.Now()
			next = last.Add(s.flushInterval())
		} else if sooner := last.Add(s.flushInterval()); sooner.Before(next) {
			next = sooner
		}
		timer.Reset(max(0, time.Until(next)))
	}
}

// takeFlushRequest reports whether a flush was requested, and clears the request.
func (s *Store) takeFlushRequest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	hurry := s.flushRequested
	s.flushRequested = false
	return hurry
}

// flushInterval is shorter while the disk fails, so that a disk that recovers is used
// soon: what memory cannot hold until then is lost (maxUnsaved).
func (s *Store) flushInterval() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault != "" {
		return min(s.flush, retryInterval)
	}
	return s.flush
}
