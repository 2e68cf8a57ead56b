package prober

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// schedule is a sequence of instants, next, next+every, …
type schedule struct {
	next, every time.Duration
}

// skipTo moves past at, which is not before next, and returns how many instants were
// skipped: all that are due except the one that is served now.
func (s *schedule) skipTo(at time.Duration) (skipped uint64) {
	late := (at - s.next) / s.every
	s.next += (late + 1) * s.every
	return uint64(late)
}

// waiter is a watcher, which wants samples at an interval, or a caller of Now, which wants
// one (every is zero).
type waiter struct {
	schedule
	// ch buffers one sample. A slow receiver finds the newest there, and delays nobody
	// else.
	ch chan sampleResult
}

// sampleResult is a sample, or why there is none.
type sampleResult struct {
	sample Sample
	err    error
}

func newWaiter(next, every time.Duration) *waiter {
	return &waiter{schedule{next, every}, make(chan sampleResult, 1)}
}

func (w *waiter) isOnce() bool { return w.every == 0 }

// deliver replaces a sample that was not received yet; missed is 1 if there was one. publish
// and addWatcher call it, with Prober.mu held, so the send does not block.
func (w *waiter) deliver(r sampleResult) (missed uint64) {
	select {
	case <-w.ch:
		missed = 1
	default:
	}
	w.ch <- r
	return missed
}

// Latest returns the newest sample, or why there is none: none was taken yet, the newest
// one failed, or the last one is older than three intervals.
func (p *Prober) Latest() (Sample, error) {
	stale := p.staleAfter()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.latestErr != nil {
		return Sample{}, p.latestErr
	}
	if age := p.now() - p.latest.Mono; age > stale {
		return Sample{}, fmt.Errorf("%w: the newest sample is %v old", p.stoppedOr(ErrHung), age.Round(time.Second))
	}
	return p.latest, nil
}

// Now returns the newest sample if it is younger than a second, else takes one, which
// concurrent callers share. It waits at most a second, and not beyond ctx.
func (p *Prober) Now(ctx context.Context) (Sample, error) {
	p.mu.Lock()
	at := p.now()
	if p.latestErr == nil && at-p.latest.Mono < maxNowAge {
		defer p.mu.Unlock()
		return p.latest, nil
	}
	// An instant that is due: the sampler serves all callers that come before it wakes with one sample.
	w := newWaiter(at, 0)
	err := p.addWaiterLocked(w)
	p.mu.Unlock()
	if err != nil {
		return Sample{}, err
	}
	defer p.removeWaiter(w)
	p.wakeSampler()

	select {
	case r := <-w.ch:
		return r.sample, r.err
	case <-ctx.Done():
		return Sample{}, ctx.Err()
	case <-p.stopped:
		return Sample{}, ErrStopped
	case <-time.After(answerTimeout):
		return Sample{}, fmt.Errorf("%w: no sample within %v", ErrHung, answerTimeout)
	}
}

// Watch calls fn with a sample at once and then each interval
// (MinInterval..MaxInterval), in the caller's goroutine, until ctx ends or fn
// returns an error, and returns that. It returns ErrStopped when Run has ended.
//
// The first sample is the newest one if that is younger than a tenth of the interval, else
// a new one; the instants are counted from there. A failed sample is left out: the reason
// is in Latest and Stats. When fn is slow it gets the newest sample next and misses those
// in between; it holds up nobody else.
//
// CPUPct is the mean since the sample that fn got before, whatever others requested in
// between; in the first it is that of Latest. The same holds for Modules.Network.
func (p *Prober) Watch(ctx context.Context, interval time.Duration, fn func(Sample) error) error {
	if err := checkInterval(interval); err != nil {
		return err
	}
	w, err := p.addWatcher(interval)
	if err != nil {
		return err
	}
	defer p.removeWaiter(w)
	p.wakeSampler()

	var before cpuTimes
	var traffic netWindow
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.stopped:
			// Both often come from one cancel: the caller's reason comes first.
			return cmp.Or(ctx.Err(), ErrStopped)
		case r := <-w.ch:
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s := r.sample
			if pct, ok := s.cpu.pctSince(before); ok && before.total() > 0 {
				s.CPUPct = pct
			}
			before = s.cpu
			s.Modules = traffic.rebase(s.Modules)
			if err := fn(s); err != nil {
				return err
			}
		}
	}
}

// addWatcher adds a watcher. One that is added soon after a sample starts with that sample,
// and shares further instants with its other receivers.
func (p *Prober) addWatcher(interval time.Duration) (*waiter, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.now()
	w := newWaiter(at, interval)
	if err := p.addWaiterLocked(w); err != nil {
		return nil, err
	}
	if p.latestErr == nil && at-p.latest.Mono <= min(interval/10, maxNowAge) {
		w.next = p.latest.Mono + interval
		w.deliver(sampleResult{sample: p.latest})
	}
	return w, nil
}

// addWaiterLocked refuses more than maxWaiters, and waiters that would wait in vain.
func (p *Prober) addWaiterLocked(w *waiter) error {
	if err := p.stoppedOr(nil); err != nil {
		return err
	}
	if len(p.waiters) >= maxWaiters {
		return ErrBusy
	}
	p.waiters = append(p.waiters, w)
	return nil
}

// removeWaiter forgets a waiter; one that was served once is gone already.
func (p *Prober) removeWaiter(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.waiters, w); i >= 0 {
		p.waiters = slices.Delete(p.waiters, i, i+1)
	}
}

// stoppedOr is ErrStopped once there will be no more samples, else err.
func (p *Prober) stoppedOr(err error) error {
	select {
	case <-p.stopped:
		return ErrStopped
	default:
		return err
	}
}
