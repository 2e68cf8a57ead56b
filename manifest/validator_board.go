//go:build agentctl_omit_relay

package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"unicode/utf8"
)

// The board build validates with the keywords below instead of a library: the schemas are a
// closed set that is part of this program, and a library costs 0.3 MB of flash and 0.8 MB of
// memory (docs/dependencies.md). A schema with any other keyword does not compile, and a
// test compiles them all. Another test compares the results with
// santhosh-tekuri/jsonschema.

// errInvalid is the only error of a validator here: explain words the reason.
var errInvalid = errors.New("the value does not fit")

// keywords are the keywords of JSON Schema 2020-12 that the registry uses. A nil pointer is a
// keyword that is absent.
type keywords struct {
	Type       oneOrMore            `json:"type"`
	Properties map[string]*keywords `json:"properties"`
	Names      *keywords            `json:"propertyNames"`
	MinProps   *int                 `json:"minProperties"`
	MaxProps   *int                 `json:"maxProperties"`
	Required   []string             `json:"required"`
	Additional *keywords            `json:"additionalProperties"`
	Minimum    *float64             `json:"minimum"`
	Maximum    *float64             `json:"maximum"`
	MinLength  *int                 `json:"minLength"`
	MaxLength  *int                 `json:"maxLength"`
	Pattern    *string              `json:"pattern"`
	Enum       []string             `json:"enum"`
	Const      *string              `json:"const"`
	Items      *keywords            `json:"items"`
	MinItems   *int                 `json:"minItems"`
	MaxItems   *int                 `json:"maxItems"`
	Unique     bool                 `json:"uniqueItems"`
	AllOf      []*keywords          `json:"allOf"`
	If         *keywords            `json:"if"`
	Then       *keywords            `json:"then"`
	Ref        *string              `json:"$ref"`

	present map[string]json.RawMessage // until prepare has checked the names
	never   bool                       // the schema false: no value fits
	pattern *regexp.Regexp
	ref     validator
}

// oneOrMore is a list that may be written as its only element.
type oneOrMore []string

// UnmarshalJSON decodes either form.
func (l *oneOrMore) UnmarshalJSON(b []byte) error {
	if b[0] == '"' {
		b = append(append([]byte{'['}, b...), ']')
	}
	return json.Unmarshal(b, (*[]string)(l))
}

// annotations are keywords that constrain no value.
var annotations = []string{"$schema", "$id", "title", "description", "default"}

// compile makes the validator of a registered schema.
func compile(all map[string]*schema, ref string) (validator, error) {
	s, ok := all[ref]
	if !ok {
		return nil, errors.New("schemas are only those of this program")
	}
	var r keywords
	if err := json.Unmarshal(s.json(), &r); err != nil {
		return nil, err
	}
	if err := r.prepare(all); err != nil {
		return nil, err
	}
	return func(tree any) error {
		if !r.valid(tree) {
			return errInvalid
		}
		return nil
	}, nil
}

// UnmarshalJSON decodes the keywords and keeps the names of all that are present, for prepare.
// The schemas true and false have none.
func (r *keywords) UnmarshalJSON(b []byte) error {
	if b[0] != '{' {
		var any bool
		err := json.Unmarshal(b, &any)
		r.never = !any
		return err
	}
	type plain keywords
	if err := json.Unmarshal(b, (*plain)(r)); err != nil {
		return err
	}
	return json.Unmarshal(b, &r.present)
}

