package stages

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// field is one member of a configuration object.
type field struct {
	name string
	into any    // pointer; keeps its value when the member is absent
	want string // what would be right: "a whole number from 1 to 10"
}

// wrong is the error of a configuration: where, and what would be right.
func wrong(where, want string) error {
	return &manifest.Error{Code: manifest.ManifestInvalid, Message: where + ": " + want, Reason: "config"}
}

// decode reads a JSON object into fields, strictly. where is the object's path, such as
// "acl.rules[2]".
func decode(where string, data []byte, fields ...field) error {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return nil
	}
	var members map[string]strictjson.Raw
	if data[0] != '{' || strictjson.Unmarshal(data, &members) != nil {
		return wrong(where, "a strict JSON object, with each key once")
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
		raw, ok := members[f.name]
		if !ok {
			continue
		}
		if string(raw) == "null" || strictjson.Unmarshal(raw, f.into) != nil {
			return wrong(where+"."+f.name, f.want)
		}
		delete(members, f.name)
	}
	for name := range members {
		what := "a key here is unknown"
		if plainWord(name) {
			what = name + " is not a field of it"
		}
		return wrong(where, what+"; the fields are "+strings.Join(names, ", "))
	}
	return nil
}

// plainWord tells whether a key may be repeated in a message.
func plainWord(s string) bool {
	return len(s) > 0 && len(s) <= 32 && !strings.ContainsFunc(s, func(r rune) bool { return (r < 'a' || r > 'z') && r != '_' })
}

// decodeList reads the elements of a list with one; each has its path.
func decodeList[T any](where string, list []strictjson.Raw, most int, one func(where string, data []byte) (T, error)) ([]T, error) {
	if len(list) > most {
		return nil, wrong(where, fmt.Sprintf("at most %d elements", most))
	}
	out := make([]T, 0, len(list))
	for i, raw := range list {
		v, err := one(fmt.Sprintf("%s[%d]", where, i), raw)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

func oneOf(where, got string, words ...string) error {
	if slices.Contains(words, got) {
		return nil
	}
	return wrong(where, "one of "+strings.Join(words, ", "))
}

// glob reports whether pattern, in which * stands for any run of characters, fits s.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && pattern[p] == s[i]:
			p, i = p+1, i+1
		case star >= 0: // let the last star take one more
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
