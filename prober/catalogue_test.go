package prober

import (
	"slices"
	"strings"
	"testing"
)

// fullSample has a value for each sensor, all of them different.
func fullSample() *Sample {
	return &Sample{
		TSMS: MinTSMS, CPUPct: 1, MemBytes: 2 << 20, MemTotalBytes: 64 << 20, DiskPct: 4, Load1: 5, Load5: 6, Load15: 7,
		Modules: &ModuleReadings{
			Network:     &Network{WindowMS: 1000, BytesIn: 8, BytesOut: 9, ErrorsIn: 10, ErrorsOut: 11, BytesInPerS: 8, BytesOutPerS: 9},
			Temperature: &Temperature{HottestC: 12, Zones: []Zone{{"cpu", 12}}},
			Power:       &Power{UnderVoltage: new(true), FreqCapped: new(false), Throttled: new(true), SoftTempLimit: new(false)},
			Wear:        &Wear{UsedPct: new(13.0), PreEOL: EOLWarning, Devices: []WearDevice{{"mmcblk0", new(13.0), EOLWarning}}},
		},
	}
}

// TestCatalogue checks each row by itself, and that keys, metrics, frame fields and record
// ids are unique.
func TestCatalogue(t *testing.T) {
	seen := map[any]bool{}
	unique := func(kind string, v any) {
		if seen[[2]any{kind, v}] {
			t.Errorf("%s %v is given twice", kind, v)
		}
		seen[[2]any{kind, v}] = true
	}
	full := fullSample()
	last := Module(0)
	for _, s := range Sensors() {
		name := s.Key + s.Metric.Name
		if s.Module < last {
			t.Errorf("%s is not in the order of modules", name)
		}
		last = s.Module
		if s.Key != "" {
			unique("key", s.Key)
			if member, field, ok := strings.Cut(s.Key, "."); !ok || member != s.Module.Member() || field == "" {
				t.Errorf("key %s does not begin with the member of module %s", s.Key, s.Module)
			}
		}
		if s.Frame != "" {
			unique("frame field", s.Frame)
		}
		if s.Metric.Name != "" {
			unique("metric", s.Metric.Name)
			if s.Metric.Noun == "" || s.Metric.Max <= s.Metric.Min || (s.Form == FormFlag) != (s.Metric.Good != "") {
				t.Errorf("metric %+v lacks words or a range", s.Metric)
			}
		}
		if s.Record.ID != 0 {
			unique("record id", s.Record.ID)
		}
		if hasRecord := s.Record.ID != 0; hasRecord != (s.Module.IsOptional() && s.Key != "") {
			t.Errorf("%s: recorded %v, want it for optional sensors with a key", name, hasRecord)
		}
		if s.Read == nil {
			if s.Record.Count == nil {
				t.Errorf("%s can be neither read nor counted", name)
			}
			continue
		}
		if _, known := s.Read(full); !known {
			t.Errorf("%s is not known in a full sample", name)
		}
		if _, known := s.Read(&Sample{MemTotalBytes: 1}); known == s.Module.IsOptional() {
			t.Errorf("%s is known in a sample without modules: %v", name, known)
		}
	}
}

// TestRecordIDs: the ids of keys are in history files and never change.
func TestRecordIDs(t *testing.T) {
	want := []string{"", "network.bytes_in_per_s", "network.bytes_out_per_s", "network.errors_in", "network.errors_out",
		"temperature.hottest_c", "power.under_voltage", "power.freq_capped", "power.throttled", "power.soft_temp_limit",
		"wear.used_pct", "wear.pre_eol"}
	for _, s := range Sensors() {
		if s.Record.ID == 0 {
			continue
		}
		if int(s.Record.ID) >= len(want) || want[s.Record.ID] != s.Key {
			t.Errorf("record id %d is %s; files have %v", s.Record.ID, s.Key, want)
		}
	}
}

// TestModuleTable: every module has names and a sensor, and every optional one access to its
// member of ModuleReadings.
func TestModuleTable(t *testing.T) {
	full := fullSample().Modules
	for m := range NumModules {
		for _, name := range []string{m.String(), m.Member()} {
			if got, ok := ModuleByName(name); !ok || got != m {
				t.Errorf("%q is module %v, %v, want %v", name, got, ok, m)
			}
		}
		if !slices.ContainsFunc(Sensors(), func(s Sensor) bool { return s.Module == m && s.Key != "" }) {
			t.Errorf("module %s has no sensor", m)
		}
		if !m.IsOptional() {
			continue
		}
		only := full.Only(SetOf(m))
		if only == (ModuleReadings{}) || only.NewSince(&noReadings) != SetOf(m) || moduleTable[m].check(full) != nil || m.DefaultInterval() < MinInterval {
			t.Errorf("module %s: %+v of %+v", m, only, full)
		}
	}
	if all := full.Only(OptionalModules); all != *full {
		t.Errorf("all modules are %+v, want every member of %+v", all, *full)
	}
	if got := full.NewSince(full); got != 0 {
		t.Errorf("new since the same readings: %v", got.Names())
	}
}
