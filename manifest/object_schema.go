package manifest

import (
	"bytes"
	"encoding/json"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/strictjson"
)

// objectSchema is what this package itself understands of a schema: the outermost object. It
// is read from the schema's JSON, so nothing is written twice. When exact, it is all
// there is to the schema, and scan may accept a value without asking the library;
// every refusal is the library's in any case.
type objectSchema struct {
	ref        string
	noun       string // what its properties are called in messages
	exact      bool
	closed     bool // no properties but those
	properties []property
	required   uint32 // bits of props
	hasNode    bool   // one of props is node_id
}

// maxProperties is the number of bits in shape.required.
const maxProperties = 32

// property is one property of a closed flat object.
type property struct {
	name           string
	typ            string // as in the schema; "" for any
	min, max       int64  // of a number; of a string's length in characters
	hasMin, hasMax bool
	pattern        *pattern
	object         *objectSchema // of an object
}

// schemaJSON is the part of JSON Schema that a shape covers. Every other keyword makes a
// schema inexact.
type schemaJSON struct {
	Type                 string                     `json:"type"`
	Required             []string                   `json:"required"`
	Properties           map[string]json.RawMessage `json:"properties"`
	AdditionalProperties *bool                      `json:"additionalProperties"`
	Minimum              *int64                     `json:"minimum"`
	Maximum              *int64                     `json:"maximum"`
	MinLength            *int64                     `json:"minLength"`
	MaxLength            *int64                     `json:"maxLength"`
	Pattern              *string                    `json:"pattern"`
}

var (
	objectKeywords = []string{"$schema", "$id", "title", "description", "type", "required", "properties", "additionalProperties"}
	numberKeywords = []string{"title", "description", "default", "type", "minimum", "maximum"}
	stringKeywords = []string{"title", "description", "default", "type", "minLength", "maxLength", "pattern"}
)

// parse reads a schema and tells whether words are all its keywords and were understood.
func (s *schemaJSON) parse(raw []byte, words []string) (exact bool) {
	var keys map[string]json.RawMessage
	exact = json.Unmarshal(raw, s) == nil && json.Unmarshal(raw, &keys) == nil
	for k := range keys {
		exact = exact && slices.Contains(words, k)
	}
	return exact
}

func newObjectSchema(ref string, raw []byte) *objectSchema {
	sh := &objectSchema{ref: ref, noun: "field"}
	if name, _, _ := strings.Cut(ref, "@"); strings.HasSuffix(name, ".input") {
		sh.noun = "argument"
	}
	var s schemaJSON
	sh.exact = s.parse(raw, objectKeywords) && s.Type == "object" && len(s.Properties) <= maxProperties
	sh.closed = s.AdditionalProperties != nil && !*s.AdditionalProperties
	sh.exact = sh.exact && sh.closed
	// In the order of "required", which is the order that devices send.
	names := slices.Clone(s.Required)
	for name := range s.Properties {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names[len(s.Required):])
	for i, name := range names {
		p, ok := newProperty(name, s.Properties[name])
		sh.exact = sh.exact && ok
		sh.properties = append(sh.properties, p)
		sh.hasNode = sh.hasNode || name == "node_id"
		if i < len(s.Required) && i < maxProperties {
			sh.required |= 1 << i
		}
	}
	return sh
}

func newProperty(name string, raw []byte) (p property, exact bool) {
	var s schemaJSON
	_ = s.parse(raw, nil) // for the type; what it may say depends on that
	p = property{name: name, typ: s.Type}
	low, high := s.Minimum, s.Maximum
	switch s.Type {
	case "integer", "number":
		exact = s.parse(raw, numberKeywords)
	case "string":
		exact = s.parse(raw, stringKeywords)
		low, high = s.MinLength, s.MaxLength
		p.pattern, exact = newPattern(s.Pattern, exact)
	case "object":
		p.object = newObjectSchema("", raw)
	}
	if low != nil {
		p.min, p.hasMin = *low, true
	}
	if high != nil {
		p.max, p.hasMax = *high, true
	}
	return p, exact
}

// pattern is a regular expression of a simple form: `^`, a fixed row of character
// classes, at most one class repeated without bound, `$`; ASCII only.
type pattern struct {
	prefix   []*charSet
	repeated *charSet // of all characters behind the row; nil: there are none
}

type charSet [128]bool

func newPattern(expr *string, exact bool) (*pattern, bool) {
	var p pattern
	if expr == nil {
		p.repeated = new(charSet)
		for c := ' '; c <= '~'; c++ { // the rest is left to the library
			p.repeated[c] = true
		}
		return &p, exact
	}
	re, err := syntax.Parse(*expr, syntax.Perl)
	if err != nil || re.Op != syntax.OpConcat || len(re.Sub) < 2 {
		return nil, false
	}
	last := len(re.Sub) - 1
	if re.Sub[0].Op != syntax.OpBeginText || re.Sub[last].Op != syntax.OpEndText {
		return nil, false
	}
	for _, sub := range re.Sub[1:last] {
		if p.repeated != nil || !p.add(sub) {
			return nil, false
		}
	}
	return &p, exact
}

func (p *pattern) add(re *syntax.Regexp) bool {
	least, most, class := 1, 1, re
	switch re.Op {
	case syntax.OpStar:
		least, most, class = 0, -1, re.Sub[0]
	case syntax.OpPlus:
		least, most, class = 1, -1, re.Sub[0]
	case syntax.OpRepeat:
		least, most, class = re.Min, re.Max, re.Sub[0]
	}
	if class.Op != syntax.OpCharClass || (most >= 0 && most != least) {
		return false
	}
	set := new(charSet)
	for i := 0; i < len(class.Rune); i += 2 {
		if class.Rune[i+1] >= 128 {
			return false
		}
		for c := class.Rune[i]; c <= class.Rune[i+1]; c++ {
			set[c] = true
		}
	}
	for range least {
		p.prefix = append(p.prefix, set)
	}
	if most < 0 {
		p.repeated = set
	}
	return true
}

// normalize rewrites a valid object without white space and with whole numbers written
// plainly where the schema says integer, in objects of objects too, not in arrays.
func (sh *objectSchema) normalize(raw []byte) []byte {
	v := jsontext.Value(bytes.Clone(raw))
	_ = v.Compact() // cannot fail: the value was validated
	dec := jsontext.NewDecoder(bytes.NewBuffer(v))
	_, _ = dec.ReadToken()
	out := make([]byte, 0, len(v))
	for sep := byte('{'); dec.PeekKind() == '"'; sep = ',' {
		name, _ := dec.ReadToken()
		key := name.String()
		val, _ := dec.ReadValue()
		out = append(out, sep)
		out, _ = jsontext.AppendQuote(out, key)
		out = append(out, ':')
		i := slices.IndexFunc(sh.properties, func(p property) bool { return p.name == key })
		if i >= 0 {
			val = sh.properties[i].normalize(val)
		}
		out = append(out, val...)
	}
	if len(out) == 0 {
		return append(out, "{}"...)
	}
	return append(out, '}')
}

func (p *property) normalize(val jsontext.Value) jsontext.Value {
	switch {
	case p.object != nil && val.Kind() == '{':
		return p.object.normalize(val)
	case p.typ == "integer" && val.Kind() == '0':
		if n, ok := strictjson.Whole(val); ok {
			return strconv.AppendInt(nil, n, 10)
		}
	}
	return val
}
