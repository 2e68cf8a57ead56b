package history

import (
	"time"

	"agentctl/prober"
)

// modulesEvery is how often the readings of other modules are kept at most: at every
// sample they would double what is written to the card.
const modulesEvery = 10 * time.Second

// moduleNotes keeps what the modules beside the sample say, while Record runs. What was
// not read anew since is not kept again.
type moduleNotes struct {
	at   time.Duration // Mono of the sample whose modules were kept last; 0 for none
	kept prober.Modules

	seen            *prober.Network // counted already
	window, in, out uint64          // ms and bytes since at
	inErrs, outErrs uint64
}

// add looks at every sample, and hands a reading of each module to keep from time to time:
//
//	network.bytes_in_per_s, network.bytes_out_per_s    mean since the one before
//	network.errors_in, network.errors_out              since the one before, if there were any
//	temperature.hottest_c
//	power.under_voltage, .freq_capped, .throttled, .soft_temp_limit    0 or 1
//	wear.used_pct
//	wear.pre_eol                                       0 normal, 1 warning, 2 urgent
func (m *moduleNotes) add(x prober.Sample, keep func(key string, value float64)) {
	if x.Extra == nil {
		return
	}
	now := *x.Extra
	if n := now.Network; n != nil && n != m.seen {
		m.seen = n
		m.window += uint64(n.WindowMS)
		m.in, m.out = m.in+n.BytesIn, m.out+n.BytesOut
		m.inErrs, m.outErrs = m.inErrs+n.ErrorsIn, m.outErrs+n.ErrorsOut
	}
	// A sample may come a little early.
	if m.at != 0 && x.Mono-m.at < modulesEvery-modulesEvery/20 {
		return
	}
	m.at = x.Mono
	if m.window > 0 {
		keep("network.bytes_in_per_s", float64(m.in)*1000/float64(m.window))
		keep("network.bytes_out_per_s", float64(m.out)*1000/float64(m.window))
		if m.inErrs+m.outErrs > 0 {
			keep("network.errors_in", float64(m.inErrs))
			keep("network.errors_out", float64(m.outErrs))
		}
		m.window, m.in, m.out, m.inErrs, m.outErrs = 0, 0, 0, 0, 0
	}
	if t := now.Temperature; t != nil && t != m.kept.Temperature {
		keep("temperature.hottest_c", t.HottestC)
	}
	if p := now.Power; p != nil && p != m.kept.Power {
		keepFlag(keep, "power.under_voltage", p.UnderVoltage)
		keepFlag(keep, "power.freq_capped", p.FreqCapped)
		keepFlag(keep, "power.throttled", p.Throttled)
		keepFlag(keep, "power.soft_temp_limit", p.SoftTempLimit)
	}
	if w := now.Wear; w != nil && w != m.kept.Wear {
		if w.UsedPct != nil {
			keep("wear.used_pct", *w.UsedPct)
		}
		if level, ok := map[string]float64{prober.EOLNormal: 0, prober.EOLWarning: 1, prober.EOLUrgent: 2}[w.PreEOL]; ok {
			keep("wear.pre_eol", level)
		}
	}
	m.kept = now
}

func keepFlag(keep func(string, float64), key string, v *bool) {
	switch {
	case v == nil:
	case *v:
		keep(key, 1)
	default:
		keep(key, 0)
	}
}
