package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
)

// POST /mcp/tools/call takes {"tool", "arguments"}. Depending on the Accept header the
// response is the tool's result as JSON, or an event stream of metric frames (RFC-0009 §5).
// It calls a tool without an MCP session; the tools and permissions are those of /mcp.

// toolsPath is where tools are called and metric streams are opened.
const toolsPath = "/mcp/tools/call"

// toolCall is the body of a request to toolsPath.
type toolCall struct {
	Tool      string `json:"tool"`
	Arguments any    `json:"arguments"`
}

func newToolCall(tool string, arguments any) toolCall {
	if arguments == nil {
		arguments = struct{}{}
	}
	return toolCall{tool, arguments}
}

// Call calls a tool and returns its result as JSON, as the relay sent it. arguments must
// encode as a JSON object; nil is an empty one.
//
// The call is not repeated after a failure: the tool may have run. A failure that the tool itself
// reports is a *ToolError, or an *Error if the tool answered with the relay's error envelope.
func (c *Client) Call(ctx context.Context, tool string, arguments any) (json.RawMessage, error) {
	resp, err := c.do(ctx, http.MethodPost, c.URL()+toolsPath, "application/json", newToolCall(tool, arguments))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, &ProtocolError{"read the answer", err}
	}
	return body, nil
}

// call calls a tool of the relay itself and decodes its result, unless result is nil. Such
// a tool may report an error in a result with status 200, which becomes an *Error as well.
func (c *Client) call(ctx context.Context, tool string, arguments, result any) error {
	body, err := c.Call(ctx, tool, arguments)
	if err != nil {
		return err
	}
	var env envelope
	refusal := &Error{Status: http.StatusOK, HadToken: c.token != ""}
	if json.Unmarshal(body, &env) == nil && env.into(refusal) {
		return refusal
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(body, result); err != nil {
		return &ProtocolError{"unexpected answer to " + tool, err}
	}
	return nil
}

// Plugin is a loaded plugin of the relay, as kernel.introspection.plugins lists it.
type Plugin struct {
	Name      string `json:"name"`
	Version   string `json:"version"`
	Tenant    string `json:"tenant,omitempty"`
	State     string `json:"state"`
	InFlight  int64  `json:"in_flight"`
	Calls     int64  `json:"calls"`  // passed to the plugin, reads included
	Errors    int64  `json:"errors"` // of those, failed
	Panics    int64  `json:"panics"`
	Timeouts  int64  `json:"timeouts"`
	Tools     int    `json:"tools"`
	Resources int    `json:"resources"`
	Sandbox   string `json:"sandbox,omitempty"`    // of a program that is a plugin
	Failures  int    `json:"failures,omitempty"`   // how often that program ended or did not start
	LastError string `json:"last_error,omitempty"` // why it was down the last time
	// Notes say what else an operator should know, such as why a tool is withdrawn.
	Notes []string `json:"notes,omitempty"`
}

// Plugins lists the loaded plugins, connected boards included: every board is a plugin. It
// needs the scope kernel:admin, as LoadPlugin and UnloadPlugin do.
func (c *Client) Plugins(ctx context.Context) ([]Plugin, error) {
	all := []Plugin{}
	args := map[string]any{"limit": 200}
	for after := ""; ; {
		var page struct {
			Plugins []Plugin `json:"plugins"`
			Next    string   `json:"next"`
		}
		if err := c.call(ctx, "kernel.introspection.plugins", args, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Plugins...)
		if page.Next == "" || page.Next <= after {
			return all, nil
		}
		after = page.Next
		args["after"] = after
	}
}

// LoadPlugin starts a plugin of the relay's plugin directory.
func (c *Client) LoadPlugin(ctx context.Context, name string) error {
	return c.call(ctx, "kernel.plugin.load", map[string]any{"name": name}, nil)
}

// ReloadPlugin replaces a plugin by the version that its folder has now. If that one does not pass its
// checks, the running one stays and the error says why.
func (c *Client) ReloadPlugin(ctx context.Context, name string) error {
	return c.call(ctx, "kernel.plugin.reload", map[string]any{"name": name}, nil)
}

// UnloadPlugin stops a plugin: NAME or NAME@VERSION.
func (c *Client) UnloadPlugin(ctx context.Context, name string) error {
	return c.call(ctx, "kernel.plugin.unload", map[string]any{"name": name}, nil)
}
