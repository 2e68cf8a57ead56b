package process

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// A plugin.json looks like this; docs/kernel.md explains it:
//
// 	{
// 	  "name": "notes",
// 	  "version": "1.0.0",
// 	  "capabilities": ["tickets.read", "tickets.write"],
// 	  "tools": [{
// 	    "name": "notes.add",
// 	    "description": "Adds a note.",
// 	    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}
// 	  }],
// 	  "resources": [{"uri": "mcp://notes/all.json", "description": "All notes.", "subscribable": true}],
// 	  "sandbox": {"read": ["/srv/notes"], "network": false},
// 	  "bus": {"call": ["tickets.create"], "subscribe": ["alert"], "append": ["notes.*"]}
// 	}
//
// The relay shows clients the declarations of the manifest, never the server's lists: a plugin
// cannot add a tool or change a description while it runs. `agentctl plugin adopt` writes the
// manifest of a server that was not written for the relay, with its "command", and for each tool
// its "serverName" and "digest".

// PluginManifest is the content of a plugin.json: what an external plugin offers.
// plugin.schema.json describes the form; ParseManifest reads it.
type PluginManifest struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	// Command is the program to start, with its arguments, in place of the executable "run". The
	// program is an absolute path, a path below the plugin's folder that begins with "./", or a name
	// that is looked up in PATH. Arguments that begin with "./" are paths below that folder.
	Command []string `json:"command,omitempty"`
	// Env are more variables of the program's environment. $HOME in a value is the folder for
	// its data. They are no place for secrets: administrators can read a manifest.
	Env               map[string]string  `json:"env,omitempty"`
	Tools             []DeclaredTool     `json:"tools,omitempty"`
	Resources         []DeclaredResource `json:"resources,omitempty"`
	ResourceTemplates []DeclaredTemplate `json:"resourceTemplates,omitempty"`
	Prompts           []DeclaredPrompt   `json:"prompts,omitempty"`
	// FollowResources offers resources that the server lists and Resources has not, under their
	// URIs and without the server's words about them.
	FollowResources bool `json:"followResources,omitempty"`
	// Ignored are tools of the server that were left out on purpose, by its own names.
	Ignored []string `json:"ignored,omitempty"`
	// Capabilities are the scopes that callers need, spelled "notes.read" or "notes:read": scopes
	// of the plugin, which begin with its name, and scopes of the relay.
	Capabilities []string `json:"capabilities,omitempty"`
	// Sandbox is what the program needs beyond what the sandbox allows to all.
	Sandbox DeclaredSandbox `json:"sandbox,omitzero"`
	// Bus is what the plugin asks for beyond answering calls; an operator must allow it.
	Bus DeclaredBus `json:"bus,omitzero"`
}

// DeclaredSandbox extends or narrows the sandbox of a plugin that the relay starts. Paths are
// absolute, or begin with "~/" for the home of the relay's user. What the relay keeps to itself is
// refused.
type DeclaredSandbox struct {
	Read    []string `json:"read,omitempty"`    // files and folders to read and run
	Write   []string `json:"write,omitempty"`   // files and folders to read and write
	Network *bool    `json:"network,omitempty"` // false: no network; default true
}

// DeclaredTool is a tool of a PluginManifest. Its name begins with the plugin's name.
type DeclaredTool struct {
	Name         string               `json:"name"`
	Title        string               `json:"title,omitempty"`
	Description  string               `json:"description"`
	InputSchema  json.RawMessage      `json:"inputSchema"`
	OutputSchema json.RawMessage      `json:"outputSchema,omitempty"`
	Annotations  *DeclaredAnnotations `json:"annotations,omitempty"`
	// ServerName is what the server calls the tool; default: Name.
	ServerName string `json:"serverName,omitempty"`
	// Digest is that of the tool as the server listed it when it was adopted (toolDigest). A tool
	// whose digest has changed is not offered. Without a digest it is not compared.
	Digest string `json:"digest,omitempty"`
	// Capability is the scope that a caller needs; default: the last of Capabilities.
	Capability string `json:"capability,omitempty"`
}

// DeclaredAnnotations are the hints of MCP about a tool (ToolAnnotations). Those that are missing
// have the defaults of MCP, which assume the worst.
type DeclaredAnnotations struct {
	ReadOnly    *bool `json:"readOnlyHint,omitempty"`
	Destructive *bool `json:"destructiveHint,omitempty"`
	Idempotent  *bool `json:"idempotentHint,omitempty"`
	OpenWorld   *bool `json:"openWorldHint,omitempty"`
}

