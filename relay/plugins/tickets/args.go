package tickets

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// field is one argument of a tool. The schema that clients are shown and the check that
// calls go through are both made of it.
type field struct {
	name, about string
	kind        string   // "string", "integer" or "object"
	min, max    int64    // of an integer; of a string's length in characters
	enum        []string // closed set of a string; nil: any
	pattern     *regexp.Regexp
	def         any
	required    bool
	fields      []field // of an object
}

// fields is a closed object.
type fields []field

// Patterns. A title begins with something to see and is one line.
var (
	ulidPattern  = regexp.MustCompile(`^[0-7][0-9A-HJKMNP-TV-Z]{25}$`)
	nodePattern  = regexp.MustCompile(`^[0-7][0-9a-hjkmnp-tv-z]{25}$`)
	agentPattern = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._:@-]*)?$`)
	linePattern  = regexp.MustCompile("^[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$")
	keyPattern   = regexp.MustCompile(`^[\x21-\x7e]+$`)
)

// schema is the JSON schema of the object.
func (fs fields) schema() map[string]any {
	props := make(map[string]any, len(fs))
	required := []string{}
	for i := range fs {
		f := &fs[i]
		props[f.name] = f.schema()
		if f.required {
			required = append(required, f.name)
		}
	}
	s := map[string]any{"type": "object", "properties": props, "additionalProperties": false}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}

func (f *field) schema() map[string]any {
	s := map[string]any{"type": f.kind}
	switch f.kind {
	case "object":
		s = fields(f.fields).schema()
	case "integer":
		s["minimum"], s["maximum"] = f.min, f.max
	case "string":
		if f.enum != nil {
			s["enum"] = f.enum
			break
		}
		s["minLength"], s["maxLength"] = f.min, f.max
		if f.pattern != nil {
			s["pattern"] = f.pattern.String()
		}
	}
	s["description"] = f.about
	if f.def != nil {
		s["default"] = f.def
	}
	return s
}

// check is the Check of a tool: strict JSON of exactly these fields. It returns the
// arguments without white space and with whole numbers written plainly. Its errors are
// E_MANIFEST_INVALID and quote nothing of the value.
func (fs fields) check(raw []byte) ([]byte, error) {
	dec := jsontext.NewDecoder(bytes.NewReader(raw)) // refuses duplicate names and bad UTF-8
	var out bytes.Buffer
	if err := fs.read(dec, &out, ""); err != nil {
		var e *manifest.Error
		if !errors.As(err, &e) {
			e = invalid("arguments: not strict JSON")
		}
		return nil, e
	}
	if _, err := dec.ReadToken(); !errors.Is(err, io.EOF) {
		return nil, invalid("arguments: must be one JSON object")
	}
	return out.Bytes(), nil
}

func invalid(format string, a ...any) *manifest.Error {
	return &manifest.Error{Code: manifest.ManifestInvalid, Message: fmt.Sprintf(format, a...), Reason: "schema"}
}

func (fs fields) read(dec *jsontext.Decoder, out *bytes.Buffer, path string) error {
	if dec.PeekKind() != '{' {
		if path == "" {
			return invalid("arguments: must be a JSON object")
		}
		return invalid("argument %s: must be an object", strings.TrimSuffix(path, "."))
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	have := make([]bool, len(fs))
	out.WriteByte('{')
	for dec.PeekKind() == '"' {
		tok, err := dec.ReadToken()
		if err != nil {
			return err
		}
		name := tok.String()
		i := slices.IndexFunc(fs, func(f field) bool { return f.name == name })
		if i < 0 {
			return invalid("unknown argument; known: %s", fs.names(path))
		}
		if slices.Contains(have, true) {
			out.WriteByte(',')
		}
		have[i] = true
		fmt.Fprintf(out, "%q:", fs[i].name)
		if err := fs[i].read(dec, out, path); err != nil {
			return err
		}
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	out.WriteByte('}')
	for i := range fs {
		if fs[i].required && !have[i] {
			return invalid("argument %s%s: missing", path, fs[i].name)
		}
	}
	return nil
}

func (fs fields) names(path string) string {
	if len(fs) == 0 {
		return "none"
	}
	names := make([]string, len(fs))
	for i := range fs {
		names[i] = path + fs[i].name
	}
	return strings.Join(names, ", ")
}

func (f *field) read(dec *jsontext.Decoder, out *bytes.Buffer, path string) error {
	if f.kind == "object" {
		return fields(f.fields).read(dec, out, path+f.name+".")
	}
	val, err := dec.ReadValue()
	if err != nil {
		return err
	}
	why := ""
	switch {
	case f.kind == "integer" && val.Kind() == '0':
		if val, why = f.integer(val); why == "" {
			out.Write(val)
		}
	case f.kind == "string" && val.Kind() == '"':
		var s string
		if err := json.Unmarshal(val, &s); err != nil {
			return err
		}
		why = f.text(s)
		out.Write(val)
	case f.kind == "integer":
		why = "must be an integer"
	default:
		why = "must be a string"
	}
	if why != "" {
		return invalid("argument %s%s: %s", path, f.name, why)
	}
	return nil
}

// integer takes 20.0 and 2e1 for 20, as JSON Schema does.
func (f *field) integer(val jsontext.Value) (normal jsontext.Value, why string) {
	v, err := strconv.ParseFloat(string(val), 64)
	switch {
	case err != nil || v < float64(f.min) || v > float64(f.max):
		return nil, fmt.Sprintf("out of range %d..%d", f.min, f.max)
	case v != math.Trunc(v):
		return nil, "must be an integer"
	}
	return strconv.AppendInt(nil, int64(v), 10), ""
}

func (f *field) text(s string) string {
	n := int64(utf8.RuneCountInString(s))
	switch {
	case f.enum != nil:
		if !slices.Contains(f.enum, s) {
			return "must be one of " + strings.Join(f.enum, ", ")
		}
	case n < f.min:
		return fmt.Sprintf("shorter than %d characters", f.min)
	case n > f.max:
		return fmt.Sprintf("longer than %d characters", f.max)
	case f.pattern != nil && !f.pattern.MatchString(s):
		return "has characters or a form that the schema does not allow"
	}
	return ""
}
