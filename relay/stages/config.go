package stages

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// The configuration of a stage is a strict JSON object. Each stage lists its fields with
// their bounds; decode reads them and reports which field is wrong and what it accepts.
// Errors do not quote values, since a configuration may hold secrets.

// field is one member of a configuration object.
type field struct {
	name  string
	into  any         // a pointer; it keeps its value when the member is absent
	want  string      // what a valid value is: "a whole number from 1 to 10"
	valid func() bool // checks *into after decoding; nil: every value of the type is valid
}

// boolField returns a field whose value is true or false.
func boolField(name string, into *bool) field { return field{name, into, "true or false", nil} }

// intField returns a field whose value is a whole number within bounds.
func intField(name string, into *int, minimum, maximum int) field {
	return field{name, into, fmt.Sprintf("a whole number from %d to %d", minimum, maximum),
		func() bool { return *into >= minimum && *into <= maximum }}
}

// enumField returns a field whose value is one of a closed set of words.
func enumField(name string, into *string, words ...string) field {
	return field{name, into, "one of " + strings.Join(words, ", "), func() bool { return slices.Contains(words, *into) }}
}

// invalid returns the error of a configuration: where it is wrong, and what is valid there.
func invalid(where, want string) error {
	return &manifest.Error{Code: manifest.ManifestInvalid, Message: where + ": " + want, Reason: "config"}
}

// decode reads a JSON object into fields. where is the object's path, such as
// "acl.rules[2]". Empty data leaves all fields at their defaults.
//
// valid is called for absent members too: a field that is required has a default that is not
// valid. null is refused, so that it cannot stand for a default.
func decode(where string, data []byte, fields ...field) error {
	data = bytes.TrimSpace(data)
	var members map[string]strictjson.Raw
	if len(data) > 0 && (data[0] != '{' || strictjson.Unmarshal(data, &members) != nil) {
		return invalid(where, "a strict JSON object, with each key once")
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
		if raw, ok := members[f.name]; ok && (string(raw) == "null" || strictjson.Unmarshal(raw, f.into) != nil) {
			return invalid(where+"."+f.name, f.want)
		}
		delete(members, f.name)
	}
	for name := range members {
		problem := "a key here is unknown"
		if isPlainWord(name) {
			problem = name + " is not a field of it"
		}
		return invalid(where, problem+"; the fields are "+strings.Join(names, ", "))
	}
	// A stage that cannot work with its defaults, such as sign without a key, refuses later.
	if len(data) == 0 {
		return nil
	}
	for _, f := range fields {
		if f.valid != nil && !f.valid() {
			return invalid(where+"."+f.name, f.want)
		}
	}
	return nil
}

// isPlainWord reports whether an unknown key is harmless enough to be quoted in a message.
func isPlainWord(s string) bool {
	return len(s) > 0 && len(s) <= 32 && !strings.ContainsFunc(s, func(r rune) bool { return (r < 'a' || r > 'z') && r != '_' })
}

// decodeList reads the elements of a list, each with its path.
func decodeList[T any](where string, list []strictjson.Raw, maxLen int, decodeElement func(where string, data []byte) (T, error)) ([]T, error) {
	if len(list) > maxLen {
		return nil, invalid(where, fmt.Sprintf("at most %d elements", maxLen))
	}
	out := make([]T, len(list))
	for i, raw := range list {
		var err error
		if out[i], err = decodeElement(fmt.Sprintf("%s[%d]", where, i), raw); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// glob reports whether pattern, in which * stands for any run of characters, matches s.
// It takes time in proportion to the product of the lengths, whatever the pattern: a mismatch
// goes back to the last star only, which is enough because a star matches any run. A caller
// who chooses the string cannot make it take exponential time.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && pattern[p] == s[i]:
			p, i = p+1, i+1
		case star >= 0: // let the last star match one more character
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
