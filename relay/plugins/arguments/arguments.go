// Package arguments declares the arguments of a tool once, for two uses: the JSON Schema
// that clients see and the check that every call passes before its plugin runs.
//
//	in := arguments.Object{
//		{Name: "id", Type: arguments.String, Max: 26, Required: true, Description: "the ticket's id"},
//		{Name: "limit", Type: arguments.Integer, Min: 1, Max: 100, Default: 50},
//	}
//	tool.InputSchema = in.Schema()
//	tool.CheckArguments = in.Check
//
// A check needs no JSON Schema engine and its errors name the argument, so that an agent
// can correct its call. Errors never quote a value: it may be a secret.
package arguments

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	strict "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/lazyregexp"
	"agentctl/manifest"
)

// Types of a Field, as JSON Schema names them. Booleans and numbers with a fraction are
// missing because no tool of the relay takes one.
const (
	String  = "string"
	Integer = "integer"
	Array   = "array" // of strings
	Map     = "object"
)

// maxMapBytes bounds the JSON of a free-form object.
const maxMapBytes = 16 << 10

// Field is one argument of a tool. Which members apply depends on Type: Min, Max, Enum and
// Pattern to a String, Min and Max to an Integer, Min, Max and Pattern to an Array (which must
// have a Pattern), Members to a Map.
type Field struct {
	Name        string
	Description string
	Type        string
	Required    bool
	Default     any // shown to clients; the plugin applies it
	// Min and Max bound an integer, a string's length in characters (Max 0: no bound) or
	// the number of an array's elements.
	Min, Max int64
	Enum     []string           // closed set of a string; nil: any
	Pattern  *lazyregexp.Regexp // of a string, or of each element of an array; nil: any
	Form     string             // Pattern in words, for errors: "a ULID in upper case"
	Example  any                // a valid value, for errors; default: Default, or what the bounds show
	Members  Object             // of an object; nil: any object of at most 16 KiB
}

// Object lists the members of a closed object. A nil Object has no members. It does
// not change once its tool is loaded, since calls check their arguments concurrently.
type Object []Field

// Schema returns the JSON Schema of the object. It admits no further members, as Check does. A
// Default that cannot be encoded is a mistake in the program, and panics.
func (o Object) Schema() json.RawMessage {
	data, err := json.Marshal(o.schema())
	if err != nil {
		panic("arguments: " + err.Error()) // the program gave a Default that JSON cannot encode
	}
	return data
}

// BriefSchema is Schema without lengths, patterns and defaults, for tools whose texts a language model
// reads in every conversation. Check enforces them all the same, and its errors say what is allowed.
func (o Object) BriefSchema() json.RawMessage {
	brief := slices.Clone(o)
	for i := range brief {
		f := &brief[i]
		if f.Type == String {
			f.Max, f.Pattern = 0, nil
		}
		f.Default = nil
	}
	return brief.Schema()
}

// schema leaves "required" out when nothing is.
func (o Object) schema() map[string]any {
	properties := make(map[string]any, len(o))
	var required []string
	for i := range o {
		properties[o[i].Name] = o[i].schema()
		if o[i].Required {
			required = append(required, o[i].Name)
		}
	}
	s := map[string]any{"type": Map, "properties": properties, "additionalProperties": false}
	if required != nil {
		s["required"] = required
	}
	return s
}

// schema is the JSON Schema of one member. A closed set needs no further bounds.
func (f *Field) schema() map[string]any {
	s := map[string]any{"type": f.Type}
	switch {
	case f.Members != nil:
		s = f.Members.schema()
	case f.Type == Integer:
		s["minimum"], s["maximum"] = f.Min, f.Max
	case f.Type == Array:
		s["items"] = map[string]any{"type": String, "pattern": f.Pattern.String()}
		s["minItems"], s["maxItems"] = f.Min, f.Max
	case f.Enum != nil:
		s["enum"] = f.Enum
	default:
		if f.Max > 0 {
			s["minLength"], s["maxLength"] = f.Min, f.Max
		}
		if f.Pattern != nil {
			s["pattern"] = f.Pattern.String()
		}
	}
	if f.Description != "" {
		s["description"] = f.Description
	}
	if f.Default != nil {
		s["default"] = f.Default
	}
	return s
}

// Check validates the arguments of a call and returns them in their normal form: members
// by name, without white space, whole numbers without fraction or exponent (JSON Schema
// takes 20.0 and 2e1 for 20). Its error is an E_MANIFEST_INVALID, about the first problem.
//
// Duplicate names and invalid UTF-8 are refused: two JSON readers could otherwise see different
// arguments. Defaults are not filled in; the plugin applies them.
func (o Object) Check(raw []byte) ([]byte, error) { return o.check(raw, "") }

