package control

import (
	"context"
	"slices"
	"time"

	"agentctl/prober"

	"go.uber.org/zap"
)

// Sampling is what start, stop and set_config made of the sampler, for status.
type Sampling struct {
	Running    bool     `json:"running"`
	IntervalMS int64    `json:"interval_ms"`
	Modules    []string `json:"modules"` // names, as start answers them
}

// sampling is the state of local push, protected by Server.mu. While somebody wants
// samples, one goroutine (Server.feed) watches the prober; else nothing runs.
type sampling struct {
	isRunning   bool
	pushEnabled bool // the switch of subscribe_metrics, for everybody
	subscribers int  // connections that take events
	modules     prober.ModuleSet
	intervals   intervals
	bursts      []burst

	seq          uint64                           // of the last metrics
	stateCount   uint64                           // states so far
	sentReadings prober.ModuleReadings            // of the modules beyond the frame, told last
	nextDue      [prober.NumModules]time.Duration // when a module is told next, on the samples' clock
	lastSent     [prober.NumModules]time.Duration // the sample it was told of last
	current      plan                             // what feed does
	replan       context.CancelFunc               // makes feed plan anew
}

// intervals is how often each module wants to be told; zero: the base interval.
type intervals [prober.NumModules]time.Duration

func (iv *intervals) of(m prober.Module, base time.Duration) time.Duration {
	if iv[m] > 0 {
		return iv[m]
	}
	return base
}

type burst struct {
	every time.Duration
	until time.Time
}

// plan is what feed shall do: watch at an interval, or nothing when it is zero, and
// think again at until.
type plan struct {
	every   time.Duration
	until   time.Time // zero: until told
	isBurst bool
}

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

// context is what the plan holds for.
func (pl plan) context(ctx context.Context) (context.Context, context.CancelFunc) {
	if pl.until.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, pl.until)
}

// replanLocked has feed plan anew if there is anything new.
func (s *Server) replanLocked() {
	if s.sampling.replan != nil && s.sampling.plan(s.prober.Interval(), time.Now()) != s.sampling.current {
		s.sampling.replan()
	}
}

// runSampler watches the prober as long and as fast as somebody wants it, until ctx ends.
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
				s.sleep(pctx, time.Second) // too many watchers, or a prober that ended
			}
		} else {
			<-pctx.Done()
		}
		cancel()
	}
}

// sleep waits for d or the end of ctx.
func (s *Server) sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
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

// dueLocked takes the modules that are due at a sample and sets their next time. A
// module is not told twice when it was held up; one beyond the frame only when it was
// read anew.
func (p *sampling) dueLocked(s *prober.Sample, base time.Duration) (set prober.ModuleSet) {
	slack := p.current.every / 2
	var news prober.ModuleSet
	if s.Modules != nil {
		news = s.Modules.NewSince(&p.sentReadings)
	}
	for m := range prober.NumModules {
		if !p.modules.Has(m) || (!p.current.isBurst && s.Mono+slack < p.nextDue[m]) || (m.IsOptional() && !news.Has(m)) {
			continue
		}
		if s.Mono > 0 && s.Mono == p.lastSent[m] {
			continue // a new plan begins with the newest sample, which was told already
		}
		set |= 1 << m
		p.lastSent[m] = s.Mono
		every := p.intervals.of(m, base)
		if next := p.nextDue[m] + every; p.nextDue[m] > 0 && next > s.Mono {
			p.nextDue[m] = next
		} else {
			p.nextDue[m] = s.Mono + every
		}
	}
	if s.Modules != nil {
		p.sentReadings.Update(s.Modules, set)
	}
	return set
}

// applySampling makes what runs anew, out of the modules that are started now. It tells those
// who read and record, in the order of the changes; if modules cannot be had nothing is
// changed.
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

// setIntervals applies set_config; zeros change nothing, unless all modules are set.
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

// Configure changes cadences as set_config does, at once: for a configuration that was
// read anew. ModuleIntervals, unless nil, names all modules that have an interval of
// their own; the others have none any more. Persist is not looked at. When something is
// wrong nothing is changed.
func (s *Server) Configure(c Config) error {
	base := time.Duration(c.BaseIntervalMS) * time.Millisecond
	if c.BaseIntervalMS != 0 && (c.BaseIntervalMS < prober.MinInterval.Milliseconds() || c.BaseIntervalMS > prober.MaxInterval.Milliseconds()) {
		return errParams("base_interval_ms", "must be %d..%d", prober.MinInterval.Milliseconds(), prober.MaxInterval.Milliseconds())
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

// Sampling tells what is sampled for this socket now.
func (s *Server) Sampling() Sampling {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Sampling{s.sampling.isRunning, s.prober.Interval().Milliseconds(), s.sampling.modules.Names()}
}