// DeclaredResource is a resource of a PluginManifest. Its URI begins with mcp://NAME/; what
// follows is a path, or the server's own URI (see serverURI).
type DeclaredResource struct {
	URI           string          `json:"uri"`
	Name          string          `json:"name,omitempty"` // default: the URI without mcp://
	Description   string          `json:"description"`
	MIMEType      string          `json:"mimeType,omitempty"` // default: application/json
	ContentSchema json.RawMessage `json:"contentSchema,omitempty"`
	Subscribable  bool            `json:"subscribable,omitempty"`
	// Capability is the scope that a caller needs; default: the first of Capabilities.
	Capability string `json:"capability,omitempty"`
}

// DeclaredTemplate is a resource template of a PluginManifest: mcp://NAME/ and a template of
// RFC 6570.
type DeclaredTemplate struct {
	URITemplate string `json:"uriTemplate"`
	Name        string `json:"name"`
	Description string `json:"description"`
	MIMEType    string `json:"mimeType,omitempty"`
	// Capability is the scope that a caller needs; default: the first of Capabilities.
	Capability string `json:"capability,omitempty"`
}

// DeclaredPrompt is a prompt of a PluginManifest. Its name begins with the plugin's name.
type DeclaredPrompt struct {
	Name        string             `json:"name"`
	Title       string             `json:"title,omitempty"`
	Description string             `json:"description"`
	Arguments   []DeclaredArgument `json:"arguments,omitempty"`
	ServerName  string             `json:"serverName,omitempty"` // what the server calls it; default: Name
	// Capability is the scope that a caller needs; default: the first of Capabilities.
	Capability string `json:"capability,omitempty"`
}

// DeclaredArgument is an argument of a DeclaredPrompt.
type DeclaredArgument struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Required    bool   `json:"required,omitempty"`
}

// MaxManifest bounds a plugin.json, bytes: it fits 16 schemas of the largest size
// (maxSchema).
const MaxManifest = 1 << 20

// ManifestError lists everything that is wrong with a plugin manifest, in the order of
// the places.
type ManifestError struct {
	Problems []Problem
}

// Problem is one mistake in the manifest. Where is a path such as "tools[0].name"; it is empty
// for the whole document. What describes the mistake and, where possible, a valid value.
type Problem struct {
	Where string `json:"where"`
	What  string `json:"what"`
}

// Error lists the problems, one a line, after a first line that names none.
func (e *ManifestError) Error() string {
	var b strings.Builder
	b.WriteString("the plugin manifest is not valid:")
	for _, p := range e.Problems {
		b.WriteString("\n  ")
		if p.Where != "" {
			b.WriteString(p.Where + ": ")
		}
		b.WriteString(p.What)
	}
	return b.String()
}

// manifestError is the error of a document that cannot be checked place by place.
func manifestError(format string, args ...any) error {
	return &ManifestError{[]Problem{{What: fmt.Sprintf(format, args...)}}}
}

// ParseManifest reads a plugin manifest, strictly. The error is a *ManifestError that
// names every problem at once. The schemas in the manifest are not compiled yet. It checks the size, strict
// JSON (no duplicate names), the schema and the rules that it cannot express, and then decodes the Go
// value: no part of an invalid document is used.
func ParseManifest(data []byte) (*PluginManifest, error) {
	if len(data) > MaxManifest {
		return nil, manifestError("too large: %d bytes (use at most %d)", len(data), MaxManifest)
	}
	if err := strictjson.Check(data); err != nil {
		return nil, manifestError("not strict JSON: %s", strings.TrimPrefix(err.Error(), "strictjson: "))
	}
	problems, err := checkManifest(data)
	if err != nil {
		return nil, err
	}
	if len(problems) > 0 {
		return nil, &ManifestError{problems}
	}
	var m PluginManifest
	if err := strictjson.Unmarshal(data, &m); err != nil { // the schema refuses what this would
		return nil, manifestError("%v", err)
	}
	return &m, nil
}

// Manifest reads a plugin.json as the manifest that the kernel loads. Each tool gets the
// checks that its schemas ask for.
func Manifest(data []byte) (*kernel.Manifest, error) {
	m, _, err := parse(data)
	return m, err
}

