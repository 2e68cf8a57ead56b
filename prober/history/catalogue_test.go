package history

import (
	"testing"
	"time"

	"agentctl/prober"
)

// TestCatalogueIsRecorded: every sensor with a key comes back from the file as it was read,
// from a column of the sample or as a reading.
func TestCatalogueIsRecorded(t *testing.T) {
	s, c := open(t, Options{})
	c.step(time.Second)
	x := c.sample(3)
	x.Mono = time.Second
	x.Modules = &prober.ModuleReadings{
		Network:     &prober.Network{WindowMS: 1000, BytesIn: 8, BytesOut: 9, ErrorsIn: 10, ErrorsOut: 11, BytesInPerS: 8, BytesOutPerS: 9},
		Temperature: &prober.Temperature{HottestC: 12},
		Power:       &prober.Power{UnderVoltage: new(true), FreqCapped: new(false), Throttled: new(true), SoftTempLimit: new(false)},
		Wear:        &prober.Wear{UsedPct: new(13.0), PreEOL: prober.EOLWarning},
	}
	var modules moduleRecorder
	s.Add(x, modules.record(x)...)
	flush(t, s)
	rows := query(t, s, Query{FromMS: epoch})
	if len(rows) != 1 || !rows[0].HasSample {
		t.Fatalf("recorded are %+v", rows)
	}
	readings := map[string]float64{}
	for _, r := range rows[0].Modules {
		readings[r.Key] = r.Value
	}
	for _, sensor := range prober.Sensors() {
		if sensor.Key == "" {
			continue
		}
		var want, got float64
		var known bool
		if sensor.Record.Count != nil && !sensor.Record.PerSecond {
			want = float64(sensor.Record.Count(x.Modules.Network))
		} else {
			want, _ = sensor.Read(&x)
		}
		if sensor.Module.IsOptional() {
			got, known = readings[sensor.Key]
		} else {
			got, known = sensor.Read(&rows[0].Sample)
		}
		if !known || got != want {
			t.Errorf("%s is recorded as %v, %v, want %v", sensor.Key, got, known, want)
		}
	}
}
