package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"agentctl/prober/alert"
)

// durationUnits are the units of a duration, the longest first.
var durationUnits = []struct {
	name string
	d    time.Duration
}{{"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}, {"ms", time.Millisecond}}

// durationPattern is what parseDuration reads, for the schema.
const durationPattern = `^(0|([0-9]{1,12}(d|h|m|s|ms))+)$`

// parseDuration reads 0, 300s, 12h, 30d or 1h30m: whole numbers with a unit each.
func parseDuration(s string) (time.Duration, error) {
	bad := fmt.Errorf("%.64q is no duration", s)
	if s == "0" {
		return 0, nil
	}
	var sum time.Duration
	for rest := s; rest != "" || s == ""; {
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		letters := digits + len(rest[digits:]) - len(strings.TrimLeft(rest[digits:], "dhms"))
		n, err := strconv.ParseInt(rest[:digits], 10, 64)
		unit := unitOf(rest[digits:letters])
		if unit == 0 && digits > 0 && letters == digits && digits == len(s) {
			return 0, fmt.Errorf("%.64q has no unit, such as s or h", s)
		}
		if err != nil || digits > 12 || unit == 0 {
			return 0, bad
		}
		if d := time.Duration(n) * unit; n != 0 && (d/unit != time.Duration(n) || sum+d < sum) {
			return 0, fmt.Errorf("%.64q is too long", s)
		} else {
			sum += d
		}
		rest = rest[letters:]
	}
	return sum, nil
}

func unitOf(name string) time.Duration {
	for _, u := range durationUnits {
		if u.name == name {
			return u.d
		}
	}
	return 0
}

// durationText writes a duration as parseDuration reads it.
func durationText(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	for _, u := range durationUnits {
		if d%u.d == 0 && (u.d < time.Hour || d/u.d > 1 || u.d == time.Hour) {
			return strconv.FormatInt(int64(d/u.d), 10) + u.name
		}
	}
	return d.String()
}

// fileValue is a value as JSON and YAML show it.
func fileValue(v any) any {
	switch v := v.(type) {
	case time.Duration:
		return durationText(v)
	case []alert.Rule:
		rules := make([]ruleText, len(v))
		for i, r := range v {
			rules[i] = ruleText{r.ID, r.Metric, string(r.Op), r.Threshold, r.Hysteresis, durationText(r.For), durationText(r.ClearFor), string(r.Level)}
		}
		return rules
	}
	return v
}

// ruleText is a rule as a file has it.
type ruleText struct {
	ID         string  `json:"id"`
	Metric     string  `json:"metric"`
	Op         string  `json:"op"`
	Threshold  float64 `json:"threshold"`
	Hysteresis float64 `json:"hysteresis"`
	For        string  `json:"for"`
	ClearFor   string  `json:"clear_for"`
	Level      string  `json:"level"`
}

// nearest is a hint at the word that was probably meant, "" when none is near.
func nearest(word string, words []string) string {
	best, at := "", min(4, len(word)/2+1)
	for _, w := range words {
		if d := distance(word, w); d < at && d < len(w) {
			best, at = w, d
		}
	}
	for _, w := range words {
		if best == "" && len(word) > 2 && (strings.HasPrefix(w, word+"_") || strings.HasSuffix(w, "."+word)) {
			best = w
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", best)
}

// distance counts the changes of a letter between two words; two letters in each other's
// place are one change (optimal string alignment). Words beyond 64 bytes are far from
// everything.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	a = strings.ToLower(a)
	before, row, next := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next[0] = i + 1
		for j := range len(b) {
			change := row[j]
			if a[i] != b[j] {
				change++
			}
			next[j+1] = min(change, next[j]+1, row[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row, next = row, next, before
	}
	return row[len(b)]
}
