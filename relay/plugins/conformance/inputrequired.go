package conformance

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"

	"agentctl/relay/kernel"
)

// A tool that needs input works in rounds (SEP-2322). The server keeps nothing between
// them:
//
// 	client  tools/call
// 	server  result with inputRequests by name, and a requestState
// 	client  tools/call again, with inputResponses by name and the same requestState
// 	server  the final result, or the next inputRequests
//
// The requestState passes through the client, so the fixtures that rely on it sign it. Its
// signature covers the tool's name and is valid as long as this process.

// inputRequiredTools are the tools of protocol version 2026-07-28. They ask for input by
// their result (SEP-2322), or test the client's capabilities. Each one finds out
// by the responses and the state of the request which round it is in.
var inputRequiredTools = []fixture{
	{"test_missing_capability", "Needs a client with sampling.", "", missingCapability},
	{"test_input_required_result_elicitation", "Asks for a name.", "", askName},
	{"test_input_required_result_sampling", "Asks the client's model for a capital.", "", askModel},
	{"test_input_required_result_list_roots", "Asks for the client's roots.", "", askRoots},
	{"test_input_required_result_request_state", "Asks for a confirmation and keeps a signed state.", "", confirm},
	{"test_input_required_result_tampered_state", "Refuses a state that it did not sign.", "", confirm},
	{"test_input_required_result_multiple_inputs", "Asks for three things at once.", "", askAll},
	{"test_input_required_result_multi_round", "Asks twice.", "", askTwice},
	{"test_input_required_result_capabilities", "Asks only for what the client can give.", "", askSupported},
}

// Error codes of JSON-RPC and MCP.
const (
	codeInvalidParams     = -32602
	codeMissingCapability = -32021
)

// form is an input request for one field of a form, which is required. kind is the field's JSON
// Schema type.
func form(message, field, kind string) object {
	return object{"method": "elicitation/create", "params": object{
		"mode": "form", "message": message,
		"requestedSchema": object{"type": "object", "properties": object{field: object{"type": kind}}, "required": []string{field}},
	}}
}

// model is an input request for the client's model.
func model(question string) object {
	return object{"method": "sampling/createMessage", "params": object{
		"messages": []object{{"role": "user", "content": textBlock("%s", question)}}, "maxTokens": 100,
	}}
}

// roots is an input request for the client's roots.
func roots() object { return object{"method": "roots/list", "params": object{}} }

// ask is a result that asks for input. inputs maps names, which the client repeats in its
// responses, to requests. An empty state is left out.
func ask(state string, inputs object) *kernel.Result {
	return &kernel.Result{InputRequests: encode(inputs), RequestState: state}
}

// inputs are the responses in a repeated call, by name. The struct has the fields of all three
// kinds of responses: Action and Content of a form, Roots of a list of roots, Role and Content
// of a model's message.
type inputs map[string]struct {
	Action  string          `json:"action"`
	Content json.RawMessage `json:"content"`
	Roots   []any           `json:"roots"`
	Role    string          `json:"role"`
}

// answers returns the responses of a request; nil in the first round, and for malformed ones,
// which make the tool ask again.
func answers(r *kernel.Request) inputs {
	var in inputs
	if json.Unmarshal(r.InputResponses, &in) != nil {
		return nil
	}
	return in
}

// accepted returns a field of an accepted form; "" when there is none, also when the user
// declined or canceled. For a boolean it returns "yes", whatever the value.
func (in inputs) accepted(name, field string) string {
	a, ok := in[name]
	if !ok || a.Action != "accept" {
		return ""
	}
	var fields map[string]any
	if json.Unmarshal(a.Content, &fields) != nil {
		return ""
	}
	switch v := fields[field].(type) {
	case string:
		return v
	case bool:
		return "yes"
	}
	return ""
}

// modelText returns the text of a model's answer; "" when there is none.
func (in inputs) modelText(name string) string {
	a, ok := in[name]
	if !ok || a.Role == "" {
		return ""
	}
	var block struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(a.Content, &block) != nil {
		return ""
	}
	return block.Text
}

// missingCapability answers with the error that MCP defines for a client without a capability
// that the tool needs.
func missingCapability(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if hasCapability(r, "sampling") {
		return texts("The client can sample."), nil
	}
	return &kernel.Result{RPCError: &kernel.RPCError{
		Code: codeMissingCapability, Message: "this tool needs the client's sampling capability",
		Data: encode(object{"requiredCapabilities": object{"sampling": object{}}}),
	}}, nil
}

// hasCapability reports whether the client declared a capability. It relies on r.Session, which
// calls through the MCP endpoint have.
func hasCapability(r *kernel.Request, capability string) bool {
	var caps map[string]json.RawMessage
	_ = json.Unmarshal(r.Session.Capabilities(), &caps)
	return caps[capability] != nil
}

