package control

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	strict "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// args are the arguments of all tools.
type args struct {
	Name   string          `json:"name"`
	Scope  string          `json:"scope"`
	Config json.RawMessage `json:"config"`
	Order  []string        `json:"order"`
	Tool   string          `json:"tool"`
	After  string          `json:"after"`
	Limit  int             `json:"limit"`
	Level  string          `json:"level"`
}

// arg is one argument of a tool. The schema that clients are shown and the check that
// calls go through are both made of it.
type arg struct {
	name, about string
	kind        string // string, integer, object or array (of strings)
	pattern     *regexp.Regexp
	max         int // of an integer, from 1; of an array's elements
	required    bool
}

// maxConfig bounds a configuration, bytes.
const maxConfig = 16 << 10

var (
	wordPattern    = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,31}$`)
	scopePattern   = regexp.MustCompile(`^(global|(transport|plugin|connection)=[!-~]{1,128})$`)
	pluginPattern  = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)
	versionPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}(@[0-9A-Za-z.+-]{1,64})?$`)
	cursorPattern  = regexp.MustCompile(`^[!-~]{1,128}$`)

	argStage  = arg{name: "name", about: "the stage, as kernel.middleware.list names it", kind: "string", pattern: wordPattern, required: true}
	argScope  = arg{name: "scope", about: "global (the default), transport=NAME, plugin=NAME or connection=ID", kind: "string", pattern: scopePattern}
	argConfig = arg{name: "config", about: "an object with the fields that kernel.middleware.list shows, at most 16 KiB; what is left out has its default", kind: "object"}
	argOrder  = arg{name: "order", about: "every stage once, the outermost first; not together with name", kind: "array", pattern: wordPattern, max: 32}
	argAfter  = arg{name: "after", about: "next of the answer before", kind: "string", pattern: cursorPattern}
	argLimit  = arg{name: "limit", about: "rows in one answer; 100 unless given", kind: "integer", max: 500}
)

func optional(a arg) arg { a.required = false; return a }

func schema(list []arg, more string) json.RawMessage {
	props := make(map[string]any, len(list))
	required := []string{}
	for _, a := range list {
		s := map[string]any{"type": a.kind, "description": a.about}
		switch a.kind {
		case "string":
			s["pattern"] = a.pattern.String()
		case "integer":
			s["minimum"], s["maximum"] = 1, a.max
		case "array":
			s["items"] = map[string]any{"type": "string", "pattern": a.pattern.String()}
			s["minItems"], s["maxItems"] = 1, a.max
		}
		props[a.name] = s
		if a.required {
			required = append(required, a.name)
		}
	}
	s := map[string]any{"type": "object", "properties": props, "additionalProperties": false, "required": required}
	if more != "" {
		var extra map[string]any
		if err := json.Unmarshal([]byte(more), &extra); err != nil {
			panic("control: " + err.Error()) // part of the program
		}
		for k, v := range extra {
			s[k] = v
		}
	}
	out, err := json.Marshal(s)
	if err != nil {
		panic("control: " + err.Error())
	}
	return out
}

func invalid(format string, a ...any) error {
	return &manifest.Error{Code: manifest.ManifestInvalid, Message: "arguments: " + fmt.Sprintf(format, a...), Reason: "schema"}
}

// check is the Check of a tool: strict JSON of exactly these arguments. It returns them
// with whole numbers written plainly. Its errors quote nothing of the value.
func check(list []arg, raw []byte) ([]byte, error) {
	var members map[string]jsontext.Value
	if err := strict.Unmarshal(raw, &members); err != nil || members == nil {
		return nil, invalid("not a strict JSON object")
	}
	names := make([]string, len(list))
	for i, a := range list {
		names[i] = a.name
		v, ok := members[a.name]
		if !ok {
			if a.required {
				return nil, invalid("%s is missing: %s", a.name, a.about)
			}
			continue
		}
		normal, want := a.read(v)
		if want != "" {
			return nil, invalid("%s has to be %s", a.name, want)
		}
		members[a.name] = normal
	}
	for name := range members {
		if !slices.Contains(names, name) {
			if len(names) == 0 {
				return nil, invalid("this tool takes none")
			}
			return nil, invalid("unknown; this tool takes %s", strings.Join(names, ", "))
		}
	}
	return strict.Marshal(members, strict.Deterministic(true))
}

// read gives a value in its normal form, or tells what it should be.
func (a *arg) read(v jsontext.Value) (normal jsontext.Value, want string) {
	var s string
	var list []string
	switch {
	case a.kind == "string":
		want = "a string of the form " + a.pattern.String()
		if v.Kind() == '"' && strict.Unmarshal(v, &s) == nil && a.pattern.MatchString(s) {
			return v, ""
		}
	case a.kind == "integer":
		want = fmt.Sprintf("a whole number from 1 to %d", a.max)
		if v.Kind() == '0' {
			if f, err := strconv.ParseFloat(string(v), 64); err == nil && f == math.Trunc(f) && f >= 1 && f <= float64(a.max) {
				return strconv.AppendInt(nil, int64(f), 10), ""
			}
		}
	case a.kind == "object":
		want = fmt.Sprintf("an object of at most %d bytes", maxConfig)
		if v.Kind() == '{' && len(v) <= maxConfig {
			return v, ""
		}
	default:
		want = fmt.Sprintf("a list of 1 to %d names", a.max)
		if v.Kind() == '[' && strict.Unmarshal(v, &list) == nil && len(list) >= 1 && len(list) <= a.max &&
			!slices.ContainsFunc(list, func(s string) bool { return !a.pattern.MatchString(s) }) {
			return v, ""
		}
	}
	return nil, want
}
