package prober

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// Optional modules are read beside the sampler: a file of sysfs may hang with its bus or
// device, and a sample must not. Each enabled module has a worker; with a sample the
// collector requests the modules that are due, and after the sampler's own readings it
// waits a moment for their results.
//
//	off ── enabled ──> waiting ──> ok | absent | failing      after each result
//	                      any  ──> hung                       no result for maxAge
//	any ── disabled ─> stopping, then off when the goroutine has ended

const (
	// moduleTimeout is how long a sample waits for modules, all together. A module that
	// takes longer is not waited for again until it was quick once.
	moduleTimeout = 50 * time.Millisecond
	// moduleCloseTimeout is how long the end of the sampler waits for modules.
	moduleCloseTimeout = 250 * time.Millisecond
)

// MaxModuleInterval bounds how seldom a module may be read.
const MaxModuleInterval = 24 * time.Hour

var errModuleHung = errors.New("no answer: the bus or the device may be dead")

// ModuleSource is a Source that can read optional modules as well.
//
// OpenModule returns the reader of a module, nil if there is none. It is called once each
// time the module is enabled, in a goroutine of the module, which also uses and closes the
// reader: whatever hangs there stops nothing else.
type ModuleSource interface {
	Source
	OpenModule(name string) ModuleReader
}

// ModuleReader reads one module. Read sets that member of ModuleReadings to a new value,
// which it does not touch again, or leaves it nil if the machine does not have it.
type ModuleReader interface {
	Read(*ModuleReadings) error
	Close() error
}

// The states of a module in ModuleState.
const (
	stateOff     = "off"
	stateWaiting = "waiting" // no reading yet
	stateOK      = "ok"
	stateAbsent  = "absent" // this machine does not have it
	stateFailing = "failing"
	stateHung    = "hung"
)

// ModuleState is the state of a module, for status.
type ModuleState struct {
	Name       string `json:"name"`
	State      string `json:"state"`       // off, waiting, ok, absent, failing or hung
	IntervalMS int64  `json:"interval_ms"` // it is read with a sample, not more often than this
	LastError  string `json:"last_error,omitempty"`
}

// moduleCollector reads the enabled modules. It belongs to the goroutine of
// Prober.runSampler; nextSample copies enabled and intervals from the Prober.
type moduleCollector struct {
	source    ModuleSource // nil: no modules
	enabled   ModuleSet
	intervals [NumModules]time.Duration
	// workers are those that were started and have not ended, running how many they are.
	workers [NumModules]*moduleWorker
	running int
	// latest is what is known now. published is what the newest sample has: it is replaced,
	// not changed, because receivers of samples hold it.
	latest    ModuleReadings
	published *ModuleReadings
}

// moduleWorker reads one module.
type moduleWorker struct {
	worker[moduleResult]
	isStopping bool
	// requestedAt is the instant of the last request; isNew is set before the first.
	requestedAt time.Duration
	isNew       bool
	// isSlow is set when the last result took longer than a sample waits.
	isSlow bool
	// needsTwo is set before the first result of a module whose values are differences
	// between two readings.
	needsTwo bool
	// latest is the newest result, and latestAt the instant of its request.
	latest   ModuleReadings
	latestAt time.Duration
	state    string
	err      error
}

type moduleResult struct {
	readings ModuleReadings
	err      error
	duration time.Duration
}

// request requests the modules that are due at an instant, and stops those that are no
// longer enabled.
func (c *moduleCollector) request(at time.Duration) {
	if c.source == nil || c.enabled == 0 && c.running == 0 {
		return
	}
	for m := firstOptional; m < NumModules; m++ {
		w := c.workers[m]
		if w != nil && w.isStopping {
			w = c.removeEnded(m)
		}
		if w != nil && !w.isStopping && !c.enabled.Has(m) {
			w.end()
		}
		if w == nil && c.enabled.Has(m) {
			w = c.start(m)
		}
		if w == nil || w.isStopping || w.isPending && !w.take(0) {
			continue
		}
		// A tenth of slack: samples are not taken to the microsecond.
		if w.isNew || at-w.requestedAt >= c.intervals[m]-c.intervals[m]/10 {
			w.isNew, w.requestedAt = false, at
			w.worker.request()
		}
	}
}

// start starts the worker of a module.
func (c *moduleCollector) start(m Module) *moduleWorker {
	w := &moduleWorker{
		worker:   newWorker[moduleResult](),
		isNew:    true,
		needsTwo: m == ModuleNetwork,
		state:    stateWaiting,
	}
	c.workers[m] = w
	c.running++
	go w.run(m, c.source)
	return w
}

// removeEnded removes a worker whose goroutine has ended. One that hangs is kept, so that
// disabling and enabling a module starts no second goroutine.
func (c *moduleCollector) removeEnded(m Module) *moduleWorker {
	select {
	case <-c.workers[m].done:
		c.workers[m] = nil
		c.running--
	default:
	}
	return c.workers[m]
}

// run is the worker's goroutine.
func (w *moduleWorker) run(m Module, source ModuleSource) {
	defer close(w.done)
	reader := source.OpenModule(m.String())
	if reader != nil {
		defer reader.Close()
	}
	access := &moduleTable[m]
	var read, result ModuleReadings // reused: they escape to the reader
	w.serve(func() (r moduleResult) {
		begin := time.Now()
		read, result = ModuleReadings{}, ModuleReadings{}
		if reader != nil {
			r.err = reader.Read(&read)
		}
		access.copy(&result, &read) // and nothing else that a reader may have set
		if r.err == nil {
			r.err = access.check(&result)
		}
		if r.err == nil {
			r.readings = result
		} else {
			r.err = fmt.Errorf("module %s: %w", m, r.err)
		}
		r.duration = time.Since(begin)
		return r
	})
}