// prepare refuses unknown keywords, compiles patterns and resolves references, here and in
// all subschemas. A reference resolves to another registered schema, which is compiled at its
// first use, so schemas may refer to each other.
func (r *keywords) prepare(all map[string]*schema) (err error) {
	known := make(map[string]bool)
	for t, i := reflect.TypeFor[keywords](), 0; i < t.NumField(); i++ {
		known[t.Field(i).Tag.Get("json")] = true
	}
	for word := range r.present {
		if !known[word] && !slices.Contains(annotations, word) {
			return fmt.Errorf("no rule for the keyword %s", word)
		}
	}
	r.present = nil
	if r.Pattern != nil {
		if r.pattern, err = regexp.Compile(*r.Pattern); err != nil {
			return err
		}
	}
	if r.Ref != nil {
		s, ok := all[*r.Ref]
		if !ok {
			return fmt.Errorf("no schema %s", *r.Ref)
		}
		r.ref = func(tree any) error { return s.validator()(tree) }
	}
	for _, inner := range slices.Concat(slices.Collect(maps.Values(r.Properties)), r.AllOf, []*keywords{r.Items, r.If, r.Then, r.Names, r.Additional}) {
		if inner != nil {
			if err := inner.prepare(all); err != nil {
				return err
			}
		}
	}
	return nil
}

// valid reports whether a value of strictjson.Decode fits.
func (r *keywords) valid(tree any) bool {
	if r.never || !r.hasType(tree) || (r.ref != nil && r.ref(tree) != nil) {
		return false
	}
	if s, ok := tree.(string); (r.Const != nil && (!ok || s != *r.Const)) || (r.Enum != nil && (!ok || !slices.Contains(r.Enum, s))) {
		return false
	}
	for _, a := range r.AllOf {
		if !a.valid(tree) {
			return false
		}
	}
	if r.If != nil && r.Then != nil && r.If.valid(tree) && !r.Then.valid(tree) {
		return false
	}
	switch v := tree.(type) {
	case map[string]any:
		return r.validObject(v)
	case []any:
		return r.validArray(v)
	case string:
		n := utf8.RuneCountInString(v)
		return (r.MinLength == nil || n >= *r.MinLength) && (r.MaxLength == nil || n <= *r.MaxLength) && (r.pattern == nil || r.pattern.MatchString(v))
	case int64:
		return r.inRange(float64(v))
	case float64:
		return r.inRange(v)
	}
	return true
}

// hasType reports whether a value has the type that the schema names, if any. 5.0 is an
// integer, as JSON Schema says.
func (r *keywords) hasType(tree any) bool {
	types := []string{"null"}
	switch v := tree.(type) {
	case map[string]any:
		types = []string{"object"}
	case []any:
		types = []string{"array"}
	case string:
		types = []string{"string"}
	case bool:
		types = []string{"boolean"}
	case int64:
		types = []string{"number", "integer"}
	case float64:
		types = []string{"number", "integer"}
		if v != math.Trunc(v) {
			types = types[:1]
		}
	}
	return len(r.Type) == 0 || slices.ContainsFunc(types, func(t string) bool { return slices.Contains(r.Type, t) })
}

// inRange checks the bounds of a number. strictjson.Decode refuses numbers whose float64
// would compare differently.
func (r *keywords) inRange(v float64) bool {
	return (r.Minimum == nil || v >= *r.Minimum) && (r.Maximum == nil || v <= *r.Maximum)
}

// validObject checks the members of an object. Without properties and additionalProperties
// any member is allowed.
func (r *keywords) validObject(o map[string]any) bool {
	for _, name := range r.Required {
		if _, ok := o[name]; !ok {
			return false
		}
	}
	for name, v := range o {
		p := r.Properties[name]
		if p == nil {
			p = r.Additional
		}
		if (r.Names != nil && !r.Names.valid(name)) || (p != nil && !p.valid(v)) {
			return false
		}
	}
	return (r.MinProps == nil || len(o) >= *r.MinProps) && (r.MaxProps == nil || len(o) <= *r.MaxProps)
}

// validArray checks length, elements and uniqueness. Comparing all pairs is fast enough for
// the short arrays that the schemas allow.
func (r *keywords) validArray(a []any) bool {
	if (r.MinItems != nil && len(a) < *r.MinItems) || (r.MaxItems != nil && len(a) > *r.MaxItems) {
		return false
	}
	for i, v := range a {
		if r.Items != nil && !r.Items.valid(v) {
			return false
		}
		if r.Unique && slices.ContainsFunc(a[:i], func(w any) bool { return reflect.DeepEqual(v, w) }) {
			return false
		}
	}
	return true
}
