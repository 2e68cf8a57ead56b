package control

import (
	"cmp"
	"context"
	"slices"
	"time"

	"agentctl/prober"

	"go.uber.org/zap"
)

// Local push: one sampler goroutine watches the prober while somebody wants samples, and
// publishes them to all clients that take events. Its plan follows from the state, which
// methods change and then call replanLocked:
//
//	idle ── running, and push with subscribers, or a burst ──> watching at the fastest
//	        interval of the started modules and of the bursts
//
// start, stop, set_config and bursts are common to all clients.

// Sampling is what is sampled for the socket, for status.
type Sampling struct {
	// Running is false between stop and the next start.
	Running bool `json:"running"`
	// IntervalMS is the base cadence, whatever bursts run.
	IntervalMS int64 `json:"interval_ms"`
	// Modules are the names of the started modules, as start answers them.
	Modules []string `json:"modules"`
}

// sampling is the state of local push, protected by Server.mu.
type sampling struct {
	// isRunning is set by start and cleared by stop. pushEnabled is set by subscribe_metrics
	// and by a hello with metrics_stream.
	isRunning, pushEnabled bool
	// subscribers is the number of connections that take events.
	subscribers int
	modules     prober.ModuleSet
	intervals   intervals
	bursts      []burst

	seq        uint64 // of the last event metrics
	stateCount uint64 // events state so far
	// sentReadings are those of optional modules as they were last sent. A module with the
	// same reading is not sent again.
	sentReadings prober.ModuleReadings
	// nextDue is when a module is sent next, and lastSent when it was sent last, both by
	// Sample.Mono.
	nextDue, lastSent [prober.NumModules]time.Duration

	// current is the plan that the sampler carries out. replan ends it; nil before the
	// sampler runs.
	current plan
	replan  context.CancelFunc
}

// intervals is how often each module is sent; zero is the base interval.
type intervals [prober.NumModules]time.Duration

// of is the interval of m, base unless it has its own.
func (iv *intervals) of(m prober.Module, base time.Duration) time.Duration {
	return cmp.Or(iv[m], base)
}

// burst is a faster cadence of all modules for a time. When bursts overlap, the fastest
// one applies.
type burst struct {
	every time.Duration
	until time.Time
}

// plan is what the sampler does until a time, or until it is replaced.
type plan struct {
	// every is the interval of Watch; 0 is nothing to do.
	every time.Duration
	// until is the end of the burst that ends first; zero without bursts.
	until   time.Time
	isBurst bool
}

// plan computes the plan, and removes bursts that have ended.
func (p *sampling) plan(base time.Duration, now time.Time) (pl plan) {
	p.bursts = slices.DeleteFunc(p.bursts, func(b burst) bool { return !b.until.After(now) })
	if !p.isRunning || p.modules == 0 || (len(p.bursts) == 0 && (!p.pushEnabled || p.subscribers == 0)) {
		return plan{}
	}
	for m := range prober.NumModules {
		if d := p.intervals.of(m, base); p.modules.Has(m) && (pl.every == 0 || d < pl.every) {
			pl.every = d
		}
	}
	for _, b := range p.bursts {
		pl.every, pl.isBurst = min(pl.every, b.every), true
		if pl.until.IsZero() || b.until.Before(pl.until) {
			pl.until = b.until
		}
	}
	return pl
}

// context returns a context that ends with the plan.
func (pl plan) context(ctx context.Context) (context.Context, context.CancelFunc) {
	if pl.until.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, pl.until)
}

// replanLocked makes the sampler plan again if the plan would differ.
func (s *Server) replanLocked() {
	if s.sampling.replan != nil && s.sampling.plan(s.prober.Interval(), time.Now()) != s.sampling.current {
		s.sampling.replan()
	}
}

// runSampler is the sampler goroutine: it carries out plans until ctx ends.
func (s *Server) runSampler(ctx context.Context) {
	for ctx.Err() == nil {
		s.mu.Lock()
		pl := s.sampling.plan(s.prober.Interval(), time.Now())
		pctx, cancel := pl.context(ctx)
		s.sampling.current, s.sampling.replan = pl, cancel
		s.sampling.nextDue = [prober.NumModules]time.Duration{}
		s.mu.Unlock()

		if pl.every > 0 {
			if err := s.prober.Watch(pctx, pl.every, s.publishMetrics); pctx.Err() == nil {
				s.log.Warn("no samples for the control socket", zap.Error(err))
				sleep(pctx, time.Second) // too many watchers, or the prober has stopped
			}
		} else {
			<-pctx.Done()
		}
		cancel()
	}
}

