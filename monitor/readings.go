package monitor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"agentctl/control"
	"agentctl/prober"
)

// ParseReading decodes a snapshot or the params of the event metrics into values by the key
// of the sensor catalogue, such as cpu.usage_percent. A number that the catalogue lacks has
// its dotted path as its key. Lists are left out: they only add details to such a number.
//
// ts and seq are not readings: ts becomes the item's time, and seq is dropped.
func ParseReading(raw []byte) (control.HistoryItem, error) {
	var m map[string]any
	if err := json.Unmarshal(raw, &m); err != nil {
		return control.HistoryItem{}, fmt.Errorf("the daemon's reading: %w", err)
	}
	r := control.HistoryItem{Values: make(map[string]float64, 8)}
	if ts, ok := m["ts"].(float64); ok {
		r.TS = int64(ts)
	}
	delete(m, "ts")
	delete(m, "seq")
	addValues(r.Values, "", m)
	return r, nil
}

// addValues adds the values in m to values. It descends into objects, whose names become
// parts of the key:
//
//	{"cpu": {"usage_percent": 7}}                 cpu.usage_percent    = 7
//	{"power": {"throttled": true}}                power.throttled      = 1
//	{"wear": {"pre_eol": "warning"}}              wear.pre_eol         = 1, its index in EOLStates
//	{"readings": {"network.bytes_in_per_s": 9}}   network.bytes_in_per_s = 9
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
			next := key + "."
			if key == "readings" { // its members are complete keys
				next = ""
			}
			addValues(values, next, v)
		}
	}
}

// ModuleNames returns the names of all modules as people type them, in the catalogue's order.
func ModuleNames() []string {
	return moduleNames(func(prober.Module) bool { return true })
}

// baseModules returns the names of the modules that every daemon reads.
func baseModules() []string {
	return moduleNames(func(m prober.Module) bool { return !m.IsOptional() })
}

// moduleNames returns the names of the modules that include accepts, in the catalogue's order.
func moduleNames(include func(prober.Module) bool) []string {
	var names []string
	for m := range prober.NumModules {
		if include(m) {
			names = append(names, m.Member())
		}
	}
	return names
}

// ModuleError reports an unknown module name. Its text lists the known ones; the command adds
// the flag.
type ModuleError struct{ Name string }

func (e *ModuleError) Error() string {
	return fmt.Sprintf("%s: the modules are %s", e.Name, strings.Join(ModuleNames(), ", "))
}

// NormalizeModules gives modules the names of ModuleNames and removes duplicates. Its error
// is a *ModuleError.
//
// The order of the input is kept.
func NormalizeModules(names []string) ([]string, error) {
	var out []string
	for _, n := range names {
		m, ok := prober.ModuleByName(n)
		if !ok {
			return nil, &ModuleError{n}
		}
		if !slices.Contains(out, m.Member()) {
			out = append(out, m.Member())
		}
	}
	return out, nil
}

// moduleOf returns the name of the module that a key belongs to, whether the catalogue has it
// or not.
func moduleOf(key string) string {
	name, _, _ := strings.Cut(key, ".")
	return name
}

// compareKeys orders keys as the catalogue orders their modules and sensors; keys that it
// lacks follow, by name.
//
// The order is that of the module, then of the sensor, then of the alphabet. It searches the
// catalogue on each call, which is fine for the few keys of a window.
func compareKeys(a, b string) int {
	moduleRank := func(key string) int {
		if m, ok := prober.ModuleByName(moduleOf(key)); ok {
			return int(m)
		}
		return int(prober.NumModules)
	}
	sensorRank := func(key string) int {
		i := slices.IndexFunc(prober.Sensors(), func(s prober.Sensor) bool { return s.Key == key })
		return cmp.Or(i+1, len(prober.Sensors())+1) // a key that is not found is the last
	}
	return cmp.Or(moduleRank(a)-moduleRank(b), sensorRank(a)-sensorRank(b), strings.Compare(a, b))
}

// PowerText returns what the firmware reports about power supply and heat: "good", or the
// warnings with isBad; "" when it reports nothing. A flag that is not among the values is
// unknown: most machines report none, some only a few.
func PowerText(values map[string]float64) (text string, isBad bool) {
	isKnown := false
	var warnings []string
	for _, s := range prober.Sensors() {
		if s.Warning == "" {
			continue
		}
		v, ok := values[s.Key]
		isKnown = isKnown || ok
		if v > 0 {
			warnings = append(warnings, s.Warning)
		}
	}
	switch {
	case !isKnown:
		return "", false
	case len(warnings) == 0:
		return "good", false
	}
	return strings.Join(warnings, ", "), true
}
