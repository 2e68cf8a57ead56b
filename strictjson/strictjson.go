// Package strictjson is the one JSON decoder behind every door of agentctl: the device
// link, the control socket and POST /mcp/tools/call.
//
// encoding/json accepts "TYPE" for a field named type, lets the last of two equal keys
// win and replaces bad UTF-8. Here all of these are errors, as are unknown keys,
// trailing bytes, nesting deeper than MaxDepth and numbers that are not finite. 5000.0 and
// 5e3 are the whole number 5000, as JSON Schema says.
package strictjson

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// MaxDepth bounds the nesting of arrays and objects.
const MaxDepth = 16

// Errors that callers may tell apart; all others are malformed JSON or a wrong type.
var (
	ErrDepth  = errors.New("strictjson: nested deeper than 16 levels")
	ErrNumber = errors.New("strictjson: a number is out of range")
)

// Raw is a JSON value kept as its bytes. Inside a document that Unmarshal accepted it is
// valid, has no duplicate keys and is not deeper than MaxDepth.
type Raw = jsontext.Value

var strict = json.JoinOptions(json.RejectUnknownMembers(true),
	json.WithUnmarshalers(json.JoinUnmarshalers(json.UnmarshalFromFunc(whole[int]), json.UnmarshalFromFunc(whole[int64]))))

// whole decodes a number that is whole but not written so; everything else is left to the
// decoder.
func whole[T int | int64](dec *jsontext.Decoder, n *T) error {
	if dec.PeekKind() != '0' {
		return errors.ErrUnsupported
	}
	val, err := dec.ReadValue()
	if err != nil {
		return err
	}
	i, err := strconv.ParseInt(string(val), 10, 64)
	if err != nil {
		f, ferr := strconv.ParseFloat(string(val), 64)
		if ferr != nil || f != math.Trunc(f) || math.Abs(f) >= 1<<53 {
			return ErrNumber
		}
		i = int64(f)
	}
	if *n = T(i); int64(*n) != i { // an int of 32 bits
		return ErrNumber
	}
	return nil
}

// Unmarshal decodes exactly one JSON value into v, strictly. The error never quotes the
// input's values.
func Unmarshal(data []byte, v any) error {
	if err := scan(data); err != nil {
		return err
	}
	if err := json.Unmarshal(data, v, strict); err != nil {
		return plain(err)
	}
	return nil
}

// Check tells whether data is one strict JSON value (any keys).
func Check(data []byte) error {
	if err := scan(data); err != nil {
		return err
	}
	v := jsontext.Value(data)
	if !v.IsValid() { // also refuses duplicate keys and bad UTF-8
		return errors.New("strictjson: malformed JSON, a duplicate key or bad UTF-8")
	}
	return nil
}

// scan checks what the decoder does not: depth, and numbers that overflow a float64. It
// relies on the decoder for well-formedness.
func scan(data []byte) error {
	depth := 0
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case c == '{' || c == '[':
			if depth++; depth > MaxDepth {
				return ErrDepth
			}
		case c == '}' || c == ']':
			depth--
		case c == '-' || (c >= '0' && c <= '9'):
			j := i + 1
			for j < len(data) && numberByte(data[j]) {
				j++
			}
			if !finite(data[i:j]) {
				return ErrNumber
			}
			i = j - 1
		}
	}
	return nil
}

func numberByte(c byte) bool {
	return (c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-'
}

// finite parses only what could overflow: an exponent or more digits than any float64
// needs.
func finite(num []byte) bool {
	if len(num) > 400 {
		return false
	}
	for _, c := range num {
		if c == 'e' || c == 'E' {
			f, err := strconv.ParseFloat(string(num), 64)
			return err == nil && !math.IsInf(f, 0)
		}
	}
	return len(num) <= 300
}

// plain drops the input's own words from an error of the decoder.
func plain(err error) error {
	var syn *jsontext.SyntacticError
	if errors.As(err, &syn) {
		return fmt.Errorf("strictjson: malformed JSON near byte %d", syn.ByteOffset)
	}
	var sem *json.SemanticError
	if errors.As(err, &sem) {
		if errors.Is(err, json.ErrUnknownName) {
			return fmt.Errorf("strictjson: an unknown key near byte %d", sem.ByteOffset)
		}
		return fmt.Errorf("strictjson: a value of the wrong type near byte %d", sem.ByteOffset)
	}
	return errors.New("strictjson: malformed JSON")
}
