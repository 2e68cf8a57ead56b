package monitor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/term"
)

// wave is an hour of points at 10 s, with a hole of 15 minutes.
func wave(from int64) []term.Point {
	var out []term.Point
	for i := int64(0); i < 360; i++ {
		if i < 150 || i >= 240 {
			out = append(out, term.Point{TS: from + i*10_000, Value: 30 + 25*math.Sin(float64(i)/40)})
		}
	}
	return out
}

// pastHour is a history of one record each 10 s for an hour, with a hole; temperature comes
// each minute.
type pastHour struct{ from int64 }

func (r pastHour) Query(_ context.Context, q control.HistoryQuery, fn func(control.HistoryRow) error) error {
	to := q.ToMS
	var held *control.HistoryRow
	for i, p := range wave(r.from) {
		if p.TS < q.FromMS || p.TS > to {
			continue
		}
		row := control.HistoryRow{TS: p.TS, Sample: &prober.Sample{TSMS: p.TS, CPUPct: float64(i % 100), MemBytes: 100 << 20, MemTotalBytes: 400 << 20}}
		if i%6 == 0 {
			row.Readings = []prober.Reading{{Key: "temperature.hottest_c", Value: 50}}
		}
		if q.StepMS > 0 { // the last of each bucket
			if held != nil && held.TS/q.StepMS != row.TS/q.StepMS {
				if err := fn(*held); err != nil {
					return err
				}
			} else if held != nil && row.Readings == nil {
				row.Readings = held.Readings // each module by itself
			}
			held = &row
			continue
		}
		if err := fn(row); err != nil {
			return err
		}
	}
	if held != nil {
		return fn(*held)
	}
	return nil
}

var historyStart = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newWindow(t *testing.T, modules ...string) *Window {
	t.Helper()
	path := socketPath(t)
	from := historyStart.UnixMilli()
	t.Cleanup(fakeDaemon(t, path, pastHour{from}))
	cl, err := control.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Close() })
	return &Window{Source: cl, FromMS: from, ToMS: from + 3_600_000, Modules: modules}
}

func TestHistoryDraw(t *testing.T) {
	t.Setenv("COLUMNS", "60")
	t.Setenv("LINES", "20")
	t.Setenv("LC_ALL", "C.UTF-8")
	t.Setenv("TERM", "xterm")
	var b bytes.Buffer
	if err := newWindow(t).Draw(t.Context(), &b, time.UTC); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LC_ALL", "C")
	h := newWindow(t, "temperature", "wear")
	if err := h.Draw(t.Context(), &b, time.UTC); err != nil {
		t.Fatal(err)
	}
	h.FromMS, h.ToMS = 1, 2
	for range 2 {
		if err := h.Draw(t.Context(), &b, time.UTC); err != nil {
			t.Fatal(err)
		}
		h.ClockUnset = true
	}
	compareGolden(t, "history.txt", b.String())
}

// Without --since a young history fills the chart, and an old one is cut at the hour.
func TestHistoryTrim(t *testing.T) {
	start := historyStart.UnixMilli()
	for name, tt := range map[string]struct{ from, to, want int64 }{
		"young":   {start - 3_000_000, start + 600_000, start},
		"old":     {start + 60_000, start + 3_600_000, start + 60_000},
		"newborn": {start - 3_590_000, start + 10_000, start - 50_000},
		"nothing": {start - 7_200_000, start - 3_600_000, start - 7_200_000},
	} {
		h := newWindow(t)
		h.FromMS, h.ToMS = tt.from, tt.to
		if err := h.Trim(t.Context()); err != nil || h.FromMS != tt.want {
			t.Errorf("%s: from %d, %v; want %d", name, h.FromMS-start, err, tt.want-start)
		}
	}
}

