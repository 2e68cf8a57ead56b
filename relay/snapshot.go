package relay

import (
	"agentctl/relay/eventlog"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/transport/sse"
)

// snapshot is the Stats of the rooms at one moment.
type snapshot struct {
	r                     *Relay
	hub                   hub.Stats
	sse                   sse.Stats
	mcp                   mcp.Stats
	kernel                kernel.Stats
	events                eventlog.Stats
	plugins, tools        int
	auditLines, auditLost uint64
	heap                  float64
}

func (r *Relay) snapshot() *snapshot {
	s := &snapshot{r: r, hub: r.hub.Stats(), sse: r.streams.Stats(), mcp: r.mcp.Stats(), heap: heapBytes()}
	s.kernel, s.events = r.kernel.Stats(), r.events.Stats()
	s.plugins, s.tools = s.kernel.Plugins, s.kernel.Tools
	s.auditLines, s.auditLost = r.audit.stats()
	return s
}
