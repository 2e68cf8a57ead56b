package strictjson

import (
	"bytes"
	"io"
	"math"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// Decode decodes exactly one JSON value, strictly, without a Go type to decode into: an
// object becomes map[string]any, an array []any, a number int64 if it is whole and below
// 1e18 and float64 otherwise.
//
// JSON Schema engines validate such a tree. The number rules make two engines agree: a
// number that as a float64 becomes whole or infinite is ErrNumber.
func Decode(data []byte) (any, error) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(data))
	v, err := decodeValue(dec, 1)
	if err != nil {
		return nil, err
	}
	if _, err := dec.ReadToken(); err != io.EOF {
		return nil, errMalformed
	}
	return v, nil
}

// decodeValue decodes the next value; depth is that of the value, 1 for the outermost.
func decodeValue(dec *jsontext.Decoder, depth int) (any, error) {
	if depth > MaxDepth {
		return nil, ErrDepth
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
	return decodeNumber(raw)
}

// decodeObject relies on the decoder to refuse duplicate keys.
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

// decodeArray returns an empty slice, not nil, for [], so that it differs from null.
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

// decodeNumber refuses a number whose float64 is infinite, or is whole although the
// number is not. Every number that is left compares with a whole bound as its float64 does.
func decodeNumber(lit []byte) (any, error) {
	if i, ok := Whole(lit); ok {
		return i, nil
	}
	f, err := strconv.ParseFloat(string(lit), 64)
	if err != nil {
		return nil, ErrNumber
	}
	if f == math.Trunc(f) {
		// Whole returned the whole numbers below 1e18; a fraction has a negative exponent.
		if _, exp := significand(lit); exp < 0 || math.Abs(f) < 1e18 {
			return nil, ErrNumber
		}
	}
	return f, nil
}

// Whole returns the value of a valid JSON number that is whole and below 1e18, however it
// is written: 5000, 5000.0, 5e3.
//
// 18 digits always fit an int64, so that the loop needs no check for overflow. A huge
// exponent is refused before the loops run.
func Whole(lit []byte) (int64, bool) {
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
	mantissa, power := lit, []byte(nil)
	if i := bytes.IndexAny(lit, "eE"); i >= 0 {
		mantissa, power = lit[:i], lit[i+1:]
	}
	whole, fraction, _ := bytes.Cut(bytes.TrimPrefix(mantissa, []byte("-")), []byte("."))
	digits = bytes.TrimLeft(append(bytes.Clone(whole), fraction...), "0")
	n := len(digits)
	digits = bytes.TrimRight(digits, "0")
	if len(digits) == 0 {
		return nil, 0
	}
	exp = n - len(digits) - len(fraction)
	if power != nil {
		// Beyond the range of any float64, and far from overflow of a 32-bit int.
		const limit = 1e9
		p, _ := strconv.Atoi(string(power)) // out of range: the largest or smallest int
		exp += max(-limit, min(limit, p))
	}
	return digits, exp
}
