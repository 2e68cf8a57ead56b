package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
)

// Schemas of plugins are JSON Schema 2020-12 unless they name another draft. Arguments are
// validated before the plugin sees them, results before the client does. A schema may refer
// to its own parts only.

// noLoader refuses every reference to another document: a plugin could otherwise make the
// relay read files or fetch URLs.
type noLoader struct{}

// Load implements jsonschema.URLLoader.
func (noLoader) Load(string) (any, error) {
	return nil, errors.New("a plugin's schema may refer to itself only")
}

// compile compiles a schema of a plugin; nil for none. It runs when a manifest
// is read, and not for each call.
func compile(raw json.RawMessage) (*jsonschema.Schema, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	if err := c.AddResource("plugin.json", doc); err != nil {
		return nil, err
	}
	return c.Compile("plugin.json")
}

// validate validates JSON against a schema. Its error quotes neither.
func validate(s *jsonschema.Schema, data []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil || s.Validate(v) != nil {
		return errInvalid
	}
	return nil
}

// errInvalid quotes nothing, since arguments and results may hold secrets.
var errInvalid = errors.New("does not match the schema")

// argumentCheck returns the CheckArguments of a tool with this inputSchema.
func argumentCheck(raw json.RawMessage) (func([]byte) ([]byte, error), error) {
	s, err := compile(raw)
	if err != nil || s == nil {
		return nil, err
	}
	var in inputSchema
	_ = json.Unmarshal(raw, &in) // it compiled, so it is an object or a boolean
	return func(args []byte) ([]byte, error) {
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(args))
		if err == nil {
			err = s.Validate(v)
		}
		if err != nil {
			return nil, manifest.E(manifest.ManifestInvalid, in.explain(v, err))
		}
		return args, nil
	}, nil
}

// inputSchema is the part of an input schema that explain needs.
type inputSchema struct {
	Properties map[string]json.RawMessage `json:"properties"`
	Required   []string                   `json:"required"`
}

// maxExplained bounds the schema of an argument in a message, bytes.
const maxExplained = 200

// explain says which argument is wrong and what its schema is. It has words of the plugin's schema
// only, which the operator installed, and none of the call.
func (in *inputSchema) explain(args any, err error) string {
	given, _ := args.(map[string]any)
	for _, name := range in.Required {
		if _, ok := given[name]; !ok && isPrintable(name) {
			return "argument " + name + ": missing"
		}
	}
	for cause, ok := errors.AsType[*jsonschema.ValidationError](err); ok && cause != nil; {
		if len(cause.InstanceLocation) > 0 {
			name := cause.InstanceLocation[0]
			if schema, known := in.Properties[name]; known && isPrintable(name) && len(schema) <= maxExplained && isPrintable(string(schema)) {
				return "argument " + name + ": must fit " + string(schema)
			}
		}
		if len(cause.Causes) == 0 {
			break
		}
		cause = cause.Causes[0]
	}
	return "the arguments do not match the tool's schema; tools/list shows it"
}

// isPrintable reports whether s may be part of an error: printable ASCII.
func isPrintable(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// resultCheck returns the CheckResult of a tool with this outputSchema.
func resultCheck(raw json.RawMessage) (func([]byte) error, error) {
	s, err := compile(raw)
	if err != nil || s == nil {
		return nil, err
	}
	return func(result []byte) error { return validate(s, result) }, nil
}
