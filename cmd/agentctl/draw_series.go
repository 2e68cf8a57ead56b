package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"agentctl/control"
	"agentctl/prober"
)

// reading is what the modules said at a moment: values by the key of the sensor catalogue,
// such as cpu.usage_percent, or by a dotted name that the catalogue does not have.
type reading = control.HistoryItem

// parseReading decodes a snapshot or the params of the event metrics. Lists are left out:
// they are details of a number beside them.
func parseReading(raw []byte) (reading, error) {
	var m map[string]any
	if err := json.Unmarshal(raw, &m); err != nil {
		return reading{}, fmt.Errorf("the daemon's reading: %w", err)
	}
	r := reading{Values: make(map[string]float64, 8)}
	if ts, ok := m["ts"].(float64); ok {
		r.TS = int64(ts)
	}
	delete(m, "ts")
	delete(m, "seq")
	addValues(r.Values, "", m)
	return r, nil
}

// addValues adds the numbers, flags and states in m, whose names begin with prefix.
func addValues(values map[string]float64, prefix string, m map[string]any) {
	for k, v := range m {
		key := prefix + k
		switch v := v.(type) {
		case float64:
			values[key] = v
		case bool:
			values[key] = 0
			if v {
				values[key] = 1
			}
		case string:
			if i := slices.Index(prober.EOLStates, v); i >= 0 {
				values[key] = float64(i)
			}
		case map[string]any:
			if key == "readings" {
				key = ""
			} else {
				key += "."
			}
			addValues(values, key, v)
		}
	}
}

// series is a value that is drawn over time.
type series struct {
	key, label, unit string
	max              float64 // the end of its scale, when it has one
	maxKey           string  // or the key of the value that is
}

// What is drawn, and the names and keys in the order of the sensor catalogue: modules that
// every daemon reads, all modules, and the keys of each in history.
var (
	catalogue                []series
	baseModules, moduleNames []string
	moduleKeys               = map[string][]string{}
)

func init() {
	for m := range prober.NumModules {
		if !m.IsOptional() {
			baseModules = append(baseModules, m.Member())
		}
		moduleNames = append(moduleNames, m.Member())
	}
	for _, s := range prober.Sensors() {
		if s.Key != "" {
			moduleKeys[s.Module.Member()] = append(moduleKeys[s.Module.Member()], s.Key)
		}
		if s.Chart.Label != "" {
			catalogue = append(catalogue, series{s.Key, s.Chart.Label, s.Unit, s.Chart.Max, s.Chart.MaxKey})
		}
	}
}

// module is the module that a dotted name belongs to.
func module(key string) string {
	m, _, _ := strings.Cut(key, ".")
	return m
}

// checkModules makes one spelling of module names and refuses others.
func checkModules(names []string) ([]string, error) {
	var out []string
	for _, n := range names {
		m, ok := prober.ModuleByName(n)
		if !ok {
			return nil, exit(exitUsage, "--modules %s: the modules are %s", n, strings.Join(moduleNames, ", "))
		}
		if !slices.Contains(out, m.Member()) {
			out = append(out, m.Member())
		}
	}
	return out, nil
}

// compareKeys orders dotted names by module, then as moduleKeys has them, then by name.
func compareKeys(a, b string) int {
	rank := func(list []string, k string) int {
		if i := slices.Index(list, k); i >= 0 {
			return i
		}
		return len(list)
	}
	ma, mb := module(a), module(b)
	return cmp.Or(rank(moduleNames, ma)-rank(moduleNames, mb), rank(moduleKeys[ma], a)-rank(moduleKeys[mb], b), strings.Compare(a, b))
}

// powerText is what the firmware says about supply and heat, "" when it says nothing.
func powerText(values map[string]float64) (text string, bad bool) {
	known := false
	var now []string
	for _, s := range prober.Sensors() {
		if s.Warning == "" {
			continue
		}
		v, ok := values[s.Key]
		known = known || ok
		if v > 0 {
			now = append(now, s.Warning)
		}
	}
	if !known {
		return "", false
	}
	if len(now) == 0 {
		return "good", false
	}
	return strings.Join(now, ", "), true
}
