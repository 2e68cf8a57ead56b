package strictjson

import (
	"bytes"

	"github.com/go-json-experiment/json/jsontext"
)

// Object is a JSON object that Check, or json.Valid, has accepted, from its brace on. The
// methods and functions below rely on that: they find the parts without parsing again and
// without copying, and do not check bounds. They are for messages of which a few members
// decide what happens to the others.
type Object []byte

// Members iterates over the members, for use with range. name and value are parts of the
// object. It is a method value rather than an iter.Seq2, whose closure would be allocated.
func (o Object) Members(yield func(name, value []byte) bool) {
	for b := SkipSpace(o[1:]); b[0] != '}'; {
		n := valueLen(b)
		name, _ := Text(b[:n])
		b = SkipSpace(SkipSpace(b[n:])[1:]) // after the colon
		n = valueLen(b)
		if !yield(name, b[:n]) {
			return
		}
		if b = SkipSpace(b[n:]); b[0] == ',' {
			b = SkipSpace(b[1:])
		}
	}
}

// SkipSpace drops leading white space.
func SkipSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\n' || b[0] == '\r') {
		b = b[1:]
	}
	return b
}

// valueLen is the length of the JSON value at the start of b.
//
// It counts brackets without matching their kinds and skips strings, which is enough for a value
// that is known to be valid.
func valueLen(b []byte) int {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			i = stringEnd(b, i)
			if depth == 0 {
				return i + 1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
			if depth < 0 {
				return i // the end of the object that contains a number or a literal
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return i
			}
		}
	}
	return len(b)
}

// Text is the content of a JSON string; ok is false for a value of another type. A string
// without an escape, which is the ordinary case, is not copied.
func Text(value []byte) (s []byte, ok bool) {
	if value[0] != '"' {
		return nil, false
	}
	if s = value[1 : len(value)-1]; bytes.IndexByte(s, '\\') < 0 {
		return s, true
	}
	s, _ = jsontext.AppendUnquote(nil, value) // an error reports that U+FFFD replaced a lone surrogate
	return s, true
}
