package duration_test

import (
	"errors"
	"fmt"
	"regexp"
	"testing"
	"time"

	"pgregory.net/rapid"

	"agentctl/duration"
)

func Example() {
	var every time.Duration
	flag := duration.NewValue(&every, 5*time.Second)
	fmt.Println(flag)
	fmt.Println(flag.Set("1.5h"), every)
	fmt.Println(flag.Set("2x"))
	// Output:
	// 5s
	// <nil> 1h30m0s
	// not a duration: "2x" (use 90s, 5m, 2h, 3d or 2w)
}

func TestParseAndFormat(t *testing.T) {
	tests := []struct {
		in        string
		want      time.Duration
		formatted string
	}{
		{"0", 0, "0"},
		{"0s", 0, "0"},
		{"250ms", 250 * time.Millisecond, "250ms"},
		{"90s", 90 * time.Second, "90s"},
		{"300s", 5 * time.Minute, "5m"},
		{"1m30s", 90 * time.Second, "90s"},
		{"1h30m", 90 * time.Minute, "90m"},
		{"1.5h", 90 * time.Minute, "90m"},
		{"12h", 12 * time.Hour, "12h"},
		{"24h", 24 * time.Hour, "24h"},
		{"1d", 24 * time.Hour, "24h"},
		{"30d", 720 * time.Hour, "30d"},
		{"2w", 14 * 24 * time.Hour, "14d"},
		{"0.5w", 84 * time.Hour, "84h"},
		{"0.1ms", 100 * time.Microsecond, "0.1ms"},
		{"3650d", 3650 * 24 * time.Hour, "3650d"},
	}
	pattern := regexp.MustCompile(duration.Pattern)
	for _, tt := range tests {
		got, err := duration.Parse(tt.in)
		if err != nil || got != tt.want || duration.Format(got) != tt.formatted {
			t.Errorf("Parse(%q) = %v (%s), %v; want %v (%s)", tt.in, got, duration.Format(got), err, tt.want, tt.formatted)
		}
		if !pattern.MatchString(tt.in) {
			t.Errorf("Pattern refuses %q", tt.in)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, in := range []string{"", "s", "1", "-1s", "+1s", "1 s", "1us", "1y", "1s1", "9999999999999s", "999999999999h", "15250w2000d", "1S", "١s", "NaNd", ".5h", "1.h", "2x"} {
		d, err := duration.Parse(in)
		var parseErr *duration.Error
		if !errors.As(err, &parseErr) || parseErr.Text != in {
			t.Errorf("Parse(%q) = %v, %v; want a *duration.Error", in, d, err)
		}
	}
}

// TestFormatRoundTrip checks that Parse reads what Format writes.
func TestFormatRoundTrip(t *testing.T) {
	// Thirteen digits of milliseconds do not fit into one term.
	if got := duration.Format(1_000_000_000_001 * time.Millisecond); got != "1000000000s1ms" {
		t.Errorf("10^12+1 ms is written %s", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(0, int64(100*365*24*time.Hour)).Draw(t, "ms")).Truncate(time.Millisecond)
		text := duration.Format(d)
		if got, err := duration.Parse(text); err != nil || got != d {
			t.Fatalf("%v is written %s, which reads %v, %v", d, text, got, err)
		}
	})
}
