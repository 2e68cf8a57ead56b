// Package prober samples the machine on a cadence: cpu, memory, disk and load,
// the readings of a metric frame (RFC-0009 §5.1).
//
// One goroutine takes every reading, so there is one owner of the CPU deltas, and
// one timer drives it:
//
//	p := prober.New(prober.Options{})
//	go p.Run(ctx)                       // samples every 5 s until ctx ends
//	s, err := p.Latest()                // what it last saw
//	s, err = p.Now(ctx)                 // not older than a second
//	err = p.Watch(ctx, time.Second, fn) // fn for each sample, here, until ctx ends
//
// Instants are kept on the monotonic clock and do not drift. Whoever wants the
// same instant gets the same reading. After a stop of the process, instants that
// were missed are counted and skipped, never made up for.
//
// A reading that cannot be had is an error, never a frame of zeros.
//
// Beyond the frame there are modules (OptionalModuleNames), off unless enabled: network,
// temperature, power and wear. They come in Sample.Modules, each read in a goroutine of
// its own.
package prober

import (
	"context"
	"errors"
	"fmt"
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
	// maxNowAge is how old a sample may be to be the answer of Now.
	maxNowAge = time.Second
	// answerTimeout bounds Now, and the wait of Run for a reading that hangs.
	answerTimeout = time.Second
	// maxWaiters bounds the watchers and the callers of Now, together.
	maxWaiters = 256
)

// Errors a caller may decide by.
var (
	ErrNoSample = errors.New("prober: no sample was taken yet")
	ErrHung     = errors.New("prober: the sampler does not answer, a collector hangs")
	ErrStopped  = errors.New("prober: stopped")
	ErrBusy     = fmt.Errorf("prober: %d watchers already", maxWaiters)
)

// Options configure a Prober. The zero value samples this machine every 5 s.
type Options struct {
	Root     string        // the tree with proc/ in it; default "/"
	DiskPath string        // a path on the filesystem whose fill is measured; default "/"
	Interval time.Duration // base cadence, MinInterval..MaxInterval (else the nearer one); default DefaultInterval
	Now      func() int64  // trusted wall clock, milliseconds since 1970; default the system's
	Source   Source        // where readings come from; default the machine. Run closes it
	Modules  []string      // of OptionalModuleNames, to be read as well; default none. A name that is unknown is an error of Run
	Logger   *zap.Logger   // default none
}

// Prober takes samples and hands them out. Its methods may be called from any
// goroutine, before Run as well.
type Prober struct {
	source     Source
	wallClock  func() int64
	log        *zap.Logger
	start      time.Time
	wake       chan struct{} // room for one: the plan changed
	stopped    chan struct{} // closed when no more samples will come
	optionsErr error         // of Options, told by Run

	modules moduleCollector // the loop's

	mu              sync.Mutex // protects the fields below
	hasRun          bool
	base            schedule
	waiters         []*waiter
	latest          Sample
	latestErr       error
	diskFailed      bool // the newest sample is without the disk
	stats           Stats
	enabled         ModuleSet
	moduleIntervals [NumModules]time.Duration
	moduleStates    [NumModules]ModuleState // State and LastError, of the newest sample
}

// Stats counts what a Prober did since New.
type Stats struct {
	Samples     uint64 // readings taken
	Errors      uint64 // readings that failed
	Slips       uint64 // instants of the base cadence or of a watcher that were skipped, because the process or a reading was held up
	Missed      uint64 // samples a watcher did not get, because its fn was still busy
	Watchers    int    // watchers now
	LastError   string // of the newest failed reading, kept when the next one succeeds
	LastErrorAt int64  // trusted wall clock, milliseconds; 0 when none failed
}

// New makes a Prober; nothing starts or is opened before Run.
func New(o Options) *Prober {
	p := &Prober{
		source:    o.Source,
		wallClock: o.Now,
		log:       o.Logger,
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
	if p.log == nil {
		p.log = zap.NewNop()
	}
	if p.source == nil {
		if o.Root == "" {
			o.Root = "/"
		} else if o.Root[len(o.Root)-1] != '/' {
			o.Root += "/"
		}
		if o.DiskPath == "" {
			o.DiskPath = "/"
		}
		p.source = newMachine(o.Root, o.DiskPath, p.staleAfter)
	}
	p.modules.source, _ = p.source.(ModuleSource)
	return p
}

// Run samples until ctx ends and returns its error. It may be called once. A
// sampleResult that hangs cannot be ended: Run then returns after a second with an
// error that wraps ErrHung as well, and leaves it behind.
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

	// Run itself takes no readings, so that one that hangs cannot hold it.
	go p.runSampler(ctx)
	<-ctx.Done()
	timer := time.NewTimer(answerTimeout)
	defer timer.Stop()
	select {
	case <-p.stopped:
		return ctx.Err()
	case <-timer.C:
		return fmt.Errorf("%w (%w)", ErrHung, ctx.Err())
	}
}

// runSampler is the sampler: one timer, set to the earliest instant anybody wants.
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

// nextSample tells the time, and how long until the next instant somebody wants. It takes
// the wishes for modules along.
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

// takeSample takes one reading. Nothing that the frame's schema refuses gets past it,
// whatever the Source; only the wall clock may still be unset (see Sample.Check). The
// enabled are read meanwhile, so that they are of the same moment.
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

// publish hands a reading to everybody who wanted the instant.
func (p *Prober) publish(s *Sample, err error, at time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countSampleLocked(err)
	if err == nil && (s.DiskErr == nil) == p.diskFailed {
		if p.diskFailed = s.DiskErr != nil; p.diskFailed {
			p.log.Warn("sampling goes on without the disk", zap.Error(s.DiskErr))
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

// countSampleLocked counts a reading, and logs when readings begin to fail and when they
// succeed again, not each one.
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

// Interval is the base cadence.
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

// Stats tells what was done so far.
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

// staleAfter is the age at which a reading no longer stands for the present:
// three base intervals, at least 3 s.
func (p *Prober) staleAfter() time.Duration {
	return max(3*p.Interval(), 3*time.Second)
}

// now is the monotonic time since New.
func (p *Prober) now() time.Duration { return time.Since(p.start) }

// wakeSampler makes the loop plan anew.
func (p *Prober) wakeSampler() {
	select {
	case p.wake <- struct{}{}:
	default: // already told
	}
}

func checkInterval(d time.Duration) error {
	if d < MinInterval || d > MaxInterval {
		return fmt.Errorf("prober: interval %v is outside %v..%v", d, MinInterval, MaxInterval)
	}
	return nil
}
