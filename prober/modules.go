package prober

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// ModuleReadings are readings beyond the frame: what boards die of, and the network. Each
// is read only while it is enabled (Options.Modules, SetModules). One that this
// machine does not have, or that cannot be read now, is nil, never zero.
//
// They are shared by everybody who got the sample and must not be changed. A module
// that is read less often than samples are taken is the same pointer until it is
// read anew, so a reader can tell what is new.
type ModuleReadings struct {
	Network     *Network     `json:"network,omitempty"`
	Temperature *Temperature `json:"temperature,omitempty"`
	Power       *Power       `json:"power,omitempty"`
	Wear        *Wear        `json:"wear,omitempty"`
}

// Network is the traffic of all interfaces that lead out of this machine, loopback
// never among them: the physical ones and ppp where there are such, because bridges,
// VLANs, tunnels and containers carry the same bytes again, else all others (in a
// container). It is absent from the first reading, which has nothing to be compared
// with.
//
// The figures cover WindowMS, the time since the reading before; in Watch, the time
// since what its fn got before. An interface counts from when it is first seen; one
// whose counters began anew counts nothing in that window.
type Network struct {
	WindowMS       int64   `json:"window_ms"`
	BytesIn        uint64  `json:"bytes_in"`
	BytesOut       uint64  `json:"bytes_out"`
	PacketsIn      uint64  `json:"packets_in"`
	PacketsOut     uint64  `json:"packets_out"`
	ErrorsIn       uint64  `json:"errors_in"`
	ErrorsOut      uint64  `json:"errors_out"`
	BytesInPerS    float64 `json:"bytes_in_per_s"`
	BytesOutPerS   float64 `json:"bytes_out_per_s"`
	PacketsInPerS  float64 `json:"packets_in_per_s"`
	PacketsOutPerS float64 `json:"packets_out_per_s"`

	from, to netTotals // what the figures were made of, for other windows
}

// Temperature is what the sensors say, in degrees Celsius with one decimal.
type Temperature struct {
	HottestC float64 `json:"hottest_c"`
	Zones    []Zone  `json:"zones"` // 1..16
}

// Zone is one sensor, by the name its driver gives it: "cpu-thermal", "nvme Composite".
type Zone struct {
	Name string  `json:"name"` // printable ASCII, at most 32 bytes, no two alike
	C    float64 `json:"c"`    // -60..150
}

// Power is what the firmware of a Raspberry Pi does about its supply and its heat:
// now, or within the about two seconds that its driver looks at. What the kernel does
// not tell is nil; other boards have no Power at all.
type Power struct {
	UnderVoltage  *bool `json:"under_voltage,omitempty"`   // the supply is too weak, or its cable
	FreqCapped    *bool `json:"freq_capped,omitempty"`     // the CPU may not run at full speed
	Throttled     *bool `json:"throttled,omitempty"`       // the CPU is slowed down
	SoftTempLimit *bool `json:"soft_temp_limit,omitempty"` // slowed down a little, from 60 °C on some models
}

// Wear is what an eMMC says about its own age (JEDEC eMMC 5.0). SD cards have no such
// figures and are left out. Some kernels read them once, when the card is found.
type Wear struct {
	UsedPct *float64     `json:"used_pct,omitempty"` // the largest of Devices
	PreEOL  string       `json:"pre_eol,omitempty"`  // the worst of Devices
	Devices []WearDevice `json:"devices"`            // 1..8
}

// WearDevice is one eMMC. At least one of the two is known.
type WearDevice struct {
	Name    string   `json:"name"`               // "mmcblk0"
	UsedPct *float64 `json:"used_pct,omitempty"` // at least so much of its life is used: 0, 10 .. 90, and 100 when exceeded
	PreEOL  string   `json:"pre_eol,omitempty"`  // of the reserved blocks: normal, warning (80 % used), urgent (90 % used)
}

// States of the reserved blocks of an eMMC, from good to bad.
const (
	EOLNormal  = "normal"
	EOLWarning = "warning"
	EOLUrgent  = "urgent"
)

// Bounds of what the modules may hold.
const (
	maxZones    = 16
	maxZoneName = 32
	maxWorn     = 8
	minC, maxC  = -60, 150
)

