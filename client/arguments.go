package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"agentctl/manifest"
)

// ParseArguments makes the arguments of a tool of words of the form key=value. A value that
// is JSON is passed as such, any other as a string, unless the type of the argument is known:
//
//   - A string is a string also when it looks like a number.
//   - An array may be written as JSON, or as its elements with commas between them.
func ParseArguments(words []string, types map[string]manifest.ArgumentType) (json.RawMessage, error) {
	m := make(map[string]json.RawMessage, len(words))
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("argument %q is not of the form key=value", w)
		}
		if _, twice := m[k]; twice {
			return nil, fmt.Errorf("argument %q is given twice", k)
		}
		m[k] = argument(v, types[k])
	}
	return json.Marshal(m)
}

// argument is a value as JSON.
func argument(v string, t manifest.ArgumentType) json.RawMessage {
	data := jsonOrString([]byte(v))
	switch {
	case t.Type == "string" && data[0] != '"':
		return text(v)
	case t.Type == "array" && bytes.TrimSpace(data)[0] != '[':
		elements := []json.RawMessage{}
		if json.Valid([]byte(v)) { // one element that may have commas
			elements = append(elements, argument(v, manifest.ArgumentType{Type: t.Items}))
		} else if v != "" {
			for part := range strings.SplitSeq(v, ",") {
				elements = append(elements, argument(part, manifest.ArgumentType{Type: t.Items}))
			}
		}
		list, _ := json.Marshal(elements) // cannot fail: JSON
		return list
	}
	return data
}

// text is a JSON string.
func text(v string) json.RawMessage {
	data, _ := json.Marshal(v) // cannot fail: a string
	return data
}

// maxToolPages bounds the pages of tools that ToolArguments reads.
const maxToolPages = 5

// ToolArguments asks the relay for the types of the arguments of a tool that is not a board's, by
// its input schema. nil, without an error: the relay lists no such tool for the token.
func (c *Client) ToolArguments(ctx context.Context, tool string) (map[string]manifest.ArgumentType, error) {
	plugin, _, ok := strings.Cut(tool, ".")
	if !ok {
		return nil, nil
	}
	cursor := ""
	for range maxToolPages {
		page, err := c.listTools(ctx, plugin, cursor)
		if err != nil {
			return nil, err
		}
		for i := range page.Tools {
			if page.Tools[i].Name == tool {
				return argumentTypes(page.Tools[i].InputSchema), nil
			}
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	return nil, nil
}

// CheckToolset asks the relay whether it knows all words of a toolset: its plugins are words too. An
// unknown word is an *Error with status 400, whose message has the words that the token may use.
func (c *Client) CheckToolset(ctx context.Context, toolset string) error {
	_, err := c.listTools(ctx, toolset, "")
	return err
}

// mcpVersion is the version of MCP whose requests need no session.
const mcpVersion = "2026-07-28"

// toolPage is a page of the answer to tools/list.
type toolPage struct {
	Tools []struct {
		Name        string          `json:"name"`
		InputSchema json.RawMessage `json:"inputSchema"`
	} `json:"tools"`
	NextCursor string `json:"nextCursor"`
}

// listTools requests one page of the tools of a toolset. A token that may use no tool of a plugin is
// refused as if the relay did not have it.
func (c *Client) listTools(ctx context.Context, toolset, cursor string) (*toolPage, error) {
	const method = "tools/list"
	params := map[string]any{"_meta": map[string]any{
		"io.modelcontextprotocol/protocolVersion":    mcpVersion,
		"io.modelcontextprotocol/clientInfo":         map[string]string{"name": "agentctl", "version": "1"},
		"io.modelcontextprotocol/clientCapabilities": struct{}{},
	}}
	if cursor != "" {
		params["cursor"] = cursor
	}
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, MCPURL(c.URL(), toolset, false), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("MCP-Protocol-Version", mcpVersion)
	req.Header.Set("Mcp-Method", method)
	resp, err := c.send(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	var answer struct {
		Result toolPage `json:"result"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&answer); err != nil {
		return nil, &ProtocolError{"unexpected answer to " + method, err}
	}
	return &answer.Result, nil
}

// argumentTypes reads the types of the properties of an input schema. A type that is not stated
// plainly, as behind $ref or anyOf, is not known.
func argumentTypes(schema json.RawMessage) map[string]manifest.ArgumentType {
	var object struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	if json.Unmarshal(schema, &object) != nil {
		return nil
	}
	types := make(map[string]manifest.ArgumentType, len(object.Properties))
	for name, property := range object.Properties {
		var p struct {
			Type  json.RawMessage
			Items json.RawMessage
		}
		var items struct{ Type json.RawMessage }
		if json.Unmarshal(property, &p) == nil {
			_ = json.Unmarshal(p.Items, &items) // true and false state no type
		}
		types[name] = manifest.ArgumentType{Type: typeName(p.Type), Items: typeName(items.Type)}
	}
	return types
}

// typeName returns a type of JSON Schema: a string, or the only one beside "null" of an array.
func typeName(raw json.RawMessage) (name string) {
	if json.Unmarshal(raw, &name) == nil {
		return name
	}
	var names []string
	_ = json.Unmarshal(raw, &names)
	for _, n := range names {
		switch {
		case n == "null":
		case name != "":
			return ""
		default:
			name = n
		}
	}
	return name
}
