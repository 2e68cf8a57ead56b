package prober

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// moduleTimeout is how long a sample waits for its modules, all together. One that
// takes longer is not waited for again until it was quick once.
const moduleTimeout = 50 * time.Millisecond

// moduleCloseTimeout is how long the end of the sampler waits for its modules.
const moduleCloseTimeout = 250 * time.Millisecond

// MaxModuleInterval bounds how seldom a module may be read.
const MaxModuleInterval = 24 * time.Hour

var errModuleHung = errors.New("no answer, a dead bus or device hangs like this")

// ModuleSource is a Source that can read modules as well.
//
// OpenModule gives the reader of one module, nil if there is none. It is called, and the
// reader used and closed, in a goroutine of the module's own: whatever hangs there
// stops nothing else. It is called once each time the module is enabled.
type ModuleSource interface {
	Source
	OpenModule(name string) ModuleReader
}

// ModuleReader reads one module. Read sets that member of Modules to a new value,
// which it does not touch again, or leaves it nil if the machine does not have it.
type ModuleReader interface {
	Read(*ModuleReadings) error
	Close() error
}

// ModuleState is what became of a module.
type ModuleState struct {
	Name       string `json:"name"`
	State      string `json:"state"`       // off, waiting (no reading yet), ok, absent (this machine does not have it), failing, hung
	IntervalMS int64  `json:"interval_ms"` // it is read with a sample, not more often than this
	LastError  string `json:"last_error,omitempty"`
}

// moduleCollector read the enabled modules beside the sampler: it asks those that are due
// before its own reading and takes their answers after it. All but want and every
// belongs to the goroutine of Prober.loop.
type moduleCollector struct {
	source    ModuleSource // nil: no modules
	enabled   ModuleSet    // copied from the Prober in plan, every too
	intervals [NumModules]time.Duration
	workers   [NumModules]*moduleWorker // those that were started and not forgotten
	running   int                       // how many of them
	latest    ModuleReadings            // what is known now
	published *ModuleReadings           // what the newest sample has
	timer     *time.Timer               // armed only while a sample waits
}

// moduleWorker is the loop's end of one module's goroutine.
type moduleWorker struct {
	requests chan struct{}     // one reading each; closed to end it
	results  chan moduleResult // room for the one answer that can be due
	done     chan struct{}     // closed when the goroutine is gone

	stopping    bool           // requests was closed
	requestedAt time.Duration  // the instant of the last ask
	isPending   bool           // it was not answered yet
	isNew       bool           // nothing was asked so far
	isSlow      bool           // the last answer took longer than a sample waits
	needsTwo    bool           // the first reading says nothing: figures are between two
	latest      ModuleReadings // the newest reading, only this module
	latestAt    time.Duration  // the instant it was asked for
	state       string
	err         error
}

type moduleResult struct {
	readings ModuleReadings
	err      error
	duration time.Duration
}

// request has the modules read that are due at an instant, and ends those that are no
// longer wanted.
func (c *moduleCollector) request(at time.Duration) {
	if c.source == nil || c.enabled == 0 && c.running == 0 {
		return
	}
	for m := firstOptional; m < NumModules; m++ {
		r := c.workers[m]
		if r != nil && r.stopping {
			r = c.removeStopped(m)
		}
		if r != nil && !r.stopping && !c.enabled.Has(m) {
			r.stop()
		}
		if r == nil && c.enabled.Has(m) {
			r = c.start(m)
		}
		if r != nil && r.isPending {
			r.poll() // what came late makes room for the next
		}
		// A tenth of slack: samples are not taken to the microsecond.
		if r == nil || r.stopping || r.isPending || !r.isNew && at-r.requestedAt < c.intervals[m]-c.intervals[m]/10 {
			continue
		}
		r.isPending, r.isNew, r.requestedAt = true, false, at
		r.requests <- struct{}{}
	}
}

func (c *moduleCollector) start(m Module) *moduleWorker {
	r := &moduleWorker{
		requests: make(chan struct{}, 1),
		results:  make(chan moduleResult, 1),
		done:     make(chan struct{}),
		isNew:    true,
		needsTwo: m == ModuleNetwork,
		state:    "waiting",
	}
	c.workers[m] = r
	c.running++
	go r.run(m, c.source)
	return r
}

// removeStopped forgets a collector whose goroutine is gone. One that hangs is kept, so that
// switching a module off and on starts no second one beside it.
func (c *moduleCollector) removeStopped(m Module) *moduleWorker {
	select {
	case <-c.workers[m].done:
		c.workers[m] = nil
		c.running--
	default:
	}
	return c.workers[m]
}

// run makes the readings. It never blocks on answers: one ask, one answer, and no
// second ask before the answer was taken.
func (r *moduleWorker) run(m Module, source ModuleSource) {
	defer close(r.done)
	reader := source.OpenModule(m.String())
	if reader != nil {
		defer reader.Close()
	}
	for range r.requests {
		begin := time.Now()
		var a moduleResult
		if reader != nil {
			a.err = reader.Read(&a.readings)
		}
		a.readings = a.readings.Only(1 << m)
		if a.err == nil {
			a.err = moduleTable[m].check(&a.readings)
		}
		if a.err != nil {
			a.readings, a.err = ModuleReadings{}, fmt.Errorf("module %s: %w", m, a.err)
		}
		a.duration = time.Since(begin)
		r.results <- a
	}
}