func TestHistoryExport(t *testing.T) {
	h := newWindow(t, "cpu", "memory", "temperature")
	text := func(format string) string {
		var b bytes.Buffer
		if err := h.Export(t.Context(), &b, format); err != nil {
			t.Fatalf("%s: %v", format, err)
		}
		return b.String()
	}
	lines := strings.Split(strings.TrimSpace(text("csv")), "\n")
	if lines[0] != "ts,cpu.usage_percent,memory.total,memory.used,temperature.hottest_c" || lines[1] != "1772366400000,0,400,100,50" ||
		lines[2] != "1772366410000,1,400,100," || len(lines) != 1+270 {
		t.Errorf("csv: %d lines:\n%s", len(lines), strings.Join(lines[:3], "\n"))
	}
	if n := strings.Count(text("ndjson"), "\n"); n != 270 {
		t.Errorf("ndjson: %d lines", n)
	}
	h.StepMS = 600_000
	var doc, doc2 struct {
		StepMS int64 `json:"step_ms" yaml:"step_ms"`
		Items  []struct {
			TS  int64
			CPU struct {
				UsagePercent float64 `json:"usage_percent" yaml:"usage_percent"`
			}
		}
	}
	if err := json.Unmarshal([]byte(text("json")), &doc); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(text("yaml")), &doc2); err != nil {
		t.Fatal(err)
	}
	// Six buckets of ten minutes; the hole of a quarter of an hour swallows one.
	for _, d := range [][]int64{{doc.StepMS, int64(len(doc.Items)), doc.Items[0].TS}, {doc2.StepMS, int64(len(doc2.Items)), doc2.Items[0].TS}} {
		if d[0] != 600_000 || d[1] != 5 || d[2] != historyStart.UnixMilli()+590_000 {
			t.Errorf("got %v", d)
		}
	}
	h.FromMS, h.ToMS = 1, 2
	if got := text("json"); !strings.Contains(got, `"items": [`) || json.Unmarshal([]byte(got), &doc) != nil || len(doc.Items) != 0 {
		t.Errorf("an empty window is %s", got)
	}
	if got := text("yaml"); !strings.Contains(got, "items: []") {
		t.Errorf("an empty window is %s", got)
	}
	if got := text("csv"); strings.Count(got, "\n") != 1 {
		t.Errorf("an empty window is %s", got)
	}
}

func TestParseTime(t *testing.T) {
	now := time.Date(2026, 3, 10, 12, 0, 0, 0, time.FixedZone("", 3600))
	tests := []struct {
		in   string
		want time.Time // zero: an error
	}{
		{"0s", now}, {"90s", now.Add(-90 * time.Second)}, {"7d", now.Add(-7 * 24 * time.Hour)}, {"1.5d", now.Add(-36 * time.Hour)}, {"2w", now.Add(-14 * 24 * time.Hour)},
		{"2026-03-01T00:00:00Z", time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)},
		{"2026-03-01T00:00:00.5+02:00", time.Date(2026, 2, 28, 22, 0, 0, 5e8, time.UTC)},
		{"2026-03-01", time.Date(2026, 3, 1, 0, 0, 0, 0, now.Location())},
		{"-1h", time.Time{}}, {"d", time.Time{}}, {"yesterday", time.Time{}}, {"", time.Time{}}, {"1e9d", time.Time{}}, {"NaNd", time.Time{}},
	}
	for _, tt := range tests {
		got, err := ParseTime(tt.in, now)
		if (err != nil) != tt.want.IsZero() || (err == nil && !got.Equal(tt.want)) {
			t.Errorf("%q is %v, %v; want %v", tt.in, got, err, tt.want)
		}
	}
}

// A SeriesSource makes the records that a daemon would, with the begin of each step as time.
func TestSeriesSource(t *testing.T) {
	from := historyStart.UnixMilli()
	var asked []int64
	var keys []string
	source := SeriesSource(func(_ context.Context, from, to, step int64, k []string, fn func(int64, map[string]float64) error) error {
		asked, keys = []int64{from, to, step}, k
		for ts := from; ts < to; ts += step {
			if err := fn(ts, map[string]float64{"cpu.usage_percent": 5, "power.throttled": 1}); err != nil {
				return err
			}
		}
		return nil
	})
	h := &Window{Source: source, FromMS: from + 30_000, ToMS: from + 180_000, StepMS: 60_000, Modules: []string{"cpu", "power"}}
	var b bytes.Buffer
	if err := h.Export(t.Context(), &b, "ndjson"); err != nil {
		t.Fatal(err)
	}
	want := ""
	for _, ts := range []int64{from + 30_000, from + 60_000, from + 120_000, from + 180_000} {
		want += fmt.Sprintf("{\"ts\":%d,\"cpu\":{\"usage_percent\":5},\"power\":{\"throttled\":true}}\n", ts)
	}
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
	if !slices.Equal(asked, []int64{from, from + 180_001, 60_000}) || len(keys) != 5 || keys[0] != "cpu.usage_percent" {
		t.Errorf("asked %v for %v", asked, keys)
	}
	h = &Window{Source: source, FromMS: from, ToMS: from + 86_400_000}
	if err := h.Trim(t.Context()); err != nil || h.FromMS != from || asked[2] < 6000 {
		t.Errorf("trimmed to %d, asked %v, %v", h.FromMS-from, asked, err)
	}
}
