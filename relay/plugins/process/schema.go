package process

import (
	"bytes"
	"encoding/json"
	"errors"

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
	return func(args []byte) ([]byte, error) {
		if validate(s, args) != nil {
			return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not match the tool's schema")
		}
		return args, nil
	}, nil
}

// resultCheck returns the CheckResult of a tool with this outputSchema.
func resultCheck(raw json.RawMessage) (func([]byte) error, error) {
	s, err := compile(raw)
	if err != nil || s == nil {
		return nil, err
	}
	return func(result []byte) error { return validate(s, result) }, nil
}
