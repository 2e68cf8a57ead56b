package prober

import (
	"math"
	"slices"
	"time"
)

// The sensor catalogue: one table of modules and one of sensors. History, the control
// socket, alert rules, configuration keys, charts and exports are derived from them.
//
// To add a sensor to a module, add a row to sensors. To add a module, add a constant and
// a row to moduleTable, a member to ModuleReadings and a reader to moduleOpeners.

// Module identifies a group of readings that is sampled and configured together. Lists
// of modules are in the order of these constants.
type Module uint8

// The modules. Those from ModuleNetwork on are optional.
const (
	ModuleCPU Module = iota
	ModuleMemory
	ModuleDisk
	ModuleLoad
	ModuleNetwork
	ModuleTemperature
	ModulePower
	ModuleWear
	NumModules

	firstOptional = ModuleNetwork
)

// moduleInfo is a row of moduleTable.
type moduleInfo struct {
	// name is used in configuration keys and in lists of modules.
	name string
	// member is used in JSON, and before the dot of a sensor's key.
	member string
	// alias is a third name that requests and configurations may use; "" for none.
	alias string
	// interval is how often an optional module is read, unless SetModuleInterval changes it.
	interval time.Duration
	memberAccess
}

// moduleTable describes the modules. The driver behind power samples every 2 s and then
// clears its flags; wear changes within weeks, and reading it may cost the card a command.
var moduleTable = [NumModules]moduleInfo{
	ModuleCPU:    {name: "cpu", member: "cpu"},
	ModuleMemory: {name: "mem", member: "memory"},
	ModuleDisk:   {name: "disk", member: "disk"},
	ModuleLoad:   {name: "load", member: "load"},
	ModuleNetwork: {"network", "network", "net", MinInterval,
		accessTo(func(r *ModuleReadings) **Network { return &r.Network }, (*Network).check)},
	ModuleTemperature: {"temperature", "temperature", "", 5 * time.Second,
		accessTo(func(r *ModuleReadings) **Temperature { return &r.Temperature }, (*Temperature).check)},
	ModulePower: {"power", "power", "", 2 * time.Second,
		accessTo(func(r *ModuleReadings) **Power { return &r.Power }, (*Power).check)},
	ModuleWear: {"wear", "wear", "", time.Hour,
		accessTo(func(r *ModuleReadings) **Wear { return &r.Wear }, (*Wear).check)},
}

// String is the name of m in configuration keys and in lists of modules: "mem".
func (m Module) String() string { return moduleTable[m].name }

// Member is the name of m in JSON and in the keys of its sensors: "memory".
func (m Module) Member() string { return moduleTable[m].member }

// IsOptional reports whether m is read only while it is enabled. Its readings are then
// in Sample.Modules.
func (m Module) IsOptional() bool { return m >= firstOptional }

// DefaultInterval is how often an optional module is read by default, at most.
func (m Module) DefaultInterval() time.Duration { return moduleTable[m].interval }

// MaxInterval is the longest interval that a client or a configuration may set for m. The default
// is always within it.
func (m Module) MaxInterval() time.Duration { return max(MaxInterval, m.DefaultInterval()) }

// OtherName is the name of m that is not String, "" for none. ModuleByName knows both.
func (m Module) OtherName() string {
	if t := moduleTable[m]; t.member != t.name {
		return t.member
	}
	return moduleTable[m].alias
}

// ModuleByName finds a module by its name, its JSON member or its alias.
func ModuleByName(name string) (m Module, ok bool) {
	i := slices.IndexFunc(moduleTable[:], func(t moduleInfo) bool {
		return t.name == name || t.member == name || t.alias == name && name != ""
	})
	return Module(max(i, 0)), i >= 0
}

// ModuleSet is a set of modules, a bit for each.
type ModuleSet uint16

// AllModules has every module; OptionalModules those that can be enabled, whether this
// machine has them or not.
const (
	AllModules      ModuleSet = 1<<NumModules - 1
	OptionalModules ModuleSet = AllModules - (1<<firstOptional - 1)
)

// SetOf returns the set of the given modules.
func SetOf(modules ...Module) (s ModuleSet) {
	for _, m := range modules {
		s |= 1 << m
	}
	return s
}

