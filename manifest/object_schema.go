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

// objectSchema is what this package understands of a schema: the properties of the outermost
// object. It is read from the schema's JSON, so that nothing is written twice. If exact, the
// schema says nothing else, and scan may accept a value without the validator. The validator
// makes every refusal.
type objectSchema struct {
	ref        string
	noun       string // of its properties in messages: argument or field
	exact      bool
	closed     bool // other properties are refused
	properties []property
	required   uint32 // bit i: properties[i] is required
	hasNode    bool   // one of them is node_id
}

// maxProperties is the number of bits in objectSchema.required.
const maxProperties = 32

// property is one property of an objectSchema.
type property struct {
	name           string
	typ            string // as in the schema; "" for any
	min, max       int64  // of a number; of a string's length in characters
	hasMin, hasMax bool
	pattern        *pattern
	expr           string        // of the schema's pattern; "" for none
	example        string        // a valid value as JSON; "" if none is known
	object         *objectSchema // of an object
	words          []string      // the values of a string, or of the elements of an array
}

// schemaJSON is the part of JSON Schema that an objectSchema covers. Every other keyword makes
// it inexact.
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
	Default              json.RawMessage            `json:"default"`
	MinItems             *int64                     `json:"minItems"`
	MaxItems             *int64                     `json:"maxItems"`
	Enum                 []string                   `json:"enum"`
	Items                struct {
		Enum []string `json:"enum"`
	} `json:"items"`
}

// Keywords that keep a schema or property exact: understood, or without effect on validity.
var (
	objectKeywords = []string{"$schema", "$id", "title", "description", "type", "required", "properties", "additionalProperties"}
	numberKeywords = []string{"title", "description", "default", "type", "minimum", "maximum"}
	stringKeywords = []string{"title", "description", "default", "type", "minLength", "maxLength", "pattern"}
)

// parse reads a schema and reports whether it understood everything: known keywords only.
func (s *schemaJSON) parse(raw []byte, words []string) (exact bool) {
	var keys map[string]json.RawMessage
	exact = json.Unmarshal(raw, s) == nil && json.Unmarshal(raw, &keys) == nil
	for k := range keys {
		exact = exact && slices.Contains(words, k)
	}
	return exact
}

// newObjectSchema reads the outermost object of a schema. It never fails: what it does not
// understand makes it inexact.
func newObjectSchema(ref string, raw []byte) *objectSchema {
	sh := &objectSchema{ref: ref, noun: "field"}
	if name, _, _ := strings.Cut(ref, "@"); strings.HasSuffix(name, ".input") {
		sh.noun = "argument"
	}
	var s schemaJSON
	sh.exact = s.parse(raw, objectKeywords) && s.Type == "object" && len(s.Properties) <= maxProperties
	sh.closed = s.AdditionalProperties != nil && !*s.AdditionalProperties
	sh.exact = sh.exact && sh.closed
	// Required properties first, in the order of "required": devices send them so, and scan
	// expects it. The others follow by name.
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

// newProperty reads one property; exact is false if scan cannot check it.
func newProperty(name string, raw []byte) (p property, exact bool) {
	var s schemaJSON
	_ = s.parse(raw, nil) // the type decides which keywords are known
	p = property{name: name, typ: s.Type, words: append(s.Enum, s.Items.Enum...)}
	low, high := s.Minimum, s.Maximum
	switch s.Type {
	case "integer", "number":
		exact = s.parse(raw, numberKeywords)
	case "string":
		exact = s.parse(raw, stringKeywords)
		low, high = s.MinLength, s.MaxLength
		p.pattern, exact = newPattern(s.Pattern, exact)
	case "array":
		low, high = s.MinItems, s.MaxItems
	case "object":
		p.object = newObjectSchema("", raw)
	}
	if low != nil {
		p.min, p.hasMin = *low, true
	}
	if high != nil {
		p.max, p.hasMax = *high, true
	}
	if s.Pattern != nil {
		p.expr = *s.Pattern
	}
	p.example = p.makeExample(s.Default)
	return p, exact
}

// pattern is a regular expression of a simple form that can be checked byte by byte: `^`, a
// fixed sequence of character classes, at most one class with unbounded repetition, `$`;
// ASCII only. The schemas' patterns are of that form.
type pattern struct {
	prefix   []*charSet
	repeated *charSet // class of all characters after prefix; nil: there are none
}

// charSet holds the ASCII characters of a class. An array of flags is faster to test than a
// bitmap, and there are few of them.
type charSet [128]bool

// newPattern returns the pattern of a property; exact becomes false if expr is of another
// form. Without a pattern, every printable ASCII character is allowed and all others are left
// to the validator.
func newPattern(expr *string, exact bool) (*pattern, bool) {
	var p pattern
	if expr == nil {
		p.repeated = new(charSet)
		for c := ' '; c <= '~'; c++ {
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

// add appends one class with its repetition; false if it is of another form.
func (p *pattern) add(re *syntax.Regexp) bool {
	atLeast, atMost, class := 1, 1, re
	switch re.Op {
	case syntax.OpStar:
		atLeast, atMost, class = 0, -1, re.Sub[0]
	case syntax.OpPlus:
		atLeast, atMost, class = 1, -1, re.Sub[0]
	case syntax.OpRepeat:
		atLeast, atMost, class = re.Min, re.Max, re.Sub[0]
	}
	if class.Op != syntax.OpCharClass || (atMost >= 0 && atMost != atLeast) {
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
	for range atLeast {
		p.prefix = append(p.prefix, set)
	}
	if atMost < 0 {
		p.repeated = set
	}
	return true
}

// normalize rewrites a valid object without white space and with whole numbers in plain form
// where the schema says integer, in nested objects too but not in arrays. Keys keep their
// order.
func (sh *objectSchema) normalize(raw []byte) []byte {
	v := jsontext.Value(bytes.Clone(raw))
	_ = v.Compact() // cannot fail, as below: the value was validated
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

// normalize rewrites the value of one property.
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
