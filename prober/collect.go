package prober

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// modulePatience is how long a sample waits for its modules, all together. One that
// takes longer is not waited for again until it was quick once.
const modulePatience = 50 * time.Millisecond

// moduleFarewell is how long the end of the sampler waits for its modules.
const moduleFarewell = 250 * time.Millisecond

// MaxModuleInterval bounds how seldom a module may be read.
const MaxModuleInterval = 24 * time.Hour

var errModuleHangs = errors.New("no answer, a dead bus or device hangs like this")

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

// collectors read the enabled modules beside the sampler: it asks those that are due
// before its own reading and takes their answers after it. All but want and every
// belongs to the goroutine of Prober.loop.
type collectors struct {
	source ModuleSource // nil: no modules
	want   ModuleSet    // copied from the Prober in plan, every too
	every  [NumModules]time.Duration
	run    [NumModules]*collector // those that were started and not forgotten
	busy   int                    // how many of them
	known  ModuleReadings         // what is known now
	shown  *ModuleReadings        // what the newest sample has
	timer  *time.Timer            // armed only while a sample waits
}

// collector is the loop's end of one module's goroutine.
type collector struct {
	asks    chan struct{}     // one reading each; closed to end it
	answers chan moduleAnswer // room for the one answer that can be due
	done    chan struct{}     // closed when the goroutine is gone

	ending bool           // asks was closed
	asked  time.Duration  // the instant of the last ask
	out    bool           // it was not answered yet
	fresh  bool           // nothing was asked so far
	slow   bool           // the last answer took longer than a sample waits
	pair   bool           // the first reading says nothing: figures are between two
	got    ModuleReadings // the newest reading, only this module
	gotAt  time.Duration  // the instant it was asked for
	state  string
	err    error
}

type moduleAnswer struct {
	got  ModuleReadings
	err  error
	took time.Duration
}

// ask has the modules read that are due at an instant, and ends those that are no
// longer wanted.
func (c *collectors) ask(at time.Duration) {
	if c.source == nil || c.want == 0 && c.busy == 0 {
		return
	}
	for m := firstOptional; m < NumModules; m++ {
		r := c.run[m]
		if r != nil && r.ending {
			r = c.reap(m)
		}
		if r != nil && !r.ending && !c.want.Has(m) {
			r.end()
		}
		if r == nil && c.want.Has(m) {
			r = c.start(m)
		}
		if r != nil && r.out {
			r.poll() // what came late makes room for the next
		}
		// A tenth of slack: samples are not taken to the microsecond.
		if r == nil || r.ending || r.out || !r.fresh && at-r.asked < c.every[m]-c.every[m]/10 {
			continue
		}
		r.out, r.fresh, r.asked = true, false, at
		r.asks <- struct{}{}
	}
}

func (c *collectors) start(m Module) *collector {
	r := &collector{
		asks:    make(chan struct{}, 1),
		answers: make(chan moduleAnswer, 1),
		done:    make(chan struct{}),
		fresh:   true,
		pair:    m == ModuleNetwork,
		state:   "waiting",
	}
	c.run[m] = r
	c.busy++
	go r.loop(m, c.source)
	return r
}

// reap forgets a collector whose goroutine is gone. One that hangs is kept, so that
// switching a module off and on starts no second one beside it.
func (c *collectors) reap(m Module) *collector {
	select {
	case <-c.run[m].done:
		c.run[m] = nil
		c.busy--
	default:
	}
	return c.run[m]
}

// loop makes the readings. It never blocks on answers: one ask, one answer, and no
// second ask before the answer was taken.
func (r *collector) loop(m Module, source ModuleSource) {
	defer close(r.done)
	reader := source.OpenModule(m.String())
	if reader != nil {
		defer reader.Close()
	}
	for range r.asks {
		begin := time.Now()
		var a moduleAnswer
		if reader != nil {
			a.err = reader.Read(&a.got)
		}
		a.got = a.got.Only(1 << m)
		if a.err == nil {
			a.err = moduleTable[m].check(&a.got)
		}
		if a.err != nil {
			a.got, a.err = ModuleReadings{}, fmt.Errorf("module %s: %w", m, a.err)
		}
		a.took = time.Since(begin)
		r.answers <- a
	}
}

