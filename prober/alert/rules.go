package alert

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"agentctl/prober"
)

// maxWait bounds For and ClearFor of a rule.
const maxWait = 24 * time.Hour

// DefaultRules watch the usual causes of board failures: a full disk, heat, a weak power
// supply, exhausted memory, and worn flash.
func DefaultRules() []Rule {
	return []Rule{
		{ID: "disk-full", Metric: "disk_pct", Op: AtLeast, Threshold: 95, Hysteresis: 2, Level: Error},
		{ID: "too-hot", Metric: "temperature_c", Op: AtLeast, Threshold: 80, Hysteresis: 5, For: 10 * time.Second, Level: Warn},
		// Raised at once, since a dip may corrupt the card. It is cleared after a minute, so
		// that a supply that dips with each load peak does not raise an alert each time.
		{ID: "under-voltage", Metric: "under_voltage", Op: AtLeast, Threshold: 1, ClearFor: time.Minute, Level: Error},
		{ID: "memory-full", Metric: "mem_pct", Op: AtLeast, Threshold: 95, Hysteresis: 3, For: time.Minute, Level: Error},
		{ID: "flash-worn", Metric: "wear_pct", Op: AtLeast, Threshold: 90, Level: Warn},
		{ID: "flash-reserve", Metric: "wear_pre_eol", Op: AtLeast, Threshold: 2, Level: Warn},
	}
}

// Check returns all errors of the rules. Each names the rule, the problem and what is allowed.
func Check(rules []Rule) error {
	if len(rules) > MaxRules {
		return fmt.Errorf("%d alert rules, at most %d", len(rules), MaxRules)
	}
	var errs []error
	for i := range rules {
		r := &rules[i]
		name := fmt.Sprintf("%.64q", r.ID)
		if r.ID == "" {
			name = fmt.Sprintf("number %d", i+1)
		}
		fail := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("alert rule %s: %w", name, fmt.Errorf(format, args...)))
		}
		if !isID(r.ID) {
			fail("its id must be 1 to 64 of a-z, 0-9, - and _, and begin with a letter or a digit")
		} else if slices.ContainsFunc(rules[:i], func(o Rule) bool { return o.ID == r.ID }) {
			fail("another rule has the same id")
		}
		r.check(fail)
	}
	return errors.Join(errs...)
}

func isID(id string) bool {
	if id == "" || len(id) > 64 || id[0] == '-' || id[0] == '_' {
		return false
	}
	return strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
}

func (r *Rule) check(fail func(string, ...any)) {
	if r.Level != Info && r.Level != Warn && r.Level != Error {
		fail("level %.20q; choose info, warn or error", r.Level)
	}
	for _, w := range []struct {
		key string
		d   time.Duration
	}{{"for", r.For}, {"clear_for", r.ClearFor}} {
		if w.d < 0 || w.d > maxWait {
			fail("%s %v is outside 0s..%v", w.key, w.d, maxWait)
		}
	}
	sensor := sensorOf(r.Metric)
	if sensor == nil {
		fail("there is no metric %.40q; choose from %s", r.Metric, strings.Join(MetricNames(), ", "))
	}
	if opTexts[r.Op] == "" {
		fail("op %.20q; choose >, >=, < or <=", r.Op)
	}
	if sensor != nil && opTexts[r.Op] != "" {
		r.checkThreshold(&sensor.Metric, fail)
	}
}

// checkThreshold refuses a condition that can never be true, never be false, or never be
// cleared. Each comparison is written so that NaN, which compares false, fails.
func (r *Rule) checkThreshold(m *prober.Metric, fail func(string, ...any)) {
	in := func(v float64) bool { return v >= m.Min && v <= m.Max }
	switch {
	case !in(r.Threshold):
		fail("threshold %v is outside %s of %s", r.Threshold, rangeOf(m), m.Name)
	case !r.Op.holds(m.Min, r.Threshold) && !r.Op.holds(m.Max, r.Threshold):
		fail("%s %s %v can never be true: %s is %s", m.Name, r.Op, r.Threshold, m.Name, rangeOf(m))
	case r.Op.holds(m.Min, r.Threshold) && r.Op.holds(m.Max, r.Threshold):
		fail("%s %s %v is always true: %s is %s", m.Name, r.Op, r.Threshold, m.Name, rangeOf(m))
	case !(r.Hysteresis >= 0) || math.IsInf(r.Hysteresis, 0):
		fail("hysteresis %v is not 0 or more", r.Hysteresis)
	case r.Op.holds(m.Min, r.clearsAt()) && r.Op.holds(m.Max, r.clearsAt()):
		fail("hysteresis %v is so large that it could never be cleared: %s is %s", r.Hysteresis, m.Name, rangeOf(m))
	}
}

// rangeOf returns the range of a metric in words.
func rangeOf(m *prober.Metric) string {
	if m.Max == prober.Unbounded {
		return fmt.Sprintf("%v and more", m.Min)
	}
	return fmt.Sprintf("%v..%v", m.Min, m.Max)
}
