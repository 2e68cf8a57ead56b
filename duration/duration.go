// Package duration reads and writes durations as people type them: 90s, 5m, 1.5h, 3d, 2w.
// Every flag and every configuration key uses this grammar, so that a duration means the
// same wherever it is written:
//
//	duration = "0" | term { term }
//	term     = digits [ "." digits ] unit
//	unit     = "w" | "d" | "h" | "m" | "s" | "ms"
//
// A day has 24 hours and a week 7 days. There is no sign.
package duration

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"sync"
	"time"
)

// Pattern is the grammar as a regular expression, for JSON Schemas.
const Pattern = `^(0|([0-9]{1,12}(\.[0-9]{1,9})?(w|d|h|m|s|ms))+)$`

const day = 24 * time.Hour

// units are the units of a term, the longest first.
var units = []struct {
	name string
	size time.Duration
}{{"w", 7 * day}, {"d", day}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}, {"ms", time.Millisecond}}

// term is one number with its unit. Its digits are bounded as in Pattern. It is compiled when it is
// first used, since most commands use none.
var term = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9]{1,12})(\.[0-9]{1,9})?(ms|[wdhms])`) })

// Error reports a text that is not a duration.
type Error struct{ Text string }

func (e *Error) Error() string {
	return fmt.Sprintf("not a duration: %.64q (use 90s, 5m, 2h, 3d or 2w)", e.Text)
}

// Parse reads a duration. Its error is an *Error, also for a duration that is longer than
// a time.Duration can hold (292 years).
func Parse(s string) (time.Duration, error) {
	if s == "0" {
		return 0, nil
	}
	var sum time.Duration
	for rest := s; rest != "" || s == ""; {
		m := term().FindStringSubmatch(rest)
		if m == nil {
			return 0, &Error{s}
		}
		d, ok := termValue(m[1], m[2], m[3])
		if !ok || sum+d < sum {
			return 0, &Error{s}
		}
		sum += d
		rest = rest[len(m[0]):]
	}
	return sum, nil
}

// termValue returns the length of one term; ok is false when it overflows. The whole part is
// multiplied as an integer because a float64 is not exact to the nanosecond beyond 104 days.
func termValue(whole, fraction, unit string) (d time.Duration, ok bool) {
	size := unitSize(unit)
	n, err := strconv.ParseInt(whole, 10, 64)
	if err != nil || n > int64(math.MaxInt64/size)-1 {
		return 0, false
	}
	part, _ := strconv.ParseFloat("0"+fraction, 64) // the pattern admits digits only
	return time.Duration(n)*size + time.Duration(math.Round(part*float64(size))), true
}

func unitSize(name string) time.Duration {
	for _, u := range units {
		if u.name == name {
			return u.size
		}
	}
	return 0
}

// maxTerm is the length from which a number of milliseconds has more digits than a term.
const maxTerm = 1_000_000_000_000 * time.Millisecond

// Format writes a duration so that Parse reads the same value: a whole number of the
// largest unit from milliseconds to days that divides it. One day is 24h.
func Format(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	if s := d.Truncate(time.Second); d >= maxTerm && d != s {
		return Format(s) + Format(d-s)
	}
	for _, u := range units[1:] {
		if d%u.size == 0 && (u.size != day || d != day) {
			return strconv.FormatInt(int64(d/u.size), 10) + u.name
		}
	}
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + "ms"
}

// Value is a command-line flag that takes a duration. It implements the Value interface of
// pflag without importing it.
type Value time.Duration

// NewValue stores def in p and returns a flag that sets p.
func NewValue(p *time.Duration, def time.Duration) *Value {
	*p = def
	return (*Value)(p)
}

// String returns the current value, as the help shows a default.
func (v *Value) String() string { return Format(time.Duration(*v)) }

// Set parses the flag's argument.
func (v *Value) Set(s string) error {
	d, err := Parse(s)
	if err == nil {
		*v = Value(d)
	}
	return err
}

// Type returns the kind of argument that the help names.
func (v *Value) Type() string { return "duration" }
