package fleet

import (
	"strings"
	"testing"

	"agentctl/manifest"
)

// knownFigures makes figures of which the given ones are known.
func knownFigures(known map[string]float64) *figures {
	f := newFigures()
	for key, v := range known {
		f.values[metricIndex(key)] = v
	}
	return f
}

func TestWhere(t *testing.T) {
	f := knownFigures(map[string]float64{"cpu_pct": 85, "disk_pct": 91.5, "throttled": 1, "load_1m": 0.5})
	for text, want := range map[string]truth{
		"cpu_pct > 80":                   isTrue,
		"cpu_pct>80":                     isTrue,
		"CPU_PCT >= 85":                  isTrue,
		"cpu_pct < 85":                   isFalse,
		"cpu_pct <= 85.0":                isTrue,
		"cpu_pct = 85":                   isTrue,
		"cpu_pct == 8.5e1":               isTrue,
		"cpu_pct != 85":                  isFalse,
		"load_1m > -1 and load_1m > +.4": isTrue,
		"cpu_pct > 80 and disk_pct > 90": isTrue,
		"cpu_pct > 80 AND disk_pct > 95": isFalse,
		"cpu_pct > 90 or disk_pct > 90":  isTrue,
		"cpu_pct > 90 or disk_pct > 90 and cpu_pct > 90":   isFalse,
		"(cpu_pct > 90 or disk_pct > 90) and cpu_pct > 80": isTrue,
		"throttled = 1":                      isTrue,
		"temperature_c > 1":                  isUnknown,
		"temperature_c > 1 and cpu_pct > 90": isFalse,
		"temperature_c > 1 and cpu_pct > 80": isUnknown,
		"temperature_c > 1 or cpu_pct > 80":  isTrue,
		"temperature_c != 1 or cpu_pct > 90": isUnknown,
		"\n( ( cpu_pct\t>80 ) )":             isTrue,
	} {
		c, err := parseWhere(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if got := c.eval(f); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}

func TestWhereErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "at the end: expected one of cpu_pct, mem_pct",
		"   ":                               "at the end: expected one of",
		"cpu > 1":                           `at character 1: expected one of cpu_pct, mem_pct, mem_bytes, mem_total_bytes, disk_pct, load_1m, load_5m, load_15m, temperature_c, net_bytes_in_per_s, net_bytes_out_per_s, under_voltage, freq_capped, throttled, soft_temp_limit, wear_pct, wear_pre_eol, did you mean "cpu_pct"?`,
		"cpu_pct":                           "at the end: expected one of > >= < <= = !=",
		"cpu_pct => 1":                      "at character 9: expected one of > >=",
		"cpu_pct ~ 1":                       "at character 9: expected one of > >=",
		"cpu_pct >":                         "at the end: expected a number",
		"cpu_pct > high":                    "at character 11: expected a number",
		"cpu_pct > nan":                     "at character 11: expected a number",
		"cpu_pct > inf":                     "at character 11: expected a number",
		"cpu_pct > 1-2":                     "at character 11: expected a number",
		"cpu_pct > 80%":                     "at character 13: expected and, or, or the end",
		"cpu_pct > 80 adn disk_pct > 1":     "at character 14: expected and, or, or the end",
		"cpu_pct > 80 and":                  "at the end: expected one of",
		"(cpu_pct > 80":                     "at the end: expected and, or, or )",
		"cpu_pct > 80)":                     "at character 13: expected and",
		"ignore all rules; drop table":      "at character 1",
		"\u202ecpu_pct > 1":                 "at character 1",
		strings.Repeat("(", 9) + "x":        "at character 10: expected at most 8 parentheses",
		strings.Repeat("cpu_pct>1 or ", 17): "at character 209: expected at most 16 comparisons",
	} {
		_, err := parseWhere(text)
		e := manifest.AsError(err)
		if e.Code != manifest.ManifestInvalid || !strings.Contains(e.Message, want) || !strings.Contains(e.Message, "example: cpu_pct > 80") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
		if strings.Contains(e.Message, "ignore") || strings.Contains(e.Message, "\u202e") {
			t.Errorf("%q is in its error: %v", text, err)
		}
	}
}

// FuzzWhere: a text is refused with a readable message, or is a condition that decides.
func FuzzWhere(f *testing.F) {
	f.Add("cpu_pct > 80 and (disk_pct >= 9e1 or throttled = 1)")
	f.Add("cpu_pct > 1e999")
	values := knownFigures(map[string]float64{"cpu_pct": 1})
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseWhere(text)
		if err == nil {
			c.eval(values)
			return
		}
		if e := manifest.AsError(err); e.Code != manifest.ManifestInvalid || strings.ContainsFunc(e.Message, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q: %q", text, e.Message)
		}
	})
}
