package kernel

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// PluginManifest is the JSON form in which a plugin that is no part of this program says
// what it offers. ParseManifest makes one; plugin.schema.json describes the form.
type PluginManifest struct {
	Name         string             `json:"name"`
	Version      string             `json:"version"` // semantic version
	Tools        []DeclaredTool     `json:"tools,omitempty"`
	Resources    []DeclaredResource `json:"resources,omitempty"`
	Capabilities []string           `json:"capabilities,omitempty"` // scopes, spelled "tickets.read" or "tickets:read"
}

// DeclaredTool is a tool of a PluginManifest; its name begins with the plugin's.
type DeclaredTool struct {
	Name         string          `json:"name"`
	Description  string          `json:"description"`
	InputSchema  json.RawMessage `json:"inputSchema"`
	OutputSchema json.RawMessage `json:"outputSchema,omitempty"`
	Capability   string          `json:"capability,omitempty"` // what a caller needs; default: the last of Capabilities
}

// DeclaredResource is a resource of a PluginManifest; its URI begins with mcp://NAME/.
type DeclaredResource struct {
	URI           string          `json:"uri"`
	Description   string          `json:"description"`
	ContentSchema json.RawMessage `json:"contentSchema,omitempty"`
	Subscribable  bool            `json:"subscribable,omitempty"`
	Capability    string          `json:"capability,omitempty"` // what a caller needs; default: the first of Capabilities
}

// Bounds of a PluginManifest.
const (
	MaxManifest      = 1 << 20 // bytes
	maxPluginName    = 32
	maxDescription   = 1024
	maxSchema        = 64 << 10
	maxURI           = 256
	maxCapabilities  = 16
	maxProblems      = 100
	maxQuotedInError = 48
)

//go:embed plugin.schema.json
var manifestSchema []byte

// ManifestSchema is the published JSON Schema of PluginManifest. ParseManifest checks the
// same and what a schema cannot say: names that are unique and begin with the plugin's,
// references that stay inside.
func ManifestSchema() []byte { return append([]byte(nil), manifestSchema...) }

// ManifestError is everything that is wrong with a plugin manifest.
type ManifestError struct {
	Problems []Problem
}

// Problem is one thing that is wrong, and what would be right.
type Problem struct {
	Where string `json:"where"` // "tools[0].name"; "" for the whole
	What  string `json:"what"`
}

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

// ParseManifest reads a plugin manifest, strictly. The error is a *ManifestError that names
// everything that is wrong at once.
func ParseManifest(data []byte) (*PluginManifest, error) {
	if len(data) > MaxManifest {
		return nil, &ManifestError{[]Problem{{"", fmt.Sprintf("%d bytes are too many; at most %d", len(data), MaxManifest)}}}
	}
	if err := strictjson.Check(data); err != nil {
		return nil, &ManifestError{[]Problem{{"", "not strict JSON: " + err.Error()}}}
	}
	var tree any
	if err := json.Unmarshal(data, &tree); err != nil {
		return nil, &ManifestError{[]Problem{{"", "not JSON: " + err.Error()}}}
	}
	var c manifestCheck
	c.manifest(tree)
	if len(c.problems) > 0 {
		return nil, &ManifestError{c.problems}
	}
	var m PluginManifest
	if err := strictjson.Unmarshal(data, &m); err != nil { // the check above lets nothing through that this refuses
		return nil, &ManifestError{[]Problem{{"", err.Error()}}}
	}
	return &m, nil
}

// Manifest is what the kernel loads for a plugin with this declaration; tenant "" offers
// it to everybody. Where no capability is named a caller needs the first of all for
// resources and the last for tools; kernel:admin when there is none. Checks of arguments
// and results are the host's to add.
func (p *PluginManifest) Manifest(tenant string) *Manifest {
	m := &Manifest{Name: p.Name, Version: p.Version, Tenant: tenant}
	for i := range p.Tools {
		t := &p.Tools[i]
		m.Tools = append(m.Tools, &Tool{Name: t.Name, Description: t.Description, InputSchema: t.InputSchema, OutputSchema: t.OutputSchema,
			Scope: p.scope(t.Capability, len(p.Capabilities)-1)})
	}
	for i := range p.Resources {
		r := &p.Resources[i]
		m.Resources = append(m.Resources, &Resource{URI: r.URI, Name: strings.TrimPrefix(r.URI, uriPrefix), Description: r.Description,
			MIME: "application/json", Scope: p.scope(r.Capability, 0), Watchable: r.Subscribable})
	}
	return m
}

// scope is that of a capability, or else of the one at i, or else of an admin.
func (p *PluginManifest) scope(capability string, i int) string {
	if capability == "" && i >= 0 && i < len(p.Capabilities) {
		capability = p.Capabilities[i]
	}
	if scope, ok := CapabilityScope(capability); ok {
		return scope
	}
	return manifest.ScopeKernelAdmin
}