// sleep waits for d or the end of ctx, whichever comes first.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// publishMetrics publishes a sample as the event metrics, with the modules that are due.
func (s *Server) publishMetrics(p prober.Sample) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sampling.isRunning || !s.sampling.pushEnabled || s.sampling.subscribers == 0 {
		return nil // only a burst keeps the sampler going
	}
	set := s.sampling.dueLocked(&p, s.prober.Interval())
	if set == 0 {
		return nil
	}
	snap := snapshotOf(&p, set)
	s.sampling.seq++
	snap.Seq = s.sampling.seq
	e, err := newEvent(EventMetrics, EventMetrics, snap)
	if err != nil {
		return err
	}
	s.events.Publish(e)
	return nil
}

// dueLocked returns the modules that are due at a sample and sets their next time. A delayed
// sample is not sent twice; an optional module is sent only when it has a new reading.
func (p *sampling) dueLocked(s *prober.Sample, base time.Duration) (set prober.ModuleSet) {
	slack := p.current.every / 2 // samples are not taken to the microsecond
	renewed := prober.AllModules - prober.OptionalModules
	if s.Modules != nil {
		renewed |= s.Modules.NewSince(&p.sentReadings)
	}
	for m := range prober.NumModules {
		if !(p.modules & renewed).Has(m) || !p.current.isBurst && s.Mono+slack < p.nextDue[m] {
			continue
		}
		if s.Mono > 0 && s.Mono == p.lastSent[m] {
			continue // a new plan begins with the newest sample, which was sent already
		}
		set |= 1 << m
		p.lastSent[m] = s.Mono
		every := p.intervals.of(m, base)
		if p.nextDue[m] += every; p.nextDue[m] == every || p.nextDue[m] <= s.Mono {
			p.nextDue[m] = s.Mono + every // the first one of the plan, or one after a delay
		}
	}
	if s.Modules != nil {
		p.sentReadings.Update(s.Modules, set)
	}
	return set
}

// applySampling starts or stops local push, with the modules that change returns for those
// that are started now. It calls EnableModules and OnRecording in the order of the changes,
// which samplingMu ensures. When modules cannot be enabled nothing changes.
func (s *Server) applySampling(running bool, change func(now prober.ModuleSet) prober.ModuleSet) (prober.ModuleSet, error) {
	s.samplingMu.Lock()
	defer s.samplingMu.Unlock()
	s.mu.Lock()
	set, ran := change(s.sampling.modules), s.sampling.isRunning
	s.mu.Unlock()

	extra := prober.ModuleSet(0)
	if running {
		extra = set & prober.OptionalModules
	}
	if extra != s.enabledModules {
		if s.o.EnableModules == nil {
			extra = 0
		} else if err := s.o.EnableModules(extra.Names()); err != nil && running {
			return 0, newError(CodeInternal, err.Error())
		}
		s.enabledModules = extra
	}
	s.mu.Lock()
	s.sampling.isRunning, s.sampling.modules = running, set
	s.replanLocked()
	s.mu.Unlock()
	if running != ran && s.o.OnRecording != nil {
		s.o.OnRecording(running)
	}
	return set, nil
}

// setIntervals applies set_config. The change lasts until a restart; the caller saves
// it if that was requested. A zero leaves an interval as it is; with all, that of a
// module is reset. It returns the base interval.
func (s *Server) setIntervals(base time.Duration, every intervals, all bool) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if base > 0 {
		if err := s.prober.SetInterval(base); err != nil {
			return 0, newError(CodeInternal, err.Error())
		}
	}
	for m := range prober.NumModules {
		if every[m] == 0 && !all {
			continue
		}
		if m.IsOptional() {
			if err := s.prober.SetModuleInterval(m.String(), every[m]); err != nil {
				return 0, newError(CodeInternal, err.Error())
			}
		}
		s.sampling.intervals[m] = every[m]
	}
	s.replanLocked()
	return s.prober.Interval(), nil
}

// Configure changes cadences as set_config does, for a configuration that was reloaded.
// ModuleIntervals, unless nil, names all modules with an interval other than the default;
// the others are reset. Persist is ignored. When something is invalid nothing changes.
func (s *Server) Configure(c Config) error {
	var base time.Duration
	if c.BaseIntervalMS != 0 {
		var err *Error
		if base, err = integer(c.BaseIntervalMS).millis("base_interval_ms", prober.MinInterval, prober.MaxInterval); err != nil {
			return err
		}
	}
	byName := map[string]integer{}
	for name, ms := range c.ModuleIntervals {
		byName[name] = integer(ms)
	}
	every, err := parseIntervals(byName)
	if err != nil {
		return err
	}
	_, serr := s.setIntervals(base, every, c.ModuleIntervals != nil)
	return serr
}

// Sampling returns what is sampled for the socket now.
func (s *Server) Sampling() Sampling {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Sampling{s.sampling.isRunning, s.prober.Interval().Milliseconds(), s.sampling.modules.Names()}
}
