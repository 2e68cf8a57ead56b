package stages_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// TestRedactKeepsTheSchema: what a client gets of a tool with an output schema matches it, or is an
// error that says so, and has no secret.
func TestRedactKeepsTheSchema(t *testing.T) {
	const object = `{"type":"object","additionalProperties":false,"required":["user","token"],"properties":{"user":{"type":"string"},"token":`
	tests := []struct {
		name, token, answer string
		want                string // the structured content; "": the error envelope
		redacted            string // _meta agentctl/redacted
	}{
		{"a string", `{"type":"string"}`, `{"user":"ann","token":"S3CRET"}`, `{"user":"ann","token":"[redacted]"}`, ``},
		{"any value", `{}`, `{"user":"ann","token":123456}`, `{"user":"ann","token":"[redacted]"}`, ``},
		{"a number", `{"type":"integer"}`, `{"user":"ann","token":123456}`, `{"user":"ann","token":0}`, `["/token"]`},
		{"a boolean", `{"type":"boolean"}`, `{"user":"ann","token":true}`, `{"user":"ann","token":false}`, `["/token"]`},
		{"null or a number", `{"type":["null","number"]}`, `{"user":"ann","token":null}`, `{"user":"ann","token":null}`, `["/token"]`},
		{"an object", `{"type":"object","required":["id"],"properties":{"id":{"type":"number"},"key":{"type":"string"}}}`,
			`{"user":"ann","token":{"id":7,"key":"S3CRET"}}`, `{"user":"ann","token":{"id":0,"key":"[redacted]"}}`, `["/token/id"]`},
		{"an array", `{"type":"array","items":{"type":"number"},"minItems":2}`, `{"user":"ann","token":[1,2]}`, `{"user":"ann","token":[0,0]}`, `["/token/0","/token/1"]`},
		{"a string by a pattern, beside a number", `{"type":"object","properties":{"n":{"type":"number"}}}`, `{"user":"42421","token":{"n":1}}`, `{"user":"[redacted]","token":{"n":0}}`, `["/token/n"]`},
		{"an enum", `{"enum":["S3CRET","other"]}`, `{"user":"ann","token":"S3CRET"}`, ``, ``},
		{"a pattern", `{"type":"string","pattern":"^S3"}`, `{"user":"ann","token":"S3CRET"}`, ``, ``},
		{"a format", `{"type":"string","format":"uuid"}`, `{"user":"ann","token":"0193e5a0-0000-7000-8000-00000000c0de"}`, ``, ``},
		{"a minimum", `{"type":"number","minimum":1}`, `{"user":"ann","token":5}`, ``, ``},
		{"a name", `{"type":"string"}`, `{"user":"ann","token":"x","42421":1}`, ``, ``},
		{"no secret", `{"type":"string"}`, `{"user":"ann", "token":"[redacted]"}`, `{"user":"ann", "token":"[redacted]"}`, ``},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &plugin{name: "p", schema: json.RawMessage(object + tt.token + `}}`)}
			p.call = func(*kernel.Request) (*kernel.Result, error) {
				return &kernel.Result{Structured: json.RawMessage(tt.answer)}, nil
			}
			k, m := newKernel(t, stages.Options{}, p)
			enable(t, m, "redact", `{"fields":["token"],"patterns":["42421"]}`)
			res, err := k.Call(t.Context(), request(agent(), "p.do", `{}`, ""))
			if err != nil {
				t.Fatal(err)
			}
			var meta map[string]json.RawMessage
			_ = json.Unmarshal(res.Meta, &meta)
			if got := string(meta[stages.MetaRedacted]); got != tt.redacted {
				t.Errorf("_meta %s: %s, want %s", stages.MetaRedacted, got, tt.redacted)
			}
			if tt.want == "" {
				if !res.IsError || !strings.Contains(string(res.Structured), `"reason":"redact"`) || len(res.Content) != 2 || !strings.Contains(string(res.Content[1]), "[redacted]") {
					t.Errorf("got %s %s", res.Structured, res.Content)
				}
			} else if string(res.Structured) != tt.want || res.IsError || !valid(t, string(p.schema), string(res.Structured)) {
				t.Errorf("got %s, want %s", res.Structured, tt.want)
			}
			if all := string(res.Structured) + string(res.Meta) + string(encode(t, res.Content)); strings.Contains(all, "S3CRET") || strings.Contains(all, "123456") || strings.Contains(all, "42421") || strings.Contains(all, "c0de") {
				t.Errorf("the secret is in %s", all)
			}
		})
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// valid validates a document with an independent reading of the schema.
func valid(t *testing.T, schema, doc string) bool {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	s, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.AddResource("s.json", s); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile("s.json")
	if err != nil {
		t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	return compiled.Validate(v) == nil
}
