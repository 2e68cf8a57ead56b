package control

import (
	"bytes"
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"agentctl/prober"
	"agentctl/strictjson"
)

// params are the members of a params object that were not taken yet. A method takes what it
// knows and calls finish, which refuses the rest. The first error is kept, so that a method
// can take everything and check once.
type params struct {
	members map[string]strictjson.Raw
	err     *Error
}

// parseParams takes the params of a request, which may be missing, null or an empty array.
func parseParams(raw []byte) *params {
	p := &params{}
	if len(raw) > 0 && !isEmptyArray(raw) && strictjson.Unmarshal(raw, &p.members) != nil {
		p.fail(errParams("params", "must be an object"))
	}
	return p
}

// isEmptyArray reports whether params are by position and there are none, as clients of JSON-RPC
// libraries send for a method without params.
func isEmptyArray(raw []byte) bool {
	inner, ok := bytes.CutPrefix(raw, []byte{'['})
	return ok && bytes.Equal(bytes.TrimLeft(inner, " \t\r\n"), []byte{']'})
}

// fail keeps the first error.
func (p *params) fail(err *Error) {
	if p.err == nil {
		p.err = err
	}
}

// take decodes a member into v and reports whether it is there; null counts as missing.
func (p *params) take(name string, v any) bool {
	raw, ok := p.members[name]
	delete(p.members, name)
	if !ok || string(raw) == "null" {
		return false
	}
	if err := strictjson.Unmarshal(raw, v); err != nil {
		p.fail(errParams(name, "has the wrong type"))
	}
	return true
}

// mustHave fails unless a member is there and not null. It comes before the take.
func (p *params) mustHave(name string) {
	if raw, ok := p.members[name]; !ok || string(raw) == "null" {
		p.fail(errParams(name, "is missing"))
	}
}

// require is take for a member that must be there.
func (p *params) require(name string, v any) {
	p.mustHave(name)
	p.take(name, v)
}

// text requires a string of at most limit bytes.
func (p *params) text(name string, limit int) (s string) {
	p.require(name, &s)
	if len(s) > limit {
		p.fail(errParams(name, "is longer than %d bytes", limit))
	}
	return s
}

// millis takes a duration in whole milliseconds, min..max; 0 without one.
func (p *params) millis(name string, min, max time.Duration) time.Duration {
	var n integer
	if !p.take(name, &n) {
		return 0
	}
	d, err := n.millis(name, min, max)
	if err != nil {
		p.fail(err)
	}
	return d
}

// requireMillis is millis for a member that must be there.
func (p *params) requireMillis(name string, min, max time.Duration) time.Duration {
	p.mustHave(name)
	return p.millis(name, min, max)
}

// integer takes a number that is not negative and has no fraction; 0 without one.
func (p *params) integer(name string) int64 {
	var n integer
	p.take(name, &n)
	switch {
	case n.isTooLarge():
		p.fail(errParams(name, "is too large: a whole number is at most 2^53"))
	case n < 0:
		p.fail(errParams(name, "is negative"))
	}
	return int64(n)
}

// requireInteger is integer for a member that must be there.
func (p *params) requireInteger(name string) int64 {
	p.mustHave(name)
	return p.integer(name)
}

// modules takes a list of modules; def without one, or for an empty list.
func (p *params) modules(name string, def prober.ModuleSet) prober.ModuleSet {
	var names []string
	if !p.take(name, &names) || len(names) == 0 {
		return def
	}
	if len(names) > 64 {
		p.fail(errParams(name, "has more than 64 entries"))
		return def
	}
	var set prober.ModuleSet
	for _, n := range names {
		m, ok := prober.ModuleByName(n)
		if !ok {
			p.fail(errParams(name, "knows only %s", moduleChoice))
			return def
		}
		set |= prober.SetOf(m)
	}
	return set
}

// choices takes a list of words, each of which must be one of known.
func (p *params) choices(name string, known []string) (list []string) {
	p.take(name, &list)
	for _, w := range list {
		if !slices.Contains(known, w) {
			err := errParams(name, "knows only %q", known)
			err.Code, err.Message = CodeNotSupported, codeNames[CodeNotSupported]
			p.fail(err)
		}
	}
	return list
}

// finish refuses members that were not taken and returns the first error.
func (p *params) finish() error {
	if len(p.members) > 0 {
		name := slices.Min(slices.Collect(maps.Keys(p.members))) // the same error each time
		p.fail(errParams(name[:min(len(name), 64)], "is not known here"))
	}
	if p.err != nil {
		return p.err
	}
	return nil
}

// integer is a JSON number without a fraction, in any notation: 1000, 1000.0 and 1e3 are
// equal.
type integer int64

// UnmarshalJSON decodes a number without a fraction. One beyond ±2^53, from where on not every whole
// number is a float64, becomes one that isTooLarge: the decoder does not pass an error on.
func (n *integer) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseFloat(string(b), 64)
	switch {
	case errors.Is(err, strconv.ErrRange), err == nil && math.Abs(v) > maxInteger:
		*n = maxInteger + 1
		if v < 0 {
			*n = -*n
		}
		return nil
	case err != nil || v != math.Trunc(v):
		return errors.New("not a whole number")
	}
	*n = integer(v)
	return nil
}

const maxInteger = 1 << 53

func (n integer) isTooLarge() bool { return n > maxInteger || n < -maxInteger }

// millis is n milliseconds, which must be within min..max.
func (n integer) millis(name string, min, max time.Duration) (time.Duration, *Error) {
	if n.isTooLarge() {
		return 0, errParams(name, "is too large: must be %d..%d", min.Milliseconds(), max.Milliseconds())
	}
	if int64(n) < min.Milliseconds() || int64(n) > max.Milliseconds() {
		return 0, errParams(name, "must be %d..%d", min.Milliseconds(), max.Milliseconds())
	}
	return time.Duration(n) * time.Millisecond, nil
}
