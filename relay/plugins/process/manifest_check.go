package process

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"github.com/yosida95/uritemplate/v3"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/suggest"
)

// A plugin.json is checked in two steps, and the problems of both are reported together:
//
//  1. plugin.schema.json says which keys there are and which form each value has. Its
//     descriptions are the hints in the messages.
//  2. manifestChecker.relations checks what a schema cannot express: names that are unique
//     and begin with the plugin's, capabilities that the manifest lists, schemas of a
//     bounded size that refer to nothing outside of themselves.

//go:embed plugin.schema.json
var manifestSchemaJSON []byte

// Bounds of a check and of its report.
const (
	maxSchema        = 64 << 10 // bytes of one schema
	maxProblems      = 100
	maxQuotedInError = 48 // bytes of a value
)

// manifestSchema is compiled at first use: most processes never read a plugin.json.
var manifestSchema = sync.OnceValues(func() (*jsonschema.Schema, error) { return compile(manifestSchemaJSON) })

// manifestChecker collects the problems of one manifest.
type manifestChecker struct {
	doc      any // the manifest, as jsonschema.UnmarshalJSON decodes it
	problems []located
}

// located is a problem with its place.
type located struct {
	at   location
	what string
}

// location is a place in a document: the keys and indices that lead there.
type location []string

// child is the location of a member. It never shares memory with a sibling.
func (l location) child(key string) location { return append(slices.Clip(l), key) }

// element is the location of an element of an array.
func (l location) element(i int) location { return l.child(strconv.Itoa(i)) }

// String writes a location as people read it: tools[0].name.
func (l location) String() string {
	var b strings.Builder
	for _, key := range l {
		switch _, err := strconv.Atoi(key); {
		case err == nil:
			b.WriteString("[" + key + "]")
		case b.Len() == 0:
			b.WriteString(key)
		default:
			b.WriteString("." + key)
		}
	}
	return b.String()
}

// compare sorts indices by number and keys by name.
func (l location) compare(other location) int {
	return slices.CompareFunc(l, other, func(a, b string) int {
		i, errA := strconv.Atoi(a)
		j, errB := strconv.Atoi(b)
		if errA == nil && errB == nil {
			return cmp.Compare(i, j)
		}
		return strings.Compare(a, b)
	})
}

// checkManifest returns the problems of a manifest that is strict JSON, at most maxProblems,
// sorted by their places. The error says that it could not be checked at all.
func checkManifest(data []byte) ([]Problem, error) {
	schema, err := manifestSchema()
	if err != nil {
		return nil, err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		return nil, manifestError("not JSON: %v", err)
	}
	c := manifestChecker{doc: doc}
	var invalid *jsonschema.ValidationError
	if err := schema.Validate(doc); errors.As(err, &invalid) {
		c.violation(invalid)
	}
	c.relations()
	slices.SortStableFunc(c.problems, func(a, b located) int { return a.at.compare(b.at) })
	var out []Problem
	for _, p := range c.problems[:min(len(c.problems), maxProblems)] {
		out = append(out, Problem{p.at.String(), p.what})
	}
	return out, nil
}

// add keeps more problems than are reported, so that the first ones by place are among
// them, but no unbounded number.
func (c *manifestChecker) add(at location, format string, args ...any) {
	if len(c.problems) < 10*maxProblems {
		c.problems = append(c.problems, located{slices.Clone(at), fmt.Sprintf(format, args...)})
	}
}

