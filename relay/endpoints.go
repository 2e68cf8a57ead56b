package relay

import (
	"encoding/json"
	"net/http"
	"sync"
	"sync/atomic"

	"agentctl/manifest"
	"agentctl/relay/plugins/control"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// Names of the ways in, as the control plane shows them.
const (
	endpointHTTP = "http" // POST /mcp/tools/call
	endpointMCP  = "mcp"
	endpointLink = "link" // of devices; closing it leaves open links alone
)

// endpoints are what can be changed of the ways in at run time.
type endpoints struct {
	mu              sync.Mutex // of changes
	http, mcp, link atomic.Bool
	streamQuota     atomic.Int64
	enforceQuota    atomic.Bool
}

func (d *endpoints) init(o *Options) {
	d.http.Store(true)
	d.mcp.Store(true)
	d.link.Store(true)
	d.streamQuota.Store(int64(o.StreamQuota))
	d.enforceQuota.Store(o.EnforceQuota)
}

// gate serves a route while its door is open.
func (r *Relay) gate(open *atomic.Bool, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !open.Load() {
			trace, _ := edge.TraceID(req)
			r.writeError(w, http.StatusServiceUnavailable, manifest.E(manifest.Internal, "the operator has closed this way in"), trace)
			return
		}
		h.ServeHTTP(w, req)
	})
}

// maxListedSessions bounds the sessions that the control plane shows.
const maxListedSessions = 200

// transports is the control plane's view of the doors.
type transports struct{ r *Relay }

// endpointConfig is what Configure takes; absent members stay.
type endpointConfig struct {
	Enabled      *bool  `json:"enabled,omitempty"`
	StreamQuota  *int64 `json:"stream_quota,omitempty"` // http only
	EnforceQuota *bool  `json:"enforce_stream_quota,omitempty"`
}

// List implements control.Transports.
func (t transports) List() []control.Transport {
	r, d := t.r, &t.r.endpoints
	quota, enforce := d.streamQuota.Load(), d.enforceQuota.Load()
	listen := ""
	if r.listener != nil {
		listen = r.listener.Addr().String()
	}
	row := func(name string, open bool, sessions int, c endpointConfig) control.Transport {
		c.Enabled = &open
		raw, _ := json.Marshal(c) // plain values
		return control.Transport{Name: name, Listen: listen, Enabled: open, Sessions: sessions, Config: raw}
	}
	m := r.mcp.Stats()
	mcpRow := row(endpointMCP, d.mcp.Load(), m.Sessions+m.Streams, endpointConfig{})
	for _, s := range r.mcp.Sessions(maxListedSessions) {
		mcpRow.Open = append(mcpRow.Open, control.Session{ID: s.ID, Tenant: s.Tenant, AgentID: s.Actor})
	}
	return []control.Transport{
		row(endpointHTTP, d.http.Load(), r.streams.Stats().Open, endpointConfig{StreamQuota: &quota, EnforceQuota: &enforce}),
		mcpRow,
		row(endpointLink, d.link.Load(), r.hub.Stats().Nodes, endpointConfig{}),
	}
}

// Configure implements control.Transports.
func (t transports) Configure(name string, raw json.RawMessage) error {
	d := &t.r.endpoints
	bad := func(msg string) error { return manifest.E(manifest.BadRequest, msg) }
	var c endpointConfig
	if err := strictjson.Unmarshal(raw, &c); err != nil {
		return bad("config takes enabled, and for http stream_quota and enforce_stream_quota")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	open, other := &d.link, (*atomic.Bool)(nil)
	switch name {
	case endpointHTTP:
		open, other = &d.http, &d.mcp
	case endpointMCP:
		open, other = &d.mcp, &d.http
	case endpointLink:
	default:
		return bad("the transports are http, mcp and link")
	}
	switch {
	case name != endpointHTTP && (c.StreamQuota != nil || c.EnforceQuota != nil):
		return bad("only http has stream_quota and enforce_stream_quota")
	case c.StreamQuota != nil && (*c.StreamQuota < 0 || *c.StreamQuota > 1_000_000):
		return bad("stream_quota must be 0 (none) to 1000000")
	case c.Enabled != nil && !*c.Enabled && other != nil && !other.Load():
		return bad("this is the last way to the control plane; open the other one first")
	}
	if c.Enabled != nil {
		open.Store(*c.Enabled)
	}
	if c.StreamQuota != nil {
		d.streamQuota.Store(*c.StreamQuota)
	}
	if c.EnforceQuota != nil {
		d.enforceQuota.Store(*c.EnforceQuota)
	}
	return nil
}

// healthProblems lists what is wrong at the moment.
func (r *Relay) healthProblems() []string {
	var wrong []string
	add := func(bad bool, what string) {
		if bad {
			wrong = append(wrong, what)
		}
	}
	s := r.events.Stats()
	add(s.LastError != "", "the event log cannot be written: see the relay's log and the disk of its state directory")
	add(s.RetentionError != "", "retention of the event log fails: see the relay's log")
	_, lost := r.audit.stats()
	add(lost > 0, "audit lines were lost: see the disk of the state directory")
	for _, p := range r.processes.List() {
		add(p.State != "up", "the process of plugin "+p.Name+" is down: see the relay's log")
	}
	return wrong
}
