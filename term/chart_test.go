package term

import (
	"flag"
	"math"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// compareGolden compares text with a file of testdata, or rewrites that with -update.
func compareGolden(t *testing.T, path, got string) {
	t.Helper()
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

// wave is an hour of points at 10 s, with a hole of 15 minutes.
func wave(from int64) []Point {
	var out []Point
	for i := int64(0); i < 360; i++ {
		if i < 150 || i >= 240 {
			out = append(out, Point{from + i*10_000, 30 + 25*math.Sin(float64(i)/40)})
		}
	}
	return out
}

func TestChart(t *testing.T) {
	from := time.Date(2026, 3, 1, 11, 30, 0, 0, time.UTC).UnixMilli()
	zone := time.FixedZone("", 3600)
	memory := []Point{{from, 100}, {from + 10_000, 100}, {from + 1_800_000, 400}}
	tests := []struct {
		name  string
		chart Chart
	}{
		{"braille", Chart{Label: "CPU", Unit: "%", Max: 100, Points: wave(from), Step: 30_000, Width: 72, Height: 8}},
		{"ascii", Chart{Label: "CPU", Unit: "%", Max: 100, Points: wave(from), Step: 60_000, Width: 72, Height: 9, ASCII: true}},
		{"narrow", Chart{Label: "Temp", Unit: "C", Points: wave(from), Step: 60_000, Width: 40, Height: 5}},
		{"memory", Chart{Label: "Memory", Unit: "MiB", Max: 512, Points: memory, Step: 10_000, Width: 40, Height: 4, ASCII: true}},
		{"nothing", Chart{Label: "Net in", Unit: "B/s", Step: 10_000, Width: 40, Height: 4, ASCII: true}},
	}
	var all strings.Builder
	for _, tt := range tests {
		tt.chart.From, tt.chart.To, tt.chart.Zone = from, from+3_600_000, zone
		lines := tt.chart.Lines()
		for _, line := range lines {
			if n := utf8.RuneCountInString(line); n > tt.chart.Width {
				t.Errorf("%s: a line of %d columns, want at most %d: %s", tt.name, n, tt.chart.Width, line)
			}
		}
		if len(lines) != tt.chart.Height+3 {
			t.Errorf("%s: %d lines, want %d", tt.name, len(lines), tt.chart.Height+3)
		}
		all.WriteString("# " + tt.name + "\n" + strings.Join(lines, "\n") + "\n")
	}
	compareGolden(t, "testdata/charts.txt", all.String())
}

// A hole in the data is a hole in the line, at any width.
func TestChartGap(t *testing.T) {
	from := time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC).UnixMilli()
	for width := MinChartWidth; width < 200; width += 7 {
		c := Chart{Label: "CPU", Unit: "%", Max: 100, Points: wave(from), From: from, To: from + 3_600_000, Step: 60_000,
			Width: width, Height: 6, Zone: time.UTC}
		rows := c.plot(c.scale())
		for x := range PlotWidth(width) {
			blank := true
			for _, row := range rows {
				blank = blank && row[x] == ' '
			}
			at, w := float64(x)/float64(PlotWidth(width)), 1/float64(PlotWidth(width)) // the hole is at 150/360 to 240/360
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
		name      string
		values    []float64
		width     int
		low, high float64
		ascii     bool
		want      string
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
		if got := Sparkline(tt.values, tt.width, tt.low, tt.high, tt.ascii); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestNiceCeil(t *testing.T) {
	for v, want := range map[float64]float64{0: 1, -3: 1, 0.3: 0.3, 7: 8, 8.5: 10, 11: 20, 100: 100, 101: 200, math.Inf(1): 1} {
		if got := NiceCeil(v); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v: got %v, want %v", v, got, want)
		}
	}
}
