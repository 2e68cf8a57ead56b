package alert

import (
	"math"
	"slices"

	"agentctl/prober"
)

// Metric is a figure a rule can watch.
type Metric struct {
	Name   string  // cpu_pct
	Unit   string  // "%"; "" for flags and plain numbers
	Min    float64 // of what it can be
	Max    float64
	Module string // of the prober, which must be enabled; "" for what is in every sample
}

// metric is a Metric and how it is read and spoken of.
type metric struct {
	Metric
	flag   bool // 0 or 1; the noun says what 1 means
	noun   string
	good   string // of flags: what 0 means
	advice string
	value  func(*prober.Sample) (v float64, known bool)
}

// unbounded is a bound nothing reaches.
const unbounded = math.MaxFloat64

const (
	heat  = "temperature"
	power = "power"
	wear  = "wear"
	net   = "network"
)

var metrics = []metric{
	pct("cpu_pct", "cpu use", "", "see what runs: top", func(s *prober.Sample) (float64, bool) { return s.CPUPct, true }),
	pct("mem_pct", "memory use", "", "see what takes it: ps aux --sort -rss", memPct),
	pct("disk_pct", "disk use", "", "free some space: journalctl --vacuum-size=50M, then du -xh / | sort -h | tail", func(s *prober.Sample) (float64, bool) { return s.DiskPct, s.DiskErr == nil }),
	figure("load_1m", "load over 1 minute", "", "", func(s *prober.Sample) (float64, bool) { return s.Load1, true }),
	figure("load_5m", "load over 5 minutes", "", "", func(s *prober.Sample) (float64, bool) { return s.Load5, true }),
	figure("load_15m", "load over 15 minutes", "", "", func(s *prober.Sample) (float64, bool) { return s.Load15, true }),
	temperature(),
	flag("under_voltage", "the supply voltage is too low", "the supply voltage is well", "use the board's own power supply and a short cable", func(p *prober.Power) *bool { return p.UnderVoltage }),
	flag("freq_capped", "the CPU may not run at full speed", "the CPU may run at full speed", "mind its supply and its heat", func(p *prober.Power) *bool { return p.FreqCapped }),
	flag("throttled", "the CPU is slowed down", "the CPU is no longer slowed down", "mind its supply and its heat", func(p *prober.Power) *bool { return p.Throttled }),
	flag("soft_temp_limit", "the CPU is slowed down a little by heat", "the CPU is not slowed down by heat", "give it air or a heat sink", func(p *prober.Power) *bool { return p.SoftTempLimit }),
	pct("wear_pct", "used life of the eMMC", wear, "back it up and plan to replace it", wearPct),
	preEOL(),
	traffic("net_bytes_in_per_s", "bytes received a second", func(n *prober.Network) float64 { return n.BytesInPerS }),
	traffic("net_bytes_out_per_s", "bytes sent a second", func(n *prober.Network) float64 { return n.BytesOutPerS }),
	traffic("net_errors_per_s", "network errors a second", func(n *prober.Network) float64 {
		return 1000 * float64(n.ErrorsIn+n.ErrorsOut) / float64(max(n.WindowMS, 1))
	}),
}

// Metrics are the figures a rule can watch.
func Metrics() []Metric {
	list := make([]Metric, len(metrics))
	for i := range metrics {
		list[i] = metrics[i].Metric
	}
	return list
}

func metricOf(name string) *metric {
	if i := slices.IndexFunc(metrics, func(m metric) bool { return m.Name == name }); i >= 0 {
		return &metrics[i]
	}
	return nil
}

// says is the figure in words.
func (m *metric) says(v float64) string {
	switch {
	case !m.flag:
		return m.noun + " is " + m.format(v)
	case v == 0:
		return m.good
	default:
		return m.noun
	}
}

func (m *metric) format(v float64) string {
	if m.Unit == "" {
		return number(v)
	}
	return number(v) + " " + m.Unit
}

func pct(name, noun, module, advice string, value func(*prober.Sample) (float64, bool)) metric {
	return metric{Metric: Metric{Name: name, Unit: "%", Max: 100, Module: module}, noun: noun, advice: advice, value: value}
}

func figure(name, noun, module, advice string, value func(*prober.Sample) (float64, bool)) metric {
	return metric{Metric: Metric{Name: name, Max: unbounded, Module: module}, noun: noun, advice: advice, value: value}
}

func traffic(name, noun string, value func(*prober.Network) float64) metric {
	return figure(name, noun, net, "", func(s *prober.Sample) (float64, bool) {
		if s.Modules == nil || s.Modules.Network == nil {
			return 0, false
		}
		return value(s.Modules.Network), true
	})
}

func flag(name, noun, good, advice string, value func(*prober.Power) *bool) metric {
	m := figure(name, noun, power, advice, func(s *prober.Sample) (float64, bool) {
		if s.Modules == nil || s.Modules.Power == nil {
			return 0, false
		}
		set := value(s.Modules.Power)
		if set == nil {
			return 0, false
		}
		if *set {
			return 1, true
		}
		return 0, true
	})
	m.flag, m.Max, m.good = true, 1, good
	return m
}

func temperature() metric {
	m := figure("temperature_c", "the hottest temperature", heat, "give the board air or a heat sink, or less to do", func(s *prober.Sample) (float64, bool) {
		if s.Modules == nil || s.Modules.Temperature == nil {
			return 0, false
		}
		return s.Modules.Temperature.HottestC, true
	})
	m.Unit, m.Min, m.Max = "C", -60, 150
	return m
}

func memPct(s *prober.Sample) (float64, bool) {
	if s.MemTotalBytes == 0 {
		return 0, false
	}
	return math.Round(10000*float64(s.MemBytes)/float64(s.MemTotalBytes)) / 100, true
}

func wearPct(s *prober.Sample) (float64, bool) {
	if s.Modules == nil || s.Modules.Wear == nil || s.Modules.Wear.UsedPct == nil {
		return 0, false
	}
	return *s.Modules.Wear.UsedPct, true
}

// preEOL makes a number of the state of the eMMC's reserved blocks: 1 normal, 2
// warning, 3 urgent.
func preEOL() metric {
	m := figure("wear_pre_eol", "the state of the eMMC's reserved blocks (1 good, 2 mostly used, 3 used up)", wear, "back it up and replace it", func(s *prober.Sample) (float64, bool) {
		if s.Modules == nil || s.Modules.Wear == nil {
			return 0, false
		}
		i := slices.Index([]string{prober.EOLNormal, prober.EOLWarning, prober.EOLUrgent}, s.Modules.Wear.PreEOL)
		return float64(i + 1), i >= 0
	})
	m.Min, m.Max = 1, 3
	return m
}