func (r *moduleWorker) stop() {
	r.stopping = true
	r.latest, r.state = ModuleReadings{}, "off"
	close(r.requests)
}

// poll takes the answer if it is there.
func (r *moduleWorker) poll() bool {
	select {
	case a := <-r.results:
		r.handle(a)
		return true
	default:
		return false
	}
}

// handle books an answer.
func (r *moduleWorker) handle(a moduleResult) {
	r.isPending, r.isSlow = false, a.duration > moduleTimeout
	r.latest, r.latestAt, r.err = a.readings, r.requestedAt, a.err
	first := r.needsTwo
	r.needsTwo = false
	switch {
	case a.err != nil:
		r.state = "failing"
	case first && a.readings == (ModuleReadings{}):
	case a.readings == (ModuleReadings{}):
		r.state = "absent"
	default:
		r.state = "ok"
	}
}

// modules takes the answers, waiting a moment for those that are usually quick, and
// returns what is known now; nil is nothing. A reading older than maxAge, and than
// three intervals of its module, no longer stands for the present.
func (c *moduleCollector) collect(at, maxAge time.Duration) *ModuleReadings {
	if c.running == 0 {
		return nil
	}
	c.waitForResults()
	c.latest = ModuleReadings{}
	for m := firstOptional; m < NumModules; m++ {
		r := c.workers[m]
		if r == nil || r.stopping {
			continue
		}
		if age := at - r.latestAt; age > max(maxAge, 3*c.intervals[m]) {
			r.latest = ModuleReadings{}
		}
		if r.isPending && at-r.requestedAt > max(maxAge, 3*c.intervals[m]) {
			r.state, r.err = "hung", fmt.Errorf("module %s: %w", m, errModuleHung)
		}
		moduleTable[m].copy(&c.latest, &r.latest)
	}
	switch {
	case c.latest == (ModuleReadings{}):
		c.published = nil
	case c.published == nil || c.latest != *c.published:
		shown := c.latest
		c.published = &shown
	}
	return c.published
}

func (c *moduleCollector) waitForResults() {
	expired, armed := false, false
	for _, r := range c.workers {
		if r == nil || r.stopping || !r.isPending || r.poll() || r.isSlow {
			continue
		}
		if !armed {
			armed = true
			c.startTimer()
			defer c.timer.Stop()
		}
		if !expired {
			select {
			case a := <-r.results:
				r.handle(a)
				continue
			case <-c.timer.C:
				expired = true
			}
		}
		r.isSlow = true
	}
}

func (c *moduleCollector) startTimer() {
	if c.timer == nil {
		c.timer = time.NewTimer(moduleTimeout)
		return
	}
	c.timer.Reset(moduleTimeout)
}

// close ends all goroutines and waits a moment for them. One that hangs cannot be
// ended: it is left to the end of the process, and the error says so.
func (c *moduleCollector) close() error {
	for _, r := range c.workers {
		if r != nil && !r.stopping {
			r.stop()
		}
	}
	timer := time.NewTimer(moduleCloseTimeout)
	defer timer.Stop()
	for m, r := range c.workers {
		if r == nil {
			continue
		}
		select {
		case <-r.done:
		case <-timer.C:
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

// SetModuleInterval has a module read at most so often, MinInterval to
// MaxModuleInterval; 0 restores its default. A module is read with a sample, so never
// more often than samples are taken. Defaults: network with each sample, temperature
// 5 s, power 2 s, wear 1 h.
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

// ModuleStates tells of every module, in the order of OptionalModuleNames, how it stood with
// the newest sample.
func (p *Prober) ModuleStates() []ModuleState {
	p.mu.Lock()
	defer p.mu.Unlock()
	states := make([]ModuleState, 0, NumModules-firstOptional)
	for m := firstOptional; m < NumModules; m++ {
		s := ModuleState{Name: m.String(), State: "off", IntervalMS: max(p.moduleIntervals[m], p.base.every).Milliseconds()}
		if p.enabled.Has(m) {
			s.State = "waiting"
			if p.modules.source == nil {
				s.State = "absent"
			}
			if seen := p.moduleStates[m]; seen.State != "" && seen.State != "off" {
				s.State, s.LastError = seen.State, seen.LastError
			}
		}
		states = append(states, s)
	}
	return states
}

// updateModuleStates keeps for ModuleStates how the modules stand, and logs the changes that
// somebody may want to know of.
func (p *Prober) updateModuleStates() {
	if p.modules.running == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for m := firstOptional; m < NumModules; m++ {
		r, seen := p.modules.workers[m], &p.moduleStates[m]
		if r == nil {
			*seen = ModuleState{}
			continue
		}
		if seen.State == r.state {
			continue
		}
		bad := r.state == "hung" || r.state == "failing"
		if bad {
			p.log.Warn("a module cannot be read", zap.Error(r.err))
			seen.LastError = r.err.Error()
		} else if seen.State == "hung" || seen.State == "failing" {
			p.log.Info("a module is read again", zap.Stringer("module", m))
		}
		seen.State = r.state
	}
}
