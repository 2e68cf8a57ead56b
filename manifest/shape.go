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

// shape is what this package itself understands of a schema: the outermost object. It
// is read from the schema's JSON, so nothing is written twice. When exact, it is all
// there is to the schema, and scan may accept a value without asking the library;
// every refusal is the library's in any case.
type shape struct {
	ref      string
	noun     string // what its properties are called in messages
	exact    bool
	closed   bool // no properties but those
	props    []prop
	required uint32 // bits of props
	hasNode  bool   // one of props is node_id
}

// maxProps is the number of bits in shape.required.
const maxProps = 32

// prop is one property of a closed flat object.
type prop struct {
	name           string
	typ            string // as in the schema; "" for any
	min, max       int64  // of a number; of a string's length in characters
	hasMin, hasMax bool
	text           *pattern
	inner          *shape // of an object
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
	objectWords = []string{"$schema", "$id", "title", "description", "type", "required", "properties", "additionalProperties"}
	numberWords = []string{"title", "description", "default", "type", "minimum", "maximum"}
	stringWords = []string{"title", "description", "default", "type", "minLength", "maxLength", "pattern"}
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

func newShape(ref string, raw []byte) *shape {
	sh := &shape{ref: ref, noun: "field"}
	if name, _, _ := strings.Cut(ref, "@"); strings.HasSuffix(name, ".input") {
		sh.noun = "argument"
	}
	var s schemaJSON
	sh.exact = s.parse(raw, objectWords) && s.Type == "object" && len(s.Properties) <= maxProps
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
		p, ok := newProp(name, s.Properties[name])
		sh.exact = sh.exact && ok
		sh.props = append(sh.props, p)
		sh.hasNode = sh.hasNode || name == "node_id"
		if i < len(s.Required) && i < maxProps {
			sh.required |= 1 << i
		}
	}
	return sh
}

func newProp(name string, raw []byte) (p prop, exact bool) {
	var s schemaJSON
	_ = s.parse(raw, nil) // for the type; what it may say depends on that
	p = prop{name: name, typ: s.Type}
	low, high := s.Minimum, s.Maximum
	switch s.Type {
	case "integer", "number":
		exact = s.parse(raw, numberWords)
	case "string":
		exact = s.parse(raw, stringWords)
		low, high = s.MinLength, s.MaxLength
		p.text, exact = newPattern(s.Pattern, exact)
	case "object":
		p.inner = newShape("", raw)
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
	row  []*charSet
	tail *charSet // of all characters behind the row; nil: there are none
}

type charSet [128]bool

func newPattern(expr *string, exact bool) (*pattern, bool) {
	var p pattern
	if expr == nil {
		p.tail = new(charSet)
		for c := ' '; c <= '~'; c++ { // the rest is left to the library
			p.tail[c] = true
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
		if p.tail != nil || !p.add(sub) {
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
		p.row = append(p.row, set)
	}
	if most < 0 {
		p.tail = set
	}
	return true
}

// normalise rewrites a valid object without white space and with whole numbers written
// plainly where the schema says integer, in objects of objects too, not in arrays.
func (sh *shape) normalise(raw []byte) []byte {
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
		i := slices.IndexFunc(sh.props, func(p prop) bool { return p.name == key })
		if i >= 0 {
			val = sh.props[i].normalise(val)
		}
		out = append(out, val...)
	}
	if len(out) == 0 {
		return append(out, "{}"...)
	}
	return append(out, '}')
}

func (p *prop) normalise(val jsontext.Value) jsontext.Value {
	switch {
	case p.inner != nil && val.Kind() == '{':
		return p.inner.normalise(val)
	case p.typ == "integer" && val.Kind() == '0':
		if n, ok := strictjson.Whole(val); ok {
			return strconv.AppendInt(nil, n, 10)
		}
	}
	return val
}
