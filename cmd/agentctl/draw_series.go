package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"agentctl/control"
)

// reading is what the modules said at a moment: numbers by dotted name, such as
// cpu.usage_percent or temperature.hottest_c. Yes and no are 1 and 0.
type reading struct {
	TS     int64 // milliseconds since 1970
	Values map[string]float64
}

// parseReading takes a snapshot, the params of the event metrics, or an item of the
// history. Lists are left out: they are details of a number beside them.
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
	r.add("", m)
	return r, nil
}

func (r reading) add(prefix string, m map[string]any) {
	for k, v := range m {
		key := prefix + k
		switch v := v.(type) {
		case float64:
			r.Values[key] = v
		case bool:
			r.Values[key] = 0
			if v {
				r.Values[key] = 1
			}
		case string:
			if i := slices.Index(eolStates, v); i >= 0 {
				r.Values[key] = float64(i)
			}
		case map[string]any:
			if key == "readings" {
				key = ""
			} else {
				key += "."
			}
			r.add(key, v)
		}
	}
}

// itemReading is parseReading for an item of the history, of which there may be very many.
func itemReading(i control.HistoryItem) reading {
	r := reading{i.TS, make(map[string]float64, 8)}
	add := func(key string, v *float64) {
		if v != nil {
			r.Values[key] = *v
		}
	}
	if i.CPU != nil {
		r.Values["cpu.usage_percent"] = i.CPU.UsagePercent
	}
	if i.Memory != nil {
		r.Values["memory.total"], r.Values["memory.used"] = float64(i.Memory.Total), float64(i.Memory.Used)
	}
	if i.Disk != nil {
		r.Values["disk.usage_percent"] = i.Disk.UsagePercent
	}
	if l := i.Load; l != nil {
		r.Values["load.load_1m"], r.Values["load.load_5m"], r.Values["load.load_15m"] = l.Load1, l.Load5, l.Load15
	}
	if n := i.Network; n != nil {
		add("network.bytes_in_per_s", n.BytesInPerS)
		add("network.bytes_out_per_s", n.BytesOutPerS)
		add("network.errors_in", n.ErrorsIn)
		add("network.errors_out", n.ErrorsOut)
	}
	if i.Temperature != nil {
		r.Values["temperature.hottest_c"] = i.Temperature.HottestC
	}
	if p := i.Power; p != nil {
		for key, on := range map[string]*bool{"power.under_voltage": p.UnderVoltage, "power.freq_capped": p.FreqCapped,
			"power.throttled": p.Throttled, "power.soft_temp_limit": p.SoftTempLimit} {
			if on != nil {
				r.Values[key] = 0
				if *on {
					r.Values[key] = 1
				}
			}
		}
	}
	if w := i.Wear; w != nil {
		add("wear.used_pct", w.UsedPct)
		if at := slices.Index(eolStates, w.PreEOL); at >= 0 {
			r.Values["wear.pre_eol"] = float64(at)
		}
	}
	return r
}

// eolStates are what wear.pre_eol says, from good to bad, as history keeps them.
var eolStates = []string{"normal", "warning", "urgent"}

// series is a number that is drawn over time.
type series struct {
	key, module, label, unit string
	max                      float64 // the end of its scale, when it has one
	maxKey                   string  // or where it is told
}

// catalogue is what is drawn, in this order.
var catalogue = []series{
	{key: "cpu.usage_percent", module: "cpu", label: "CPU", unit: "%", max: 100},
	{key: "memory.used", module: "memory", label: "Memory", unit: "MiB", maxKey: "memory.total"},
	{key: "disk.usage_percent", module: "disk", label: "Disk", unit: "%", max: 100},
	{key: "load.load_1m", module: "load", label: "Load 1m"},
	{key: "network.bytes_in_per_s", module: "network", label: "Net in", unit: "B/s"},
	{key: "network.bytes_out_per_s", module: "network", label: "Net out", unit: "B/s"},
	{key: "temperature.hottest_c", module: "temperature", label: "Temp", unit: "C"},
	{key: "wear.used_pct", module: "wear", label: "Wear", unit: "%", max: 100},
}

// baseModules are those of every daemon; moduleNames all there are.
var (
	baseModules = []string{"cpu", "memory", "disk", "load"}
	moduleNames = append(slices.Clone(baseModules), "network", "temperature", "power", "wear")
)

// module is the module that a dotted name belongs to.
func module(key string) string {
	m, _, _ := strings.Cut(key, ".")
	return m
}

// checkModules makes one spelling of module names and refuses others.
func checkModules(names []string) ([]string, error) {
	var out []string
	for _, n := range names {
		if n == "mem" {
			n = "memory"
		}
		if !slices.Contains(moduleNames, n) {
			return nil, exit(exitUsage, "--modules %s: the modules are %s", n, strings.Join(moduleNames, ", "))
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
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

// moduleKeys are the numbers of a module as history has them.
var moduleKeys = map[string][]string{
	"cpu":         {"cpu.usage_percent"},
	"memory":      {"memory.total", "memory.used"},
	"disk":        {"disk.usage_percent"},
	"load":        {"load.load_1m", "load.load_5m", "load.load_15m"},
	"network":     {"network.bytes_in_per_s", "network.bytes_out_per_s", "network.errors_in", "network.errors_out"},
	"temperature": {"temperature.hottest_c"},
	"power":       {"power.under_voltage", "power.freq_capped", "power.throttled", "power.soft_temp_limit"},
	"wear":        {"wear.used_pct", "wear.pre_eol"},
}

// powerText is what the firmware says about supply and heat, "" when it says nothing.
func powerText(values map[string]float64) (text string, bad bool) {
	known := false
	var now []string
	for _, f := range [][2]string{{"under_voltage", "under-voltage"}, {"throttled", "throttled"},
		{"freq_capped", "frequency capped"}, {"soft_temp_limit", "soft temperature limit"}} {
		v, ok := values["power."+f[0]]
		known = known || ok
		if v > 0 {
			now = append(now, f[1])
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
