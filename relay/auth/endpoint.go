package auth

import (
	"errors"
	"io/fs"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

const (
	endpointFile    = "endpoint.json"
	maxEndpointFile = 4 << 10 // bytes
)

// Endpoint is where clients find the relay, and what else a command on its machine must know of
// it. The relay stores it each time it starts, so that `agentctl invite --state-dir` can print a
// line to paste.
type Endpoint struct {
	URL      string `json:"url"`
	CASHA256 string `json:"ca_sha256,omitempty"` // pin of the relay's own authority; "": it serves another certificate, or none
	// PluginDir is the plugin directory, an absolute path; "": plugins in the state directory.
	PluginDir string `json:"plugin_dir,omitempty"`
}

// SaveEndpoint stores where the relay serves, unless that is stored already.
func (s *Store) SaveEndpoint(e Endpoint) error {
	if before, err := s.Endpoint(); err == nil && before == e {
		return nil
	}
	out, err := json.Marshal(e, jsontext.WithIndent("  "))
	if err != nil {
		return err
	}
	return explain(s.dir.path, s.withFiles(func() error { return s.dir.replace(endpointFile, append(out, '\n')) }))
}

// Endpoint returns where the relay served when it last started; the zero value before its first
// start. A file with other content counts as none: the next start replaces it.
func (s *Store) Endpoint() (Endpoint, error) {
	b, err := s.dir.read(endpointFile, maxEndpointFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Endpoint{}, nil
	}
	if err != nil {
		return Endpoint{}, explain(s.dir.path, err)
	}
	var e Endpoint
	if json.Unmarshal(b, &e) != nil {
		return Endpoint{}, nil
	}
	return e, nil
}