// askName asks for a form and greets the user in the second round.
func askName(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if name := answers(r).accepted("user_name", "name"); name != "" {
		return texts("Hello, %s!", name), nil
	}
	return ask("", object{"user_name": form("What is your name?", "name", "string")}), nil
}

// askModel asks the client's model.
func askModel(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if text := answers(r).modelText("capital_question"); text != "" {
		return texts("The model says: %s", text), nil
	}
	return ask("", object{"capital_question": model("What is the capital of France?")}), nil
}

// askRoots asks for the client's roots. An empty list is an answer.
func askRoots(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if a, ok := answers(r)["client_roots"]; ok && a.Roots != nil {
		return texts("The client has %d roots: %s", len(a.Roots), encode(a.Roots)), nil
	}
	return ask("", object{"client_roots": roots()}), nil
}

// sign returns a request state with a MAC over it and the tool's name: both parts in base64url,
// joined by a dot. The state is not encrypted, so the client can read it.
func (p *Plugin) sign(tool, state string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(state)) + "." + base64.RawURLEncoding.EncodeToString(p.mac(tool, state))
}

// mac binds a state to its tool, so that the state of one tool is not valid for another. The NUL
// separates the two: no tool of this plugin has one in its name.
func (p *Plugin) mac(tool, state string) []byte {
	h := hmac.New(sha256.New, p.key[:])
	h.Write([]byte(tool + "\x00" + state))
	return h.Sum(nil)
}

// verify returns the state that sign signed for the tool. It compares MACs in constant time. A
// replayed state is accepted: the fixtures have no effects that a replay could repeat.
func (p *Plugin) verify(tool, signed string) (state string, ok bool) {
	a, b, _ := strings.Cut(signed, ".")
	raw, err := base64.RawURLEncoding.DecodeString(a)
	if err != nil {
		return "", false
	}
	mac, err := base64.RawURLEncoding.DecodeString(b)
	if err != nil || !hmac.Equal(mac, p.mac(tool, string(raw))) {
		return "", false
	}
	return string(raw), true
}

// badState refuses a state that was changed on its way.
var badState = &kernel.Result{RPCError: &kernel.RPCError{Code: codeInvalidParams, Message: "the requestState is not one of this server's"}}

// confirm asks for a confirmation and refuses a state that it did not sign.
func confirm(_ context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if r.RequestState != "" {
		if _, ok := p.verify(r.Tool, r.RequestState); !ok {
			return badState, nil
		}
		if answers(r).accepted("confirm", "ok") != "" {
			return texts("state-ok: the state came back unchanged and the user has confirmed."), nil
		}
	}
	return ask(p.sign(r.Tool, "confirm"), object{"confirm": form("Please confirm", "ok", "boolean")}), nil
}

// askAll asks for three inputs in one round.
func askAll(_ context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	in := answers(r)
	if name, hello := in.accepted("user_name", "name"), in.modelText("greeting"); name != "" && hello != "" && in["client_roots"].Roots != nil {
		if _, ok := p.verify(r.Tool, r.RequestState); !ok {
			return badState, nil
		}
		return texts("%s %s, you have %d roots.", hello, name, len(in["client_roots"].Roots)), nil
	}
	return ask(p.sign(r.Tool, "all"), object{
		"user_name":    form("What is your name?", "name", "string"),
		"greeting":     model("Generate a greeting"),
		"client_roots": roots(),
	}), nil
}

// askTwice asks for a name, then for a color. The state says which answer is expected:
//
//	""           no round was made: ask for the name, with the state "first"
//	"first"      a name is expected: ask for the color, with the state "name:" + name
//	"name:NAME"  a color is expected: answer
//
// An answer that is missing, or not the one that the state expects, starts over.
func askTwice(_ context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	in := answers(r)
	state := ""
	if r.RequestState != "" {
		var ok bool
		if state, ok = p.verify(r.Tool, r.RequestState); !ok {
			return badState, nil
		}
	}
	if name, ok := strings.CutPrefix(state, "name:"); ok {
		if colour := in.accepted("step2", "color"); colour != "" {
			return texts("%s likes %s.", name, colour), nil
		}
	}
	if name := in.accepted("step1", "name"); name != "" && state == "first" {
		return ask(p.sign(r.Tool, "name:"+name), object{"step2": form("Step 2: What is your favorite color?", "color", "string")}), nil
	}
	return ask(p.sign(r.Tool, "first"), object{"step1": form("Step 1: What is your name?", "name", "string")}), nil
}

// askSupported asks only for inputs whose capability the client declared.
func askSupported(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	if len(answers(r)) > 0 {
		return texts("The client gave what it can give."), nil
	}
	want := object{}
	if hasCapability(r, "elicitation") {
		want["user_name"] = form("What is your name?", "name", "string")
	}
	if hasCapability(r, "sampling") {
		want["greeting"] = model("Generate a short greeting")
	}
	if hasCapability(r, "roots") {
		want["client_roots"] = roots()
	}
	if len(want) == 0 {
		return texts("The client can give nothing."), nil
	}
	return ask("", want), nil
}
