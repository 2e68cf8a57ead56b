package history

import (
	"slices"
	"time"

	"agentctl/prober"
)

// modulesEvery is how often the readings of other modules are kept at most: at every
// sample they would double what is written to the card.
const modulesEvery = 10 * time.Second

// keyNames are the readings there are. In the file and in memory a name is its place here,
// from 1, so names are only ever added, at the end; 255 are the most.
var keyNames = [...]string{
	"network.bytes_in_per_s",
	"network.bytes_out_per_s",
	"network.errors_in",
	"network.errors_out",
	"temperature.hottest_c",
	"power.under_voltage",
	"power.freq_capped",
	"power.throttled",
	"power.soft_temp_limit",
	"wear.used_pct",
	"wear.pre_eol",
}

// keyOf is the number of a name, 0 when there is none.
func keyOf(name string) uint8 { return uint8(slices.Index(keyNames[:], name) + 1) }

// moduleNotes keeps what the modules beside the sample say, while Record runs. What was
// not read anew since is not kept again.
type moduleNotes struct {
	at   time.Duration // Mono of the sample whose modules were kept last; 0 for none
	kept prober.ModuleReadings

	seen            *prober.Network // counted already
	window, in, out uint64          // ms and bytes since at
	inErrs, outErrs uint64

	ready []Reading
}

// of looks at every sample, and returns readings to keep with it from time to time; they
// are valid until the next call.
func (m *moduleNotes) of(x prober.Sample) []Reading {
	if x.Modules == nil {
		return nil
	}
	now := *x.Modules
	if n := now.Network; n != nil && n != m.seen {
		m.seen = n
		m.window += uint64(n.WindowMS)
		m.in, m.out = m.in+n.BytesIn, m.out+n.BytesOut
		m.inErrs, m.outErrs = m.inErrs+n.ErrorsIn, m.outErrs+n.ErrorsOut
	}
	// A sample may come a little early.
	if m.at != 0 && x.Mono-m.at < modulesEvery-modulesEvery/20 {
		return nil
	}
	m.at = x.Mono
	m.ready = m.ready[:0]
	if m.window > 0 {
		m.keep("network.bytes_in_per_s", float64(m.in)*1000/float64(m.window))
		m.keep("network.bytes_out_per_s", float64(m.out)*1000/float64(m.window))
		if m.inErrs+m.outErrs > 0 {
			m.keep("network.errors_in", float64(m.inErrs))
			m.keep("network.errors_out", float64(m.outErrs))
		}
		m.window, m.in, m.out, m.inErrs, m.outErrs = 0, 0, 0, 0, 0
	}
	if t := now.Temperature; t != nil && t != m.kept.Temperature {
		m.keep("temperature.hottest_c", t.HottestC)
	}
	if p := now.Power; p != nil && p != m.kept.Power {
		m.keepFlag("power.under_voltage", p.UnderVoltage)
		m.keepFlag("power.freq_capped", p.FreqCapped)
		m.keepFlag("power.throttled", p.Throttled)
		m.keepFlag("power.soft_temp_limit", p.SoftTempLimit)
	}
	if w := now.Wear; w != nil && w != m.kept.Wear {
		if w.UsedPct != nil {
			m.keep("wear.used_pct", *w.UsedPct)
		}
		if level, ok := map[string]float64{prober.EOLNormal: 0, prober.EOLWarning: 1, prober.EOLUrgent: 2}[w.PreEOL]; ok {
			m.keep("wear.pre_eol", level)
		}
	}
	m.kept = now
	return m.ready
}

func (m *moduleNotes) keep(key string, v float64) { m.ready = append(m.ready, Reading{key, v}) }

func (m *moduleNotes) keepFlag(key string, v *bool) {
	switch {
	case v == nil:
	case *v:
		m.keep(key, 1)
	default:
		m.keep(key, 0)
	}
}