// Digest is the SHA-256 of the bytes of a plugin.json, in hex: which version of it an operator
// saw, consented to, or loaded.
func Digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// parse is Manifest, with the declaration that it was made of.
func parse(data []byte) (*kernel.Manifest, *PluginManifest, error) {
	pm, err := ParseManifest(data)
	if err != nil {
		return nil, nil, err
	}
	m := pm.kernelManifest()
	for _, t := range m.Tools {
		if t.CheckArguments, err = argumentCheck(t.InputSchema); err != nil {
			return nil, nil, fmt.Errorf("inputSchema of %s: %w", t.Name, err)
		}
		if t.CheckResult, err = resultCheck(t.OutputSchema); err != nil {
			return nil, nil, fmt.Errorf("outputSchema of %s: %w", t.Name, err)
		}
	}
	return m, pm, nil
}

// kernelManifest converts the declaration to the form that the kernel loads, for every tenant. A
// resource that names no capability needs the first of the manifest, a tool the last; kernel:admin when
// the manifest has none. Plugins list the scope to read first and the one to write last, so a tool that
// names none is treated as one that writes.
func (p *PluginManifest) kernelManifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: p.Name, Version: p.Version}
	for _, t := range p.Tools {
		m.Tools = append(m.Tools, &kernel.Tool{Name: t.Name, ToolInfo: &kernel.ToolInfo{
			Title: t.Title, Description: t.Description, InputSchema: t.InputSchema, OutputSchema: t.OutputSchema,
			Hints: t.Annotations.hints(), Scope: p.scope(t.Capability, len(p.Capabilities)-1),
			LogCalls: t.Annotations.hints()&kernel.HintReadOnly == 0, // it may change something
		}})
	}
	for _, r := range p.Resources {
		m.Resources = append(m.Resources, &kernel.Resource{
			URI: r.URI, Name: cmp.Or(r.Name, strings.TrimPrefix(r.URI, "mcp://")), Description: r.Description,
			MIME: cmp.Or(r.MIMEType, "application/json"), Scope: p.scope(r.Capability, 0), Watchable: r.Subscribable,
		})
	}
	return m
}

// hints returns the annotations as the kernel has them.
func (a *DeclaredAnnotations) hints() (h kernel.Hints) {
	if a == nil {
		return 0
	}
	is := func(p *bool, want bool) bool { return p != nil && *p == want }
	if is(a.ReadOnly, true) {
		// A tool that changes nothing is not destructive either.
		h |= kernel.HintReadOnly | kernel.HintSafe
	}
	if is(a.Destructive, false) {
		h |= kernel.HintSafe
	}
	if is(a.Idempotent, true) {
		h |= kernel.HintIdempotent
	}
	if is(a.OpenWorld, false) {
		h |= kernel.HintLocal
	}
	return h
}

// scope returns the scope of a capability, or else of the one at index i, or else of an
// administrator.
func (p *PluginManifest) scope(capability string, i int) string {
	if capability == "" && i >= 0 && i < len(p.Capabilities) {
		capability = p.Capabilities[i]
	}
	if scope, ok := capabilityScope(p.Name, capability); ok {
		return scope
	}
	return manifest.ScopeKernelAdmin
}

// Scopes returns the plugin's own scopes, in the order of the manifest.
func (p *PluginManifest) Scopes() (scopes []string) {
	for _, c := range p.Capabilities {
		scope, _ := capabilityScope(p.Name, c)
		if _, _, ok := manifest.PluginScope(scope); ok {
			scopes = append(scopes, scope)
		}
	}
	return scopes
}

// relayCapabilities are the relay's scopes that a manifest may require of callers.
var relayCapabilities = []string{
	manifest.ScopeCallReadOnly, manifest.ScopeToolsList, manifest.ScopeEventsSubscribe, manifest.ScopeEventsIngest,
	manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite, manifest.ScopeBoardsInspect, manifest.ScopeKernelAdmin,
}

// capabilityScope returns the scope that a capability of a plugin stands for, in either spelling:
// "notes.read" and "notes:read". ok is false for a scope of another plugin, so that no plugin can
// take what an operator granted for another one.
func capabilityScope(plugin, capability string) (scope string, ok bool) {
	for _, s := range relayCapabilities {
		if s == capability || strings.ReplaceAll(s, ":", ".") == capability {
			return s, true
		}
	}
	scope = strings.Replace(capability, ".", ":", 1)
	owner, _, ok := manifest.PluginScope(scope)
	return scope, ok && owner == plugin
}
