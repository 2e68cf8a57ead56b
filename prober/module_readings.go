package prober

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// ModuleReadings are the readings of the optional modules: what boards fail of, and the
// network. A module is read while it is enabled (Options.Modules, SetModules). One that
// this machine does not have, or that cannot be read now, is nil, never zero.
//
// All receivers of a sample share them; they must not be changed. A module that is read
// less often than samples are taken keeps its pointer until it is read again, so a receiver
// can find out what is new (NewSince).
type ModuleReadings struct {
	Network     *Network     `json:"network,omitempty"`
	Temperature *Temperature `json:"temperature,omitempty"`
	Power       *Power       `json:"power,omitempty"`
	Wear        *Wear        `json:"wear,omitempty"`
}

// Network is the traffic of the interfaces that lead out of this machine. These are the
// physical ones and ppp, because bridges, VLANs, tunnels and containers carry the same
// bytes again; where there are none, as in a container, they are all but loopback. The
// first reading has no Network, because it has no predecessor.
//
// The values cover WindowMS, the time since the previous reading; in Watch, the time since
// the previous call of its fn. An interface counts from when it is first seen; one whose
// counters were reset counts nothing in that window.
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

	from, to netTotals // from which the values of another window are computed
}

// Temperature is the readings of the sensors, in degrees Celsius with one decimal.
type Temperature struct {
	HottestC float64 `json:"hottest_c"`
	Zones    []Zone  `json:"zones"` // 1..16
}

// Zone is one sensor, by the name its driver gives it: "cpu-thermal", "nvme Composite".
type Zone struct {
	Name string  `json:"name"` // printable ASCII, at most 32 bytes, unique
	C    float64 `json:"c"`    // -60..150
}

// Power is what the firmware of a Raspberry Pi does about its supply and its heat:
// now, or within the two seconds or so between the readings of its driver. A flag that the
// kernel does not report is nil; other boards have no Power.
type Power struct {
	UnderVoltage  *bool `json:"under_voltage,omitempty"`   // the supply is too weak, or its cable
	FreqCapped    *bool `json:"freq_capped,omitempty"`     // the CPU may not run at full speed
	Throttled     *bool `json:"throttled,omitempty"`       // the CPU is slowed down
	SoftTempLimit *bool `json:"soft_temp_limit,omitempty"` // slowed down a little, from 60 °C on some models
}

// Wear is what the eMMCs report about their age (JEDEC eMMC 5.0). SD cards have no such
// figures and are left out. Some kernels read them once, when the card is found.
type Wear struct {
	UsedPct *float64     `json:"used_pct,omitempty"` // the largest of Devices
	PreEOL  string       `json:"pre_eol,omitempty"`  // the worst of Devices
	Devices []WearDevice `json:"devices"`            // 1..8
}

// WearDevice is one eMMC. At least one of the two is known.
type WearDevice struct {
	Name string `json:"name"` // "mmcblk0"
	// UsedPct is the share of its life that is used at least: 0, 10 .. 90, and 100 when it
	// is exceeded.
	UsedPct *float64 `json:"used_pct,omitempty"`
	// PreEOL is the state of the reserved blocks: normal, warning (80 % used) or urgent
	// (90 % used).
	PreEOL string `json:"pre_eol,omitempty"`
}

// States of the reserved blocks of an eMMC.
const (
	EOLNormal  = "normal"
	EOLWarning = "warning"
	EOLUrgent  = "urgent"
)

// EOLStates are the states of the reserved blocks, from good to bad. History, exports and
// rules use the index.
var EOLStates = []string{EOLNormal, EOLWarning, EOLUrgent}

// Bounds of what the modules may hold.
const (
	maxZones       = 16
	maxZoneName    = 32
	maxWearDevices = 8
	minC, maxC     = -60, 150
)

// memberAccess reads, copies and checks one member of ModuleReadings. It is empty for
// modules that are not optional.
type memberAccess struct {
	get   func(*ModuleReadings) any // comparable: a pointer, typed also when it is nil
	copy  func(dst, src *ModuleReadings)
	check func(*ModuleReadings) error // nil for a member that is nil or may leave the machine
}

