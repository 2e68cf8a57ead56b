package relay

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentctl/relay/audit"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// A Status is made for each request from what the packages count in memory, so that it is answered
// while the disk hangs. The sizes of the stores are read every sizesInterval, in another goroutine.

// Status is what `agentctl relay status` shows of a running relay. Field names are part of the
// command's interface.
type Status struct {
	Version   string `json:"version"`
	PID       int    `json:"pid"`
	StartedMS int64  `json:"started_ms"`
	UptimeS   int64  `json:"uptime_s"`
	StateDir  string `json:"state_dir"`
	URL       string `json:"url"`
	Ready     bool   `json:"ready"`
	// Degraded is why the relay runs without its event log; "" if it does not.
	Degraded string `json:"degraded,omitempty"`
	// Problems are sentences for an operator; empty: the relay is healthy.
	Problems  []string         `json:"problems"`
	Listeners []ListenerStatus `json:"listeners"`
	Boards    BoardStatus      `json:"boards"`
	Agents    AgentStatus      `json:"agents"`
	Stores    []StoreStatus    `json:"stores"`
	Events    EventStatus      `json:"events"`
	Audit     AuditStatus      `json:"audit"`
	Pools     []PoolStatus     `json:"pools"`
	Clock     ClockStatus      `json:"clock"`
	Plugins   []PluginStatus   `json:"plugins"` // without boards
}

// Healthy reports whether nothing prevents serving: no store and no clock that fails, and
// not degraded. Warnings do not count.
func (s *Status) Healthy() bool {
	for i := range s.Stores {
		if !s.Stores[i].OK() {
			return false
		}
	}
	return s.Ready && s.Clock.OK && s.Degraded == ""
}

// ListenerStatus is an address that is served.
type ListenerStatus struct {
	Name string `json:"name"` // "relay", "metrics" or "sse"
	URL  string `json:"url"`
}

// BoardStatus counts boards.
type BoardStatus struct {
	Linked     int `json:"linked"`
	Registered int `json:"registered"`
	Streams    int `json:"streams"` // metric streams open on boards
}

// AgentStatus counts what clients have open.
type AgentStatus struct {
	MCPSessions int `json:"mcp_sessions"`
	Streams     int `json:"streams"` // metric streams of clients
}

// StoreStatus is a store on disk.
type StoreStatus struct {
	storage.Health
	Works    bool  `json:"ok"`
	Bytes    int64 `json:"bytes"`               // with the files beside it, at most sizesInterval ago
	MaxBytes int64 `json:"max_bytes,omitempty"` // 0: the number of its records is bounded
}

// EventStatus is the event log and what waits for it.
type EventStatus struct {
	Count   int64         `json:"count"`
	Last    uint64        `json:"last_seq"`
	Waiting int           `json:"waiting"` // in memory, for the disk
	Lost    uint64        `json:"lost"`    // since the start, reported as log.gap
	Dropped uint64        `json:"dropped"` // offered and not kept, since the start
	Classes []EventsClass `json:"classes,omitempty"`
	Error   string        `json:"error,omitempty"` // of the newest transaction
}

// EventsClass is one class of events.
type EventsClass struct {
	Class string `json:"class"`
	Count int64  `json:"count"`
	Bytes int64  `json:"bytes"`
}

// AuditStatus is the audit log.
type AuditStatus struct {
	Lines    uint64 `json:"lines"` // since the start, as the others
	Lost     uint64 `json:"lost"`
	Refusals uint64 `json:"refusals"`
}

// PoolStatus is something that clients share.
type PoolStatus struct {
	Name    string `json:"name"`
	InUse   int64  `json:"in_use"`
	Limit   int64  `json:"limit"`
	Refused uint64 `json:"refused"` // since the start
}

// ClockStatus says whether the relay trusts its clock.
type ClockStatus struct {
	OK      bool   `json:"ok"`
	Problem string `json:"problem,omitempty"`
	NowMS   int64  `json:"now_ms"`
}

// PluginStatus is a loaded plugin.
type PluginStatus struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"`
	Sandbox string `json:"sandbox,omitempty"`
}

