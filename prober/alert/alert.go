// Package alert judges samples by rules: a rule watches one figure and raises an
// alert when it is beyond a threshold for a while, and clears it when the figure has
// come back, with room in between so that it does not flap.
//
//	engine, err := alert.New(alert.DefaultRules())
//	err = p.SetModules(engine.Modules())              // what the rules need to see
//	err = p.Watch(ctx, time.Second, func(s prober.Sample) error {
//		for _, e := range engine.Evaluate(s) { … }   // nearly always none
//		return nil
//	})
//
// An Event is the event `alert` of the control socket (docs/control.md).
package alert

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"agentctl/prober"
)

// MaxRules bounds the rules of an Engine.
const MaxRules = 64

// Level is how bad it is.
type Level string

const (
	Info  Level = "info"
	Warn  Level = "warn"
	Error Level = "error"
)

// Op compares a figure with a threshold.
type Op string

const (
	Above   Op = ">"
	AtLeast Op = ">="
	Below   Op = "<"
	AtMost  Op = "<="
)

// holds tells whether v is beyond a threshold.
func (o Op) holds(v, threshold float64) bool {
	switch o {
	case Above:
		return v > threshold
	case AtLeast:
		return v >= threshold
	case Below:
		return v < threshold
	case AtMost:
		return v <= threshold
	}
	return false
}

// isUpper tells that large figures are the bad ones.
func (o Op) isUpper() bool { return o == Above || o == AtLeast }

// text say it in a message.
func (o Op) text() string {
	return map[Op]string{Above: "above", AtLeast: "at least", Below: "below", AtMost: "at most"}[o]
}

// Rule says what is worth an alert. The tags are the keys of a configuration file.
type Rule struct {
	ID         string        `koanf:"id"`         // a-z, 0-9, - and _, at most 64 bytes; no two alike
	Metric     string        `koanf:"metric"`     // one of Metrics
	Op         Op            `koanf:"op"`         // >, >=, < or <=
	Threshold  float64       `koanf:"threshold"`  // in the metric's unit; flags are 0 and 1
	Hysteresis float64       `koanf:"hysteresis"` // how far back past the threshold clears it; default 0
	For        time.Duration `koanf:"for"`        // how long it must hold before it is raised, up to 24 h; default at once
	ClearFor   time.Duration `koanf:"clear_for"`  // how long it must be well before it is cleared, up to 24 h; default For
	Level      Level         `koanf:"level"`      // info, warn or error
}

// clearsAt is where the figure has come back.
func (r *Rule) clearsAt() float64 {
	if r.Op.isUpper() {
		return r.Threshold - r.Hysteresis
	}
	return r.Threshold + r.Hysteresis
}

func (r *Rule) clearFor() time.Duration {
	if r.ClearFor == 0 {
		return r.For
	}
	return r.ClearFor
}

// Event says that an alert was raised, or cleared: then its level is info and its
// message begins with "cleared: ".
type Event struct {
	Level     Level   `json:"level"`
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Threshold float64 `json:"threshold"` // where it is raised, in either case
	RuleID    string  `json:"rule_id"`
	Message   string  `json:"message"` // one line for a person, what to do included; at most 512 bytes
	TS        int64   `json:"ts"`      // of the sample, milliseconds since 1970

	Cleared bool `json:"-"`
}

// Engine judges samples by rules. Its methods may be called from any goroutine; it
// starts none, and reads no clock but the samples'.
type Engine struct {
	mu     sync.Mutex // protects the fields below
	states []ruleState
	sample prober.Sample // the newest; kept here so that judging allocates nothing
}

// ruleState is what became of one rule.
type ruleState struct {
	Rule
	sensor   *prober.Sensor
	raised   bool
	event    Event         // that raised it
	changing bool          // it is on its way to the other state
	since    time.Duration // from this instant on
}

// New makes an Engine of rules that pass Check.
func New(rules []Rule) (*Engine, error) {
	e := new(Engine)
	_, err := e.Replace(rules)
	return e, err
}

