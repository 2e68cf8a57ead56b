//go:build linux

package control

import (
	"encoding/json"
	"maps"
	"testing"

	"agentctl/prober"
)

// fullSample has a value for each sensor.
func fullSample() *prober.Sample {
	return &prober.Sample{
		TSMS: prober.MinTSMS, CPUPct: 1, MemBytes: 2 << 20, MemTotalBytes: 64 << 20, DiskPct: 4, Load1: 5, Load5: 6, Load15: 7,
		Modules: &prober.ModuleReadings{
			Network:     &prober.Network{WindowMS: 1000, BytesIn: 8, BytesOut: 9, ErrorsIn: 10, ErrorsOut: 11, BytesInPerS: 8, BytesOutPerS: 9},
			Temperature: &prober.Temperature{HottestC: 12, Zones: []prober.Zone{{Name: "cpu", C: 12}}},
			Power:       &prober.Power{UnderVoltage: new(true), FreqCapped: new(false), Throttled: new(true), SoftTempLimit: new(false)},
			Wear:        &prober.Wear{UsedPct: new(13.0), PreEOL: prober.EOLWarning},
		},
	}
}

// TestSnapshotCoversCatalogue: a snapshot of all modules has every sensor, under its key.
func TestSnapshotCoversCatalogue(t *testing.T) {
	sample := fullSample()
	b, err := json.Marshal(snapshotOf(sample, prober.AllModules))
	if err != nil {
		t.Fatal(err)
	}
	var item HistoryItem // decodes by key, and leaves out what the catalogue does not have
	if err := json.Unmarshal(b, &item); err != nil {
		t.Fatal(err)
	}
	for _, s := range prober.Sensors() {
		if s.Key == "" {
			continue
		}
		got, ok := item.Values[s.Key]
		if s.Read == nil {
			if !ok {
				t.Errorf("a snapshot has no %s", s.Key)
			}
			continue
		}
		if want, _ := s.Read(sample); !ok || got != want {
			t.Errorf("a snapshot has %s %v, %v, want %v", s.Key, got, ok, want)
		}
	}
	if only := snapshotOf(sample, 0); only != (Snapshot{TS: sample.TSMS}) {
		t.Errorf("a snapshot of no module has %+v", only)
	}
}

// TestItemCoversCatalogue: an item of query_history has every sensor that is recorded, and
// is the same after decoding and encoding.
func TestItemCoversCatalogue(t *testing.T) {
	sample := fullSample()
	row := HistoryRow{TS: sample.TSMS, Sample: sample}
	want := map[string]float64{}
	for i, s := range prober.Sensors() {
		if s.Key == "" {
			continue
		}
		v := float64(i)
		switch {
		case !s.Module.IsOptional():
			v, _ = s.Read(sample)
		case s.Form != prober.FormNumber:
			v = 1
		}
		want[s.Key] = v
		if s.Module.IsOptional() {
			row.Readings = append(row.Readings, readingOf(s.Key, v))
		}
	}
	b := appendRow(nil, prober.AllModules, &row)
	var item HistoryItem
	if err := json.Unmarshal(b, &item); err != nil || item.TS != row.TS || !maps.Equal(item.Values, want) {
		t.Errorf("%s is %+v, %v, want %v", b, item, err, want)
	}
	if again, err := json.Marshal(item); err != nil || string(again) != string(b) {
		t.Errorf("encoded again: %s, %v, want %s", again, err, b)
	}
	if b := appendRow(nil, 0, &row); len(b) != 0 {
		t.Errorf("an item of no module is %s", b)
	}
}

// TestRowOfCoversCatalogue: the answer to an empty window has every sensor that can be read.
func TestRowOfCoversCatalogue(t *testing.T) {
	sample := fullSample()
	row := rowOf(sample)
	got := map[string]float64{}
	for _, r := range row.Readings {
		got[r.Key] = r.Value
	}
	for _, s := range prober.Sensors() {
		if s.Record.ID == 0 || s.Read == nil {
			continue
		}
		if want, _ := s.Read(sample); got[s.Key] != want {
			t.Errorf("%s is %v, want %v", s.Key, got[s.Key], want)
		}
	}
}