// end stops the worker and drops its reading. Its goroutine may take a while to end.
func (w *moduleWorker) end() {
	w.isStopping = true
	w.latest, w.state = ModuleReadings{}, stateOff
	w.stop()
}

// take receives the result if it arrives within d, and reports whether it did.
func (w *moduleWorker) take(d time.Duration) bool {
	r, ok := w.receive(d)
	if ok {
		w.handle(r)
	}
	return ok
}

// handle takes over a result and sets the state that follows from it.
func (w *moduleWorker) handle(r moduleResult) {
	w.isSlow = r.duration > moduleTimeout
	w.latest, w.latestAt, w.err = r.readings, w.requestedAt, r.err
	isFirst := w.needsTwo
	w.needsTwo = false
	switch {
	case r.err != nil:
		w.state = stateFailing
	case r.readings != (ModuleReadings{}):
		w.state = stateOK
	case !isFirst:
		w.state = stateAbsent
	}
}

// collect returns what is known now, nil for nothing. A reading that is older than maxAge
// and than three intervals of its module is dropped.
func (c *moduleCollector) collect(at, maxAge time.Duration) *ModuleReadings {
	if c.running == 0 {
		return nil
	}
	// A module that has no new result keeps its reading until limit: most are read less often than
	// samples are taken.
	c.waitForResults()
	c.latest = ModuleReadings{}
	for m := firstOptional; m < NumModules; m++ {
		w := c.workers[m]
		if w == nil || w.isStopping {
			continue
		}
		limit := max(maxAge, 3*c.intervals[m])
		if at-w.latestAt > limit {
			w.latest = ModuleReadings{}
		}
		if w.isPending && at-w.requestedAt > limit {
			w.state, w.err = stateHung, fmt.Errorf("module %s: %w", m, errModuleHung)
		}
		moduleTable[m].copy(&c.latest, &w.latest)
	}
	switch {
	case c.latest == (ModuleReadings{}):
		c.published = nil
	case c.published == nil || c.latest != *c.published:
		// A new value, because readers of earlier samples hold the old one.
		published := c.latest
		c.published = &published
	}
	return c.published
}

// waitForResults waits for pending results until moduleTimeout, except those of slow
// modules, whose results are taken if they are there.
func (c *moduleCollector) waitForResults() {
	var deadline time.Time // set when the first module is not ready
	for _, w := range c.workers {
		if w == nil || w.isStopping || !w.isPending || w.take(0) || w.isSlow {
			continue
		}
		if deadline.IsZero() {
			deadline = time.Now().Add(moduleTimeout)
		}
		w.isSlow = !w.take(time.Until(deadline)) || w.isSlow
	}
}

// close stops all workers and waits a moment for them. One that hangs is left to the end
// of the process, and the error says so.
func (c *moduleCollector) close() error {
	for _, w := range c.workers {
		if w != nil && !w.isStopping {
			w.end()
		}
	}
	deadline := time.Now().Add(moduleCloseTimeout)
	for m, w := range c.workers {
		if w != nil && !w.hasEnded(time.Until(deadline)) {
			return fmt.Errorf("close module %s: %w; left to the end of the process", Module(m), errModuleHung)
		}
	}
	return nil
}

// SetModules enables exactly the named modules, from the next sample on.
func (p *Prober) SetModules(names []string) error {
	set, err := optionalSetOf(names)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.enabled = set
	return nil
}

// SetModuleInterval changes how often a module is read at most, MinInterval to
// MaxModuleInterval; 0 restores Module.DefaultInterval. A module is read with a sample, so
// never more often than samples are taken.
func (p *Prober) SetModuleInterval(name string, d time.Duration) error {
	m, err := optionalModule(name)
	if err != nil {
		return err
	}
	if d == 0 {
		d = m.DefaultInterval()
	}
	if d < MinInterval || d > MaxModuleInterval {
		return fmt.Errorf("prober: interval %v of module %s is outside %v..%v", d, name, MinInterval, MaxModuleInterval)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moduleIntervals[m] = d
	return nil
}

// ModuleStates returns the state of each optional module with the newest sample, in the
// order of OptionalModuleNames.
func (p *Prober) ModuleStates() []ModuleState {
	p.mu.Lock()
	defer p.mu.Unlock()
	states := make([]ModuleState, 0, NumModules-firstOptional)
	for m := firstOptional; m < NumModules; m++ {
		s := ModuleState{Name: m.String(), State: stateOff, IntervalMS: max(p.moduleIntervals[m], p.base.every).Milliseconds()}
		if p.enabled.Has(m) {
			s.State = stateWaiting
			if p.modules.source == nil {
				s.State = stateAbsent
			}
			if known := p.moduleStates[m]; known.State != "" && known.State != stateOff {
				s.State, s.LastError = known.State, known.LastError
			}
		}
		states = append(states, s)
	}
	return states
}

// updateModuleStates copies the states of the workers for ModuleStates, and logs when a
// module begins to fail and when it is read again.
func (p *Prober) updateModuleStates() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for m := firstOptional; m < NumModules; m++ {
		w, known := p.modules.workers[m], &p.moduleStates[m]
		if w == nil {
			*known = ModuleState{}
			continue
		}
		if known.State == w.state {
			continue
		}
		if isBad(w.state) {
			p.log.Warn("a module cannot be read", zap.Error(w.err))
			known.LastError = w.err.Error()
		} else if isBad(known.State) {
			p.log.Info("a module is read again", zap.Stringer("module", m))
		}
		known.State = w.state
	}
}

func isBad(state string) bool { return state == stateHung || state == stateFailing }