func (r *collector) end() {
	r.ending = true
	r.got, r.state = ModuleReadings{}, "off"
	close(r.asks)
}

// poll takes the answer if it is there.
func (r *collector) poll() bool {
	select {
	case a := <-r.answers:
		r.take(a)
		return true
	default:
		return false
	}
}

// take books an answer.
func (r *collector) take(a moduleAnswer) {
	r.out, r.slow = false, a.took > modulePatience
	r.got, r.gotAt, r.err = a.got, r.asked, a.err
	first := r.pair
	r.pair = false
	switch {
	case a.err != nil:
		r.state = "failing"
	case first && a.got == (ModuleReadings{}):
	case a.got == (ModuleReadings{}):
		r.state = "absent"
	default:
		r.state = "ok"
	}
}

// collect takes the answers, waiting a moment for those that are usually quick, and
// returns what is known now; nil is nothing. A reading older than maxAge, and than
// three intervals of its module, no longer stands for the present.
func (c *collectors) collect(at, maxAge time.Duration) *ModuleReadings {
	if c.busy == 0 {
		return nil
	}
	c.await()
	c.known = ModuleReadings{}
	for m := firstOptional; m < NumModules; m++ {
		r := c.run[m]
		if r == nil || r.ending {
			continue
		}
		if age := at - r.gotAt; age > max(maxAge, 3*c.every[m]) {
			r.got = ModuleReadings{}
		}
		if r.out && at-r.asked > max(maxAge, 3*c.every[m]) {
			r.state, r.err = "hung", fmt.Errorf("module %s: %w", m, errModuleHangs)
		}
		moduleTable[m].copy(&c.known, &r.got)
	}
	switch {
	case c.known == (ModuleReadings{}):
		c.shown = nil
	case c.shown == nil || c.known != *c.shown:
		shown := c.known
		c.shown = &shown
	}
	return c.shown
}

func (c *collectors) await() {
	expired, armed := false, false
	for _, r := range c.run {
		if r == nil || r.ending || !r.out || r.poll() || r.slow {
			continue
		}
		if !armed {
			armed = true
			c.arm()
			defer c.timer.Stop()
		}
		if !expired {
			select {
			case a := <-r.answers:
				r.take(a)
				continue
			case <-c.timer.C:
				expired = true
			}
		}
		r.slow = true
	}
}

func (c *collectors) arm() {
	if c.timer == nil {
		c.timer = time.NewTimer(modulePatience)
		return
	}
	c.timer.Reset(modulePatience)
}

// close ends all goroutines and waits a moment for them. One that hangs cannot be
// ended: it is left to the end of the process, and the error says so.
func (c *collectors) close() error {
	for _, r := range c.run {
		if r != nil && !r.ending {
			r.end()
		}
	}
	timer := time.NewTimer(moduleFarewell)
	defer timer.Stop()
	for m, r := range c.run {
		if r == nil {
			continue
		}
		select {
		case <-r.done:
		case <-timer.C:
			return fmt.Errorf("close module %s: %w; left to the end of the process", Module(m), errModuleHangs)
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
	p.modules = set
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
	p.moduleEvery[m] = d
	return nil
}

// ModuleStates tells of every module, in the order of OptionalModuleNames, how it stood with
// the newest sample.
func (p *Prober) ModuleStates() []ModuleState {
	p.mu.Lock()
	defer p.mu.Unlock()
	states := make([]ModuleState, 0, NumModules-firstOptional)
	for m := firstOptional; m < NumModules; m++ {
		s := ModuleState{Name: m.String(), State: "off", IntervalMS: max(p.moduleEvery[m], p.base.every).Milliseconds()}
		if p.modules.Has(m) {
			s.State = "waiting"
			if p.collect.source == nil {
				s.State = "absent"
			}
			if seen := p.moduleSeen[m]; seen.State != "" && seen.State != "off" {
				s.State, s.LastError = seen.State, seen.LastError
			}
		}
		states = append(states, s)
	}
	return states
}

// noteModules keeps for ModuleStates how the modules stand, and logs the changes that
// somebody may want to know of.
func (p *Prober) noteModules() {
	if p.collect.busy == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for m := firstOptional; m < NumModules; m++ {
		r, seen := p.collect.run[m], &p.moduleSeen[m]
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
