package sse

import (
	"bytes"
	"strings"
)

// AppendEvent appends one event: its type, one data field per line, and the blank line
// that ends it. An empty type is left out; readers then use "message".
//
// A CR or LF in the type or in a line is refused with ErrField, because it would start a
// new field; dst is then returned unchanged.
func AppendEvent(dst []byte, eventType string, lines ...[]byte) ([]byte, error) {
	return AppendEventID(dst, nil, eventType, lines...)
}

// AppendEventID is AppendEvent with an id field in front, unless id is empty. NUL in an
// id is refused too, since readers ignore such an id.
func AppendEventID(dst, id []byte, eventType string, lines ...[]byte) ([]byte, error) {
	if hasLineBreak(id) || bytes.IndexByte(id, 0) >= 0 || strings.ContainsAny(eventType, "\r\n") {
		return dst, ErrField
	}
	for _, line := range lines {
		if hasLineBreak(line) {
			return dst, ErrField
		}
	}
	if len(id) > 0 {
		dst = appendField(dst, "id: ", id)
	}
	if eventType != "" {
		dst = appendField(dst, "event: ", eventType)
	}
	for _, line := range lines {
		dst = appendField(dst, "data: ", line)
	}
	return append(dst, '\n'), nil
}

// AppendComment appends a comment, which readers ignore. The text is the caller's own and
// must not contain CR or LF.
func AppendComment(dst []byte, text string) []byte {
	return append(appendField(dst, ": ", text), '\n')
}

func appendField[T string | []byte](dst []byte, name string, value T) []byte {
	dst = append(dst, name...)
	dst = append(dst, value...)
	return append(dst, '\n')
}

// hasLineBreak uses two IndexByte, which are vectorized; ContainsAny looks at each byte.
func hasLineBreak(b []byte) bool {
	return bytes.IndexByte(b, '\n') >= 0 || bytes.IndexByte(b, '\r') >= 0
}

// isWholeEvent reports whether b ends with the blank line that ends an event.
func isWholeEvent(b []byte) bool { return bytes.HasSuffix(b, []byte("\n\n")) }
