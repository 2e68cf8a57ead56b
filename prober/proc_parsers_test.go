package prober

import (
	"bytes"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestParseStat(t *testing.T) {
	tests := []struct {
		name, in string
		want     cpuTimes
		err      error
	}{
		{"ten columns, guests not counted twice", "cpu  10 20 30 40 50 60 70 80 5 5\ncpu0 x\n", cpuTimes{busy: 270, idle: 90}, nil},
		{"seven columns", "cpu  1 2 3 4 5 6 7\n", cpuTimes{busy: 19, idle: 9}, nil},
		{"more columns to come", "cpu 1 1 1 1 1 1 1 1 1 1 1 1 x\n", cpuTimes{busy: 6, idle: 2}, nil},
		{"empty", "", cpuTimes{}, errEmpty},
		{"cut off in a number", "cpu  1 2 3 4 5 6 7", cpuTimes{}, errNoCPU},
		{"six columns", "cpu  1 2 3 4 5 6\n", cpuTimes{}, errNoCPU},
		{"per cpu lines only", "cpu0 1 2 3 4 5 6 7\n", cpuTimes{}, errNoCPU},
		{"another file", "MemTotal: 1 kB\n", cpuTimes{}, errNoCPU},
		{"a sandbox's zeros", "cpu  0 0 0 0 0 0 0 0 0 0\n", cpuTimes{}, errCPUZero},
		{"negative", "cpu  1 2 3 -4 5 6 7\n", cpuTimes{}, errNumber},
		{"fraction", "cpu  1 2 3 4.5 5 6 7\n", cpuTimes{}, errNumber},
		{"above 2^64", "cpu  18446744073709551616 2 3 4 5 6 7\n", cpuTimes{}, errNumber},
		{"sum would overflow", "cpu  18446744073709551615 18446744073709551615 3 4 5 6 7\n", cpuTimes{}, errNumber},
		{"NUL bytes", "cpu  1 2 3 \x00 5 6 7\n", cpuTimes{}, errNumber},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := parseStat([]byte(tt.in)); got != tt.want || err != tt.err {
				t.Errorf("got %+v, %v, want %+v, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

func TestParseMeminfo(t *testing.T) {
	const kb = 1024
	mem := func(lines map[memField]uint64) (m meminfo) {
		for f, v := range lines {
			m.value[f] = v
			m.seen |= 1 << f
		}
		return m
	}
	tests := []struct {
		name, in string
		want     meminfo
		err      error
	}{
		{"usual", "MemTotal:  100 kB\nMemFree: 20 kB\nMemAvailable:   60 kB\nCached: 1 kB\n",
			mem(map[memField]uint64{memTotal: 100 * kb, memFree: 20 * kb, memAvailable: 60 * kb}), nil},
		{"no MemAvailable", "MemTotal: 100 kB\nMemFree: 20 kB\nCached: 7 kB\n",
			mem(map[memField]uint64{memTotal: 100 * kb, memFree: 20 * kb, memCached: 7 * kb}), nil},
		{"other lines are not looked at", "x\nActive: what\nMemTotal: 1 kB\nMemAvailable: 1 kB\n",
			mem(map[memField]uint64{memTotal: kb, memAvailable: kb}), nil},
		{"empty", "", meminfo{}, errEmpty},
		{"total missing", "MemFree: 20 kB\nMemAvailable: 60 kB\n", meminfo{}, errNoTotal},
		{"total zero", "MemTotal: 0 kB\nMemFree: 20 kB\nMemAvailable: 60 kB\n", meminfo{}, errNoTotal},
		{"total only", "MemTotal: 10 kB\n", meminfo{}, errNoFree},
		{"cut off in a number", "MemTotal: 10 kB\nMemAvailable: 6", meminfo{}, errNoFree},
		{"no unit", "MemTotal: 10\nMemFree: 20 kB\n", meminfo{}, errNumber},
		{"negative", "MemTotal: 10 kB\nMemFree: -20 kB\n", meminfo{}, errNumber},
		{"text", "MemTotal: lots kB\n", meminfo{}, errNumber},
		{"above 2^53 bytes", "MemTotal: 8796093022209 kB\n", meminfo{}, errNumber},
		{"above 2^64", "MemTotal: 99999999999999999999 kB\n", meminfo{}, errNumber},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseMeminfo([]byte(tt.in))
			if err != tt.err || err == nil && got != tt.want {
				t.Errorf("got %+v, %v, want %+v, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

func TestParseLoadavg(t *testing.T) {
	tests := []struct {
		name, in string
		want     [3]float64
		err      error
	}{
		{"usual", "0.31 12.04 100.00 1/112 20415\n", [3]float64{0.31, 12.04, 100}, nil},
		{"no newline", "1 2 3", [3]float64{1, 2, 3}, nil},
		{"empty", "", [3]float64{}, errEmpty},
		{"two", "0.31 12.04\n", [3]float64{}, errNoLoad},
		{"fraction of a process", "0.31 12.04 1/112 20415\n", [3]float64{}, errNumber},
		{"NaN", "NaN 0 0\n", [3]float64{}, errNumber},
		{"Inf", "0 inf 0\n", [3]float64{}, errNumber},
		{"exponent", "0 1e9 0\n", [3]float64{}, errNumber},
		{"negative", "0 0 -1\n", [3]float64{}, errNumber},
		{"no digits after the point", "0. 0 0\n", [3]float64{}, errNumber},
		{"huge", "99999999999999999999.00 0 0\n", [3]float64{}, errNumber},
		{"too many digits", "0.1234567890123456 0 0\n", [3]float64{}, errNumber},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := parseLoadavg([]byte(tt.in)); got != tt.want || err != tt.err {
				t.Errorf("got %v, %v, want %v, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

// seeds adds every fixture of that name to a fuzz corpus.
func seeds(f *testing.F, name string) {
	files, err := filepath.Glob("testdata/proc/*/proc/" + name + "*")
	if err != nil || len(files) == 0 {
		f.Fatalf("no testdata for %s: %v", name, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
}

// Each fuzz target compares with a reading of the same bytes by fields and big
// integers: what is accepted has the right value, what the kernel could have
// written is accepted.

func FuzzStat(f *testing.F) {
	seeds(f, "stat")
	f.Add([]byte("cpu  9007199254740993 0 0 0 0 0 0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseStat(b)
		line, _, whole := strings.Cut(string(b), "\n")
		fields := strings.Split(line, " ")
		fields = slicesDeleteEmpty(fields)
		var sum [2]big.Int
		plain := whole && strings.HasPrefix(line, "cpu ") && len(fields) >= 8
		for i := 1; plain && i < min(len(fields), 9); i++ {
			v, ok := new(big.Int).SetString(fields[i], 10)
			plain = ok && isDigits(fields[i]) && v.Cmp(big.NewInt(maxTicks)) <= 0
			if ok {
				k := 0
				if i == 4 || i == 5 {
					k = 1
				}
				sum[k].Add(&sum[k], v)
			}
		}
		plain = plain && (sum[0].Sign() > 0 || sum[1].Sign() > 0)
		if plain != (err == nil) {
			t.Fatalf("%q: got %v, but the plain reading says ok=%v", line, err, plain)
		}
		if err == nil && (sum[0].String() != fmt.Sprint(got.busy) || sum[1].String() != fmt.Sprint(got.idle)) {
			t.Fatalf("%q: got %+v, want %v and %v", line, got, &sum[0], &sum[1])
		}
		var m cpuMeter
		if err == nil {
			if pct, _ := m.add(got); !(pct >= 0 && pct <= 100) {
				t.Fatalf("%q: %v %%", line, pct)
			}
		}
	})
}

func FuzzMeminfo(f *testing.F) {
	seeds(f, "meminfo")
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMeminfo(b)
		if err != nil {
			return
		}
		if m.value[memTotal] == 0 || m.value[memTotal] > maxBytes {
			t.Fatalf("total %d from %q", m.value[memTotal], b)
		}
		used, err := m.used(func() (uint64, bool) { return 1 << 20, true })
		if err == nil && used > m.value[memTotal] {
			t.Fatalf("used %d of %d from %q", used, m.value[memTotal], b)
		}
		// Print and parse again.
		var out bytes.Buffer
		for f, name := range memNames {
			if m.has(memField(f)) && !m.has(memAvailable) {
				fmt.Fprintf(&out, "%s: %d kB\n", name, m.value[f]/1024)
			}
		}
		if m.has(memAvailable) {
			return // stopped early: which lines follow is not known
		}
		again, err := parseMeminfo(out.Bytes())
		if err != nil || again != m {
			t.Fatalf("printed %q, parsed %+v, %v, want %+v", out.String(), again, err, m)
		}
	})
}

func FuzzLoadavg(f *testing.F) {
	seeds(f, "loadavg")
	f.Add([]byte("0.07 1234567890123.45 00000 x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseLoadavg(b)
		if err != nil {
			return
		}
		line, _, _ := strings.Cut(string(b), "\n")
		fields := slicesDeleteEmpty(strings.Split(line, " "))
		for i, v := range got {
			want, err := strconv.ParseFloat(fields[i], 64)
			if err != nil || v != want {
				t.Fatalf("%q: figure %d is %v, want %v (%v)", line, i, v, want, err)
			}
		}
	})
}

func slicesDeleteEmpty(in []string) (out []string) {
	for _, s := range in {
		if s != "" {
			out = append(out, s)
		}
	}
	return out
}

func isDigits(s string) bool { return strings.Trim(s, "0123456789") == "" }

func TestCPUMeter(t *testing.T) {
	tests := []struct {
		name string
		in   []cpuTimes
		want []float64
	}{
		{"first is the mean since boot", []cpuTimes{{25, 75}}, []float64{25}},
		{"then deltas", []cpuTimes{{0, 100}, {50, 150}, {150, 150}, {150, 250}}, []float64{0, 50, 100, 0}},
		{"two decimals", []cpuTimes{{0, 100}, {100, 300}}, []float64{0, 33.33}},
		{"nothing moved", []cpuTimes{{25, 75}, {125, 75}, {125, 75}}, []float64{25, 100, 100}},
		{"a moment later: the window before is kept", []cpuTimes{{0, 100}, {50, 150}, {51, 150}, {51, 152}, {151, 152}},
			[]float64{0, 50, 50.5, 49.51, 98.06}},
		{"iowait went back", []cpuTimes{{100, 100}, {150, 99}, {150, 149}}, []float64{50, 100, 0}},
		{"all went back: the last one is kept", []cpuTimes{{100, 100}, {200, 100}, {10, 10}, {20, 40}}, []float64{50, 100, 100, 25}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var m cpuMeter
			var before cpuTimes
			for i, in := range tt.in {
				got, cum := m.add(in)
				if got != tt.want[i] {
					t.Errorf("reading %d: got %v, want %v", i, got, tt.want[i])
				}
				if cum.busy < before.busy || cum.idle < before.idle {
					t.Errorf("reading %d: cumulative times went back from %+v to %+v", i, before, cum)
				}
				before = cum
			}
		})
	}
}

func TestCheck(t *testing.T) {
	s := Sample{TSMS: MinTSMS, CPUPct: 100, MemBytes: 0, MemTotalBytes: 1, DiskPct: 100}
	if err := s.Check(); err != nil {
		t.Errorf("a frame at the bounds: %v", err)
	}
	s.TSMS--
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), ErrClock.Error()) {
		t.Errorf("a frame before the floor: %v, want ErrClock", err)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		" Pi\x00":                 "Pi",
		"\x1b[31mred\r\n":         "[31mred",
		strings.Repeat("a", 1000): strings.Repeat("a", 128),
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
}
