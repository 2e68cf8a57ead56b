package main

import (
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

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

// wave is an hour of samples at 10 s with a hole of a quarter of an hour.
func wave(from int64) []point {
	var out []point
	for i := int64(0); i < 360; i++ {
		if i < 150 || i >= 240 {
			out = append(out, point{from + i*10_000, 30 + 25*math.Sin(float64(i)/40)})
		}
	}
	return out
}

func TestChart(t *testing.T) {
	from := time.Date(2026, 3, 1, 11, 30, 0, 0, time.UTC).UnixMilli()
	zone := time.FixedZone("", 3600)
	tests := []struct {
		name string
		c    chart
	}{
		{"braille", chart{label: "CPU", unit: "%", max: 100, points: wave(from), step: 30_000, width: 72, height: 8}},
		{"ascii", chart{label: "CPU", unit: "%", max: 100, points: wave(from), step: 60_000, width: 72, height: 9, ascii: true}},
		{"narrow", chart{label: "Temp", unit: "C", points: wave(from), step: 60_000, width: 40, height: 5}},
		{"memory", chart{label: "Memory", unit: "MiB", max: 512, points: []point{{from, 100}, {from + 10_000, 100}, {from + 1_800_000, 400}}, step: 10_000, width: 40, height: 4, ascii: true}},
		{"nothing", chart{label: "Net in", unit: "B/s", step: 10_000, width: 40, height: 4, ascii: true}},
	}
	var all strings.Builder
	for _, tt := range tests {
		tt.c.from, tt.c.to, tt.c.zone = from, from+3_600_000, zone
		lines := tt.c.lines()
		for _, l := range lines {
			if n := utf8.RuneCountInString(l); n > tt.c.width {
				t.Errorf("%s: a line of %d columns, want at most %d: %s", tt.name, n, tt.c.width, l)
			}
		}
		if len(lines) != tt.c.height+3 {
			t.Errorf("%s: %d lines, want %d", tt.name, len(lines), tt.c.height+3)
		}
		all.WriteString("# " + tt.name + "\n" + strings.Join(lines, "\n") + "\n")
	}
	golden(t, "charts.txt", all.String())
}

// A hole in the data is a hole in the line, at any width.
func TestChartGap(t *testing.T) {
	from := time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC).UnixMilli()
	for width := minChartWidth; width < 200; width += 7 {
		c := chart{label: "CPU", unit: "%", max: 100, points: wave(from), from: from, to: from + 3_600_000, step: 60_000,
			width: width, height: 6, zone: time.UTC}
		rows := c.plot(c.scale())
		for x := range plotWidth(width) {
			blank := true
			for _, row := range rows {
				blank = blank && row[x] == ' '
			}
			at, w := float64(x)/float64(plotWidth(width)), 1/float64(plotWidth(width)) // the hole is at 150/360 to 240/360
			if inside := at > 0.42 && at+w < 0.66; inside && !blank {
				t.Fatalf("width %d: column %d is drawn, inside the hole", width, x)
			}
			if at+w < 0.41 && blank {
				t.Fatalf("width %d: column %d is blank, outside the hole", width, x)
			}
		}
	}
}

func TestSparkline(t *testing.T) {
	nan := math.NaN()
	tests := []struct {
		name   string
		values []float64
		width  int
		lo, hi float64
		ascii  bool
		want   string
	}{
		{"levels", []float64{0, 12.5, 25, 50, 87.5, 100}, 6, 0, 100, false, "▁▂▃▅██"},
		{"ascii", []float64{0, 50, 100}, 5, 0, 100, true, "  _=#"},
		{"newest", []float64{100, 100, 0, 0}, 2, 0, 100, false, "▁▁"},
		{"gap", []float64{0, nan, 100}, 3, 0, 100, false, "▁ █"},
		{"outside", []float64{-5, 500, math.Inf(1)}, 3, 0, 100, false, "▁██"},
		{"no range", []float64{7, 7}, 2, 0, 0, false, "▁▁"},
		{"none", nil, 3, 0, 1, false, "   "},
	}
	for _, tt := range tests {
		if got := sparkline(tt.values, tt.width, tt.lo, tt.hi, tt.ascii); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestValueText(t *testing.T) {
	tests := []struct {
		v          float64
		unit, want string
	}{
		{12.34, "%", "12.3 %"}, {512, "MiB", "512 MiB"}, {16000, "MiB", "15.6 GiB"}, {999, "B/s", "999 B/s"},
		{1500, "B/s", "1.5 kB/s"}, {999_900, "B/s", "1.0 MB/s"}, {2e9, "B/s", "2.0 GB/s"}, {2e12, "B/s", "2000.0 GB/s"}, {0.5, "", "0.50"},
	}
	for _, tt := range tests {
		if got := valueText(tt.v, tt.unit); got != tt.want {
			t.Errorf("%v %s: got %q, want %q", tt.v, tt.unit, got, tt.want)
		}
	}
}

func TestCutLine(t *testing.T) {
	tests := []struct {
		in   string
		n    int
		want string
	}{
		{"abcdef", 3, "abc"}, {"ab", 3, "ab"}, {"▁▂▃▄", 2, "▁▂"}, {"a\x1b[31mbcd\x1b[0me", 2, "a\x1b[31mb\x1b[0m"},
	}
	for _, tt := range tests {
		if got := cutLine(tt.in, tt.n); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

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
	got := itemReading(item)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	keys := 0
	for _, k := range moduleKeys {
		keys += len(k)
	}
	if len(want.Values) != keys {
		t.Errorf("%d numbers, but there are %d columns", len(want.Values), keys)
	}
	if got := itemReading(control.HistoryItem{TS: 1}); len(got.Values) != 0 {
		t.Errorf("an empty item is %v", got)
	}
}
