package control

import (
	"encoding/json"

	"agentctl/lazyregexp"
	"agentctl/relay/plugins/arguments"
)

// args are the arguments of all tools; each tool uses some of them.
type args struct {
	Name    string          `json:"name"`
	Scope   string          `json:"scope"`
	Config  json.RawMessage `json:"config"`
	Order   []string        `json:"order"`
	Tool    string          `json:"tool"`
	After   string          `json:"after"`
	Limit   int             `json:"limit"`
	Level   string          `json:"level"`
	Tenants []string        `json:"tenants"`
	Digest  string          `json:"digest"`
}

// Patterns of arguments. They keep unprintable characters out of messages, events and log
// lines. Whether a name exists is checked by Middleware, Transports or Plugins.
var (
	wordPattern    = lazyregexp.New(`^[a-z][a-z0-9_-]{0,31}$`)
	scopePattern   = lazyregexp.New(`^(global|(transport|plugin|connection)=[!-~]{1,512})$`)
	pluginPattern  = lazyregexp.New(`^[a-z0-9][a-z0-9_-]{0,31}$`)
	versionPattern = lazyregexp.New(`^[a-z0-9][a-z0-9_-]{0,31}(@[0-9A-Za-z.+-]{1,64})?$`)
	tenantPattern  = lazyregexp.New(`^([a-z0-9][a-z0-9-]{0,31}|\*)$`)
	digestPattern  = lazyregexp.New(`^[0-9a-f]{64}$`)
	cursorPattern  = lazyregexp.New(`^[!-~]{1,128}$`)
)

// forms are the patterns in words, for errors.
var forms = map[*lazyregexp.Regexp]string{
	wordPattern:    "a word of a-z, 0-9, _ and -",
	scopePattern:   "global, transport=NAME, plugin=NAME or connection=ID",
	pluginPattern:  "the name of a folder: a-z, 0-9, _ and -",
	versionPattern: "NAME or NAME@VERSION",
	tenantPattern:  "a tenant, or *",
	digestPattern:  "64 hexadecimal digits",
	cursorPattern:  "printable ASCII without spaces",
}

// text is an argument that is a string of the form of a pattern.
func text(name string, pattern *lazyregexp.Regexp, description string) arguments.Field {
	return arguments.Field{Name: name, Description: description, Type: arguments.String, Pattern: pattern, Form: forms[pattern]}
}

// required returns a copy of a field that a call must have.
func required(f arguments.Field) arguments.Field { f.Required = true; return f }

// Arguments that several tools take.
var (
	argStage  = text("name", wordPattern, "the stage, as kernel.middleware.list names it")
	argScope  = text("scope", scopePattern, "global (the default), transport=NAME, plugin=NAME or connection=ID")
	argConfig = arguments.Field{Name: "config", Type: arguments.Map,
		Description: "an object with the fields that kernel.middleware.list shows, at most 16 KiB; what is left out has its default"}
	argOrder = arguments.Field{Name: "order", Type: arguments.Array, Pattern: wordPattern, Min: 1, Max: 32,
		Description: "every stage once, the outermost first; not together with name"}
	argAfter  = text("after", cursorPattern, "next of the answer before")
	argPlugin = text("name", cursorPattern, "one plugin, with its manifest; not together with after and limit")
	argLimit  = arguments.Field{Name: "limit", Type: arguments.Integer, Min: 1, Max: 500, Description: "rows in one answer; 100 unless given"}
)

// inputSchema is the JSON Schema of arguments, with further rules that hold at its top.
// "required" is always there, also when it is empty.
func inputSchema(in arguments.Object, rules string) json.RawMessage {
	s := map[string]json.RawMessage{"required": json.RawMessage("[]")}
	for _, part := range []json.RawMessage{in.Schema(), json.RawMessage(rules)} {
		if err := json.Unmarshal(part, &s); err != nil && len(part) > 0 {
			panic("control: " + err.Error()) // part of the program
		}
	}
	data, err := json.Marshal(s)
	if err != nil {
		panic("control: " + err.Error())
	}
	return data
}
