package control

import (
	"math"
	"strconv"

	"agentctl/prober"
)

// appendRow appends what row says of the modules in set as an item of query_history, or
// nothing when it says nothing. It must give the same bytes each time.
func (s modules) appendRow(b []byte, row *HistoryRow) []byte {
	begin := len(b)
	b = append(b, `{"ts":`...)
	b = strconv.AppendInt(b, row.TS, 10)
	bare := len(b)
	if p := row.Sample; p != nil && finite(p.CPUPct, p.DiskPct, p.Load1, p.Load5, p.Load15) {
		b = s.appendSample(b, p)
	}
	b = s.appendReadings(b, row.Readings)
	if len(b) == bare {
		return b[:begin]
	}
	return append(b, '}')
}

func (s modules) appendSample(b []byte, p *prober.Sample) []byte {
	if s.has(modCPU) {
		b = append(appendFloat(append(b, `,"cpu":{"usage_percent":`...), p.CPUPct), '}')
	}
	if s.has(modMem) {
		b = strconv.AppendUint(append(b, `,"memory":{"total":`...), p.MemTotalBytes>>20, 10)
		b = strconv.AppendUint(append(b, `,"used":`...), p.MemBytes>>20, 10)
		b = append(b, '}')
	}
	if s.has(modDisk) && p.DiskErr == nil {
		b = append(appendFloat(append(b, `,"disk":{"usage_percent":`...), p.DiskPct), '}')
	}
	if s.has(modLoad) {
		b = appendFloat(append(b, `,"load":{"load_1m":`...), p.Load1)
		b = appendFloat(append(b, `,"load_5m":`...), p.Load5)
		b = appendFloat(append(b, `,"load_15m":`...), p.Load15)
		b = append(b, '}')
	}
	return b
}

// recorded are the readings that an item can have, by module, with their form.
var recorded = map[string]struct {
	module module
	field  string
	form   func(b []byte, v float64) []byte // nothing appended: the value makes no sense
}{
	"network.bytes_in_per_s":  {modNetwork, "bytes_in_per_s", appendFloat},
	"network.bytes_out_per_s": {modNetwork, "bytes_out_per_s", appendFloat},
	"network.errors_in":       {modNetwork, "errors_in", appendFloat},
	"network.errors_out":      {modNetwork, "errors_out", appendFloat},
	"temperature.hottest_c":   {modTemperature, "hottest_c", appendFloat},
	"power.under_voltage":     {modPower, "under_voltage", appendFlag},
	"power.freq_capped":       {modPower, "freq_capped", appendFlag},
	"power.throttled":         {modPower, "throttled", appendFlag},
	"power.soft_temp_limit":   {modPower, "soft_temp_limit", appendFlag},
	"wear.used_pct":           {modWear, "used_pct", appendFloat},
	"wear.pre_eol":            {modWear, "pre_eol", appendEOL},
}

// appendReadings appends the readings of the modules in set, a member for each module.
func (s modules) appendReadings(b []byte, readings []Reading) []byte {
	for m := modNetwork; m < numModules && len(readings) > 0; m++ {
		if !s.has(m) {
			continue
		}
		open := false
		for _, r := range readings {
			k, ok := recorded[r.Key]
			if !ok || k.module != m || !finite(r.Value) {
				continue
			}
			before := len(b)
			if open {
				b = append(b, ',')
			} else {
				b = append(append(append(b, `,"`...), moduleNames[m]...), `":{`...)
			}
			b = append(append(append(b, '"'), k.field...), `":`...)
			begin := len(b)
			if b = k.form(b, r.Value); len(b) == begin {
				b = b[:before]
				continue
			}
			open = true
		}
		if open {
			b = append(b, '}')
		}
	}
	return b
}

func appendFloat(b []byte, v float64) []byte { return strconv.AppendFloat(b, v, 'f', -1, 64) }

func appendFlag(b []byte, v float64) []byte { return strconv.AppendBool(b, v != 0) }

var eolWords = []string{prober.EOLNormal, prober.EOLWarning, prober.EOLUrgent}

func appendEOL(b []byte, v float64) []byte {
	if i := int(v); v == math.Trunc(v) && i >= 0 && i < len(eolWords) {
		return strconv.AppendQuote(b, eolWords[i])
	}
	return b
}

func finite(vs ...float64) bool {
	for _, v := range vs {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return false
		}
	}
	return true
}

// rowOf is a sample as it would have been recorded.
func rowOf(p *prober.Sample) HistoryRow {
	row := HistoryRow{TS: p.TSMS, Sample: p}
	if p.Modules == nil {
		return row
	}
	add := func(key string, v float64) { row.Readings = append(row.Readings, Reading{key, v}) }
	if n := p.Modules.Network; n != nil {
		add("network.bytes_in_per_s", n.BytesInPerS)
		add("network.bytes_out_per_s", n.BytesOutPerS)
	}
	if t := p.Modules.Temperature; t != nil {
		add("temperature.hottest_c", t.HottestC)
	}
	if w := p.Modules.Power; w != nil {
		addFlag(add, "power.under_voltage", w.UnderVoltage)
		addFlag(add, "power.freq_capped", w.FreqCapped)
		addFlag(add, "power.throttled", w.Throttled)
		addFlag(add, "power.soft_temp_limit", w.SoftTempLimit)
	}
	if w := p.Modules.Wear; w != nil {
		if w.UsedPct != nil {
			add("wear.used_pct", *w.UsedPct)
		}
		for i, word := range eolWords {
			if word == w.PreEOL {
				add("wear.pre_eol", float64(i))
			}
		}
	}
	return row
}

func addFlag(add func(string, float64), key string, v *bool) {
	switch {
	case v == nil:
	case *v:
		add(key, 1)
	default:
		add(key, 0)
	}
}
