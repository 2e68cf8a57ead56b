package relay

import (
	"encoding/json"
	"net"
	"path/filepath"
	"sync/atomic"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
)

// Transports as operators see them: in kernel.transport.list, in mcp://kernel/transports.json and
// as the label `transport` of /metrics. Only http, mcp and link can be disabled (endpoints.go).

// Names of the transports that an operator cannot disable, beside the endpoints.
const (
	transportSSE     = "sse"     // the event gateway
	transportMetrics = "metrics" // GET /metrics
	transportStatus  = "status"  // the status socket
	transportPlugins = "plugins" // external plugins: in figures all of them together
)

// transportCounts count what one transport answered.
type transportCounts struct{ requests, errors atomic.Uint64 }

// countRequest counts the decision about a request of a transport, if it is counted here: links, streams
// of the gateway and plugins are counted by their packages.
func (c *counters) countRequest(rec *kernel.Record) {
	var t *transportCounts
	switch rec.Transport {
	case endpointHTTP:
		t = &c.http
	case endpointMCP:
		t = &c.mcp
	default:
		return
	}
	t.requests.Add(1)
	if rec.Code != "" {
		t.errors.Add(1)
	}
}

// transportOf is the transport of a request that was refused before it had a caller.
func transportOf(path string) string {
	if path == "/mcp" {
		return endpointMCP
	}
	return endpointHTTP
}

// transportFigures are the figures of one transport, for metrics.
type transportFigures struct {
	Name     string `json:"name"`
	Enabled  bool   `json:"enabled"`
	Sessions int    `json:"sessions"` // open connections, sessions and streams
	// Requests were answered; Errors of those were refused or failed. Calls of plugins are counted by
	// plugin instead (kernel.PluginFigures).
	Requests uint64 `json:"requests"`
	Errors   uint64 `json:"errors"`
}

// transportFigures returns the figures of all transports, always in the same order.
func (r *Relay) transportFigures(s *snapshot) []transportFigures {
	e, c := &r.endpoints, r.metrics
	list := []transportFigures{
		{endpointHTTP, e.http.Load(), s.sse.Open, c.http.requests.Load(), c.http.errors.Load()},
		{endpointMCP, e.mcp.Load(), s.mcp.Sessions + s.mcp.Streams, c.mcp.requests.Load(), c.mcp.errors.Load()},
		{endpointLink, e.link.Load(), s.hub.Nodes, s.hub.Accepted + s.hub.Refused, s.hub.Refused},
		{Name: transportSSE},
		{transportMetrics, r.metricsListener != nil, r.metricsSessions(), c.metrics.requests.Load(), c.metrics.errors.Load()},
		{transportStatus, c.statusServed.Load(), int(c.statusOpen.Load()), c.status.requests.Load(), c.status.errors.Load()},
		{Name: transportPlugins},
	}
	if g := r.gateway; g != nil {
		st, pool := g.Stats(), g.SubscriberPool()
		refused := pool.Refused + st.RateLimited
		list[3] = transportFigures{transportSSE, true, st.Subscribers, st.Connections + refused, refused}
	}
	p := &list[len(list)-1]
	for _, state := range r.processes.List() {
		p.Enabled = true
		if state.State == "up" {
			p.Sessions++
		}
	}
	return list
}

// metricsSessions counts the connections of the metrics listener.
func (r *Relay) metricsSessions() int {
	if c := r.metricsConns.Load(); c != nil {
		return int(c.Agents().InUse + c.Strangers().InUse)
	}
	return 0
}

// maxListedSessions bounds the MCP sessions that the control plane shows.
const maxListedSessions = 200

// List implements control.Transports: the endpoints, which can be configured, the other listeners
// and sockets, and a row for each external plugin.
func (t transports) List() []control.Transport {
	r := t.r
	rows := make([]control.Transport, 0, 8)
	for _, f := range r.transportFigures(r.snapshot()) {
		if f.Name != transportPlugins {
			rows = append(rows, control.Transport{Name: f.Name, Enabled: f.Enabled, Sessions: f.Sessions})
		}
	}
	quota, enforce := r.endpoints.streamQuota.Load(), r.endpoints.enforceQuota.Load()
	for i := range rows {
		row := &rows[i]
		config := endpointConfig{Enabled: &row.Enabled}
		switch row.Name {
		case endpointHTTP:
			row.Adapter, row.Listen = "http", listenAddr(r.listener)
			config.StreamQuota, config.EnforceQuota = &quota, &enforce
		case endpointMCP:
			row.Adapter, row.Listen = "http", listenAddr(r.listener)
			for _, s := range r.mcp.Sessions(maxListedSessions) {
				row.Open = append(row.Open, control.Session{ID: s.ID, Tenant: s.Tenant, AgentID: s.Actor})
			}
		case endpointLink:
			row.Adapter, row.Listen = "websocket", listenAddr(r.listener)
		case transportSSE:
			row.Adapter, row.Listen = "sse", listenAddr(r.gatewayListener)
		case transportMetrics:
			row.Adapter, row.Listen = "http", listenAddr(r.metricsListener)
		case transportStatus:
			row.Adapter, row.Listen = "unix", filepath.Join(r.opt.StateDir, statusSocket)
		}
		// Only these have a configuration that Configure accepts.
		if row.Name == endpointHTTP || row.Name == endpointMCP || row.Name == endpointLink {
			row.Config, _ = json.Marshal(config) // cannot fail: plain values
		}
	}
	return append(rows, t.plugins()...)
}

// plugins returns a row for each external plugin: a child of the relay speaks over pipes and has no
// address, others connect over a Unix socket.
func (t transports) plugins() (rows []control.Transport) {
	o := t.r.processOptions()
	for _, s := range t.r.processes.List() {
		row := control.Transport{Name: "plugin:" + s.Name, Adapter: "stdio", Enabled: true}
		switch s.Sandbox {
		case process.SandboxService:
			row.Adapter, row.Listen = "unix", filepath.Join(o.SocketDir, s.Name+".sock")
		case process.SandboxExternal:
			row.Adapter, row.Listen = "unix", process.SocketPath(o.Dir, s.Name)
		}
		if s.State == "up" {
			row.Sessions = 1
		}
		rows = append(rows, row)
	}
	return rows
}

// listenAddr is the address of a listener, "" without one.
func listenAddr(ln net.Listener) string {
	if ln == nil {
		return ""
	}
	return ln.Addr().String()
}
