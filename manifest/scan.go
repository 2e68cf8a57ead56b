package manifest

import (
	"math"
	"strconv"
)

// seen is what scan noticed on its way.
type seen struct {
	nodeID  []byte // value of node_id, a part of the input
	compact bool   // no white space between the tokens
}

// scan reads a value once and tells whether it certainly fits an exact shape. false says
// nothing: escapes, exponents, negative numbers and whatever else is rare or wrong is
// left to the library. It allocates nothing.
func (sh *shape) scan(raw []byte) (found seen, ok bool) {
	s := scanner{raw: raw, compact: true}
	s.space()
	if !s.take('{') {
		return found, false
	}
	var have uint32
	next := 0 // the property that is expected
	s.space()
	for more := !s.take('}'); more; {
		i, ok := sh.name(&s, next)
		if !ok || have&(1<<i) != 0 {
			return found, false
		}
		have |= 1 << i
		next = i + 1
		p := &sh.props[i]
		start := s.at
		if !s.value(p) {
			return found, false
		}
		if p.name == "node_id" {
			found.nodeID = raw[start+1 : s.at-1]
		}
		s.space()
		if more = s.take(','); more {
			s.space()
		} else if !s.take('}') {
			return found, false
		}
	}
	s.space()
	found.compact = s.compact
	return found, s.at == len(raw) && have&sh.required == sh.required
}

// name reads `"name":` and finds the property, which is mostly the one that is expected.
func (sh *shape) name(s *scanner, expected int) (i int, ok bool) {
	if !s.take('"') {
		return 0, false
	}
	start := s.at
	for s.at < len(s.raw) && s.raw[s.at] != '"' {
		s.at++
	}
	name := s.raw[start:s.at]
	if !s.take('"') {
		return 0, false
	}
	s.space()
	if !s.take(':') {
		return 0, false
	}
	s.space()
	if expected < len(sh.props) && string(name) == sh.props[expected].name {
		return expected, true
	}
	for i := range sh.props {
		if string(name) == sh.props[i].name {
			return i, true
		}
	}
	return 0, false
}

type scanner struct {
	raw     []byte
	at      int
	compact bool
}

func (s *scanner) take(c byte) bool {
	if s.at < len(s.raw) && s.raw[s.at] == c {
		s.at++
		return true
	}
	return false
}

func (s *scanner) space() {
	for s.at < len(s.raw) {
		switch s.raw[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
			s.compact = false
		default:
			return
		}
	}
}

func (s *scanner) value(p *prop) bool {
	if p.typ == "string" {
		return s.text(p)
	}
	return s.number(p)
}

// text reads a string of ASCII without escapes but \" \\ and \/.
func (s *scanner) text(p *prop) bool {
	if !s.take('"') {
		return false
	}
	n := 0
	for ; s.at < len(s.raw); s.at++ {
		c := s.raw[s.at]
		switch c {
		case '"':
			s.at++
			return n >= len(p.text.row) && (!p.hasMin || int64(n) >= p.min) && (!p.hasMax || int64(n) <= p.max)
		case '\\':
			if s.at++; s.at == len(s.raw) {
				return false
			}
			if c = s.raw[s.at]; c != '"' && c != '\\' && c != '/' {
				return false
			}
		}
		if c < ' ' || !p.text.allows(n, rune(c)) {
			return false
		}
		n++
	}
	return false
}

// number reads a number that is not negative and has no exponent. Its whole part and
// whether something follows it decide about whole bounds exactly, without a float.
func (s *scanner) number(p *prop) bool {
	start := s.at
	whole, n := s.digits()
	if n == 0 || n > 18 || (n > 1 && s.raw[start] == '0') {
		return false
	}
	fraction := false
	if s.at < len(s.raw) && s.raw[s.at] == '.' {
		if p.typ == "integer" {
			return false
		}
		s.at++
		rest, m := s.digits()
		if m == 0 || m > 18 {
			return false
		}
		fraction = rest != 0
		if fraction && n+m > 15 && !staysFraction(s.raw[start:s.at]) {
			return false
		}
	}
	return (!p.hasMin || whole >= p.min) && (!p.hasMax || whole < p.max || (whole == p.max && !fraction))
}

// digits reads decimal digits. The value is that of the first 18.
func (s *scanner) digits() (v int64, n int) {
	for ; s.at < len(s.raw); s.at++ {
		d := s.raw[s.at] - '0'
		if d > 9 {
			break
		}
		if n++; n <= 18 {
			v = v*10 + int64(d)
		}
	}
	return v, n
}

// staysFraction tells whether a number with a fraction has one as a float64 as well.
// With up to 15 digits it always does; see strictjson.Decode for the others.
func staysFraction(lit []byte) bool {
	f, err := strconv.ParseFloat(string(lit), 64)
	return err == nil && f != math.Trunc(f)
}
