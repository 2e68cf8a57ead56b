package relay

import (
	"agentctl/relay/hub"
	"agentctl/relay/mcp"
	"agentctl/transport/sse"
)

// snapshot is the Stats of the rooms at one moment.
type snapshot struct {
	r                     *Relay
	hub                   hub.Stats
	sse                   sse.Stats
	mcp                   mcp.Stats
	plugins, tools        int
	auditLines, auditLost uint64
	heap                  float64
}

func (r *Relay) snapshot() *snapshot {
	s := &snapshot{r: r, hub: r.hub.Stats(), sse: r.streams.Stats(), mcp: r.mcp.Stats(), heap: heapBytes()}
	s.plugins, s.tools, _ = r.kernel.Counts()
	s.auditLines, s.auditLost = r.audit.stats()
	return s
}
