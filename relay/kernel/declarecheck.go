package kernel

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"agentctl/manifest"
)

// manifestCheck collects what is wrong with a manifest, in the order of the document's
// known keys.
type manifestCheck struct {
	problems []Problem
	name     string          // of the plugin, when it is a good one
	scopes   map[string]bool // of its capabilities
}

func (c *manifestCheck) wrong(where, format string, args ...any) {
	if len(c.problems) < maxProblems {
		c.problems = append(c.problems, Problem{where, fmt.Sprintf(format, args...)})
	}
}

// quoted shows a value of the file, cut short.
func quoted(s string) string {
	if len(s) > maxQuotedInError {
		s = s[:maxQuotedInError]
	}
	return fmt.Sprintf("%+q", s)
}

// key is a known key of an object and the check of its value.
type key struct {
	name     string
	required bool
	check    func(where string, v any)
}

// object checks a closed object. Where a required key is missing its check is not asked.
func (c *manifestCheck) object(where string, v any, keys []key) {
	o, ok := v.(map[string]any)
	if !ok {
		c.wrong(where, "must be an object, not %s", kindOf(v))
		return
	}
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
		at := join(where, k.name)
		if value, there := o[k.name]; there {
			k.check(at, value)
		} else if k.required {
			c.wrong(at, "is missing")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(o)) {
		if !slices.Contains(names, name) {
			c.wrong(where, "unknown key %s; the keys are %s", quoted(name), strings.Join(names, ", "))
		}
	}
}

func join(where, name string) string {
	if where == "" {
		return name
	}
	return where + "." + name
}

// list checks an array and its elements.
func (c *manifestCheck) list(where string, v any, most int, each func(where string, v any)) {
	a, ok := v.([]any)
	if !ok {
		c.wrong(where, "must be an array, not %s", kindOf(v))
		return
	}
	if len(a) > most {
		c.wrong(where, "has %d elements; at most %d", len(a), most)
		return
	}
	for i, e := range a {
		each(fmt.Sprintf("%s[%d]", where, i), e)
	}
}

func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "a boolean"
	case float64:
		return "a number"
	case string:
		return "a string"
	case []any:
		return "an array"
	}
	return "an object"
}

func (c *manifestCheck) manifest(v any) {
	tools, uris := make(map[string]bool), make(map[string]bool)
	c.scopes = make(map[string]bool)
	c.object("", v, []key{
		{"name", true, c.pluginName},
		{"version", true, func(at string, v any) {
			if s, ok := c.text(at, v); ok && !validVersion(s) {
				c.wrong(at, "%s is no semantic version; write one like 1.0.0 or 1.2.3-beta.1, at most %d bytes", quoted(s), maxVersion)
			}
		}},
		{"capabilities", false, func(at string, v any) {
			c.list(at, v, maxCapabilities, func(at string, v any) { c.capability(at, v) })
		}},
		{"tools", false, func(at string, v any) {
			c.list(at, v, MaxToolsPerPlugin, func(at string, v any) { c.tool(at, v, tools) })
		}},
		{"resources", false, func(at string, v any) {
			c.list(at, v, MaxToolsPerPlugin, func(at string, v any) { c.resource(at, v, uris) })
		}},
	})
}

func (c *manifestCheck) text(where string, v any) (string, bool) {
	s, ok := v.(string)
	if !ok {
		c.wrong(where, "must be a string, not %s", kindOf(v))
	}
	return s, ok
}

// reservedNames are plugins of the relay itself.
var reservedNames = []string{"agents", "devices", "kernel", "system", "tickets"}

func (c *manifestCheck) pluginName(at string, v any) {
	s, ok := c.text(at, v)
	switch {
	case !ok:
	case !word(s) || s[0] < 'a' || len(s) > maxPluginName:
		c.wrong(at, "%s is no plugin name; use a-z, 0-9 and _, a letter first, at most %d", quoted(s), maxPluginName)
	case slices.Contains(reservedNames, s):
		c.wrong(at, "%s is a part of the relay itself; choose another name", s)
	default:
		c.name = s
	}
}

// word tells whether s is made of a-z, 0-9 and underscore.
func word(s string) bool {
	for i := 0; i < len(s); i++ {
		if b := s[i]; (b < 'a' || b > 'z') && (b < '0' || b > '9') && b != '_' {
			return false
		}
	}
	return s != ""
}

func (c *manifestCheck) tool(at string, v any, seen map[string]bool) {
	c.object(at, v, []key{
		{"name", true, func(at string, v any) { c.toolName(at, v, seen) }},
		{"description", true, c.description},
		{"inputSchema", true, func(at string, v any) { c.schema(at, v, true) }},
		{"outputSchema", false, func(at string, v any) { c.schema(at, v, true) }},
		{"capability", false, c.needs},
	})
}

func (c *manifestCheck) toolName(at string, v any, seen map[string]bool) {
	s, ok := c.text(at, v)
	if !ok {
		return
	}
	segments := strings.Split(s, ".")
	good := len(s) <= manifest.MaxToolNameLen && len(segments) >= 2 && len(segments) <= 3
	for _, w := range segments {
		good = good && word(w)
	}
	switch {
	case !good:
		c.wrong(at, "%s is no tool name; write plugin.verb or plugin.noun.verb of a-z, 0-9 and _, at most %d bytes", quoted(s), manifest.MaxToolNameLen)
	case c.name != "" && segments[0] != c.name:
		c.wrong(at, "%s must begin with the plugin's name: %s.", quoted(s), c.name)
	case seen[s]:
		c.wrong(at, "%s is there twice", quoted(s))
	}
	seen[s] = true
}

