package manifest

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxMessage bounds a message, characters: a board sends it as the detail of a cmd_ack.
const maxMessage = 200

// explain words the validator's refusal: the first thing that is wrong, by the schema's own
// names. It quotes nothing of the value, so that a message cannot carry text to an agent.
func (sh *objectSchema) explain(tree any) string {
	o, ok := tree.(map[string]any)
	if !ok {
		return sh.noun + "s: must be a JSON object"
	}
	known := 0
	for i := range sh.properties {
		p := &sh.properties[i]
		v, present := o[p.name]
		if present {
			known++
		}
		why := ""
		switch {
		case present:
			why = p.explain(v)
		case i < maxProperties && sh.required&(1<<i) != 0:
			why = "missing"
		}
		if why != "" {
			why = sh.noun + " " + p.name + ": " + why
			if example := sh.exampleOf(p); len(why)+len(example) <= maxMessage {
				why += example
			}
			return why
		}
	}
	if sh.closed && known < len(o) {
		return sh.unknownProperty()
	}
	return "the value does not fit schema " + strings.TrimPrefix(sh.ref, SchemaPrefix)
}

// exampleOf shows how an argument is given, "" if no valid value is known. Fields of answers are
// for the authors of boards, who have the schema.
func (sh *objectSchema) exampleOf(p *property) string {
	if p.example == "" || sh.noun != "argument" {
		return ""
	}
	return `; for example {"` + p.name + `":` + p.example + "}"
}

// forms are the patterns of strings in words, each with a string that fits.
var forms = map[string]struct{ words, example string }{
	`^[\x20-\x7E]*$`: {"printable ASCII", "hello"},
	`^[0-9]+$`:       {"digits", "1000"},
}

// makeExample returns a valid value: the schema's default, or one that its bounds show.
func (p *property) makeExample(byDefault []byte) string {
	switch {
	case len(byDefault) > 0:
		return string(byDefault)
	case p.typ == "array" && len(p.words) > 0:
		return `["` + p.words[0] + `"]`
	case p.typ == "string" && len(p.words) > 0:
		return `"` + p.words[0] + `"`
	case p.typ == "string" && forms[p.expr].example != "":
		return `"` + forms[p.expr].example + `"`
	case (p.typ == "integer" || p.typ == "number") && p.hasMin:
		return strconv.FormatInt(p.min, 10)
	case p.typ == "boolean":
		return "true"
	}
	return ""
}

// maxKnownNames is how long the names in a message of unknownProperty may be; a message has at most
// 200 characters.
const maxKnownNames = 160

// unknownProperty names the known ones, since the unknown one may not be quoted.
func (sh *objectSchema) unknownProperty() string {
	if len(sh.properties) == 0 {
		return "unknown " + sh.noun + ": there are none"
	}
	names := make([]string, len(sh.properties))
	for i := range sh.properties {
		names[i] = sh.properties[i].name
	}
	if known := strings.Join(names, ", "); len(known) <= maxKnownNames {
		return "unknown " + sh.noun + "; known: " + known
	}
	return "unknown " + sh.noun + "; the tool's schema lists the known ones"
}

// explain returns what is wrong with a value, "" for nothing that it understands.
func (p *property) explain(v any) string {
	switch v := v.(type) {
	case string:
		return p.explainString(v)
	case int64:
		return p.explainNumber(float64(v), true)
	case float64:
		return p.explainNumber(v, v >= 1e18 || v <= -1e18) // see strictjson.Decode
	case bool:
		return p.typeMismatch("boolean")
	case nil:
		return p.typeMismatch("null")
	case []any:
		return p.explainArray(v)
	}
	return p.typeMismatch("object")
}

// explainArray words what is wrong with an array of words, the only kind of array in arguments.
func (p *property) explainArray(v []any) string {
	if p.typ != "array" || len(p.words) == 0 {
		return p.typeMismatch("array")
	}
	n := int64(len(v))
	isWrong := (p.hasMin && n < p.min) || (p.hasMax && n > p.max)
	seen := make(map[string]bool, len(v))
	for _, e := range v {
		word, ok := e.(string)
		isWrong = isWrong || !ok || seen[word] || !slices.Contains(p.words, word)
		seen[word] = true
	}
	if !isWrong {
		return ""
	}
	// maxMessage is too little for the names themselves.
	return "must be " + strconv.FormatInt(p.min, 10) + " to " + strconv.FormatInt(p.max, 10) + " different names that the tool's schema lists"
}

// typeMismatch returns what is wrong if a value of type got is not of the property's type,
// else "".
func (p *property) typeMismatch(got string) string {
	switch p.typ {
	case "", got:
		return ""
	case "integer", "array", "object":
		return "must be an " + p.typ
	}
	return "must be a " + p.typ
}

// explainNumber words what is wrong with a number; whole means that it has no fraction.
func (p *property) explainNumber(v float64, whole bool) string {
	if p.typ != "number" && (p.typ != "integer" || !whole) {
		return p.typeMismatch("number")
	}
	// A large whole number may be off by a little as a float64. Only the wording depends on
	// it: the validator has refused the value already.
	low, high := p.hasMin && v < float64(p.min), p.hasMax && v > float64(p.max)
	switch {
	case (low || high) && p.hasMin && p.hasMax:
		return "out of range " + strconv.FormatInt(p.min, 10) + ".." + strconv.FormatInt(p.max, 10)
	case low:
		return "less than " + strconv.FormatInt(p.min, 10)
	case high:
		return "more than " + strconv.FormatInt(p.max, 10)
	}
	return ""
}

// explainString words what is wrong with a string. Lengths count characters, as JSON Schema
// does.
func (p *property) explainString(v string) string {
	n := int64(utf8.RuneCountInString(v))
	switch {
	case p.typ != "string":
		return p.typeMismatch("string")
	case p.hasMax && n > p.max:
		return "longer than " + strconv.FormatInt(p.max, 10) + " characters"
	case p.hasMin && n < p.min:
		return "shorter than " + strconv.FormatInt(p.min, 10) + " characters"
	case len(p.words) > 0 && !slices.Contains(p.words, v):
		return "must be one of " + strings.Join(p.words, ", ")
	case p.expr == "":
		return ""
	}
	if ok, err := regexp.MatchString(p.expr, v); ok || err != nil {
		return ""
	}
	if form := forms[p.expr].words; form != "" {
		return "must be " + form
	}
	return "must match " + p.expr
}

// allows reports whether character r may be at index i.
func (t *pattern) allows(i int, r rune) bool {
	switch {
	case r < 0 || r >= 128:
		return false
	case i < len(t.prefix):
		return t.prefix[i][r]
	}
	return t.repeated != nil && t.repeated[r]
}
