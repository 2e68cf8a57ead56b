// Package prober samples the machine at a cadence: cpu, memory, disk and load, which are
// the readings of a metric frame (RFC-0009 §5.1), and the optional modules network,
// temperature, power and wear, which come in Sample.Modules.
//
//	p := prober.New(prober.Options{})
//	go p.Run(ctx)                       // samples every 5 s until ctx ends
//	s, err := p.Latest()                // the newest sample
//	s, err = p.Now(ctx)                 // at most a second old
//	err = p.Watch(ctx, time.Second, fn) // calls fn for each sample, here, until ctx ends
//
// What can be sampled is listed in the sensor catalogue (Sensors, catalogue.go), from which
// the packages that record, publish and compare readings are derived.
//
// One goroutine, runSampler, takes the samples, so the CPU counters have one owner; a
// single timer is set to the earliest instant that anybody wants. Whoever wants the same
// instant gets the same sample. Instants follow the monotonic clock and do not drift; those
// missed while the process was stopped are counted and skipped. A call that may hang,
// statfs or a module's driver, runs in a worker goroutine.
//
// A failed reading is an error, never a frame of zeros.
//
// Prober.mu is a leaf. The sampler takes it to plan the next instant and to publish a sample, not
// while it reads, so a reading that hangs blocks no caller. What only the sampler uses has no lock:
// the source, the modules' workers and the counters.
package prober

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Bounds of the base cadence and of a watcher's interval.
const (
	MinInterval     = 100 * time.Millisecond
	MaxInterval     = 60 * time.Second
	DefaultInterval = 5 * time.Second
)

const (
	// maxNowAge is how old a sample may be for Now to return it.
	maxNowAge = time.Second
	// answerTimeout bounds Now, and the wait of Run for a reading that hangs.
	answerTimeout = time.Second
	// maxWaiters bounds the watchers and the callers of Now, together.
	maxWaiters = 256
)

// Errors that callers test for.
var (
	ErrNoSample = errors.New("prober: no sample was taken yet")
	ErrHung     = errors.New("prober: the sampler does not answer: a reading hangs")
	ErrStopped  = errors.New("prober: stopped")
	ErrBusy     = fmt.Errorf("prober: %d watchers already", maxWaiters)
)

// Options configure a Prober. The zero value samples this machine every 5 s.
type Options struct {
	// Root is the directory with proc/ and sys/ in it; default "/".
	Root string
	// DiskPath is a path on the filesystem that disk_pct measures; default "/".
	DiskPath string
	// Interval is the base cadence, moved into MinInterval..MaxInterval; default
	// DefaultInterval.
	Interval time.Duration
	// Now is the trusted wall clock, milliseconds since 1970; default the system's.
	Now func() int64
	// Source is where readings come from; default the machine. Run closes it.
	Source Source
	// Modules are names of optional modules to be read as well; default none. Run returns
	// an error for an unknown name.
	Modules []string
	Logger  *zap.Logger // default none
}

// Prober takes samples and delivers them. Its methods may be called from any goroutine,
// also before Run.
type Prober struct {
	source     Source
	wallClock  func() int64
	log        *zap.Logger
	start      time.Time
	wake       chan struct{} // buffers one: an earlier instant may be wanted
	stopped    chan struct{} // closed when no more samples will come
	optionsErr error         // what is wrong with Options; Run returns it

	modules moduleCollector // only the sampler goroutine uses it

	mu              sync.Mutex // protects the fields below
	hasRun          bool
	base            schedule
	waiters         []*waiter
	latest          Sample
	latestErr       error
	diskFailed      bool // the newest sample has no disk value
	stats           Stats
	enabled         ModuleSet
	moduleIntervals [NumModules]time.Duration
	moduleStates    [NumModules]ModuleState // State and LastError, of the newest sample
	reading         [NumModules]int         // readers of ReadModules that run
}

// Stats counts since New.
type Stats struct {
	Samples uint64
	Errors  uint64 // readings that failed
	// Slips are instants of the base cadence or of a watcher that were skipped, because
	// the process or a reading was held up.
	Slips uint64
	// Missed are samples that a watcher did not get, because its fn was still busy.
	Missed   uint64
	Watchers int // watchers now
	// LastError is of the newest failed reading. It stays when the next one succeeds.
	LastError   string
	LastErrorAt int64 // trusted wall clock, milliseconds; 0 when none failed
}

// New returns a Prober. It starts and opens nothing; Run does.
func New(o Options) *Prober {
	p := &Prober{
		source:    o.Source,
		wallClock: o.Now,
		log:       cmp.Or(o.Logger, zap.NewNop()),
		start:     time.Now(),
		wake:      make(chan struct{}, 1),
		stopped:   make(chan struct{}),
		base:      schedule{every: DefaultInterval},
		latestErr: ErrNoSample,
	}
	for m := range NumModules {
		p.moduleIntervals[m] = m.DefaultInterval()
	}
	p.enabled, p.optionsErr = optionalSetOf(o.Modules)
	if o.Interval != 0 {
		p.base.every = min(max(o.Interval, MinInterval), MaxInterval)
	}
	if p.wallClock == nil {
		p.wallClock = func() int64 { return time.Now().UnixMilli() }
	}
	if p.source == nil {
		root := strings.TrimSuffix(o.Root, "/") + "/"
		p.source = newMachine(root, cmp.Or(o.DiskPath, "/"), p.staleAfter)
	}
	p.modules.source, _ = p.source.(ModuleSource)
	return p
}