func (c *manifestCheck) resource(at string, v any, seen map[string]bool) {
	c.object(at, v, []key{
		{"uri", true, func(at string, v any) { c.uri(at, v, seen) }},
		{"description", true, c.description},
		{"contentSchema", false, func(at string, v any) { c.schema(at, v, false) }},
		{"subscribable", false, func(at string, v any) {
			if _, ok := v.(bool); !ok {
				c.wrong(at, "must be true or false, not %s", kindOf(v))
			}
		}},
		{"capability", false, c.needs},
	})
}

// uriPrefix begins the URIs of plugins.
const uriPrefix = "mcp://"

func (c *manifestCheck) uri(at string, v any, seen map[string]bool) {
	s, ok := c.text(at, v)
	if !ok {
		return
	}
	host, path, _ := strings.Cut(strings.TrimPrefix(s, uriPrefix), "/")
	good := strings.HasPrefix(s, uriPrefix) && word(host) && path != "" && len(s) <= maxURI
	for i := 0; i < len(path); i++ {
		b := path[i]
		good = good && (word(path[i:i+1]) || (b >= 'A' && b <= 'Z') || strings.IndexByte("-./~", b) >= 0)
	}
	switch {
	case !good:
		c.wrong(at, "%s is no resource URI; write mcp://plugin/path with a path of letters, digits and -._~/, at most %d bytes", quoted(s), maxURI)
	case c.name != "" && host != c.name:
		c.wrong(at, "%s must begin with %s%s/", quoted(s), uriPrefix, c.name)
	case seen[s]:
		c.wrong(at, "%s is there twice", quoted(s))
	}
	seen[s] = true
}

func (c *manifestCheck) description(at string, v any) {
	s, ok := c.text(at, v)
	if !ok {
		return
	}
	n := 0
	for _, r := range s {
		if n++; r < ' ' && r != '\n' && r != '\t' || r == 0x7f {
			c.wrong(at, "has a control character; write plain text")
			return
		}
	}
	if n == 0 || n > maxDescription {
		c.wrong(at, "has %d characters; write 1 to %d", n, maxDescription)
	}
}

func (c *manifestCheck) capability(at string, v any) {
	s, ok := c.text(at, v)
	if !ok {
		return
	}
	scope, ok := CapabilityScope(s)
	switch {
	case !ok:
		c.wrong(at, "%s is no capability; the capabilities are %s", quoted(s), strings.Join(capabilityWords(), ", "))
	case c.scopes[scope]:
		c.wrong(at, "%s is there twice", quoted(s))
	}
	c.scopes[scope] = true
}

// needs checks the capability that a tool or resource names as its own.
func (c *manifestCheck) needs(at string, v any) {
	if s, ok := c.text(at, v); ok {
		if scope, ok := CapabilityScope(s); !ok || !c.scopes[scope] {
			c.wrong(at, "%s is not among the manifest's capabilities; add it there", quoted(s))
		}
	}
}

// CapabilityScope is the scope that a capability of a manifest stands for, in either
// spelling: "tickets.read" and "tickets:read". Scopes of devices are none.
func CapabilityScope(capability string) (scope string, ok bool) {
	for _, s := range manifest.Scopes {
		if !strings.HasPrefix(s, "device:") && (s == capability || strings.ReplaceAll(s, ":", ".") == capability) {
			return s, true
		}
	}
	return "", false
}

func capabilityWords() []string {
	var words []string
	for _, s := range manifest.Scopes {
		if _, ok := CapabilityScope(s); ok {
			words = append(words, strings.ReplaceAll(s, ":", "."))
		}
	}
	return words
}

// schema checks what must hold of any schema in a manifest; whether it is a good one its
// compiler says. MCP wants those of tools to be of type object.
func (c *manifestCheck) schema(at string, v any, object bool) {
	o, ok := v.(map[string]any)
	if !ok {
		c.wrong(at, "must be a JSON Schema object, not %s", kindOf(v))
		return
	}
	if object && o["type"] != "object" {
		c.wrong(join(at, "type"), `must be "object"`)
	}
	if raw, err := json.Marshal(v); err != nil || len(raw) > maxSchema {
		c.wrong(at, "is larger than %d bytes", maxSchema)
		return
	}
	c.references(at, o)
}

// references checks that a schema refers to nothing outside of itself.
func (c *manifestCheck) references(at string, v any) {
	switch v := v.(type) {
	case []any:
		for i, e := range v {
			c.references(fmt.Sprintf("%s[%d]", at, i), e)
		}
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			switch ref, text := v[name].(string); {
			case text && (name == "$ref" || name == "$dynamicRef") && !strings.HasPrefix(ref, "#"):
				c.wrong(join(at, name), `%s leads outside; refer to "#/$defs/..." only`, quoted(ref))
			case name != "const" && name != "enum" && name != "default" && name != "examples":
				c.references(join(at, name), v[name])
			}
		}
	}
}
