package main

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"agentctl/control"
)

var update = flag.Bool("update", false, "rewrite the golden files and docs/cli.md")

// golden compares text with testdata/NAME, or rewrites that.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
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

const day = 24 * time.Hour

func TestParseReading(t *testing.T) {
	r, err := parseReading([]byte(`{"ts":1700000000000,"seq":3,"cpu":{"usage_percent":1.5},"temperature":{"hottest_c":50,"zones":[{"name":"x","c":50}]},
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
	if text, bad := powerText(r.Values); text != "under-voltage" || !bad {
		t.Errorf("power is %q", text)
	}
	if _, err := parseReading([]byte(`[1]`)); err == nil {
		t.Error("a list is no reading")
	}
}

// Both ways to a reading say the same of everything an item may hold.
func TestItemReading(t *testing.T) {
	raw := `{"ts":1700000000000,"cpu":{"usage_percent":1.5},"memory":{"total":512,"used":100},"disk":{"usage_percent":9},
		"load":{"load_1m":1,"load_5m":2,"load_15m":3},"network":{"bytes_in_per_s":4,"bytes_out_per_s":5,"errors_in":6,"errors_out":7},
		"temperature":{"hottest_c":50},"power":{"under_voltage":true,"freq_capped":false,"throttled":false,"soft_temp_limit":true},
		"wear":{"used_pct":10,"pre_eol":"urgent"}}`
	want, err := parseReading([]byte(raw))
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
	for _, k := range moduleKeys {
		keys += len(k)
	}
	if len(want.Values) != keys {
		t.Errorf("%d numbers, but there are %d columns", len(want.Values), keys)
	}
	if err := json.Unmarshal([]byte(`{"ts":1}`), &item); err != nil || item.TS != 1 || len(item.Values) != 0 {
		t.Errorf("an empty item is %v, %v", item, err)
	}
}
