package test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
)

// schema compiles a schema as the relay serves it.
func (r *testRelay) schema(name string) *jsonschema.Schema {
	r.t.Helper()
	s, err := r.schemaCompiler().Compile("mcp://schemas/" + name)
	if err != nil {
		r.t.Fatalf("schema %s: %v", name, err)
	}
	return s
}

// schemaCompiler knows the schemas that the relay serves and no others.
func (r *testRelay) schemaCompiler() *jsonschema.Compiler {
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(schemaLoader{r})
	return c
}

// schemaLoader loads schemas from the relay's registry.
type schemaLoader struct{ r *testRelay }

func (l schemaLoader) Load(ref string) (any, error) {
	name, ok := strings.CutPrefix(ref, "mcp://schemas/")
	if !ok {
		return nil, fmt.Errorf("a reference to %s", ref)
	}
	a := l.r.do(http.MethodGet, "/schemas/"+name, "", nil)
	if a.status != http.StatusOK {
		return nil, fmt.Errorf("%s: %d %s", ref, a.status, a.body)
	}
	return jsonschema.UnmarshalJSON(strings.NewReader(a.body))
}

func decoded(t testing.TB, body string) any {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return v
}

const draft2020 = "https://json-schema.org/draft/2020-12/schema"

// The registry: an index, and every schema under its reference, in draft 2020-12, cacheable
// for ever. RFC-0005 §3, §4 and RFC-0009 §4, §5.1 name four of them.
func TestSchemas(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	var index struct {
		Schemas []struct{ Ref, URL string }
	}
	a := r.do(http.MethodGet, "/schemas/", "", nil)
	if err := json.Unmarshal([]byte(a.body), &index); err != nil || a.status != http.StatusOK || len(index.Schemas) != len(manifest.SchemaNames()) {
		t.Fatalf("index: %d %s, %v; want %d schemas", a.status, a.body, err, len(manifest.SchemaNames()))
	}
	metaSchema, err := jsonschema.NewCompiler().Compile(draft2020)
	if err != nil {
		t.Fatal(err)
	}
	compiler := r.schemaCompiler()
	listed := make(map[string]bool)
	for _, row := range index.Schemas {
		name, ok := strings.CutPrefix(row.Ref, "mcp://schemas/")
		if !ok || row.URL != r.url+"/schemas/"+name {
			t.Errorf("the index has %s at %s", row.Ref, row.URL)
		}
		listed[name] = true
		a := r.do(http.MethodGet, "/schemas/"+name, "", nil)
		if a.status != http.StatusOK || a.header.Get("Content-Type") != "application/schema+json" ||
			!strings.Contains(a.header.Get("Cache-Control"), "max-age=86400") {
			t.Errorf("%s: %d %v", name, a.status, a.header)
		}
		var head struct {
			Schema string `json:"$schema"`
			ID     string `json:"$id"`
		}
		if err := json.Unmarshal([]byte(a.body), &head); err != nil || head.ID != row.Ref || head.Schema != draft2020 {
			t.Errorf("%s: $id %s, $schema %s, %v", name, head.ID, head.Schema, err)
		}
		if err := metaSchema.Validate(decoded(t, a.body)); err != nil {
			t.Errorf("%s is not a schema: %v", name, err)
		}
		if _, err := compiler.Compile(row.Ref); err != nil {
			t.Errorf("%s does not compile: %v", name, err)
		}
	}
	for _, name := range []string{"system.echo.invoke.input@1.0.0", "system.echo.invoke.output@1.0.0",
		"system.metrics.subscribe.input@1.0.0", "system.metrics.subscribe.frame@1.0.0"} {
		if !listed[name] {
			t.Errorf("the index lacks %s", name)
		}
	}
	for _, bad := range []string{"system.echo.invoke.input", "system.echo.invoke.input@2.0.0", "..%2f..%2frelay.json", "mcp://schemas/x"} {
		r.wantRefusal(r.do(http.MethodGet, "/schemas/"+bad, "", nil), http.StatusNotFound, manifest.BadRequest)
	}
}