// violation reports the leaves of a validation error: the others only group them. For a value
// of the wrong form, the hint is the description in plugin.schema.json.
func (c *manifestChecker) violation(e *jsonschema.ValidationError) {
	for _, cause := range e.Causes {
		c.violation(cause)
	}
	if len(e.Causes) > 0 {
		return
	}
	at := location(e.InstanceLocation)
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range k.Missing {
			c.add(at.child(name), "is missing")
		}
	case *kind.AdditionalProperties:
		keys, _ := schemaNode(e.SchemaURL)["properties"].(map[string]any)
		for _, name := range slices.Sorted(slices.Values(k.Properties)) {
			c.add(at, "unknown key %s (use %s)", quoted(name), strings.Join(slices.Sorted(maps.Keys(keys)), ", "))
		}
	case *kind.Type:
		c.add(at, "must be of type %s, not %s", strings.Join(k.Want, " or "), k.Got)
	case *kind.Const:
		c.add(at, "must be %q", k.Want)
	case *kind.MaxItems:
		c.add(at, "has %d elements (use at most %d)", k.Got, k.Want)
	case *kind.Enum:
		c.add(at, "not valid: %s (use one of %s)", quoted(k.Got), strings.ReplaceAll(strings.Trim(fmt.Sprint(k.Want), "[]"), " ", ", "))
	case *kind.UniqueItems: // relations compares capabilities across both spellings
	default:
		if !c.reported(at) { // a pattern and a length may both refuse one text
			c.add(at, "not valid: %s (use %s)", quoted(valueAt(c.doc, at)), schemaNode(e.SchemaURL)["description"])
		}
	}
}

// reported reports whether a problem of exactly this place is known.
func (c *manifestChecker) reported(at location) bool {
	return slices.ContainsFunc(c.problems, func(p located) bool { return slices.Equal(p.at, at) })
}

// relations checks the rules that the schema cannot express. It skips values of the wrong form,
// which are reported already.
func (c *manifestChecker) relations() {
	plugin, _ := c.text(location{"name"})
	scopes := make(map[string]bool)
	for i := range elements(c.doc, "capabilities") {
		at := location{"capabilities"}.element(i)
		s, ok := c.text(at)
		if !ok || c.reported(location{"name"}) {
			continue
		}
		if scope, ok := capabilityScope(plugin, s); ok {
			c.unique(scopes, scope, s, at)
		} else {
			c.unknownCapability(plugin, s, at)
		}
	}
	names, uris := make(map[string]bool), make(map[string]bool)
	for i := range elements(c.doc, "tools") {
		at := location{"tools"}.element(i)
		c.identity(names, plugin+".", at.child("name"))
		c.capability(plugin, scopes, at.child("capability"))
		c.schema(at.child("inputSchema"))
		c.schema(at.child("outputSchema"))
	}
	for i := range elements(c.doc, "resources") {
		at := location{"resources"}.element(i)
		c.identity(uris, "mcp://"+plugin+"/", at.child("uri"))
		c.capability(plugin, scopes, at.child("capability"))
		c.schema(at.child("contentSchema"))
	}
	for i := range elements(c.doc, "resourceTemplates") {
		at := location{"resourceTemplates"}.element(i)
		c.identity(uris, "mcp://"+plugin+"/", at.child("uriTemplate"))
		c.capability(plugin, scopes, at.child("capability"))
		if s, ok := c.text(at.child("uriTemplate")); ok {
			if _, err := uritemplate.New(s); err != nil {
				c.add(at.child("uriTemplate"), "%s is not a URI template of RFC 6570", quoted(s))
			}
		}
	}
	clear(names)
	for i := range elements(c.doc, "prompts") {
		at := location{"prompts"}.element(i)
		c.identity(names, plugin+".", at.child("name"))
		c.capability(plugin, scopes, at.child("capability"))
	}
	if program, ok := c.text(location{"command", "0"}); ok && program == "" {
		c.add(location{"command", "0"}, "is empty: name the program")
	}
	c.bus(plugin)
}

// text returns the string at a place that has no problem yet.
func (c *manifestChecker) text(at location) (string, bool) {
	s, ok := valueAt(c.doc, at).(string)
	return s, ok && !c.reported(at)
}

// identity checks that a name or URI begins with the plugin's, and that it is unique.
func (c *manifestChecker) identity(seen map[string]bool, prefix string, at location) {
	s, ok := c.text(at)
	switch {
	case !ok:
	case !c.reported(location{"name"}) && !strings.HasPrefix(s, prefix):
		c.add(at, "%s must begin with the plugin's name: %s", quoted(s), prefix)
	default:
		c.unique(seen, s, s, at)
	}
}

// unique reports a key that was seen before.
func (c *manifestChecker) unique(seen map[string]bool, key, text string, at location) {
	if seen[key] {
		c.add(at, "%s is given twice", quoted(text))
	}
	seen[key] = true
}

