package link

import (
	"bytes"

	"agentctl/strictjson"
)

// jsonObject is a JSON object that strictjson.Check has accepted, from its brace on. The
// functions below rely on that: they find the parts without parsing again and without
// copying, and do not check bounds.
type jsonObject []byte

// members iterates over the members, for use with range. name and value are parts of the
// object. It is a method value rather than an iter.Seq2, whose closure would be allocated.
func (o jsonObject) members(yield func(name, value []byte) bool) {
	for b := trimSpace(o[1:]); b[0] != '}'; {
		n := valueLen(b)
		name, _ := parseString(b[:n])
		b = trimSpace(trimSpace(b[n:])[1:]) // after the colon
		n = valueLen(b)
		if !yield(name, b[:n]) {
			return
		}
		if b = trimSpace(b[n:]); b[0] == ',' {
			b = trimSpace(b[1:])
		}
	}
}

// trimSpace drops leading white space.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\n' || b[0] == '\r') {
		b = b[1:]
	}
	return b
}

// valueLen is the length of the JSON value at the start of b.
func valueLen(b []byte) int {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			for i++; b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
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

// parseString is the content of a JSON string; ok is false for a value of another type.
// A string without an escape, which is the ordinary case, is not copied.
func parseString(value []byte) (s []byte, ok bool) {
	if value[0] != '"' {
		return nil, false
	}
	if s = value[1 : len(value)-1]; bytes.IndexByte(s, '\\') < 0 {
		return s, true
	}
	var unescaped string
	err := strictjson.Unmarshal(value, &unescaped)
	return []byte(unescaped), err == nil
}
