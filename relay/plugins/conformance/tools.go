package conformance

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"time"

	"agentctl/relay/kernel"
)

// fixed answers with the same blocks every time.
func fixed(blocks ...object) runFunc {
	return func(context.Context, *Plugin, *kernel.Request) (*kernel.Result, error) {
		return content(blocks...), nil
	}
}

// notificationInterval is the time between two notifications that the suite expects.
const notificationInterval = 50 * time.Millisecond

// tools are the fixtures in the order of the suite. init fills them in, since some of them
// read the list.
var tools []fixture

func init() {
	tools = append(tools, plainTools...)
	tools = append(tools, requestingTools...)
	tools = append(tools, inputRequiredTools...)
}

// plainTools need nothing of the client but that it reads notifications.
var plainTools = []fixture{
	{"test_simple_text", "Answers with one text.", "", fixed(textBlock("This is a simple text response for testing."))},
	{"test_image_content", "Answers with an image.", "", fixed(imageBlock())},
	{"test_audio_content", "Answers with a sound.", "", fixed(
		object{"type": "audio", "data": base64.StdEncoding.EncodeToString(silenceWAV), "mimeType": "audio/wav"})},
	{"test_embedded_resource", "Answers with a resource.", "", fixed(
		resourceBlock("test://embedded-resource", "text/plain", "This is an embedded resource content."))},
	{"test_multiple_content_types", "Answers with a text, an image and a resource.", "", fixed(
		textBlock("Multiple content types test:"), imageBlock(),
		resourceBlock("test://mixed-content-resource", "application/json", `{"test":"data","value":123}`))},
	{"test_error_handling", "Fails always.", "", func(context.Context, *Plugin, *kernel.Request) (*kernel.Result, error) {
		return failure("This tool intentionally returns an error for testing"), nil
	}},
	{"test_tool_with_logging", "Logs three messages while it runs.", "", logging},
	{"test_logging_tool", "Logs one message.", "", func(ctx context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
		logMessage(ctx, r, "a message that only a client with a log level gets")
		return texts("Logged once."), nil
	}},
	{"test_tool_with_progress", "Reports its progress three times.", "", progress},
	{"test_streaming_elicitation", "Reports progress and asks for nothing.", "", progress},
	{"json_schema_2020_12_tool", "Has an input schema of the 2020-12 vocabulary.", schema2020, func(_ context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return texts("Called with %s", r.Arguments), nil
	}},
	{"test_trigger_tool_change", "Changes the list of tools.", "", func(_ context.Context, p *Plugin, _ *kernel.Request) (*kernel.Result, error) {
		p.mu.Lock()
		p.hasTransientTool = !p.hasTransientTool
		p.mu.Unlock()
		if err := p.k.Load(p, true); err != nil {
			return nil, err
		}
		return texts("The list of tools has changed."), nil
	}},
	{"test_trigger_prompt_change", "Changes the list of prompts.", "", func(_ context.Context, p *Plugin, _ *kernel.Request) (*kernel.Result, error) {
		p.mu.Lock()
		p.hasTransientPrompt = !p.hasTransientPrompt
		p.mu.Unlock()
		p.k.NotifyChange("", kernel.Change{Prompts: true})
		return texts("The list of prompts has changed."), nil
	}},
}

// schema2020 is the input schema of json_schema_2020_12_tool. It uses keywords of the 2020-12
// vocabulary, such as $defs, $anchor, allOf and if, which must reach the client unchanged.
const schema2020 = `{
	"$schema": "https://json-schema.org/draft/2020-12/schema",
	"type": "object",
	"$defs": {"address": {"$anchor": "addressDef", "type": "object",
		"properties": {"street": {"type": "string"}, "city": {"type": "string"}}}},
	"properties": {
		"name": {"type": "string"},
		"address": {"$ref": "#/$defs/address"},
		"contactMethod": {"type": "string", "enum": ["phone", "email"]},
		"phone": {"type": "string"},
		"email": {"type": "string"}
	},
	"allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
	"if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
	"then": {"required": ["phone"]},
	"else": {"required": ["email"]},
	"additionalProperties": false
}`

// logMessage sends a log message to the client. It ignores the error: a client that is gone
// needs no log.
func logMessage(ctx context.Context, r *kernel.Request, message string) {
	_ = r.Session.Notify(ctx, "notifications/message", encode(object{"level": "info", "logger": "conformance", "data": message}))
}

// logging sends three log messages, of the level info. The client's log level decides whether
// they arrive: the MCP endpoint drops those below it.
func logging(ctx context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	logMessage(ctx, r, "Tool execution started")
	sleep(ctx, notificationInterval)
	logMessage(ctx, r, "Tool processing data")
	sleep(ctx, notificationInterval)
	logMessage(ctx, r, "Tool execution completed")
	return texts("Three messages were logged."), nil
}