// Run samples until ctx ends and returns its error. It may be called once. A reading that
// hangs cannot be ended: Run then returns after a second with an error that wraps ErrHung
// as well, and leaves the reading's goroutine behind.
func (p *Prober) Run(ctx context.Context) error {
	p.mu.Lock()
	if p.hasRun {
		p.mu.Unlock()
		return errors.New("prober: Run was called twice")
	}
	p.hasRun = true
	p.base.next = p.now()
	p.mu.Unlock()
	if p.optionsErr != nil {
		close(p.stopped)
		return errors.Join(p.optionsErr, p.source.Close())
	}

	// The samples are taken in another goroutine, so that a hanging one cannot block Run.
	go p.runSampler(ctx)
	<-ctx.Done()
	select {
	case <-p.stopped:
		return ctx.Err()
	case <-time.After(answerTimeout):
		return fmt.Errorf("%w (%w)", ErrHung, ctx.Err())
	}
}

// runSampler is the sampler goroutine.
func (p *Prober) runSampler(ctx context.Context) {
	defer close(p.stopped)
	defer func() {
		if err := errors.Join(p.modules.close(), p.source.Close()); err != nil {
			p.log.Warn("sampler did not close", zap.Error(err))
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var s Sample
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-timer.C:
		}
		at, wait := p.nextSample()
		for ; wait <= 0 && ctx.Err() == nil; at, wait = p.nextSample() {
			err := p.takeSample(&s, at)
			p.publish(&s, err, at)
		}
		timer.Reset(wait)
	}
}

// nextSample returns the time and how long until the next wanted instant. It copies the
// modules' settings for the collector, which has no lock.
func (p *Prober) nextSample() (at, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.modules.enabled, p.modules.intervals = p.enabled, p.moduleIntervals
	next := p.base.next
	for _, w := range p.waiters {
		next = min(next, w.next)
	}
	at = p.now()
	return at, next - at
}

// takeSample takes one sample. One that the frame's schema would refuse is an error,
// whatever the Source; the wall clock may still be unset (see Sample.Check). The modules
// are read at the same time.
func (p *Prober) takeSample(s *Sample, at time.Duration) error {
	*s = Sample{}
	p.modules.request(at)
	if err := p.source.Read(s); err != nil {
		return fmt.Errorf("sample: %w", err)
	}
	if err := s.checkReadings(); err != nil {
		return fmt.Errorf("sample: %w", err)
	}
	s.TSMS, s.Mono = p.wallClock(), at
	s.Modules = nil
	if p.modules.running > 0 {
		s.Modules = p.modules.collect(at, p.staleAfter())
		p.updateModuleStates()
	}
	return nil
}

// publish delivers a sample, or why there is none, to everybody who wanted the instant.
func (p *Prober) publish(s *Sample, err error, at time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countSampleLocked(err)
	if err == nil && (s.DiskErr == nil) == p.diskFailed {
		if p.diskFailed = s.DiskErr != nil; p.diskFailed {
			p.log.Warn("sampling continues without the disk", zap.Error(s.DiskErr))
		} else {
			p.log.Info("the disk is sampled again")
		}
	}
	if err != nil {
		p.latest, p.latestErr = Sample{}, err
	} else {
		p.latest, p.latestErr = *s, nil
	}
	if p.base.next <= at {
		p.stats.Slips += p.base.skipTo(at)
	}
	// A watcher gets no error: its next sample may be good, and Stats counts the failure. A caller of
	// Now waits for this one, so it gets the reason.
	kept := p.waiters[:0]
	for _, w := range p.waiters {
		if w.next > at {
			kept = append(kept, w)
			continue
		}
		if err == nil || w.isOnce() {
			p.stats.Missed += w.deliver(sampleResult{p.latest, err})
		}
		if !w.isOnce() {
			p.stats.Slips += w.skipTo(at)
			kept = append(kept, w)
		}
	}
	clear(p.waiters[len(kept):])
	p.waiters = kept
}

// countSampleLocked counts a sample, and logs when sampling begins to fail and when it
// succeeds again.
func (p *Prober) countSampleLocked(err error) {
	failed := p.latestErr != nil && !errors.Is(p.latestErr, ErrNoSample)
	if err == nil {
		p.stats.Samples++
		if failed {
			p.log.Info("sampling again")
		}
		return
	}
	p.stats.Errors++
	p.stats.LastError, p.stats.LastErrorAt = err.Error(), p.wallClock()
	if !failed {
		p.log.Warn("sampling failed", zap.Error(err))
	}
}

// Interval returns the base cadence.
func (p *Prober) Interval() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.base.every
}

// SetInterval changes the base cadence, MinInterval..MaxInterval. The next sample
// comes d after the last one, at once if that is past. Watchers keep theirs.
func (p *Prober) SetInterval(d time.Duration) error {
	if err := checkInterval(d); err != nil {
		return err
	}
	p.mu.Lock()
	p.base.next += d - p.base.every
	p.base.next = max(p.base.next, p.now())
	p.base.every = d
	p.mu.Unlock()
	p.wakeSampler()
	return nil
}

// Stats returns the counts so far.
func (p *Prober) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	for _, w := range p.waiters {
		if !w.isOnce() {
			s.Watchers++
		}
	}
	return s
}

// staleAfter is the age at which a sample is too old for Latest: three base intervals, at
// least 3 s.
func (p *Prober) staleAfter() time.Duration {
	return max(3*p.Interval(), 3*time.Second)
}

// now is the monotonic time since New.
func (p *Prober) now() time.Duration { return time.Since(p.start) }

// wakeSampler makes the sampler compute the next instant again.
func (p *Prober) wakeSampler() {
	select {
	case p.wake <- struct{}{}:
	default: // it is awake already
	}
}

// checkInterval checks a cadence against MinInterval and MaxInterval.
func checkInterval(d time.Duration) error {
	if d < MinInterval || d > MaxInterval {
		return fmt.Errorf("prober: interval %v is outside %v..%v", d, MinInterval, MaxInterval)
	}
	return nil
}
