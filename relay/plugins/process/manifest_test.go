package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const goodManifest = `{
  "name": "notes", "version": "1.2.0-rc.1",
  "tools": [
    {"name": "notes.add", "description": "Adds a note.", "inputSchema": {"type": "object", "properties": {"text": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string"}}}},
    {"name": "notes.book.get", "description": "Gets one.", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object"}, "capability": "tickets.read"}
  ],
  "resources": [
    {"uri": "mcp://notes/all.json", "description": "All notes.", "contentSchema": {"type": "array"}, "subscribable": true},
    {"uri": "mcp://notes/log", "description": "What was written.", "capability": "tickets:write"}
  ],
  "capabilities": ["tickets.read", "tickets:write"]
}`

func TestParseManifest(t *testing.T) {
	pm, err := ParseManifest([]byte(goodManifest))
	if err != nil {
		t.Fatal(err)
	}
	m := pm.kernelManifest()
	got := fmt.Sprint(m.Name, " ", m.Version)
	for _, t := range m.Tools {
		got += fmt.Sprint("; ", t.Name, " ", t.Scope, " ", len(t.OutputSchema) > 0)
	}
	for _, r := range m.Resources {
		got += fmt.Sprint("; ", r.URI, " ", r.Name, " ", r.Scope, " ", r.Watchable)
	}
	want := "notes 1.2.0-rc.1; notes.add tickets:write false; notes.book.get tickets:read true" +
		"; mcp://notes/all.json notes/all.json tickets:read true; mcp://notes/log notes/log tickets:write false"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	pm.Capabilities = nil
	if s := pm.kernelManifest().Tools[0].Scope; s != manifest.ScopeKernelAdmin {
		t.Errorf("without a capability a caller needs %s", s)
	}
}