// progress reports progress three times, at 0, 50 and 100 percent.
func progress(ctx context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	for i, done := range []int{0, 50, 100} {
		if i > 0 {
			sleep(ctx, notificationInterval)
		}
		_ = r.Session.Notify(ctx, "notifications/progress", encode(object{"progress": done, "total": 100}))
	}
	return texts("Progress token: %v", r.Session.ProgressToken()), nil
}

// requestingTools are those of protocol versions with sessions. They send requests to the
// client during a call. In a version without sessions Session.Request returns an error, which
// they report as a failed result.
var requestingTools = []fixture{
	{"test_sampling", "Asks the client's model.", `{"type":"object","properties":{"prompt":{"type":"string","description":"what to ask the model"}},"required":["prompt"]}`, sampling},
	{"test_elicitation", "Asks the client's user.", `{"type":"object","properties":{"message":{"type":"string","description":"what to ask the user"}},"required":["message"]}`, elicitation},
	{"test_elicitation_sep1034_defaults", "Asks the user with a default for every kind of value.", "", elicit("Please check these values", defaultsSchema)},
	{"test_elicitation_sep1330_enums", "Asks the user with every form of choice.", "", elicit("Please choose", enumsSchema)},
}

// defaultsSchema has a field with a default of each type (SEP-1034).
const defaultsSchema = `{"type":"object","properties":{
	"name": {"type":"string","description":"a name","default":"John Doe"},
	"age": {"type":"integer","description":"an age","default":30},
	"score": {"type":"number","description":"a score","default":95.5},
	"status": {"type":"string","description":"a status","enum":["active","inactive","pending"],"default":"active"},
	"verified": {"type":"boolean","description":"whether it was verified","default":true}
},"required":[]}`

// enumsSchema has the five forms of a choice (SEP-1330).
const enumsSchema = `{"type":"object","properties":{
	"untitledSingle": {"type":"string","enum":["option1","option2","option3"]},
	"titledSingle": {"type":"string","oneOf":` + titledOptions + `},
	"legacyEnum": {"type":"string","enum":["opt1","opt2","opt3"],"enumNames":["Option One","Option Two","Option Three"]},
	"untitledMulti": {"type":"array","items":{"type":"string","enum":["option1","option2","option3"]}},
	"titledMulti": {"type":"array","items":{"anyOf":` + titledOptions + `}}
},"required":[]}`

// titledOptions is a choice with a title for each value.
const titledOptions = `[{"const":"value1","title":"First Option"},{"const":"value2","title":"Second Option"},{"const":"value3","title":"Third Option"}]`

// userSchema is the form of test_elicitation.
const userSchema = `{"type":"object","properties":{
	"username": {"type":"string","description":"User's response"},
	"email": {"type":"string","description":"User's email address"}
},"required":["username","email"]}`

// argument returns a string argument; "" when it is missing or of another type.
func argument(r *kernel.Request, name string) string {
	var args map[string]any
	_ = json.Unmarshal(r.Arguments, &args)
	s, _ := args[name].(string)
	return s
}

// sampling asks the client's model and answers with its text.
func sampling(ctx context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
	answer, err := r.Session.Request(ctx, "sampling/createMessage", encode(object{
		"messages":  []object{{"role": "user", "content": textBlock("%s", argument(r, "prompt"))}},
		"maxTokens": 100,
	}))
	if err != nil {
		return failure("The client's model did not answer: %v", err), nil
	}
	var got struct {
		Content struct {
			Text string `json:"text"`
		} `json:"content"`
	}
	if err := json.Unmarshal(answer, &got); err != nil {
		return failure("The client's model answered with something else than one text."), nil
	}
	return texts("LLM response: %s", got.Content.Text), nil
}

// elicitation asks the user with the message of the call.
func elicitation(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	return elicit(argument(r, "message"), userSchema)(ctx, p, r)
}

// elicit asks the user to fill in a form and answers with the result.
func elicit(message, schema string) runFunc {
	return func(ctx context.Context, _ *Plugin, r *kernel.Request) (*kernel.Result, error) {
		form := object{"mode": "form", "message": message, "requestedSchema": json.RawMessage(schema)}
		answer, err := r.Session.Request(ctx, "elicitation/create", encode(form))
		if err != nil {
			return failure("The user was not asked: %v", err), nil
		}
		var got struct {
			Action  string          `json:"action"`
			Content json.RawMessage `json:"content"`
		}
		if err := json.Unmarshal(answer, &got); err != nil {
			return failure("The user's answer is malformed."), nil
		}
		return texts("Elicitation completed: action=%s, content=%s", got.Action, got.Content), nil
	}
}