// Has reports whether m is in s.
func (s ModuleSet) Has(m Module) bool { return s&(1<<m) != 0 }

// Names are the names of the modules in s, in order; never nil.
func (s ModuleSet) Names() []string {
	names := []string{}
	for m := range NumModules {
		if s.Has(m) {
			names = append(names, m.String())
		}
	}
	return names
}

// Form is what the values of a sensor mean.
type Form uint8

// Forms of values.
const (
	FormNumber Form = iota
	FormFlag        // 0 or 1; a boolean in JSON
	FormState       // an index in EOLStates; a string in JSON
)

// Sensor is one figure of a module.
type Sensor struct {
	Module Module
	// Key is the JSON member of the module, a dot, and the field's name, in history, in
	// exports and on the control socket. It is empty for figures that only rules use.
	Key string
	// Frame is the field of the metric frame that carries it (RFC-0009 §5.1), if any.
	Frame string
	Unit  string // "%", "C", "MiB", "B/s"; empty for plain numbers, flags and states
	Form  Form
	// Read finds the value in a sample; known is false when the sample does not have it.
	// It is nil for counts, which mean something over a window only.
	Read   func(*Sample) (v float64, known bool)
	Record Record
	Chart  Chart
	// Warning is a few words for a person while a flag is set.
	Warning string
	Metric  Metric
}

// Record says how history keeps a sensor of an optional module. Other modules have
// separate columns.
type Record struct {
	// ID is the number of the key in history files. It is never changed or reused; 0
	// means that the sensor is not recorded.
	ID uint8
	// Count is what was counted in the window of a Network. History records the sum
	// since its last record, or with PerSecond the mean rate. Without Count it records
	// the last value, if it was read since.
	Count     func(*Network) uint64
	PerSecond bool
}

// Chart says how a sensor is drawn over time. Without a label it is drawn by its key.
type Chart struct {
	Label string
	// Max is the end of the scale; 0 is the largest value drawn. MaxKey names the sensor
	// whose value is the end of the scale instead.
	Max    float64
	MaxKey string
	// Hidden sensors are not drawn: another one of the module stands for them.
	Hidden bool
}

// Metric describes a sensor to alert rules. Its zero value means that rules cannot use
// the sensor.
type Metric struct {
	Name string
	// Min and Max are the range of the values, by which rules are checked.
	Min, Max float64
	// Noun is what messages call the value: "cpu use". For flags it is a sentence for 1,
	// and Good one for 0.
	Noun, Good string
	// Advice is what to do when the value is too high.
	Advice string
	// HasUnit is set when Noun names the unit already.
	HasUnit bool
}

// Unbounded is the Max of a Metric that has no bound.
const Unbounded = math.MaxFloat64

// Sensors are all sensors, in the order of their modules. The slice is shared; do not
// change it.
func Sensors() []Sensor { return sensors }