// A manifest declares scopes that begin with the plugin's name, in both spellings, and no others.
func TestManifestScopes(t *testing.T) {
	const text = `{"name": "notes", "version": "1.0.0", "capabilities": ["notes.read", "tickets.read", "notes:admin_delete"],
  "tools": [{"name": "notes.list", "description": "Lists.", "inputSchema": {"type": "object"}, "capability": "notes:read"},
    {"name": "notes.delete", "description": "Deletes.", "inputSchema": {"type": "object"}}],
  "resources": [{"uri": "mcp://notes/all.json", "description": "All notes."}]}`
	pm, err := ParseManifest([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	m := pm.kernelManifest()
	got := []string{m.Tools[0].Scope, m.Tools[1].Scope, m.Resources[0].Scope}
	if want := []string{"notes:read", "notes:admin_delete", "notes:read"}; !slices.Equal(got, want) {
		t.Errorf("the scopes of the tools and the resource are %v, want %v", got, want)
	}
	if got, want := pm.Scopes(), []string{"notes:read", "notes:admin_delete"}; !slices.Equal(got, want) {
		t.Errorf("the plugin's scopes are %v, want %v", got, want)
	}
	// Under another name the same declarations are refused: the plugin would get what was granted
	// for notes. So is a name under which the relay has its own scopes.
	for _, name := range []string{"memo", "nodes"} {
		_, err := ParseManifest([]byte(strings.ReplaceAll(strings.Replace(text, `"notes"`, `"`+name+`"`, 1), `"notes.list"`, `"`+name+`.list"`)))
		if err == nil || !strings.Contains(err.Error(), `capabilities[0]: "notes.read" is a scope of plugin notes`) {
			t.Errorf("plugin %s: %v", name, err)
		}
	}
	if _, err := ParseManifest([]byte(`{"name": "nodes", "version": "1.0.0", "capabilities": ["nodes.write", "nodes.read"]}`)); err == nil || strings.Count(err.Error(), "may need") != 2 {
		t.Errorf("a plugin declares scopes under a name of the relay: %v", err)
	}
	// The same scope in both spellings is one scope.
	if _, err := ParseManifest([]byte(`{"name": "notes", "version": "1.0.0", "capabilities": ["notes.read", "notes:read"]}`)); err == nil || !strings.Contains(err.Error(), "given twice") {
		t.Errorf("a capability in two spellings: %v", err)
	}
}

// Everything wrong is named at once, with where it is and what would be right.
func TestParseManifestNamesAll(t *testing.T) {
	const bad = `{
  "name": "notes", "version": "1.0", "Tools": [],
  "tools": [
    {"name": "other.add", "description": "", "inputSchema": {"type": "array"}},
    {"name": "notes.add", "description": "a\u0007", "inputSchema": {"type": "object", "properties": {"f": {"$ref": "file:///etc/passwd"}}}},
    {"name": "notes.add", "description": "x", "outputSchema": true},
    {"name": "Notes add", "description": 7, "inputSchema": {"type": "object", "enum": [{"$ref": "x"}]}, "hidden": 1},
    "notes.add"
  ],
  "resources": [{"uri": "mcp://other/all", "description": "x"}, {"uri": "http://notes/", "description": "x", "subscribable": "yes", "capability": "kernel.admin"}],
  "capabilities": ["tickets.read", "tickets:read", "root", "device.connect", "memo.read", "tickets.raed"]
}`
	_, err := ParseManifest([]byte(bad))
	var e *ManifestError
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	want := []string{
		`unknown key "Tools" (use bus, capabilities, command, env, followResources, `,
		`capabilities[1]: "tickets:read" is given twice`,
		`capabilities[2]: not valid: "root" (use a scope of the plugin: its name and a word, such as notes.read`,
		`capabilities[3]: "device.connect" is not a scope that callers may need (use notes.read, or one of tools.call.read_only, `,
		`capabilities[4]: "memo.read" is a scope of plugin memo, and this is plugin notes (use notes.read, or one of`,
		`capabilities[5]: "tickets.raed" is not a scope that callers may need, did you mean "tickets.read"? (use`,
		`resources[0].uri: "mcp://other/all" must begin with the plugin's name: mcp://notes/`,
		`resources[1].capability: "kernel.admin" is not one of the manifest's capabilities`,
		`resources[1].subscribable: must be of type boolean, not string`,
		`resources[1].uri: not valid: "http://notes/" (use mcp://plugin/path`,
		`tools[0].description: not valid: "" (use 1 to 8192 characters`,
		`tools[0].inputSchema.type: must be "object"`,
		`tools[0].name: "other.add" must begin with the plugin's name: notes.`,
		`tools[1].description: not valid: "a\a" (use 1 to 8192 characters of plain text, without control characters)`,
		`tools[1].inputSchema.properties.f.$ref: "file:///etc/passwd" refers to another document`,
		`tools[2].inputSchema: is missing`,
		`tools[2].name: "notes.add" is given twice`,
		`tools[2].outputSchema: must be of type object, not boolean`,
		`tools[3]: unknown key "hidden" (use annotations, capability, description, `,
		`tools[3].description: must be of type string, not number`,
		`tools[3].name: not valid: "Notes add" (use plugin.verb`,
		`tools[4]: must be of type object, not string`,
		`version: not valid: "1.0" (use a semantic version`,
	}
	lines := strings.Split(err.Error(), "\n")[1:]
	for i := range max(len(want), len(lines)) {
		if i >= len(want) || i >= len(lines) || !strings.HasPrefix(lines[i], "  "+want[i]) {
			t.Fatalf("problem %d of:\n%s\nwant %q", i, err, want[min(i, len(want)-1)])
		}
	}
	for _, doc := range []string{``, `[]`, `null`, `{}`, `{"name":"notes","name":"notes","version":"1.0.0"}`, `{"name":"notes","version":"1.0.0"} x`,
		`{"name":"kernel","version":"1.0.0"}`, `{"name":"9","version":"1.0.0"}`, `{"name":"\ud800","version":"1.0.0"}`,
		`{"name":"notes","version":"1.0.0","tools":{}}`, `{"name":"notes","version":"1.0.0","x":` + strings.Repeat("[", 20) + strings.Repeat("]", 20) + `}`,
		`{"name":"notes","version":"1.0.0","x":"` + strings.Repeat("x", MaxManifest) + `"}`} {
		if _, err := ParseManifest([]byte(doc)); !errors.As(err, &e) || len(e.Problems) == 0 {
			t.Errorf("%.60s: %v", doc, err)
		}
	}
}

func publishedSchema(t testing.TB) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(manifestSchemaJSON))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("plugin.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("plugin.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// beyondSchema are the problems that the published schema cannot see.
var beyondSchema = []string{"must begin with", "is given twice", "refers to another document", "is not one of the manifest's", "is larger than", "not strict JSON", "is a scope of plugin", "is not a scope that"}

// agrees holds the parser against the published schema: what it accepts the schema accepts,
// and what it refuses the schema refuses, but for what a schema cannot say.
func agrees(t testing.TB, s *jsonschema.Schema, doc []byte) {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		return
	}
	bySchema := s.Validate(v)
	_, byParser := ParseManifest(doc)
	if byParser == nil && bySchema != nil {
		t.Fatalf("the schema refuses what is accepted: %s\n%v", doc, bySchema)
	}
	var e *ManifestError
	if byParser == nil || bySchema != nil || !errors.As(byParser, &e) {
		return
	}
	for _, p := range e.Problems {
		known := false
		for _, b := range beyondSchema {
			known = known || strings.Contains(p.What, b)
		}
		if !known {
			t.Fatalf("the schema accepts what is refused: %s\n%v", doc, byParser)
		}
	}
}

// Thousands of manifests, each a good one with some parts replaced, get the same verdict from
// the parser and by the published schema.
func TestManifestSchemaAgrees(t *testing.T) {
	s := publishedSchema(t)
	rng := rand.New(rand.NewPCG(1, 2))
	manifests, accepted := 1500, 0
	if raceEnabled {
		manifests = 150
	}
	for range manifests {
		var tree any
		if err := json.Unmarshal([]byte(goodManifest), &tree); err != nil {
			t.Fatal(err)
		}
		for range 1 + rng.IntN(2) {
			tree = mutate(rng, tree)
		}
		doc, err := json.Marshal(tree)
		if err != nil {
			t.Fatal(err)
		}
		agrees(t, s, doc)
		if _, err := ParseManifest(doc); err == nil {
			accepted++
		}
	}
	if accepted < manifests/20 || accepted > manifests*19/20 {
		t.Errorf("%d of %d are good: the test says little", accepted, manifests)
	}
}

// pieces are what parts of a manifest are replaced by.
var pieces = []any{
	nil, true, 7.0, -0.5, "", "notes", "kernel", "notes.add", "notes.add.one", "notes.a.b.c", "Notes", "notes..x", "a b", "ünicode", "a\x01b", "line\nline\ttab", "del\x7f",
	"1.0.0", "1.0.0-a.01", "1.0.0+b", "1.0", "mcp://notes/x", "mcp://notes/", "mcp://no-tes/x", "mcp://notes/x y", "MCP://notes/x", "tickets.read", "kernel:admin", "device:connect",
	strings.Repeat("a", 33), strings.Repeat("ä", 1024), strings.Repeat("a", 1025), "mcp://notes/" + strings.Repeat("a", 244), "mcp://notes/" + strings.Repeat("a", 245),
	[]any{}, []any{"tickets.read"}, []any{"tickets.read", "tickets.write"}, map[string]any{}, map[string]any{"type": "object"}, map[string]any{"type": "array"},
	map[string]any{"name": "notes.x", "description": "x", "inputSchema": map[string]any{"type": "object"}},
}

func mutate(rng *rand.Rand, v any) any {
	switch v := v.(type) {
	case map[string]any:
		if len(v) > 0 && rng.IntN(8) > 0 {
			keys := make([]string, 0, len(v))
			for k := range v {
				keys = append(keys, k)
			}
			slices.Sort(keys) // a map's order is no part of the seed
			k := keys[rng.IntN(len(keys))]
			switch rng.IntN(10) {
			case 0:
				delete(v, k)
			case 1:
				v[strings.ToUpper(k)] = v[k]
			default:
				v[k] = mutate(rng, v[k])
			}
			return v
		}
	case []any:
		if len(v) > 0 && rng.IntN(8) > 0 {
			i := rng.IntN(len(v))
			v[i] = mutate(rng, v[i])
			return v
		}
	}
	raw, _ := json.Marshal(pieces[rng.IntN(len(pieces))])
	var fresh any // a copy: it may be changed later
	_ = json.Unmarshal(raw, &fresh)
	return fresh
}

// FuzzParseManifest: no input makes the parser fail otherwise than by saying why, it
// agrees with the published schema, and what it accepts it accepts again when printed.
func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(goodManifest))
	f.Add([]byte(`{"name":"x","version":"1.0.0"}`))
	f.Add([]byte(`{"name":"x","version":"1.0.0","tools":[{"name":"x.y","description":"d","inputSchema":{"type":"object","$ref":"#"}}]}`))
	s := publishedSchema(f)
	f.Fuzz(func(t *testing.T, doc []byte) {
		m, err := ParseManifest(doc)
		agrees(t, s, doc)
		if err != nil {
			return
		}
		printed, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseManifest(printed)
		if err != nil {
			t.Fatalf("%s was accepted, printed as %s it is not: %v", doc, printed, err)
		}
		reprinted, _ := json.Marshal(again)
		if !bytes.Equal(printed, reprinted) || !reflect.DeepEqual(m.Capabilities, again.Capabilities) {
			t.Fatalf("printed as %s, then as %s", printed, reprinted)
		}
		p := newPlugin(source{manifest: m.kernelManifest()}, newWatchSet(), "", zap.NewNop())
		if err := kernel.New(kernel.Options{}).Load(p, false); err != nil {
			t.Fatalf("%s was accepted and cannot be loaded: %v", doc, err)
		}
	})
}

