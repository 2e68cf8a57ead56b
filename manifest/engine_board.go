//go:build agentctl_omit_relay

package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"

	"github.com/google/jsonschema-go/jsonschema"
)

// compile makes the judge of a registered schema with google/jsonschema-go, which costs
// a board less at start than the full build's library. References are resolved inside
// the registry and nowhere else.
func compile(all map[string]*schema, ref string) (judge, error) {
	s, err := parseSchema(all, ref)
	if err != nil {
		return nil, err
	}
	r, err := s.Resolve(&jsonschema.ResolveOptions{
		Loader: func(u *url.URL) (*jsonschema.Schema, error) { return parseSchema(all, u.String()) },
	})
	if err != nil {
		return nil, err
	}
	return r.Validate, nil
}

func parseSchema(all map[string]*schema, ref string) (*jsonschema.Schema, error) {
	s, ok := all[ref]
	if !ok {
		return nil, errors.New("schemas are only those of this program")
	}
	v := new(jsonschema.Schema)
	if err := json.Unmarshal(s.json(), v); err != nil {
		return nil, fmt.Errorf("schema %s: %w", ref, err)
	}
	return v, nil
}
