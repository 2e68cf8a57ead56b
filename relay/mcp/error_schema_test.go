package mcp

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
)

// fits compiles a schema and returns a validator.
func fits(t *testing.T, schema []byte) func(value string) bool {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		t.Fatalf("%v: %s", err, schema)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("mem:s", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("mem:s")
	if err != nil {
		t.Fatalf("%v: %s", err, schema)
	}
	return func(value string) bool {
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(value)))
		if err != nil {
			t.Fatal(err)
		}
		return s.Validate(v) == nil
	}
}

// What a client sees as a tool's output schema admits the tool's answers and failures, and
// nothing else.
func TestWithErrorSchema(t *testing.T) {
	const failure = `{"error":{"code":"E_NODE_OFFLINE","message":"the device is not connected","retryable":true,"trace_id":"x","details":{"reason":"offline"}}}`
	echo, ok := manifest.Schema("mcp://schemas/system.echo.invoke.output@1.0.0")
	if !ok {
		t.Fatal("echo has no output schema")
	}
	const answer = `{"message":"hi","received_at_ms":1700000000001,"node_id":"01m7w9a4xezy4j02j5sv65x8ws"}`
	tests := []struct {
		name, schema string
		good, bad    []string
		root         string // a property at the root
	}{
		{"echo", string(echo), []string{answer}, []string{`{}`, `{"message":"hi"}`, `{"x":1}`, answer[:len(answer)-1] + `,"error":{"code":"E","message":"m"}}`}, "received_at_ms"},
		{"nothing required", `{"type":"object","properties":{"n":{"type":"integer"}},"additionalProperties":false}`, []string{`{}`, `{"n":1}`}, []string{`{"n":"1"}`, `{"m":1}`}, "n"},
		{"no properties", `{"type":"object","required":["n"]}`, []string{`{"n":1}`}, []string{`{}`}, ""},
		{"definitions", `{"type":"object","anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/definitions/b"}],"$defs":{"a":{"required":["a"],"properties":{"a":{"$ref":"#/$defs/n"}}},"n":{"type":"number"}},"definitions":{"b":{"required":["b"]}}}`,
			[]string{`{"a":1}`, `{"b":1}`}, []string{`{}`, `{"a":"1"}`}, ""},
		{"alternatives", `{"type":"object","oneOf":[{"required":["a"]},{"required":["b"]}],"properties":{"a":{},"b":{}}}`, []string{`{"a":1}`, `{"b":1}`}, []string{`{}`, `{"a":1,"b":1}`}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var o schemaCache
			got := o.withErrorSchema([]byte(tt.schema))
			if again := o.withErrorSchema([]byte(tt.schema)); !bytes.Equal(got, again) || len(o.byInput) != 1 {
				t.Errorf("%s, then %s", got, again)
			}
			ok := fits(t, got)
			for _, v := range append(tt.good, failure) {
				if !ok(v) {
					t.Errorf("%s does not fit %s", v, got)
				}
			}
			const packed = `{"agentctl/packed":{"alg":"gzip","bytes":5,"data":"H4sI"}}`
			packedOK := fits(t, withPackedSchema(got))
			for _, v := range append(tt.good, failure, packed) {
				if !packedOK(v) {
					t.Errorf("%s does not fit %s", v, withPackedSchema(got))
				}
			}
			for _, v := range append(tt.bad, `{"error":1}`) {
				if ok(v) || packedOK(v) {
					t.Errorf("%s fits %s", v, got)
				}
			}
			var root struct {
				Type       string
				Properties map[string]any
			}
			if err := json.Unmarshal(got, &root); err != nil || root.Type != "object" || tt.root != "" && root.Properties[tt.root] == nil {
				t.Errorf("at the root: %s", got)
			}
		})
	}
	recursive := []byte(`{"type":"object","anyOf":[{"required":["a"]}],"properties":{"a":{"$ref":"#"}}}`)
	if got := withErrorSchema(recursive); !fits(t, got)(`{"a":{"a":{}}}`) || !fits(t, got)(failure) {
		t.Errorf("a recursive schema became %s", got)
	}
	own := `{"type":"object","properties":{"error":{"type":"string"}}}`
	if got := withErrorSchema([]byte(own)); string(got) != own {
		t.Errorf("a schema that defines error became %s", got)
	}
}