// What plugin adopt writes beyond a manifest by hand.
func TestParseAdoptedManifest(t *testing.T) {
	adopted := `{
  "name": "demo", "version": "1.0.0",
  "command": ["node", "./server/index.js", "stdio"], "env": {"DB": "$HOME/db"},
  "tools": [{"name": "demo.get-sum", "title": "Sum", "description": "Adds.", "inputSchema": {"type": "object"}, "serverName": "get-sum",
    "annotations": {"readOnlyHint": true, "openWorldHint": false}, "digest": "sha256:` + strings.Repeat("0a", 32) + `"}],
  "resources": [{"uri": "mcp://demo/file:///a%20b?c#d", "name": "a b", "description": "A file.", "mimeType": "text/markdown; charset=utf-8"}],
  "resourceTemplates": [{"uriTemplate": "mcp://demo/demo://text/{id}", "name": "Text", "description": "One text."}],
  "prompts": [{"name": "demo.greet", "title": "Greet", "description": "Greets.", "arguments": [{"name": "city", "required": true}]}],
  "capabilities": ["tickets.read"]
}`
	m, pm, err := parse([]byte(adopted))
	if err != nil {
		t.Fatal(err)
	}
	tool, resource := m.Tools[0], m.Resources[0]
	if tool.Title != "Sum" || tool.Hints != kernel.HintReadOnly|kernel.HintSafe|kernel.HintLocal || resource.MIME != "text/markdown; charset=utf-8" || resource.Name != "a b" {
		t.Errorf("got %+v, %+v", tool.ToolInfo, resource)
	}
	if len(pm.Command) != 3 || pm.Env["DB"] != "$HOME/db" || !pm.Prompts[0].Arguments[0].Required {
		t.Errorf("got %+v", pm)
	}
	for old, bad := range map[string]string{
		`["node", "./server/index.js", "stdio"]`: `[]`,
		`["node",`:                               `["",`,
		`"DB"`:                                   `"MCP_AGENT_ID"`,
		`"$HOME/db"`:                             `"a\nb"`,
		`sha256:0a`:                              `sha512:0a`,
		`mcp://demo/demo://text/{id}`:            `mcp://other/{id}`,
		`demo://text/{id}`:                       `demo://text/{id`,
		`"demo.greet"`:                           `"other.greet"`,
		`text/markdown;`:                         `markdown;`,
		`mcp://demo/file:///a%20b?c#d`:           `mcp://demo/a b`,
		`"city"`:                                 `""`,
	} {
		text := strings.Replace(adopted, old, bad, 1)
		if text == adopted {
			t.Fatalf("%s is not in the manifest", old)
		}
		if _, err := ParseManifest([]byte(text)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}
