package manifest

import (
	"slices"
	"strings"
)

// ToolName is a projected tool name in parts: `{kind_short}.{node_id}.{cap_id}.{verb}`
// (RFC-0009 §2, RFC-0005 §2).
type ToolName struct {
	Short  string
	NodeID string
	CapID  string
	Verb   string
}

// String is the canonical, dotted spelling.
func (t ToolName) String() string {
	return t.Short + "." + t.NodeID + "." + t.CapID + "." + t.Verb
}

// Alias is the flat spelling, for clients that refuse dots in tool names: dots become
// underscores.
func (t ToolName) Alias() string {
	return t.Short + "_" + t.NodeID + "_" + t.CapID + "_" + t.Verb
}

// ParseToolName parses the canonical spelling. It accepts exactly the names that RFC-0002
// §5.7 admits (`^[a-z0-9_]+(\.[a-z0-9_]+){3}$`), that fit into MaxToolNameLen and whose second
// segment is a node id.
func ParseToolName(s string) (ToolName, bool) {
	if !isToolName(s) {
		return ToolName{}, false
	}
	p := strings.SplitN(s, ".", 4)
	if !ValidNodeID(p[1]) {
		return ToolName{}, false
	}
	return ToolName{p[0], p[1], p[2], p[3]}, true
}

// Canonical returns the dotted spelling of a tool name in either spelling. The fixed length
// of a node id gives the place where the flat one splits; of what follows it the last segment
// is the verb. Names that are neither come back unchanged.
func Canonical(s string) string {
	if strings.IndexByte(s, '.') >= 0 || len(s) > MaxToolNameLen {
		return s
	}
	short, rest, ok := strings.Cut(s, "_")
	if !ok || len(rest) < ULIDLen+4 || rest[ULIDLen] != '_' || !ValidNodeID(rest[:ULIDLen]) {
		return s
	}
	tail := rest[ULIDLen+1:]
	i := strings.LastIndexByte(tail, '_')
	if i <= 0 || i == len(tail)-1 {
		return s
	}
	dotted := short + "." + rest[:ULIDLen] + "." + tail[:i] + "." + tail[i+1:]
	if !isToolName(dotted) {
		return s
	}
	return dotted
}

// isToolName is ^[a-z0-9_]+(\.[a-z0-9_]+){3}$ with at most MaxToolNameLen characters. It runs
// on every call, so it is no regular expression.
func isToolName(s string) bool {
	if len(s) == 0 || len(s) > MaxToolNameLen {
		return false
	}
	dots, run := 0, 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '.':
			if run == 0 {
				return false
			}
			dots, run = dots+1, 0
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '_':
			run++
		default:
			return false
		}
	}
	return dots == 3 && run > 0
}

// Tool is one verb of one capability of one node, as a relay offers it and as the device
// answers it. A relay keeps one for each tool of each board, so it holds nothing twice.
type Tool struct {
	Canonical  string // Name().String(), made once
	Capability *Capability
	Kind       *Kind
	Verb       *Verb
}

// Name is the tool's name in parts.
func (t *Tool) Name() ToolName {
	nodeID, _, _ := strings.Cut(t.Canonical[len(t.Kind.Short)+1:], ".")
	return ToolName{t.Kind.Short, nodeID, t.Capability.CapID, t.Verb.Name}
}

// Project returns the tools of a node's capability, one for each verb. The error is
// E_MANIFEST_INVALID: Check refuses the capability, or a name is too long.
func Project(nodeID string, c *Capability) ([]Tool, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if !ValidNodeID(nodeID) {
		return nil, E(ManifestInvalid, "the node id is not a lower case ULID")
	}
	k, _ := LookupKind(c.Kind)
	tools := make([]Tool, 0, len(c.Verbs))
	for _, name := range c.Verbs {
		v, _ := k.Verb(name)
		s := ToolName{k.Short, nodeID, c.CapID, v.Name}.String()
		if len(s) > MaxToolNameLen {
			return nil, E(ManifestInvalid, "a projected tool name is longer than 64 characters")
		}
		tools = append(tools, Tool{Canonical: s, Capability: c, Kind: k, Verb: v})
	}
	return tools, nil
}