// Status returns the present state. It reads memory only, so that it answers while the disk
// does not.
func (r *Relay) Status() *Status {
	s := r.snapshot()
	now := time.Now()
	st := &Status{
		Version: r.opt.Version, PID: os.Getpid(), StartedMS: r.started.UnixMilli(), UptimeS: int64(time.Since(r.started).Seconds()),
		StateDir: r.opt.StateDir, URL: r.URL(), Ready: r.ready.Load(), Problems: r.healthProblems(),
		Boards: BoardStatus{Linked: s.hub.Nodes, Registered: r.store.NodeCount(), Streams: s.hub.Streams},
		Agents: AgentStatus{MCPSessions: s.mcp.Sessions, Streams: s.sse.Open},
		Events: EventStatus{Count: s.events.Events, Last: s.events.Last, Waiting: s.queue.Waiting, Lost: s.queue.Lost, Dropped: s.events.Dropped, Error: s.events.LastError},
		Audit:  AuditStatus{Lines: s.audit.Lines, Lost: s.audit.Lost, Refusals: s.audit.Refusals},
	}
	if r.degraded != nil {
		st.Degraded = r.degraded.Error()
	} else {
		st.Events.Classes = []EventsClass{{"state", s.events.Events - s.events.Calls, s.events.StateBytes}, {"calls", s.events.Calls, s.events.CallBytes}}
	}
	st.Clock = ClockStatus{Problem: r.clock.check(), NowMS: now.UnixMilli()}
	st.Clock.OK = st.Clock.Problem == ""
	if !st.Clock.OK {
		st.Problems = append(st.Problems, st.Clock.Problem)
	}
	if st.Problems == nil {
		st.Problems = []string{} // a list in JSON
	}
	for _, l := range []ListenerStatus{{"relay", r.URL()}, {"metrics", r.MetricsURL()}, {"sse", r.SSEURL()}} {
		if l.URL != "" {
			st.Listeners = append(st.Listeners, l)
		}
	}
	sizes := r.sizes.Load()
	bounds := map[string]int64{
		storeEvents: cmp.Or(r.opt.Events.MaxBytes, eventlog.DefaultMaxBytes),
		storeAudit:  cmp.Or(r.opt.AuditMaxBytes, audit.DefaultMaxBytes),
	}
	for _, h := range r.storage.Health() {
		row := StoreStatus{Health: h, Works: h.OK(), MaxBytes: bounds[h.Store]}
		if sizes != nil {
			row.Bytes = (*sizes)[h.Store]
		}
		st.Stores = append(st.Stores, row)
	}
	for _, p := range r.pools(s) {
		st.Pools = append(st.Pools, PoolStatus{p.name, p.InUse, p.Limit, p.Refused})
	}
	for _, p := range r.kernel.Info().Plugins {
		if !strings.HasPrefix(p.Name, kernel.DevicePrefix) {
			st.Plugins = append(st.Plugins, PluginStatus{p.Name, p.Version, p.State, p.Sandbox})
		}
	}
	return st
}

// sizesInterval is how often the sizes of the stores are read.
const sizesInterval = 10 * time.Second

// measureStores reads the sizes of the stores from the disk and returns them by store. It
// blocks while the disk hangs.
func (r *Relay) measureStores() map[string]int64 {
	files := map[string][]string{
		storeIdentities: {storeIdentities, storeIdentities + "-wal"},
		storeEvents:     {storeEvents, storeEvents + "-wal"},
		storeAudit:      {"audit*.jsonl*", "refusals*.jsonl*"},
	}
	sizes := make(map[string]int64, len(files))
	for store, patterns := range files {
		for _, pattern := range patterns {
			names, _ := filepath.Glob(filepath.Join(globEscaper.Replace(r.opt.StateDir), pattern)) // a constant pattern is not malformed
			for _, name := range names {
				if info, err := os.Stat(name); err == nil {
					sizes[store] += info.Size()
				}
			}
		}
	}
	return sizes
}

// globEscaper makes a path match itself alone.
var globEscaper = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)
