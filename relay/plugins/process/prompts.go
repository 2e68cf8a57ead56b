package process

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Prompts, resource templates and completion are methods of MCP that the kernel does not know
// (kernel.MethodHandler). Lists come from the manifest; the server answers the rest.

// Methods that a plugin may serve.
const (
	methodPrompts   = "prompts/list"
	methodPrompt    = "prompts/get"
	methodTemplates = "resources/templates/list"
	methodComplete  = "completion/complete"
)

// promptServerName is what the server calls a prompt.
func promptServerName(d *DeclaredPrompt) string { return cmp.Or(d.ServerName, d.Name) }

// serverTool is what a manifest says about a tool that the kernel does not need.
type serverTool struct{ name, digest string }

// serverTools are the tools of a manifest by their names.
func (pm *PluginManifest) serverTools() map[string]serverTool {
	m := make(map[string]serverTool)
	for _, t := range pm.Tools {
		if t.ServerName != "" || t.Digest != "" {
			m[t.Name] = serverTool{cmp.Or(t.ServerName, t.Name), t.Digest}
		}
	}
	return m
}

// serverName is what the server calls a tool.
func (p *Plugin) serverName(tool string) string { return cmp.Or(p.tools[tool].name, tool) }

// digestOf is the digest of a tool when it was adopted, or "".
func (p *Plugin) digestOf(tool string) string { return p.tools[tool].digest }

// Methods implements kernel.MethodHandler.
func (p *Plugin) Methods() (list []string) {
	if p.declared == nil {
		return nil
	}
	if len(p.declared.Prompts) > 0 {
		list = append(list, methodPrompts, methodPrompt)
	}
	if len(p.templates) > 0 {
		list = append(list, methodTemplates)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer.canComplete && len(list) > 0 {
		list = append(list, methodComplete)
	}
	return list
}

// HandleMethod implements kernel.MethodHandler.
func (p *Plugin) HandleMethod(ctx context.Context, caller *kernel.Caller, _ kernel.Session, method string, params json.RawMessage) (json.RawMessage, error) {
	switch method {
	case methodPrompts:
		return p.listPrompts(caller)
	case methodTemplates:
		return p.listTemplates(caller)
	case methodPrompt:
		return p.getPrompt(ctx, caller, params)
	}
	return p.complete(ctx, caller, params)
}

// listPrompts lists the prompts that the caller may use and the server has.
func (p *Plugin) listPrompts(caller *kernel.Caller) (json.RawMessage, error) {
	type prompt struct {
		Name        string             `json:"name"`
		Title       string             `json:"title,omitempty"`
		Description string             `json:"description,omitempty"`
		Arguments   []DeclaredArgument `json:"arguments,omitempty"`
	}
	list := []prompt{}
	for i := range p.declared.Prompts {
		if d := &p.declared.Prompts[i]; p.prompt(caller, d.Name) != nil {
			list = append(list, prompt{d.Name, d.Title, d.Description, d.Arguments})
		}
	}
	return json.Marshal(map[string]any{"prompts": list})
}

// prompt returns a prompt that the caller may use and the server has, else nil.
func (p *Plugin) prompt(caller *kernel.Caller, name string) *DeclaredPrompt {
	i := slices.IndexFunc(p.declared.Prompts, func(d DeclaredPrompt) bool { return d.Name == name })
	if i < 0 || !caller.Has(p.declared.scope(p.declared.Prompts[i].Capability, 0)) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer.noPrompts[name] {
		return nil
	}
	return &p.declared.Prompts[i]
}

// listTemplates lists the resource templates that the caller may use.
func (p *Plugin) listTemplates(caller *kernel.Caller) (json.RawMessage, error) {
	type row struct {
		URITemplate string `json:"uriTemplate"`
		Name        string `json:"name"`
		Description string `json:"description,omitempty"`
		MIMEType    string `json:"mimeType,omitempty"`
	}
	list := []row{}
	for _, t := range p.templates {
		if d := t.declared; caller.Has(t.resource.Scope) {
			list = append(list, row{d.URITemplate, d.Name, d.Description, d.MIMEType})
		}
	}
	return json.Marshal(map[string]any{"resourceTemplates": list})
}

// getPrompt asks the server for a prompt. For a caller without the scope, the prompt does not exist. Only
// the URIs in the server's messages are changed.
func (p *Plugin) getPrompt(ctx context.Context, caller *kernel.Caller, params json.RawMessage) (json.RawMessage, error) {
	var in struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	}
	if err := json.Unmarshal(params, &in); err != nil {
		return nil, kernel.ErrNoResource
	}
	d := p.prompt(caller, in.Name)
	if d == nil {
		return nil, kernel.ErrNoResource
	}
	ask := map[string]any{"name": promptServerName(d)}
	if len(in.Arguments) > 0 {
		ask["arguments"] = in.Arguments
	}
	raw, err := p.ask(ctx, methodPrompt, ask)
	if err != nil {
		return nil, err
	}
	var res map[string]json.RawMessage
	var messages []map[string]json.RawMessage
	if json.Unmarshal(raw, &res) != nil || json.Unmarshal(res["messages"], &messages) != nil {
		return nil, internal(manifest.ReasonBadResult, "the plugin's answer is not a prompt")
	}
	for _, m := range messages {
		if p.isAdopted() && len(m["content"]) > 0 {
			m["content"] = p.publishLink(m["content"])
		}
	}
	if res["messages"], err = json.Marshal(messages); err != nil {
		return nil, err
	}
	return json.Marshal(res)
}

// complete asks the server to complete an argument of a prompt or a resource template. It checks the
// caller's scope for that, of which the server knows nothing, and replaces its name by the server's. The
// argument and its context are passed on as they are.
func (p *Plugin) complete(ctx context.Context, caller *kernel.Caller, params json.RawMessage) (json.RawMessage, error) {
	var in struct {
		Ref struct {
			Type string `json:"type"`
			Name string `json:"name,omitempty"`
			URI  string `json:"uri,omitempty"`
		} `json:"ref"`
		Argument json.RawMessage `json:"argument"`
		Context  json.RawMessage `json:"context,omitempty"`
	}
	if err := json.Unmarshal(params, &in); err != nil {
		return nil, kernel.ErrNoResource
	}
	switch in.Ref.Type {
	case "ref/prompt":
		d := p.prompt(caller, in.Ref.Name)
		if d == nil {
			return nil, kernel.ErrNoResource
		}
		in.Ref.Name = promptServerName(d)
	default:
		i := slices.IndexFunc(p.templates, func(t template) bool { return t.declared.URITemplate == in.Ref.URI })
		if i < 0 || !caller.Has(p.templates[i].resource.Scope) {
			return nil, kernel.ErrNoResource
		}
		in.Ref.URI = serverURI(p.manifest.Name, in.Ref.URI)
	}
	return p.ask(ctx, methodComplete, in)
}

// ask sends a request to the server. An error that the server answered with is a
// *kernel.RPCError.
func (p *Plugin) ask(ctx context.Context, method string, params any) (json.RawMessage, error) {
	return withConn(ctx, p, func(c *conn) (json.RawMessage, error) {
		raw, err := c.call(ctx, method, params)
		if err == nil {
			return raw, nil
		}
		res, err := callError(ctx, c, err)
		if err == nil {
			err = res.RPCError
		}
		return nil, err
	})
}