// HasOwnWord reports whether the cap_id in the tool's name is a word of this product: the last one of
// the kind, as in system.metrics, or that with a number (metrics_2). Any other was chosen by the
// board, and a list of tools is read by language models.
func (t *Tool) HasOwnWord() bool {
	word := t.Kind.Name[strings.LastIndexByte(t.Kind.Name, '.')+1:]
	number, ok := strings.CutPrefix(t.Capability.CapID, word)
	return ok && strings.Trim(strings.TrimPrefix(number, "_"), "0123456789") == ""
}

// ShortName is what people and models call a tool of a board with these tools: its capability, if
// that has one verb ("journal"), else its verb ("snapshot"), with the capability where another one
// has the same ("metrics_2.snapshot"). SelectTool finds it.
func (t *Tool) ShortName(tools []Tool) string {
	if len(t.Capability.Verbs) == 1 {
		return t.Capability.CapID
	}
	if first, ok := find(tools, func(o *Tool) bool { return o.Verb.Name == t.Verb.Name }); ok && first.Canonical == t.Canonical {
		return t.Verb.Name
	}
	return t.Capability.CapID + "." + t.Verb.Name
}

// SelectTool finds the tool of a board that a word means: by its name in either spelling, as
// CAPABILITY.VERB, as the only tool of a capability, or by its verb, if it is one of metrics or history
// or no other tool has the same.
func SelectTool(tools []Tool, word string) (*Tool, bool) {
	name := Canonical(word)
	for _, matches := range []func(t *Tool) bool{
		func(t *Tool) bool { return t.Canonical == name },
		func(t *Tool) bool { return t.Capability.CapID+"."+t.Verb.Name == word },
		func(t *Tool) bool { return t.Capability.CapID == word && len(t.Capability.Verbs) == 1 },
		func(t *Tool) bool {
			return t.Verb.Name == word && (t.Kind.Name == KindMetrics || t.Kind.Name == KindHistory)
		},
		func(t *Tool) bool {
			same := func(o Tool) bool { return o.Verb.Name == word && o.Canonical != t.Canonical }
			return t.Verb.Name == word && !slices.ContainsFunc(tools, same)
		},
	} {
		if t, ok := find(tools, matches); ok {
			return t, true
		}
	}
	return nil, false
}

// ArgumentType is the type of a tool's argument in its JSON Schema, and the type of the elements of
// an array; "" for one that is not known, or for several.
type ArgumentType struct{ Type, Items string }

// ArgumentTypes returns the types of the arguments of a board's tool by name; nil for other tools, and
// for echo and metrics, whose arguments have always been taken as they are written.
func ArgumentTypes(tool string) map[string]ArgumentType {
	name, ok := ParseToolName(tool)
	if !ok {
		return nil
	}
	k, ok := LookupShort(name.Short)
	if !ok || !k.SinceV21 {
		return nil
	}
	v, ok := k.Verb(name.Verb)
	if !ok {
		return nil
	}
	s, _ := lookupSchema(v.Input)
	types := make(map[string]ArgumentType)
	for _, p := range s.object().properties {
		t := ArgumentType{Type: p.typ}
		if p.typ == "array" && len(p.words) > 0 {
			t.Items = "string"
		}
		types[p.name] = t
	}
	return types
}

// KnownTool reports whether some node may have this tool: a kind of this short name has this
// verb. It says nothing about a particular node, which may be offline or lack the capability.
func KnownTool(t ToolName) bool {
	k, ok := LookupShort(t.Short)
	if !ok {
		return false
	}
	_, ok = k.Verb(t.Verb)
	return ok
}