// module is one member of Modules.
type module uint8

const (
	modNetwork module = iota
	modTemperature
	modPower
	modWear
	numModules
)

var moduleNames = [numModules]string{"network", "temperature", "power", "wear"}

// moduleEvery is how often each is read unless SetModuleInterval says otherwise. The
// driver behind power looks every 2 s and forgets, wear changes within weeks and may
// cost a command to the card.
var moduleEvery = [numModules]time.Duration{MinInterval, 5 * time.Second, 2 * time.Second, time.Hour}

// ModuleNames are the modules that can be enabled, whether this machine has them or
// not.
func ModuleNames() []string { return slices.Clone(moduleNames[:]) }

func moduleOf(name string) (module, error) {
	if i := slices.Index(moduleNames[:], name); i >= 0 {
		return module(i), nil
	}
	return 0, fmt.Errorf("prober: there is no module %.40q; choose from %s", name, strings.Join(moduleNames[:], ", "))
}

// moduleSet has a bit for each.
type moduleSet uint8

func (s moduleSet) has(m module) bool { return s&(1<<m) != 0 }

func moduleSetOf(names []string) (s moduleSet, err error) {
	for _, name := range names {
		m, err := moduleOf(name)
		if err != nil {
			return 0, err
		}
		s |= 1 << m
	}
	return s, nil
}

// with returns m with one module as it is in from.
func (m ModuleReadings) with(i module, from ModuleReadings) ModuleReadings {
	switch i {
	case modNetwork:
		m.Network = from.Network
	case modTemperature:
		m.Temperature = from.Temperature
	case modPower:
		m.Power = from.Power
	case modWear:
		m.Wear = from.Wear
	}
	return m
}

// check tells whether one module may leave the machine.
func (m ModuleReadings) check(i module) error {
	switch {
	case i == modNetwork && m.Network != nil:
		return m.Network.check()
	case i == modTemperature && m.Temperature != nil:
		return m.Temperature.check()
	case i == modPower && m.Power != nil && *m.Power == (Power{}):
		return errors.New("power says nothing")
	case i == modWear && m.Wear != nil:
		return m.Wear.check()
	}
	return nil
}

// Each check is written so that NaN, which compares false with everything, fails.

func (n *Network) check() error {
	if n.WindowMS < 1 || n.WindowMS > maxBytes {
		return fmt.Errorf("window_ms is %d, outside 1..%d", n.WindowMS, uint64(maxBytes))
	}
	for _, v := range [...]uint64{n.BytesIn, n.BytesOut, n.PacketsIn, n.PacketsOut, n.ErrorsIn, n.ErrorsOut} {
		if v > maxBytes {
			return fmt.Errorf("a network count is %d, above %d", v, uint64(maxBytes))
		}
	}
	for _, v := range [...]float64{n.BytesInPerS, n.BytesOutPerS, n.PacketsInPerS, n.PacketsOutPerS} {
		if !(v >= 0 && v <= math.MaxFloat64) {
			return fmt.Errorf("a network rate is %v, outside 0..%g", v, math.MaxFloat64)
		}
	}
	return nil
}

func (t *Temperature) check() error {
	if len(t.Zones) < 1 || len(t.Zones) > maxZones {
		return fmt.Errorf("%d temperature zones, outside 1..%d", len(t.Zones), maxZones)
	}
	hottest := t.Zones[0].C
	for _, z := range t.Zones {
		if z.Name == "" || len(z.Name) > maxZoneName || printable(z.Name) != z.Name {
			return fmt.Errorf("temperature zone %.40q is no printable name of 1..%d bytes", z.Name, maxZoneName)
		}
		if !(z.C >= minC && z.C <= maxC) {
			return fmt.Errorf("temperature of %s is %v, outside %d..%d", z.Name, z.C, minC, maxC)
		}
		hottest = max(hottest, z.C)
	}
	if t.HottestC != hottest {
		return fmt.Errorf("hottest_c is %v, its zones say %v", t.HottestC, hottest)
	}
	return nil
}

