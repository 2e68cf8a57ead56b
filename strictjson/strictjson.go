// Package strictjson decodes JSON strictly. Every JSON input of agentctl passes through
// it: the device link, the control socket, the relay's endpoints and stored files.
//
// encoding/json accepts "TYPE" for a field named type, lets the last of two equal keys
// win and replaces bad UTF-8. Here all of these are errors, as are unknown keys,
// trailing bytes, nesting deeper than MaxDepth and numbers that are not finite. 5000.0 and
// 5e3 are the whole number 5000, as JSON Schema says.
//
//	err := strictjson.Unmarshal(data, &v)  // into a Go type
//	tree, err := strictjson.Decode(data)   // into maps and slices, for a JSON Schema engine
//	err := strictjson.Check(data)          // validity alone
//
// Duplicate keys and bad UTF-8 matter for security: two programs that read the same bytes
// differently can be made to disagree about what was checked and what is executed. MaxDepth
// bounds the stack that an input can cost.
package strictjson

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// MaxDepth bounds the nesting of arrays and objects, and with it the stack of every decoder
// that reads the same bytes later.
const MaxDepth = 16

// Errors that callers may distinguish; all others are malformed JSON or a wrong type. No
// error quotes the input, so that it can be shown and logged.
var (
	ErrDepth  = errors.New("nested deeper than 16 levels")
	ErrNumber = errors.New("a number is out of range or has too many digits")

	errMalformed = errors.New("malformed JSON, a duplicate key or bad UTF-8")
)

// Raw is a JSON value kept as its bytes. Inside a document that Unmarshal accepted it is
// valid, has no duplicate keys and is not deeper than MaxDepth, so it can be forwarded.
type Raw = jsontext.Value

// strict are the decoder's options. jsontext refuses duplicate keys and bad UTF-8 by default.
var strict = json.JoinOptions(json.RejectUnknownMembers(true),
	json.WithUnmarshalers(json.JoinUnmarshalers(json.UnmarshalFromFunc(whole[int]), json.UnmarshalFromFunc(whole[int64]))))

// maxExactFloat bounds whole numbers that are not written as such (5e3): below it every
// whole number is exact as a float64, which other decoders make of it.
const maxExactFloat = 1 << 53

// whole decodes a number into an integer type. It leaves every other JSON value to the
// decoder, which refuses it.
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
		var ok bool
		if i, ok = Whole(val); !ok || i <= -maxExactFloat || i >= maxExactFloat {
			return ErrNumber
		}
	}
	if *n = T(i); int64(*n) != i { // int has 32 bits on some boards
		return ErrNumber
	}
	return nil
}

// Unmarshal decodes exactly one JSON value into v, strictly.
//
// After an error v may be partly set; the caller must not use it.
func Unmarshal(data []byte, v any) error {
	if err := scan(data); err != nil {
		return err
	}
	if err := json.Unmarshal(data, v, strict); err != nil {
		return withoutInput(err)
	}
	return nil
}

// Check reports whether data is exactly one strict JSON value; its keys may be any.
func Check(data []byte) error {
	if err := scan(data); err != nil {
		return err
	}
	if !jsontext.Value(data).IsValid() { // also refuses duplicate keys and bad UTF-8
		return errMalformed
	}
	return nil
}

// scan checks what the decoder does not: depth, and numbers that overflow a float64. It
// runs on every message, so it allocates nothing for ordinary numbers, and relies on the
// decoder for well-formedness.
func scan(data []byte) error {
	depth := 0
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			i = stringEnd(data, i)
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

// stringEnd returns the index of the quote that ends the string which begins at i, or len(data). Most
// strings are short; in a long one it looks for quotes only, which is many times as fast.
func stringEnd(data []byte, i int) int {
	const short = 32
	i++
	for end := min(len(data), i+short); i < end; i++ {
		if data[i] == '"' {
			return i
		}
		if data[i] == '\\' {
			i++
		}
	}
	for from := i; i < len(data); i++ {
		n := bytes.IndexByte(data[i:], '"')
		if n < 0 {
			break
		}
		i += n
		escapes := 0
		for k := i - 1; k >= from && data[k] == '\\'; k-- {
			escapes++
		}
		if escapes%2 == 0 {
			return i
		}
		from = i + 1
	}
	return len(data)
}

// Count returns how many members the objects of data have together, and how many values follow another
// one in the same object or array. It takes a fraction of the time that decoding does, and data need not
// be valid.
func Count(data []byte) (members, following int) {
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			i = stringEnd(data, i)
		case ':':
			members++
		case ',':
			following++
		}
	}
	return members, following
}

// numberByte reports whether c may be part of a number, well-formed or not.
//
// scan only needs the end of a number. The decoder refuses one that is not well-formed.
func numberByte(c byte) bool {
	return (c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-'
}

// finite reports whether a number fits a float64. It parses only a number with an
// exponent: without one, up to 300 digits always fit. The bound of 400 characters limits the
// work that ParseFloat does for a number.
func finite(num []byte) bool {
	if len(num) > 400 {
		return false
	}
	if bytes.ContainsAny(num, "eE") {
		_, err := strconv.ParseFloat(string(num), 64)
		return err == nil
	}
	return len(num) <= 300
}

// withoutInput replaces an error of the decoder, which may quote the input.
func withoutInput(err error) error {
	var syn *jsontext.SyntacticError
	if errors.As(err, &syn) {
		return fmt.Errorf("malformed JSON near byte %d", syn.ByteOffset)
	}
	var sem *json.SemanticError
	if errors.As(err, &sem) {
		if errors.Is(err, json.ErrUnknownName) {
			return fmt.Errorf("an unknown key near byte %d", sem.ByteOffset)
		}
		return fmt.Errorf("a value of the wrong type near byte %d", sem.ByteOffset)
	}
	return errors.New("malformed JSON")
}
