// Package alert evaluates alert rules on samples. A rule watches one metric. It raises an
// alert when the metric has been beyond a threshold for some time, and clears the alert when
// the metric has returned. A hysteresis between the two keeps an alert from flapping.
//
//	engine, err := alert.New(alert.DefaultRules())
//	err = p.SetModules(engine.Modules())              // what the rules need to be sampled
//	err = p.Watch(ctx, time.Second, func(s prober.Sample) error {
//		for _, e := range engine.Evaluate(s) { … }   // nearly always none
//		return nil
//	})
//
// The metrics come from the sensor catalogue of package prober. An Event is the event
// `alert` of the control socket (docs/control.md).
package alert

import (
	"cmp"
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

// Level is the severity of an alert.
type Level string

// Levels.
const (
	Info  Level = "info"
	Warn  Level = "warn"
	Error Level = "error"
)

// Op compares a value with a threshold.
type Op string

// Comparisons.
const (
	Above   Op = ">"
	AtLeast Op = ">="
	Below   Op = "<"
	AtMost  Op = "<="
)

// holds reports whether v is beyond a threshold.
func (o Op) holds(v, threshold float64) bool {
	switch o {
	case Above:
		return v > threshold
	case AtLeast:
		return v >= threshold
	case Below:
		return v < threshold
	}
	return o == AtMost && v <= threshold
}

// isUpper reports whether the condition holds for large values.
func (o Op) isUpper() bool { return o == Above || o == AtLeast }

// opTexts are the words for the comparisons in messages.
var opTexts = map[Op]string{Above: "above", AtLeast: "at least", Below: "below", AtMost: "at most"}

// Rule says when an alert is raised and cleared. The tags are the keys of a configuration
// file.
type Rule struct {
	// ID is 1 to 64 of a-z, 0-9, - and _, unique among the rules.
	ID        string  `koanf:"id"`
	Metric    string  `koanf:"metric"`    // one of MetricNames
	Op        Op      `koanf:"op"`        // >, >=, < or <=
	Threshold float64 `koanf:"threshold"` // in the metric's unit; flags are 0 and 1
	// Hysteresis is how far back past the threshold clears the alert; default 0.
	Hysteresis float64 `koanf:"hysteresis"`
	// For is how long the condition must hold before the alert is raised, up to 24 h;
	// default at once.
	For time.Duration `koanf:"for"`
	// ClearFor is how long the value must have returned before the alert is cleared, up to
	// 24 h; default For.
	ClearFor time.Duration `koanf:"clear_for"`
	Level    Level         `koanf:"level"`
}

// clearsAt returns the value at which the alert is cleared.
func (r *Rule) clearsAt() float64 {
	if r.Op.isUpper() {
		return r.Threshold - r.Hysteresis
	}
	return r.Threshold + r.Hysteresis
}

// Event reports that an alert was raised or cleared. When it was cleared, the level is info
// and the message begins with "cleared: ".
type Event struct {
	Level     Level   `json:"level"`
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Threshold float64 `json:"threshold"` // at which the alert is raised, also in a cleared event
	RuleID    string  `json:"rule_id"`
	// Message is one line for a person, with what to do; at most 512 bytes.
	Message string `json:"message"`
	TS      int64  `json:"ts"` // of the sample, milliseconds since 1970

	Cleared bool `json:"-"`
}

// Engine evaluates rules on samples. Its methods may be called from any goroutine. It starts
// none, and takes the time from the samples (Sample.Mono).
type Engine struct {
	mu     sync.Mutex // protects the fields below
	states []ruleState
	sample prober.Sample // the newest; kept here so that Evaluate allocates nothing
}

// ruleState is a rule and its alert:
//
//	cleared ── holds for For ──> raised ── has returned for ClearFor ──> cleared
//
// While a transition waits, changing is set. The wait ends when the value no longer calls for
// the transition, or is unknown.
type ruleState struct {
	Rule
	sensor   *prober.Sensor
	raised   bool
	event    Event // that raised it
	changing bool  // a transition waits
	// since is when the wait began, by Sample.Mono.
	since time.Duration
}

// New returns an Engine with rules, which must pass Check.
func New(rules []Rule) (*Engine, error) {
	e := new(Engine)
	_, err := e.Replace(rules)
	return e, err
}

// Evaluate returns what a sample raises or clears, in the order of the rules: an event when
// an alert is raised, and one when it is cleared. Samples must come in their order.
//
// A value that the sample does not have changes nothing, but a wait (For, ClearFor) begins
// again.
func (e *Engine) Evaluate(s prober.Sample) []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sample = s
	var events []Event
	for i := range e.states {
		if ev, changed := e.states[i].evaluate(&e.sample); changed {
			events = append(events, ev)
		}
	}
	return events
}

func (st *ruleState) evaluate(s *prober.Sample) (ev Event, changed bool) {
	v, known := st.sensor.Read(s)
	known = known && !math.IsNaN(v) && !math.IsInf(v, 0)
	asksForChange, wait := st.Op.holds(v, st.Threshold), st.For
	if st.raised {
		asksForChange, wait = !st.Op.holds(v, st.clearsAt()), cmp.Or(st.ClearFor, st.For)
	}
	if !known || !asksForChange {
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
	ev = st.newEvent(v, s.TSMS)
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
		Message:   describe(st.sensor, v),
		TS:        ts,
		Cleared:   !st.raised,
	}
	if ev.Cleared {
		ev.Level, ev.Message = Info, "cleared: "+ev.Message
		return ev
	}
	if st.sensor.Form != prober.FormFlag {
		ev.Message += fmt.Sprintf(", %s %s", opTexts[st.Op], format(st.sensor, st.Threshold))
	}
	if st.For > 0 {
		ev.Message += fmt.Sprintf(" for %v", st.For)
	}
	if advice := st.sensor.Metric.Advice; advice != "" && st.Op.isUpper() {
		ev.Message += "; " + advice
	}
	return ev
}

// Replace replaces the rules. An unchanged rule keeps its state; an alert whose rule was
// removed or changed is cleared, and Replace returns the events of that. If a rule is invalid,
// nothing changes.
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

// Active returns the events that raised the alerts that are not cleared yet.
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

// Rules returns the rules in force.
func (e *Engine) Rules() []Rule {
	e.mu.Lock()
	defer e.mu.Unlock()
	rules := make([]Rule, len(e.states))
	for i, st := range e.states {
		rules[i] = st.Rule
	}
	return rules
}

// Modules returns the names of the optional modules whose readings the rules need, sorted,
// for prober.SetModules.
func (e *Engine) Modules() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var set prober.ModuleSet
	for _, st := range e.states {
		set |= prober.SetOf(st.sensor.Module)
	}
	return slices.Sorted(slices.Values((set & prober.OptionalModules).Names()))
}

// number prints at most two decimals, and few digits of a huge value.
func number(v float64) string {
	if math.Abs(v) >= 1e15 {
		return strconv.FormatFloat(v, 'g', 6, 64)
	}
	return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64)
}
