package conformance

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"agentctl/relay/kernel"
)

// Prompts, completion and resource templates are not part of the kernel. The plugin answers
// these MCP methods itself, as a kernel.MethodHandler; the MCP endpoint forwards them.
// Resources with a fixed URI go through the kernel like those of other plugins.

// watchedURI is the resource that changes every 3 seconds.
const watchedURI = "test://watched-resource"

// resources are the fixtures of resources/list. Those of the template are not listed.
var resources = []*kernel.Resource{
	{URI: "test://static-text", Name: "static-text", Description: "A text that never changes.", MIME: "text/plain", Scope: scope},
	{URI: "test://static-binary", Name: "static-binary", Description: "An image that never changes.", MIME: "image/png", Scope: scope},
	{URI: watchedURI, Name: "watched-resource", Description: "A text that changes every 3 seconds.", MIME: "text/plain", Scope: scope, Watchable: true},
}

// Read implements kernel.Reader.
func (p *Plugin) Read(_ context.Context, _ *kernel.Caller, uri string) ([]byte, error) {
	switch uri {
	case "test://static-text":
		return []byte("This is the content of the static text resource."), nil
	case "test://static-binary":
		return pixelPNG, nil
	case watchedURI:
		return []byte("Now: " + time.Now().UTC().Format(time.RFC3339)), nil
	}
	return nil, kernel.ErrNoResource
}

// Watch implements kernel.Watcher. It reports a change every 3 seconds, since the content is
// the time of the reading.
func (p *Plugin) Watch(ctx context.Context, _ string, changed func()) error {
	tick := time.NewTicker(3 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			changed()
		}
	}
}

// Methods implements kernel.MethodHandler.
func (p *Plugin) Methods() []string {
	return []string{"prompts/list", "prompts/get", "completion/complete", "resources/templates/list", "resources/read", "logging/setLevel"}
}

// HandleMethod implements kernel.MethodHandler. resources/read comes here for a URI that no
// plugin lists, such as one of the template. The MCP endpoint itself handles
// logging/setLevel; it is in the list because fixtures do log.
func (p *Plugin) HandleMethod(_ context.Context, _ *kernel.Caller, _ kernel.Session, method string, params json.RawMessage) (json.RawMessage, error) {
	switch method {
	case "prompts/list":
		return p.listPrompts(), nil
	case "prompts/get":
		return getPrompt(params)
	case "completion/complete":
		return encode(object{"completion": object{"values": []string{}, "total": 0, "hasMore": false}}), nil
	case "resources/templates/list":
		return encode(object{"resourceTemplates": []object{{
			"uriTemplate": "test://template/{id}/data", "name": "template",
			"description": "Echoes the id in its URI.", "mimeType": "application/json",
		}}}), nil
	case "resources/read":
		return readTemplate(params)
	}
	return nil, &kernel.RPCError{Code: -32601, Message: "no such method"}
}

// readTemplate reads a resource of the template test://template/{id}/data. The id is one path
// segment and not empty. Any other URI is kernel.ErrNoResource, which the MCP endpoint answers
// as an unknown resource.
func readTemplate(params json.RawMessage) (json.RawMessage, error) {
	var in struct {
		URI string `json:"uri"`
	}
	if err := json.Unmarshal(params, &in); err != nil {
		return nil, &kernel.RPCError{Code: codeInvalidParams, Message: "params are malformed"}
	}
	id, ok := strings.CutPrefix(in.URI, "test://template/")
	if !ok {
		return nil, kernel.ErrNoResource
	}
	if id, ok = strings.CutSuffix(id, "/data"); !ok || id == "" || strings.Contains(id, "/") {
		return nil, kernel.ErrNoResource
	}
	text := encode(struct {
		ID   string `json:"id"`
		Test bool   `json:"templateTest"`
		Data string `json:"data"`
	}{id, true, "Data for ID: " + id})
	return encode(object{"contents": []object{{"uri": in.URI, "mimeType": "application/json", "text": string(text)}}}), nil
}

// prompt is a prompt of the suite. Without messages it asks for input first.
type prompt struct {
	name, about string
	arguments   []string // names; all are required
	messages    func(args map[string]string) []object
}

// prompts are the fixtures of prompts/list, in the order of the suite.
var prompts = []prompt{
	{"test_simple_prompt", "A prompt without arguments.", nil, func(map[string]string) []object {
		return []object{textBlock("This is a simple prompt for testing.")}
	}},
	{"test_prompt_with_arguments", "A prompt with two arguments.", []string{"arg1", "arg2"}, func(a map[string]string) []object {
		return []object{textBlock("Prompt with arguments: arg1='%s', arg2='%s'", a["arg1"], a["arg2"])}
	}},
	{"test_prompt_with_embedded_resource", "A prompt with a resource in it.", []string{"resourceUri"}, func(a map[string]string) []object {
		return []object{resourceBlock(a["resourceUri"], "text/plain", "Embedded resource content for testing."),
			textBlock("Please process the embedded resource above.")}
	}},
	{"test_prompt_with_image", "A prompt with an image in it.", nil, func(map[string]string) []object {
		return []object{imageBlock(), textBlock("Please analyze the image above.")}
	}},
	{"test_input_required_result_prompt", "A prompt that asks for its context first.", nil, nil},
}

// listPrompts answers prompts/list.
func (p *Plugin) listPrompts() json.RawMessage {
	list := make([]object, 0, len(prompts)+1)
	for _, f := range prompts {
		o := object{"name": f.name, "description": f.about}
		var args []object
		for _, a := range f.arguments {
			args = append(args, object{"name": a, "description": "the " + a + " of this prompt", "required": true})
		}
		if args != nil {
			o["arguments"] = args
		}
		list = append(list, o)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hasTransientPrompt {
		list = append(list, object{"name": "test_transient_prompt", "description": "Is in the list after every other test_trigger_prompt_change."})
	}
	return encode(object{"prompts": list})
}

// getPrompt answers prompts/get. A prompt without messages needs an input round (SEP-2322): it
// asks for the context first and has it in inputResponses the second time.
func getPrompt(params json.RawMessage) (json.RawMessage, error) {
	var in struct {
		Name      string            `json:"name"`
		Arguments map[string]string `json:"arguments"`
		Responses inputs            `json:"inputResponses"`
	}
	if err := json.Unmarshal(params, &in); err != nil {
		return nil, &kernel.RPCError{Code: codeInvalidParams, Message: "params are malformed"}
	}
	for _, f := range prompts {
		if f.name != in.Name {
			continue
		}
		for _, a := range f.arguments {
			if _, ok := in.Arguments[a]; !ok {
				return nil, &kernel.RPCError{Code: codeInvalidParams, Message: "the argument " + a + " is missing"}
			}
		}
		if f.messages != nil {
			return promptResult(f.messages(in.Arguments)...), nil
		}
		if c := in.Responses.accepted("user_context", "context"); c != "" {
			return promptResult(textBlock("The context is: %s", c)), nil
		}
		return encode(object{"resultType": "input_required", "inputRequests": object{
			"user_context": form("What context should the prompt use?", "context", "string"),
		}}), nil
	}
	return nil, &kernel.RPCError{Code: codeInvalidParams, Message: "no such prompt"}
}

// promptResult is a prompt of user messages.
func promptResult(blocks ...object) json.RawMessage {
	messages := make([]object, len(blocks))
	for i, b := range blocks {
		messages[i] = object{"role": "user", "content": b}
	}
	return encode(object{"messages": messages})
}
