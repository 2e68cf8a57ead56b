package kernel

import (
	"encoding/json"
	"fmt"

	"agentctl/transport/strictjson"
)

// PluginManifest is the JSON form in which a plugin that is no part of this program says
// what it offers.
type PluginManifest struct {
	Name         string             `json:"name"`
	Version      string             `json:"version"` // semantic version
	Tools        []DeclaredTool     `json:"tools,omitempty"`
	Resources    []DeclaredResource `json:"resources,omitempty"`
	Capabilities []string           `json:"capabilities,omitempty"` // "tickets.read": the scope "tickets:read"
}

// DeclaredTool is a tool of a PluginManifest.
type DeclaredTool struct {
	Name         string          `json:"name"`
	Description  string          `json:"description"`
	InputSchema  json.RawMessage `json:"inputSchema"`
	OutputSchema json.RawMessage `json:"outputSchema,omitempty"`
	// Capability is what a caller needs; one of Capabilities, the last one when empty.
	Capability string `json:"capability,omitempty"`
}

// DeclaredResource is a resource of a PluginManifest.
type DeclaredResource struct {
	URI           string          `json:"uri"`
	Description   string          `json:"description"`
	ContentSchema json.RawMessage `json:"contentSchema,omitempty"`
	Subscribable  bool            `json:"subscribable,omitempty"`
	// Capability is what a caller needs; one of Capabilities, the first one when empty.
	Capability string `json:"capability,omitempty"`
}

// ParseManifest reads a plugin manifest, strictly.
func ParseManifest(data []byte) (*PluginManifest, error) {
	var m PluginManifest
	if err := strictjson.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("plugin manifest: %w", err)
	}
	return &m, nil
}

// Manifest is what the kernel loads of a plugin with this declaration; tenant "" offers
// it to everybody.
func (p *PluginManifest) Manifest(tenant string) *Manifest {
	m := &Manifest{Name: p.Name, Version: p.Version, Tenant: tenant}
	for i := range p.Tools {
		t := &p.Tools[i]
		m.Tools = append(m.Tools, &Tool{Name: t.Name, Description: t.Description, Scope: p.scope(t.Capability, len(p.Capabilities)-1),
			InputSchema: t.InputSchema, OutputSchema: t.OutputSchema})
	}
	for i := range p.Resources {
		r := &p.Resources[i]
		m.Resources = append(m.Resources, &Resource{URI: r.URI, Name: r.URI, Description: r.Description, MIME: "application/json",
			Scope: p.scope(r.Capability, 0), Watchable: r.Subscribable})
	}
	return m
}

// scope turns a capability, or else the one at i, into the scope that a token carries.
func (p *PluginManifest) scope(capability string, i int) string {
	if capability == "" && i >= 0 && i < len(p.Capabilities) {
		capability = p.Capabilities[i]
	}
	return capabilityScope(capability)
}

func capabilityScope(capability string) string {
	b := []byte(capability)
	for i, c := range b {
		if c == '.' {
			b[i] = ':'
			break
		}
	}
	return string(b)
}