// capability checks the capability that a tool or resource names as its own.
func (c *manifestChecker) capability(plugin string, scopes map[string]bool, at location) {
	if s, ok := c.text(at); ok && !c.reported(location{"name"}) {
		if scope, ok := capabilityScope(plugin, s); !ok || !scopes[scope] {
			c.add(at, "%s is not one of the manifest's capabilities; add it there", quoted(s))
		}
	}
}

// unknownCapability says why a capability is none that this plugin can declare.
func (c *manifestChecker) unknownCapability(plugin, capability string, at location) {
	ofRelay := dotted(relayCapabilities)
	own := plugin + ".read, or "
	if _, _, ok := manifest.PluginScope(plugin + ":read"); !ok {
		own = "" // the name is one of the relay's
	}
	if owner, _, ok := manifest.PluginScope(strings.Replace(capability, ".", ":", 1)); ok {
		c.add(at, "%s is a scope of plugin %s, and this is plugin %s (use %sone of %s)", quoted(capability), owner, plugin, own, strings.Join(ofRelay, ", "))
		return
	}
	c.add(at, "%s is not a scope that callers may need%s (use %sone of %s)", quoted(capability), suggest.Hint(capability, ofRelay), own, strings.Join(ofRelay, ", "))
}

// dotted returns scopes as capabilities are spelled.
func dotted(scopes []string) (capabilities []string) {
	for _, s := range scopes {
		capabilities = append(capabilities, strings.ReplaceAll(s, ":", "."))
	}
	return capabilities
}

// schema checks a schema's size and references. Its compiler says whether it is valid.
func (c *manifestChecker) schema(at location) {
	v, ok := valueAt(c.doc, at).(map[string]any)
	if !ok {
		return
	}
	if raw, err := json.Marshal(v); err != nil || len(raw) > maxSchema {
		c.add(at, "is larger than %d bytes", maxSchema)
		return
	}
	c.references(at, v)
}

// references checks that a schema refers to nothing outside of itself. The members of
// const, enum, default and examples are values, not schemas.
func (c *manifestChecker) references(at location, v any) {
	switch v := v.(type) {
	case []any:
		for i := range v {
			c.references(at.element(i), v[i])
		}
	case map[string]any:
		for key, child := range v {
			ref, isText := child.(string)
			switch {
			case isText && (key == "$ref" || key == "$dynamicRef") && !strings.HasPrefix(ref, "#"):
				c.add(at.child(key), `%s refers to another document (use "#/$defs/...")`, quoted(ref))
			case key != "const" && key != "enum" && key != "default" && key != "examples":
				c.references(at.child(key), child)
			}
		}
	}
}

// elements returns the array under a key of the manifest, of at most the allowed length:
// the schema reports a longer one.
func elements(doc any, key string) []any {
	list, _ := valueAt(doc, location{key}).([]any)
	return list[:min(len(list), kernel.MaxToolsPerPlugin)]
}

// valueAt follows a path through a decoded document; nil when it leads nowhere.
func valueAt(doc any, at location) any {
	for _, key := range at {
		switch v := doc.(type) {
		case map[string]any:
			doc = v[key]
		case []any:
			i, err := strconv.Atoi(key)
			if err != nil || i < 0 || i >= len(v) {
				return nil
			}
			doc = v[i]
		default:
			return nil
		}
	}
	return doc
}

// schemaNode returns the part of the manifest's schema that a location "...#/a/b" names.
func schemaNode(location string) map[string]any {
	var doc any
	_ = json.Unmarshal(manifestSchemaJSON, &doc) // it was compiled
	_, pointer, _ := strings.Cut(location, "#")
	path := strings.FieldsFunc(pointer, func(r rune) bool { return r == '/' })
	node, _ := valueAt(doc, path).(map[string]any)
	return node
}

// quoted shows a value of the file, cut short.
func quoted(v any) string {
	s := fmt.Sprint(v)
	return fmt.Sprintf("%+q", s[:min(len(s), maxQuotedInError)])
}
