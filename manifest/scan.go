package manifest

import (
	"math"
	"strconv"
)

// scanResult is what scan learns of a value that it accepts.
type scanResult struct {
	nodeID  []byte // value of node_id; aliases the input
	compact bool   // no white space between tokens
}

// scan reads a value in one pass and reports whether it certainly fits an exact schema. false
// does not mean that it does not fit: escapes, exponents, negative numbers and whatever else
// is rare or wrong is left to the validator. It runs on every metric frame and allocates
// nothing. A property-based test compares it with the validator.
func (sh *objectSchema) scan(raw []byte) (found scanResult, ok bool) {
	if !sh.exact {
		return found, false
	}
	s := scanner{raw: raw, compact: true}
	s.skipSpace()
	if !s.accept('{') {
		return found, false
	}
	var have uint32 // bits of the properties that have been read
	next := 0       // index of the property that is expected
	s.skipSpace()
	for more := !s.accept('}'); more; {
		i, ok := sh.scanName(&s, next)
		if !ok || have&(1<<i) != 0 {
			return found, false
		}
		have |= 1 << i
		next = i + 1
		p := &sh.properties[i]
		start := s.pos
		if !s.scanValue(p) {
			return found, false
		}
		if p.name == "node_id" {
			found.nodeID = raw[start+1 : s.pos-1]
		}
		s.skipSpace()
		if more = s.accept(','); more {
			s.skipSpace()
		} else if !s.accept('}') {
			return found, false
		}
	}
	s.skipSpace()
	found.compact = s.compact
	return found, s.pos == len(raw) && have&sh.required == sh.required
}

// scanName reads `"name":` and returns the index of the property. Devices send properties in
// the order of the schema, so the expected one is tried first.
func (sh *objectSchema) scanName(s *scanner, expected int) (i int, ok bool) {
	if !s.accept('"') {
		return 0, false
	}
	start := s.pos
	for s.pos < len(s.raw) && s.raw[s.pos] != '"' {
		s.pos++
	}
	name := s.raw[start:s.pos]
	if !s.accept('"') {
		return 0, false
	}
	s.skipSpace()
	if !s.accept(':') {
		return 0, false
	}
	s.skipSpace()
	if expected < len(sh.properties) && string(name) == sh.properties[expected].name {
		return expected, true
	}
	for i := range sh.properties {
		if string(name) == sh.properties[i].name {
			return i, true
		}
	}
	return 0, false
}

// scanner is a position in a JSON text. Its methods advance it past what they read; after
// they return false it is of no use.
type scanner struct {
	raw     []byte
	pos     int
	compact bool
}

// accept reads one byte if it is c, and reports whether it did.
func (s *scanner) accept(c byte) bool {
	if s.pos < len(s.raw) && s.raw[s.pos] == c {
		s.pos++
		return true
	}
	return false
}

// skipSpace reads white space. Any makes the value not compact, so that CheckArgs normalizes
// it.
func (s *scanner) skipSpace() {
	for s.pos < len(s.raw) {
		switch s.raw[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
			s.compact = false
		default:
			return
		}
	}
}

// scanValue reads a value of the property's type. newProperty makes a schema with other types
// inexact, so there are strings and numbers only.
func (s *scanner) scanValue(p *property) bool {
	if p.typ == "string" {
		return s.scanString(p)
	}
	return s.scanNumber(p)
}

// scanString reads a string of ASCII whose only escapes are \" \\ and \/, and checks it
// against the property's pattern as it goes.
func (s *scanner) scanString(p *property) bool {
	if !s.accept('"') {
		return false
	}
	n := 0
	for ; s.pos < len(s.raw); s.pos++ {
		c := s.raw[s.pos]
		switch c {
		case '"':
			s.pos++
			return n >= len(p.pattern.prefix) && (!p.hasMin || int64(n) >= p.min) && (!p.hasMax || int64(n) <= p.max)
		case '\\':
			if s.pos++; s.pos == len(s.raw) {
				return false
			}
			if c = s.raw[s.pos]; c != '"' && c != '\\' && c != '/' {
				return false
			}
		}
		if c < ' ' || !p.pattern.allows(n, rune(c)) {
			return false
		}
		n++
	}
	return false
}

// scanNumber reads a number without sign and exponent. Its whole part, and whether a fraction
// follows, decide about whole bounds exactly, without a float64.
func (s *scanner) scanNumber(p *property) bool {
	start := s.pos
	whole, n := s.scanDigits()
	if n == 0 || n > 18 || (n > 1 && s.raw[start] == '0') {
		return false
	}
	fraction := false
	if s.pos < len(s.raw) && s.raw[s.pos] == '.' {
		if p.typ == "integer" {
			return false
		}
		s.pos++
		rest, m := s.scanDigits()
		if m == 0 || m > 18 {
			return false
		}
		fraction = rest != 0
		if fraction && n+m > 15 && !keepsFraction(s.raw[start:s.pos]) {
			return false
		}
	}
	return (!p.hasMin || whole >= p.min) && (!p.hasMax || whole < p.max || (whole == p.max && !fraction))
}

// scanDigits reads n decimal digits; v is the value of the first 18, which fit an int64.
func (s *scanner) scanDigits() (v int64, n int) {
	for ; s.pos < len(s.raw); s.pos++ {
		d := s.raw[s.pos] - '0'
		if d > 9 {
			break
		}
		if n++; n <= 18 {
			v = v*10 + int64(d)
		}
	}
	return v, n
}

// keepsFraction reports whether a number with a fraction still has one as a float64. With up
// to 15 digits it always does; strictjson.Decode refuses the others.
func keepsFraction(lit []byte) bool {
	f, err := strconv.ParseFloat(string(lit), 64)
	return err == nil && f != math.Trunc(f)
}
