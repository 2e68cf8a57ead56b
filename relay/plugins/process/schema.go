package process

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
)

// refuse is the loader of schemas: one of a plugin refers to nothing but itself.
type refuse struct{}

func (refuse) Load(string) (any, error) {
	return nil, errors.New("a plugin's schema may refer to itself only")
}

// compile makes a schema of a plugin usable; nil for none.
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
	c.UseLoader(refuse{})
	if err := c.AddResource("plugin.json", doc); err != nil {
		return nil, err
	}
	return c.Compile("plugin.json")
}

// check judges a value by a schema, without quoting either.
func check(s *jsonschema.Schema, raw []byte) bool {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	return err == nil && s.Validate(v) == nil
}

func argumentCheck(raw json.RawMessage) (func([]byte) ([]byte, error), error) {
	s, err := compile(raw)
	if err != nil || s == nil {
		return nil, err
	}
	return func(args []byte) ([]byte, error) {
		if !check(s, args) {
			return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not fit the tool's schema")
		}
		return args, nil
	}, nil
}

func resultCheck(raw json.RawMessage) (func([]byte) error, error) {
	s, err := compile(raw)
	if err != nil || s == nil {
		return nil, err
	}
	return func(result []byte) error {
		if !check(s, result) {
			return errors.New("the plugin's result does not fit its outputSchema")
		}
		return nil
	}, nil
}