// sensors is in the order of modules, and within a module in that of an export's columns.
var sensors = []Sensor{
	{Module: ModuleCPU, Key: "cpu.usage_percent", Frame: "cpu_pct", Unit: "%",
		Read:   func(s *Sample) (float64, bool) { return s.CPUPct, true },
		Chart:  Chart{Label: "CPU", Max: 100},
		Metric: Metric{Name: "cpu_pct", Max: 100, Noun: "cpu use", Advice: "see what runs: top"}},

	{Module: ModuleMemory, Key: "memory.total", Frame: "mem_total_bytes", Unit: "MiB",
		Read:  func(s *Sample) (float64, bool) { return float64(s.MemTotalBytes >> 20), true },
		Chart: Chart{Hidden: true}},
	{Module: ModuleMemory, Key: "memory.used", Frame: "mem_bytes", Unit: "MiB",
		Read:  func(s *Sample) (float64, bool) { return float64(s.MemBytes >> 20), true },
		Chart: Chart{Label: "Memory", MaxKey: "memory.total"}},
	{Module: ModuleMemory, Unit: "%", Read: memPct,
		Metric: Metric{Name: "mem_pct", Max: 100, Noun: "memory use", Advice: "see what takes it: ps aux --sort -rss"}},

	{Module: ModuleDisk, Key: "disk.usage_percent", Frame: "disk_pct", Unit: "%",
		Read:  func(s *Sample) (float64, bool) { return s.DiskPct, s.DiskErr == nil },
		Chart: Chart{Label: "Disk", Max: 100},
		Metric: Metric{Name: "disk_pct", Max: 100, Noun: "disk use",
			Advice: "free some space: journalctl --vacuum-size=50M, then du -xh / | sort -h | tail"}},

	{Module: ModuleLoad, Key: "load.load_1m", Frame: "load_1m",
		Read:   func(s *Sample) (float64, bool) { return s.Load1, true },
		Chart:  Chart{Label: "Load 1m"},
		Metric: Metric{Name: "load_1m", Max: Unbounded, Noun: "load over 1 minute"}},
	{Module: ModuleLoad, Key: "load.load_5m", Frame: "load_5m",
		Read:   func(s *Sample) (float64, bool) { return s.Load5, true },
		Chart:  Chart{Hidden: true},
		Metric: Metric{Name: "load_5m", Max: Unbounded, Noun: "load over 5 minutes"}},
	{Module: ModuleLoad, Key: "load.load_15m", Frame: "load_15m",
		Read:   func(s *Sample) (float64, bool) { return s.Load15, true },
		Chart:  Chart{Hidden: true},
		Metric: Metric{Name: "load_15m", Max: Unbounded, Noun: "load over 15 minutes"}},

	{Module: ModuleNetwork, Key: "network.bytes_in_per_s", Unit: "B/s",
		Read:   ofNetwork(func(n *Network) float64 { return n.BytesInPerS }),
		Record: Record{ID: 1, Count: func(n *Network) uint64 { return n.BytesIn }, PerSecond: true},
		Chart:  Chart{Label: "Net in"},
		Metric: Metric{Name: "net_bytes_in_per_s", Max: Unbounded, Noun: "bytes received a second", HasUnit: true}},
	{Module: ModuleNetwork, Key: "network.bytes_out_per_s", Unit: "B/s",
		Read:   ofNetwork(func(n *Network) float64 { return n.BytesOutPerS }),
		Record: Record{ID: 2, Count: func(n *Network) uint64 { return n.BytesOut }, PerSecond: true},
		Chart:  Chart{Label: "Net out"},
		Metric: Metric{Name: "net_bytes_out_per_s", Max: Unbounded, Noun: "bytes sent a second", HasUnit: true}},
	{Module: ModuleNetwork, Key: "network.errors_in",
		Record: Record{ID: 3, Count: func(n *Network) uint64 { return n.ErrorsIn }}},
	{Module: ModuleNetwork, Key: "network.errors_out",
		Record: Record{ID: 4, Count: func(n *Network) uint64 { return n.ErrorsOut }}},
	{Module: ModuleNetwork, Read: ofNetwork(func(n *Network) float64 {
		return 1000 * float64(n.ErrorsIn+n.ErrorsOut) / float64(max(n.WindowMS, 1))
	}), Metric: Metric{Name: "net_errors_per_s", Max: Unbounded, Noun: "network errors a second"}},

	{Module: ModuleTemperature, Key: "temperature.hottest_c", Unit: "C", Read: hottest,
		Record: Record{ID: 5},
		Chart:  Chart{Label: "Temp"},
		Metric: Metric{Name: "temperature_c", Min: minC, Max: maxC, Noun: "the hottest temperature",
			Advice: "give the board air or a heat sink, or less to do"}},

	{Module: ModulePower, Key: "power.under_voltage", Form: FormFlag,
		Read:    ofPower(func(p *Power) *bool { return p.UnderVoltage }),
		Record:  Record{ID: 6},
		Warning: "under-voltage",
		Metric: Metric{Name: "under_voltage", Max: 1, Noun: "the supply voltage is too low", Good: "the supply voltage is good",
			Advice: "use the board's own power supply and a short cable"}},
	{Module: ModulePower, Key: "power.freq_capped", Form: FormFlag,
		Read:    ofPower(func(p *Power) *bool { return p.FreqCapped }),
		Record:  Record{ID: 7},
		Warning: "frequency capped",
		Metric: Metric{Name: "freq_capped", Max: 1, Noun: "the CPU may not run at full speed", Good: "the CPU may run at full speed",
			Advice: "mind its supply and its heat"}},
	{Module: ModulePower, Key: "power.throttled", Form: FormFlag,
		Read:    ofPower(func(p *Power) *bool { return p.Throttled }),
		Record:  Record{ID: 8},
		Warning: "throttled",
		Metric: Metric{Name: "throttled", Max: 1, Noun: "the CPU is slowed down", Good: "the CPU is no longer slowed down",
			Advice: "mind its supply and its heat"}},
	{Module: ModulePower, Key: "power.soft_temp_limit", Form: FormFlag,
		Read:    ofPower(func(p *Power) *bool { return p.SoftTempLimit }),
		Record:  Record{ID: 9},
		Warning: "soft temperature limit",
		Metric: Metric{Name: "soft_temp_limit", Max: 1, Noun: "the CPU is slowed down a little by heat", Good: "the CPU is not slowed down by heat",
			Advice: "give it air or a heat sink"}},

	{Module: ModuleWear, Key: "wear.used_pct", Unit: "%", Read: wearPct,
		Record: Record{ID: 10},
		Chart:  Chart{Label: "Wear", Max: 100},
		Metric: Metric{Name: "wear_pct", Max: 100, Noun: "used life of the eMMC", Advice: "back it up and plan to replace it"}},
	{Module: ModuleWear, Key: "wear.pre_eol", Form: FormState, Read: preEOL,
		Record: Record{ID: 11}},
	{Module: ModuleWear, Read: func(s *Sample) (float64, bool) { v, known := preEOL(s); return v + 1, known },
		Metric: Metric{Name: "wear_pre_eol", Min: 1, Max: 3, Noun: "the state of the eMMC's reserved blocks (1 good, 2 mostly used, 3 used up)",
			Advice: "back it up and replace it"}},
}

