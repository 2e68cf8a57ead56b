package relay

import (
	"math"
	"syscall"

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

// memoryLimit is three quarters of the machine's memory.
func memoryLimit() int64 {
	var si syscall.Sysinfo_t
	if syscall.Sysinfo(&si) != nil {
		return math.MaxInt64
	}
	return int64(uint64(si.Totalram) * uint64(si.Unit) / 4 * 3)
}
