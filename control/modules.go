package control

import (
	"time"

	"agentctl/prober"
)

// module is one thing a snapshot tells about.
type module uint8

// The modules, in the order they are answered in.
const (
	modCPU module = iota
	modMem
	modDisk
	modLoad
	modNetwork
	modTemperature
	modPower
	modWear
	numModules
)

// modules is a set of them.
type modules uint8

const (
	defaultModules = modules(1<<modCPU | 1<<modMem)
	extraModules   = modules(1<<modNetwork | 1<<modTemperature | 1<<modPower | 1<<modWear) // read only when enabled
)

var moduleNames = [numModules]string{"cpu", "mem", "disk", "load", "network", "temperature", "power", "wear"}

const knownModules = "cpu, mem (or memory), disk, load, network, temperature, power and wear"

// moduleOf knows mem by two names.
func moduleOf(name string) (module, bool) {
	if name == "memory" {
		return modMem, true
	}
	for m, n := range moduleNames {
		if n == name {
			return module(m), true
		}
	}
	return 0, false
}

func (s modules) has(m module) bool { return s&(1<<m) != 0 }

func (s modules) names() []string {
	names := []string{}
	for m := range numModules {
		if s.has(m) {
			names = append(names, moduleNames[m])
		}
	}
	return names
}

// snapshot is what a sample says of the modules in set.
func (s modules) snapshot(p prober.Sample) Snapshot {
	snap := Snapshot{TS: p.TSMS}
	if s.has(modCPU) {
		snap.CPU = &CPU{p.CPUPct}
	}
	if s.has(modMem) {
		snap.Memory = &Memory{Total: p.MemTotalBytes >> 20, Used: p.MemBytes >> 20}
	}
	if s.has(modDisk) && p.DiskErr == nil {
		snap.Disk = &Disk{p.DiskPct}
	}
	if s.has(modLoad) {
		snap.Load = &Load{p.Load1, p.Load5, p.Load15}
	}
	if p.Modules == nil {
		return snap
	}
	if s.has(modNetwork) {
		snap.Network = p.Modules.Network
	}
	if s.has(modTemperature) {
		snap.Temperature = p.Modules.Temperature
	}
	if s.has(modPower) {
		snap.Power = p.Modules.Power
	}
	if s.has(modWear) {
		snap.Wear = p.Modules.Wear
	}
	return snap
}

// readings are the modules beyond the frame as they were told last. What was read anew
// since has another address.
type readings prober.ModuleReadings

// news are the modules that were not told yet as they are in now.
func (r *readings) news(now *prober.ModuleReadings) (set modules) {
	if now == nil {
		return 0
	}
	if now.Network != nil && now.Network != r.Network {
		set |= 1 << modNetwork
	}
	if now.Temperature != nil && now.Temperature != r.Temperature {
		set |= 1 << modTemperature
	}
	if now.Power != nil && now.Power != r.Power {
		set |= 1 << modPower
	}
	if now.Wear != nil && now.Wear != r.Wear {
		set |= 1 << modWear
	}
	return set
}

// keep notes that the modules in told were told as they are in now.
func (r *readings) keep(now *prober.ModuleReadings, told modules) {
	if told.has(modNetwork) {
		r.Network = now.Network
	}
	if told.has(modTemperature) {
		r.Temperature = now.Temperature
	}
	if told.has(modPower) {
		r.Power = now.Power
	}
	if told.has(modWear) {
		r.Wear = now.Wear
	}
}

// intervals is how often each module wants to be told; zero: the base interval.
type intervals [numModules]time.Duration

func (iv *intervals) of(m module, base time.Duration) time.Duration {
	if iv[m] > 0 {
		return iv[m]
	}
	return base
}