// check validates the object whose members have the given path in front of their names.
func (o Object) check(raw []byte, path string) ([]byte, error) {
	var members map[string]jsontext.Value
	if err := strict.Unmarshal(raw, &members); err != nil || members == nil {
		if path != "" {
			return nil, Invalid("argument %s: must be an object", strings.TrimSuffix(path, "."))
		}
		return nil, Invalid("arguments: must be one strict JSON object")
	}
	for name := range members {
		if !slices.ContainsFunc(o, func(f Field) bool { return f.Name == name }) {
			return nil, Invalid("unknown argument; this tool takes %s", o.names(path))
		}
	}
	for i := range o {
		f := &o[i]
		value, given := members[f.Name]
		if !given && f.Required {
			return nil, Invalid("argument %s%s: missing%s", path, f.Name, f.example())
		}
		if !given {
			continue
		}
		normal, err := f.check(value, path+f.Name)
		if err != nil {
			return nil, err
		}
		members[f.Name] = normal
	}
	return strict.Marshal(members, strict.Deterministic(true))
}

// names lists the members for messages, with the path to them. An unknown argument is answered
// with this list and not with its own name, which comes from the caller.
func (o Object) names(path string) string {
	if len(o) == 0 {
		return "none"
	}
	names := make([]string, len(o))
	for i := range o {
		names[i] = path + o[i].Name
	}
	return strings.Join(names, ", ")
}

// check validates one value and returns its normal form. Integers pass through a float64, so Min and Max
// must be within ±2^53.
func (f *Field) check(v jsontext.Value, path string) (jsontext.Value, error) {
	if f.Members != nil {
		return f.Members.check(v, path+".")
	}
	problem := ""
	switch f.Type {
	case Integer:
		n, err := strconv.ParseFloat(string(v), 64)
		switch {
		case v.Kind() != '0' || n != math.Trunc(n):
			problem = "must be an integer"
		case err != nil || n < float64(f.Min) || n > float64(f.Max):
			problem = fmt.Sprintf("out of range %d..%d", f.Min, f.Max)
		default:
			v = strconv.AppendInt(nil, int64(n), 10)
		}
	case Array:
		var list []string
		if v.Kind() != '[' || strict.Unmarshal(v, &list) != nil || int64(len(list)) < f.Min || int64(len(list)) > f.Max {
			problem = fmt.Sprintf("must be a list of %d to %d strings", f.Min, f.Max)
		}
		if i := slices.IndexFunc(list, func(s string) bool { return f.textProblem(s) != "" }); i >= 0 && problem == "" {
			problem = f.textProblem(list[i])
		}
	case Map:
		if v.Kind() != '{' || len(v) > maxMapBytes {
			problem = fmt.Sprintf("must be an object of at most %d bytes", maxMapBytes)
		}
	default:
		var s string
		if v.Kind() != '"' || strict.Unmarshal(v, &s) != nil {
			problem = "must be a string"
		} else {
			problem = f.textProblem(s)
		}
	}
	if problem != "" {
		return nil, Invalid("argument %s: %s%s", path, problem, f.example())
	}
	return v, nil
}

// example shows how the argument is given, "" if no valid value is known. It ends the message of
// an error, so that an agent can correct its call without the schema.
func (f *Field) example() string {
	v := f.Example
	switch {
	case v != nil:
	case f.Default != nil:
		v = f.Default
	case f.Enum != nil:
		v = f.Enum[0]
	case f.Type == Integer:
		v = f.Min
	default:
		return ""
	}
	data, err := json.Marshal(map[string]any{f.Name: v})
	if err != nil {
		return "" // as for a Default that JSON cannot encode, which Schema reports
	}
	return "; for example " + string(data)
}

// textProblem describes what is wrong with a string, "" if it is valid. The length bounds
// of an array count its elements, not their characters.
func (f *Field) textProblem(s string) string {
	n := int64(utf8.RuneCountInString(s))
	switch {
	case f.Enum != nil && !slices.Contains(f.Enum, s):
		return "must be one of " + strings.Join(f.Enum, ", ")
	case f.Type == String && n < f.Min:
		return fmt.Sprintf("shorter than %d characters", f.Min)
	case f.Type == String && f.Max > 0 && n > f.Max:
		return fmt.Sprintf("longer than %d characters", f.Max)
	case f.Pattern != nil && !f.Pattern.MatchString(s) && f.Form != "":
		return "must be " + f.Form
	case f.Pattern != nil && !f.Pattern.MatchString(s):
		return fmt.Sprintf("must match %+q", f.Pattern.String())
	}
	return ""
}

// Invalid is the error of arguments that do not fit their schema. It is exported for rules
// that a Field cannot express, which a tool checks itself.
func Invalid(format string, args ...any) error {
	return &manifest.Error{Code: manifest.ManifestInvalid, Message: fmt.Sprintf(format, args...), Reason: "schema"}
}
