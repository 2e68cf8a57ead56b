package link

import "agentctl/strictjson"

// walker reads the members of a JSON object which strictjson.Check has accepted: that
// was the parsing, this only finds the parts, without a copy.
type walker struct{ rest []byte }

// walk begins with obj, which starts at its brace.
func walk(obj []byte) walker { return walker{obj[1:]} }

// next gives the next member's name and value, which are parts of the object.
func (w *walker) next() (name, value []byte, ok bool) {
	b := trimSpace(w.rest)
	if b[0] == ',' {
		b = trimSpace(b[1:])
	}
	if b[0] == '}' {
		return nil, nil, false
	}
	n := valueLen(b)
	name, _ = parseString(b[:n])
	b = trimSpace(trimSpace(b[n:])[1:]) // behind the colon
	n = valueLen(b)
	w.rest = b[n:]
	return name, b[:n], true
}

// trimSpace drops leading white space.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\n' || b[0] == '\r') {
		b = b[1:]
	}
	return b
}

// valueLen is the length of the JSON value that b begins with.
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
				return i // the end of what a bare value stands in
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
func parseString(value []byte) (s []byte, ok bool) {
	if value[0] != '"' {
		return nil, false
	}
	s = value[1 : len(value)-1]
	for _, c := range s {
		if c == '\\' { // rare: nothing that the link needs has to be escaped
			var u string
			if strictjson.Unmarshal(value, &u) != nil {
				return nil, false
			}
			return []byte(u), true
		}
	}
	return s, true
}
