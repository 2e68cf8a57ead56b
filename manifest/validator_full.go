//go:build !agentctl_omit_relay

package manifest

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// compile makes the validator of a registered schema with santhosh-tekuri/jsonschema. The
// library's default loader follows file:// and quotes the file in its error, so it gets one
// that refuses everything: devices send names of schemas, never schemas.
func compile(all map[string]*schema, ref string) (validator, error) {
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	for r, s := range all {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(s.json()))
		if err != nil {
			return nil, fmt.Errorf("schema %s: %w", r, err)
		}
		if err := c.AddResource(r, doc); err != nil {
			return nil, fmt.Errorf("schema %s: %w", r, err)
		}
	}
	s, err := c.Compile(ref)
	if err != nil {
		return nil, err
	}
	return s.Validate, nil
}

// noLoader refuses to load a schema from elsewhere: a $ref must not make the relay open a file
// or a connection.
type noLoader struct{}

func (noLoader) Load(string) (any, error) {
	return nil, errors.New("schemas are only those of this program")
}