// Evaluate tells what a sample raises or clears, in the order of the rules: each alert
// once when it is raised and once when it is cleared.
//
// A figure that the sample does not have changes nothing, but a rule that waited for
// it to hold waits anew. Samples are to come in their order.
func (e *Engine) Evaluate(s prober.Sample) []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sample = s
	var events []Event
	for i := range e.states {
		if ev, turned := e.states[i].evaluate(&e.sample); turned {
			events = append(events, ev)
		}
	}
	return events
}

func (st *ruleState) evaluate(s *prober.Sample) (Event, bool) {
	v, known := st.sensor.Read(s)
	if !known || math.IsNaN(v) || math.IsInf(v, 0) {
		st.changing = false
		return Event{}, false
	}
	turn, wait := st.Op.holds(v, st.Threshold), st.For
	if st.raised {
		turn, wait = !st.Op.holds(v, st.clearsAt()), st.clearFor()
	}
	if !turn {
		st.changing = false
		return Event{}, false
	}
	if !st.changing || s.Mono < st.since {
		st.changing, st.since = true, s.Mono
	}
	if s.Mono-st.since < wait {
		return Event{}, false
	}
	st.changing, st.raised = false, !st.raised
	ev := st.newEvent(v, s.TSMS)
	if st.raised {
		st.event = ev
	}
	return ev, true
}

func (st *ruleState) newEvent(v float64, ts int64) Event {
	ev := Event{
		Level:     st.Level,
		Metric:    st.Metric,
		Value:     v,
		Threshold: st.Threshold,
		RuleID:    st.ID,
		TS:        ts,
		Cleared:   !st.raised,
	}
	if ev.Cleared {
		ev.Level = Info
		ev.Message = "cleared: " + describe(st.sensor, v)
		return ev
	}
	ev.Message = describe(st.sensor, v)
	if st.sensor.Form != prober.FormFlag {
		ev.Message += fmt.Sprintf(", %s %s", st.Op.text(), format(st.sensor, st.Threshold))
	}
	if st.For > 0 {
		ev.Message += fmt.Sprintf(" for %v", st.For)
	}
	if st.sensor.Metric.Advice != "" && st.Op.isUpper() {
		ev.Message += "; " + st.sensor.Metric.Advice
	}
	return ev
}

// Replace puts other rules in the place of these. A rule that is there unchanged goes
// on as it stands; an alert whose rule is gone or changed is cleared, and the events
// say so. When a rule is wrong nothing changes.
func (e *Engine) Replace(rules []Rule) ([]Event, error) {
	if err := Check(rules); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	states := make([]ruleState, len(rules))
	for i, r := range rules {
		states[i] = ruleState{Rule: r, sensor: sensorOf(r.Metric)}
		if k := slices.IndexFunc(e.states, func(st ruleState) bool { return st.Rule == r }); k >= 0 {
			states[i] = e.states[k]
		}
	}
	var events []Event
	for _, st := range e.states {
		if !st.raised || slices.Contains(rules, st.Rule) {
			continue
		}
		ev := st.event
		ev.Level, ev.Cleared, ev.TS = Info, true, e.sample.TSMS
		ev.Message = "cleared: the rule " + st.ID + " was changed or removed"
		events = append(events, ev)
	}
	e.states = states
	return events, nil
}

// Active are the events that raised the alerts that are not cleared yet.
func (e *Engine) Active() []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var events []Event
	for _, st := range e.states {
		if st.raised {
			events = append(events, st.event)
		}
	}
	return events
}

// Rules are the rules as they are in force.
func (e *Engine) Rules() []Rule {
	e.mu.Lock()
	defer e.mu.Unlock()
	rules := make([]Rule, len(e.states))
	for i, st := range e.states {
		rules[i] = st.Rule
	}
	return rules
}

// Modules are the modules of the prober that the rules look at, for
// prober.SetModules.
func (e *Engine) Modules() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var set prober.ModuleSet
	for _, st := range e.states {
		set |= prober.SetOf(st.sensor.Module)
	}
	return slices.Sorted(slices.Values((set & prober.OptionalModules).Names()))
}

// number prints at most two decimals, and few digits of what is huge.
func number(v float64) string {
	if math.Abs(v) >= 1e15 {
		return strconv.FormatFloat(v, 'g', 6, 64)
	}
	return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64)
}
