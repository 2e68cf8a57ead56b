package relay

import (
	"encoding/json"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
	"agentctl/relay/storage"
	"agentctl/strictjson"
)

// What the control plane can change of the HTTP surface while the relay serves, and the problems
// that kernel.health.get and the status report. Changes last until the relay ends: the next start
// begins with the options.

// Names of the endpoints that the control plane can disable; it calls them transports.
const (
	endpointHTTP = "http" // POST /mcp/tools/call
	endpointMCP  = "mcp"  // /mcp
	endpointLink = "link" // device links; disabling it leaves open links alone
)

// endpoints holds the settings of the endpoints that change at run time. Requests read
// them without a lock; mu keeps two changes from disabling both http and mcp.
type endpoints struct {
	mu              sync.Mutex  // serializes changes
	http, mcp, link atomic.Bool // enabled
	streamQuota     atomic.Int64
	enforceQuota    atomic.Bool
}

// init enables all endpoints and takes the quota from the options.
func (e *endpoints) init(o *Options) {
	for _, enabled := range []*atomic.Bool{&e.http, &e.mcp, &e.link} {
		enabled.Store(true)
	}
	e.streamQuota.Store(int64(o.StreamQuota))
	e.enforceQuota.Store(o.EnforceQuota)
}

// gate serves a route while its endpoint is enabled. Requests and links that it let through
// before continue: disabling stops new work only.
func (r *Relay) gate(enabled *atomic.Bool, h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !enabled.Load() {
			r.fail(w, req, http.StatusServiceUnavailable, manifest.Internal, "the operator has disabled this endpoint")
			return
		}
		h(w, req)
	})
}

// transports shows and changes the endpoints for the control plane.
type transports struct{ r *Relay }

var _ control.Transports = transports{}

// endpointConfig is the configuration of one endpoint; Configure leaves absent members as
// they are.
type endpointConfig struct {
	Enabled      *bool  `json:"enabled,omitempty"`
	StreamQuota  *int64 `json:"stream_quota,omitempty"` // http only, as the next
	EnforceQuota *bool  `json:"enforce_stream_quota,omitempty"`
}

// Configure implements control.Transports. It refuses to disable the last endpoint that
// leads to the control plane: nobody could enable it again without a restart.
func (t transports) Configure(name string, raw json.RawMessage) error {
	e := &t.r.endpoints
	bad := func(msg string) error { return manifest.E(manifest.BadRequest, msg) }
	var c endpointConfig
	if err := strictjson.Unmarshal(raw, &c); err != nil {
		return bad("config takes enabled, and for http stream_quota and enforce_stream_quota")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var enabled, other *atomic.Bool // other also leads to the control plane; nil: no matter
	switch name {
	case endpointHTTP:
		enabled, other = &e.http, &e.mcp
	case endpointMCP:
		enabled, other = &e.mcp, &e.http
	case endpointLink:
		enabled = &e.link
	default:
		return bad("only http, mcp and link can be configured; kernel.transport.list shows all transports")
	}
	switch {
	case name != endpointHTTP && (c.StreamQuota != nil || c.EnforceQuota != nil):
		return bad("only http has stream_quota and enforce_stream_quota")
	case c.StreamQuota != nil && (*c.StreamQuota < 0 || *c.StreamQuota > 1_000_000):
		return bad("stream_quota must be 0 (none) to 1000000")
	case c.Enabled != nil && !*c.Enabled && other != nil && !other.Load():
		return bad("this is the last endpoint that reaches the control plane; enable the other one first")
	}
	if c.Enabled != nil {
		enabled.Store(*c.Enabled)
	}
	if c.StreamQuota != nil {
		e.streamQuota.Store(*c.StreamQuota)
	}
	if c.EnforceQuota != nil {
		e.enforceQuota.Store(*c.EnforceQuota)
	}
	return nil
}

// healthProblems lists what is wrong at the moment, for the control plane. Each is a
// sentence for an operator, with where to look; an empty list means healthy.
func (r *Relay) healthProblems() []string {
	var problems []string
	s := r.eventStats()
	for _, h := range r.storage.Health() {
		for _, p := range h.Problems {
			problems = append(problems, storage.Describe(h.Store, p, time.Now()))
		}
	}
	for _, p := range []struct {
		found bool
		text  string
	}{
		{s.LastError != "", "the event log cannot be written: see the relay's log and the disk of its state directory"},
		{s.RetentionError != "", "retention of the event log fails: see the relay's log"},
	} {
		if p.found {
			problems = append(problems, p.text)
		}
	}
	for _, p := range r.processes.List() {
		if p.State != "up" {
			problems = append(problems, "the process of plugin "+p.Name+" is down: see the relay's log")
		}
		if p.Sandbox == process.SandboxOff {
			problems = append(problems, "plugin "+p.Name+" runs without a sandbox and can read the relay's keys (--plugin-sandbox off)")
		}
	}
	return problems
}
