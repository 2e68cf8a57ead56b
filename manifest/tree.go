package manifest

import (
	"bytes"
	"errors"
	"io"
	"math"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// maxDepth bounds the nesting of a value that is validated.
const maxDepth = 16

var (
	errMalformed = errors.New("malformed JSON, a duplicate key or bad UTF-8")
	errDepth     = errors.New("nested deeper than 16 levels")
	errNumber    = errors.New("a number is out of range or has too many digits")
)

// decodeTree decodes one strict JSON value for a judge: objects are map[string]any,
// whole numbers are int64 where they fit, other numbers are float64. Both libraries see
// the same tree, so both judge alike.
func decodeTree(raw []byte) (any, error) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	v, err := decodeValue(dec, 1)
	if err != nil {
		return nil, err
	}
	if _, err := dec.ReadToken(); err != io.EOF {
		return nil, errMalformed
	}
	return v, nil
}

func decodeValue(dec *jsontext.Decoder, depth int) (any, error) {
	if depth > maxDepth {
		return nil, errDepth
	}
	switch dec.PeekKind() {
	case '{':
		return decodeObject(dec, depth)
	case '[':
		return decodeArray(dec, depth)
	}
	raw, err := dec.ReadValue()
	if err != nil {
		return nil, errMalformed
	}
	switch raw.Kind() {
	case '"':
		s, err := jsontext.AppendUnquote(nil, raw)
		return string(s), err
	case 't', 'f':
		return raw.Kind() == 't', nil
	case 'n':
		return nil, nil
	}
	v, ok := decodeNumber(raw)
	if !ok {
		return nil, errNumber
	}
	return v, nil
}

func decodeObject(dec *jsontext.Decoder, depth int) (any, error) {
	if _, err := dec.ReadToken(); err != nil {
		return nil, errMalformed
	}
	o := make(map[string]any)
	for {
		t, err := dec.ReadToken()
		if err != nil {
			return nil, errMalformed
		}
		if t.Kind() == '}' {
			return o, nil
		}
		key := t.String()
		if o[key], err = decodeValue(dec, depth+1); err != nil {
			return nil, err
		}
	}
}

func decodeArray(dec *jsontext.Decoder, depth int) (any, error) {
	if _, err := dec.ReadToken(); err != nil {
		return nil, errMalformed
	}
	a := []any{}
	for dec.PeekKind() != ']' {
		v, err := decodeValue(dec, depth+1)
		if err != nil {
			return nil, err
		}
		a = append(a, v)
	}
	_, err := dec.ReadToken()
	return a, err
}

// decodeNumber converts a JSON number to int64 if it is whole and fits, else to float64.
// It refuses a number whose float64 is infinite, or is whole although the number is not:
// what is left compares with a whole bound as the number itself does.
func decodeNumber(lit []byte) (any, bool) {
	if i, ok := wholeNumber(lit); ok {
		return i, true
	}
	f, err := strconv.ParseFloat(string(lit), 64)
	if err != nil || math.IsInf(f, 0) {
		return nil, false
	}
	if f == math.Trunc(f) && math.Abs(f) < 1e18 {
		return nil, false // whole ones below 1e18 were decoded above
	}
	if _, exp := significand(lit); exp < 0 && f == math.Trunc(f) {
		return nil, false
	}
	return f, true
}

// wholeNumber returns the value of a JSON number that is whole and below 1e18: 5000,
// 5000.0, 5e3.
func wholeNumber(lit []byte) (int64, bool) {
	digits, exp := significand(lit)
	if exp < 0 || len(digits)+exp > 18 {
		return 0, false
	}
	var v int64
	for _, d := range digits {
		v = v*10 + int64(d-'0')
	}
	for range exp {
		v *= 10
	}
	if lit[0] == '-' {
		v = -v
	}
	return v, true
}

// significand splits a JSON number into its digits without leading and trailing zeros
// and the power of ten of the last one. Zero has no digits and exponent 0.
func significand(lit []byte) (digits []byte, exp int) {
	mantissa, power, hasPower := lit, []byte(nil), false
	if i := bytes.IndexAny(lit, "eE"); i >= 0 {
		mantissa, power, hasPower = lit[:i], lit[i+1:], true
	}
	fraction := false
	for _, c := range mantissa {
		switch {
		case c == '.':
			fraction = true
			continue
		case c == '-':
			continue
		}
		if fraction {
			exp--
		}
		if c != '0' || len(digits) > 0 {
			digits = append(digits, c)
		}
	}
	for n := len(digits); n > 0 && digits[n-1] == '0'; n = len(digits) {
		digits = digits[:n-1]
		exp++
	}
	if len(digits) == 0 {
		return nil, 0
	}
	if hasPower {
		const beyond = 1e9 // any float64, and still far from the bounds of a 32 bit int
		p, err := strconv.Atoi(string(power))
		if err != nil {
			p = beyond
			if power[0] == '-' {
				p = -beyond
			}
		}
		exp += max(-beyond, min(beyond, p))
	}
	return digits, exp
}
