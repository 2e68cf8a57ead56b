package monitor

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"agentctl/control"
	"agentctl/prober"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// compareGolden compares text with testdata/NAME, or rewrites that.
func compareGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

func TestParseReading(t *testing.T) {
	r, err := ParseReading([]byte(`{"ts":1700000000000,"seq":3,"cpu":{"usage_percent":1.5},"temperature":{"hottest_c":50,"zones":[{"name":"x","c":50}]},
		"power":{"under_voltage":true,"throttled":false},"wear":{"pre_eol":"warning"},"readings":{"network.bytes_in_per_s":7},"disk":null}`))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"cpu.usage_percent": 1.5, "temperature.hottest_c": 50, "power.under_voltage": 1, "power.throttled": 0,
		"wear.pre_eol": 1, "network.bytes_in_per_s": 7}
	if r.TS != 1700000000000 || len(r.Values) != len(want) {
		t.Fatalf("got %v, want %v", r, want)
	}
	for k, v := range want {
		if r.Values[k] != v {
			t.Errorf("%s is %v, want %v", k, r.Values[k], v)
		}
	}
	if text, bad := PowerText(r.Values); text != "under-voltage" || !bad {
		t.Errorf("power is %q", text)
	}
	if _, err := ParseReading([]byte(`[1]`)); err == nil {
		t.Error("a list was read")
	}
}

// Both ways to a reading say the same of everything an item may hold.
func TestItemReading(t *testing.T) {
	raw := `{"ts":1700000000000,"cpu":{"usage_percent":1.5},"memory":{"total":512,"used":100},"disk":{"usage_percent":9},
		"load":{"load_1m":1,"load_5m":2,"load_15m":3},"network":{"bytes_in_per_s":4,"bytes_out_per_s":5,"errors_in":6,"errors_out":7},
		"temperature":{"hottest_c":50},"power":{"under_voltage":true,"freq_capped":false,"throttled":false,"soft_temp_limit":true},
		"wear":{"used_pct":10,"pre_eol":"urgent"}}`
	want, err := ParseReading([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	var item control.HistoryItem
	if err := json.Unmarshal([]byte(raw), &item); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(item, want) {
		t.Errorf("got %v, want %v", item, want)
	}
	back, err := json.Marshal(item)
	if err != nil || string(back) != strings.Join(strings.Fields(raw), "") {
		t.Errorf("encoded again: %s, %v, want %s", back, err, raw)
	}
	keys := 0
	for _, s := range prober.Sensors() {
		if s.Key != "" {
			keys++
		}
	}
	if len(want.Values) != keys {
		t.Errorf("%d numbers, but there are %d columns", len(want.Values), keys)
	}
	if err := json.Unmarshal([]byte(`{"ts":1}`), &item); err != nil || item.TS != 1 || len(item.Values) != 0 {
		t.Errorf("an empty item is %v, %v", item, err)
	}
}

func TestNormalizeModules(t *testing.T) {
	got, err := NormalizeModules([]string{"mem", "cpu", "memory"})
	if err != nil || !slices.Equal(got, []string{"memory", "cpu"}) {
		t.Errorf("got %v, %v", got, err)
	}
	var e *ModuleError
	if _, err := NormalizeModules([]string{"cpu", "gpu"}); !errors.As(err, &e) || e.Name != "gpu" || !strings.Contains(err.Error(), "cpu, memory") {
		t.Errorf("got %v", err)
	}
}

func TestCompareKeys(t *testing.T) {
	keys := []string{"zoo.x", "wear.pre_eol", "cpu.z", "memory.used", "cpu.usage_percent", "memory.total", "cpu.a"}
	slices.SortFunc(keys, compareKeys)
	if got := strings.Join(keys, " "); got != "cpu.usage_percent cpu.a cpu.z memory.total memory.used wear.pre_eol zoo.x" {
		t.Errorf("got %s", got)
	}
}