// accessTo makes the access to a member, with its check.
func accessTo[T any](member func(*ModuleReadings) **T, check func(*T) error) memberAccess {
	return memberAccess{
		get:  func(r *ModuleReadings) any { return *member(r) },
		copy: func(dst, src *ModuleReadings) { *member(dst) = *member(src) },
		check: func(r *ModuleReadings) error {
			if m := *member(r); m != nil {
				return check(m)
			}
			return nil
		},
	}
}

// Only returns the readings of the modules in set.
func (r *ModuleReadings) Only(set ModuleSet) (out ModuleReadings) {
	out.Update(r, set)
	return out
}

// Update replaces the readings of the modules in set by those in src.
func (r *ModuleReadings) Update(src *ModuleReadings, set ModuleSet) {
	for m := firstOptional; m < NumModules; m++ {
		if set.Has(m) {
			moduleTable[m].copy(r, src)
		}
	}
}

// NewSince returns the modules that were read since old was taken: they have a reading,
// at another address.
func (r *ModuleReadings) NewSince(old *ModuleReadings) (set ModuleSet) {
	for m := firstOptional; m < NumModules; m++ {
		get := moduleTable[m].get
		if now := get(r); now != get(old) && now != get(&noReadings) {
			set |= 1 << m
		}
	}
	return set
}

// OptionalModuleNames are the names of the modules that can be enabled, whether this
// machine has them or not.
func OptionalModuleNames() []string { return OptionalModules.Names() }

// optionalModule finds an optional module by its name.
func optionalModule(name string) (Module, error) {
	if m, ok := ModuleByName(name); ok && m.IsOptional() {
		return m, nil
	}
	return 0, fmt.Errorf("prober: there is no module %.40q; choose from %s", name, strings.Join(OptionalModuleNames(), ", "))
}

// optionalSetOf is the set of optional modules with these names.
func optionalSetOf(names []string) (s ModuleSet, err error) {
	for _, name := range names {
		m, err := optionalModule(name)
		if err != nil {
			return 0, err
		}
		s |= 1 << m
	}
	return s, nil
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
			return fmt.Errorf("temperature zone %.40q is not a printable name of 1..%d bytes", z.Name, maxZoneName)
		}
		if !(z.C >= minC && z.C <= maxC) {
			return fmt.Errorf("temperature of %s is %v, outside %d..%d", z.Name, z.C, minC, maxC)
		}
		hottest = max(hottest, z.C)
	}
	if t.HottestC != hottest {
		return fmt.Errorf("hottest_c is %v, but the hottest zone has %v", t.HottestC, hottest)
	}
	return nil
}

func (p *Power) check() error {
	if *p == (Power{}) {
		return errors.New("power has no flag")
	}
	return nil
}

func (w *Wear) check() error {
	if len(w.Devices) < 1 || len(w.Devices) > maxWearDevices {
		return fmt.Errorf("%d worn devices, outside 1..%d", len(w.Devices), maxWearDevices)
	}
	for _, d := range append([]WearDevice{{"wear", w.UsedPct, w.PreEOL}}, w.Devices...) {
		if d.Name == "" || len(d.Name) > maxZoneName || printable(d.Name) != d.Name {
			return fmt.Errorf("worn device %.40q is not a printable name of 1..%d bytes", d.Name, maxZoneName)
		}
		if d.UsedPct != nil && !(*d.UsedPct >= 0 && *d.UsedPct <= 100) {
			return fmt.Errorf("used_pct of %s is %v, outside 0..100", d.Name, *d.UsedPct)
		}
		if d.PreEOL != "" && !slices.Contains(EOLStates, d.PreEOL) {
			return fmt.Errorf("pre_eol of %s is %.40q", d.Name, d.PreEOL)
		}
		if d.UsedPct == nil && d.PreEOL == "" {
			return fmt.Errorf("worn device %s has no figure", d.Name)
		}
	}
	return nil
}