// memPct is the share of memory that is used, which only rules need.
func memPct(s *Sample) (float64, bool) {
	if s.MemTotalBytes == 0 {
		return 0, false
	}
	return math.Round(10000*float64(s.MemBytes)/float64(s.MemTotalBytes)) / 100, true
}

// noReadings stands for the optional modules of a sample without any.
var noReadings ModuleReadings

// optional is Modules, or an empty value where it is nil.
func (s *Sample) optional() *ModuleReadings {
	if s.Modules == nil {
		return &noReadings
	}
	return s.Modules
}

// ofNetwork reads a figure of Network, where there is one.
func ofNetwork(figure func(*Network) float64) func(*Sample) (float64, bool) {
	return func(s *Sample) (float64, bool) {
		n := s.optional().Network
		if n == nil {
			return 0, false
		}
		return figure(n), true
	}
}

// hottest reads the temperature of the hottest zone.
func hottest(s *Sample) (float64, bool) {
	t := s.optional().Temperature
	if t == nil {
		return 0, false
	}
	return t.HottestC, true
}

// ofPower reads a flag of Power. A flag that the kernel does not report is not known.
func ofPower(flag func(*Power) *bool) func(*Sample) (float64, bool) {
	return func(s *Sample) (float64, bool) {
		p := s.optional().Power
		if p == nil {
			return 0, false
		}
		isSet := flag(p)
		switch {
		case isSet == nil:
			return 0, false
		case *isSet:
			return 1, true
		}
		return 0, true
	}
}

// wearPct reads the used life of the most used eMMC. Some report only the state of their blocks.
func wearPct(s *Sample) (float64, bool) {
	w := s.optional().Wear
	if w == nil || w.UsedPct == nil {
		return 0, false
	}
	return *w.UsedPct, true
}

// preEOL is the index in EOLStates of the state of the eMMC's reserved blocks.
func preEOL(s *Sample) (float64, bool) {
	w := s.optional().Wear
	if w == nil {
		return 0, false
	}
	i := slices.Index(EOLStates, w.PreEOL)
	return float64(i), i >= 0
}