func (w *Wear) check() error {
	if len(w.Devices) < 1 || len(w.Devices) > maxWorn {
		return fmt.Errorf("%d worn devices, outside 1..%d", len(w.Devices), maxWorn)
	}
	for _, d := range append([]WearDevice{{"wear", w.UsedPct, w.PreEOL}}, w.Devices...) {
		if d.Name == "" || len(d.Name) > maxZoneName || printable(d.Name) != d.Name {
			return fmt.Errorf("worn device %.40q is no printable name of 1..%d bytes", d.Name, maxZoneName)
		}
		if d.UsedPct != nil && !(*d.UsedPct >= 0 && *d.UsedPct <= 100) {
			return fmt.Errorf("used_pct of %s is %v, outside 0..100", d.Name, *d.UsedPct)
		}
		if !slices.Contains([]string{"", EOLNormal, EOLWarning, EOLUrgent}, d.PreEOL) {
			return fmt.Errorf("pre_eol of %s is %.40q", d.Name, d.PreEOL)
		}
		if d.UsedPct == nil && d.PreEOL == "" {
			return fmt.Errorf("worn device %s says nothing", d.Name)
		}
	}
	return nil
}

// netCounters are bytes, packets and errors, in and out.
type netCounters struct {
	bytesIn, packetsIn, errorsIn, bytesOut, packetsOut, errorsOut uint64
}

// sub is what was counted since an earlier reading, never below zero.
func (c netCounters) sub(o netCounters) netCounters {
	return netCounters{
		less(c.bytesIn, o.bytesIn), less(c.packetsIn, o.packetsIn), less(c.errorsIn, o.errorsIn),
		less(c.bytesOut, o.bytesOut), less(c.packetsOut, o.packetsOut), less(c.errorsOut, o.errorsOut),
	}
}

func (c netCounters) add(o netCounters) netCounters {
	return netCounters{
		c.bytesIn + o.bytesIn, c.packetsIn + o.packetsIn, c.errorsIn + o.errorsIn,
		c.bytesOut + o.bytesOut, c.packetsOut + o.packetsOut, c.errorsOut + o.errorsOut,
	}
}

func less(a, b uint64) uint64 { return a - min(a, b) }

// netTotals are counters that only grow, at a moment. Those of one row compare with
// each other and with no others.
type netTotals struct {
	at  time.Time
	row *int // nil: there are none
	netCounters
}

// newNetwork is the traffic between two readings of one row, nil if no time passed.
func newNetwork(from, to netTotals) *Network {
	window := to.at.Sub(from.at)
	if window < time.Millisecond {
		return nil
	}
	c := to.sub(from.netCounters)
	perS := func(n uint64) float64 { return round2(float64(n) / window.Seconds()) }
	return &Network{
		WindowMS:       window.Milliseconds(),
		BytesIn:        c.bytesIn,
		BytesOut:       c.bytesOut,
		PacketsIn:      c.packetsIn,
		PacketsOut:     c.packetsOut,
		ErrorsIn:       c.errorsIn,
		ErrorsOut:      c.errorsOut,
		BytesInPerS:    perS(c.bytesIn),
		BytesOutPerS:   perS(c.bytesOut),
		PacketsInPerS:  perS(c.packetsIn),
		PacketsOutPerS: perS(c.packetsOut),
		from:           from,
		to:             to,
	}
}

// netWindow gives one watcher the traffic over its own interval.
type netWindow struct {
	seen  *Network // as the sampler had it
	given *Network // as the watcher got it
}

func (w *netWindow) over(m *ModuleReadings) *ModuleReadings {
	if m == nil || m.Network == nil {
		return m
	}
	if n := m.Network; n != w.seen {
		given := n
		// A row that is not the last one's began anew since.
		if s := w.seen; s != nil && n.to.row != nil && n.to.row == s.to.row && n.from.at.After(s.to.at) {
			if wide := newNetwork(s.to, n.to); wide != nil && wide.check() == nil {
				given = wide
			}
		}
		w.seen, w.given = n, given
	}
	if w.given == m.Network {
		return m
	}
	own := m.with(modNetwork, ModuleReadings{Network: w.given})
	return &own
}
