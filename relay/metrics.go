package relay

import (
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"agentctl/manifest"
	"agentctl/relay/audit"
	"agentctl/relay/eventlog"
	"agentctl/relay/eventqueue"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/stages"
	"agentctl/relay/storage"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// GET /metrics, in the Prometheus text format. It is written by hand: the usual client
// library brings protobuf, whose reflection keeps the linker from dropping unused code and
// costs 4.4 MB of the binary (docs/dependencies.md). A test parses the output with the
// reference parser.
//
// The other packages return Stats, which are read at scrape time. No label names a tenant,
// a node or a tool, so the number of series is bounded: it changes with the loaded plugins only, of
// which all boards are one.

// counters are what this package counts itself. The keys of both maps are fixed, so that
// they need no lock.
type counters struct {
	calls        map[manifest.Code]*atomic.Uint64 // decisions by error code; "" is success
	deviceEvents map[string]*atomic.Uint64        // by kind, see deviceEventKinds
	overQuota    atomic.Uint64                    // streams opened above a tenant's quota

	http, mcp, metrics, status transportCounts
	statusOpen                 atomic.Int32 // connections of the status socket that are open now
	statusServed               atomic.Bool  // the status socket is served
}

// deviceEventKinds are the kinds of hub.AuditEvent, and bad_event.
var deviceEventKinds = []string{"bad_event", "bad_result", "bad_sample", "clone_suspected", "device_connect", "device_disconnect",
	"device_refused", "dup_ack", "foreign_ack", "late_ack", "revoked"}

// newCounters makes a counter for each error code and each kind of device event.
func newCounters() *counters {
	c := &counters{calls: map[manifest.Code]*atomic.Uint64{"": {}}, deviceEvents: make(map[string]*atomic.Uint64, len(deviceEventKinds))}
	for _, code := range manifest.Codes {
		c.calls[code] = new(atomic.Uint64)
	}
	for _, k := range deviceEventKinds {
		c.deviceEvents[k] = new(atomic.Uint64)
	}
	return c
}

// countDecision counts a decision by its code and transport. The end of a stream is no decision.
func (c *counters) countDecision(r *kernel.Record) {
	if n := c.calls[r.Code]; n != nil && r.Decision != kernel.Closed {
		n.Add(1)
		c.countRequest(r)
	}
}

// countDeviceEvent counts an event of a known kind.
func (c *counters) countDeviceEvent(kind string) {
	if n := c.deviceEvents[kind]; n != nil {
		n.Add(1)
	}
}

// snapshot holds the Stats of all packages for one scrape.
type snapshot struct {
	r      *Relay
	hub    hub.Stats
	sse    sse.Stats
	mcp    mcp.Stats
	kernel kernel.Stats
	events eventlog.Stats
	queue  eventqueue.Stats
	audit  audit.Stats
}

// snapshot reads all Stats. They are not taken at one instant: a total may run ahead of its
// parts by what happened in between.
func (r *Relay) snapshot() *snapshot {
	s := &snapshot{r: r, hub: r.hub.Stats(), sse: r.streams.Stats(), mcp: r.mcp.Stats(), kernel: r.kernel.Stats(), events: r.eventStats()}
	s.queue, s.audit = r.queue.Stats(), r.audit.Stats()
	return s
}

// metric is a family of one series without labels.
type metric struct {
	name, typ, help string
	value           func(*snapshot) float64
}

// families are all metrics without labels. Names and types are part of the interface and do
// not change; help may. A name may therefore be older than the word for it: agentctl_stray_acks_total
// counts unsolicited acks.
var families = []metric{
	{"agentctl_devices_connected", "gauge", "Devices with a ready link.", func(s *snapshot) float64 { return float64(s.hub.Nodes) }},
	{"agentctl_device_streams", "gauge", "Metric streams open on devices.", func(s *snapshot) float64 { return float64(s.hub.Streams) }},
	{"agentctl_device_links_total", "counter", "Device links that became ready.", func(s *snapshot) float64 { return float64(s.hub.Accepted) }},
	{"agentctl_device_links_refused_total", "counter", "Device links that were refused.", func(s *snapshot) float64 { return float64(s.hub.Refused) }},
	{"agentctl_device_takeovers_total", "counter", "Links that superseded an older one of the same node.", func(s *snapshot) float64 { return float64(s.hub.Takeovers) }},
	{"agentctl_device_sessions_resumed_total", "counter", "Links that resumed the session of an earlier one.", func(s *snapshot) float64 { return float64(s.hub.Resumed) }},
	{"agentctl_device_sessions_lost", "gauge", "Sessions without a link, of the last 30 s.", func(s *snapshot) float64 { return float64(s.hub.Lost) }},
	{"agentctl_commands_total", "counter", "Commands sent to devices.", func(s *snapshot) float64 { return float64(s.hub.Commands) }},
	{"agentctl_late_acks_total", "counter", "Answers that arrived after the deadline and were dropped.", func(s *snapshot) float64 { return float64(s.hub.LateAcks) }},
	{"agentctl_stray_acks_total", "counter", "Answers that match no command in flight: duplicate, or of another node.", func(s *snapshot) float64 { return float64(s.hub.UnsolicitedAcks) }},
	{"agentctl_bad_results_total", "counter", "Results that did not fit their schema or named another node.", func(s *snapshot) float64 { return float64(s.hub.BadResults) }},
	{"agentctl_metric_frames_total", "counter", "Metric frames received from devices.", func(s *snapshot) float64 { return float64(s.hub.Frames) }},
	{"agentctl_metric_frames_bad_total", "counter", "Metric frames that did not fit their schema and were dropped.", func(s *snapshot) float64 { return float64(s.hub.BadFrames) }},
	{"agentctl_sse_streams", "gauge", "Open metric streams of clients.", func(s *snapshot) float64 { return float64(s.sse.Open) }},
	{"agentctl_sse_events_total", "counter", "Frames written to clients.", func(s *snapshot) float64 { return float64(s.sse.Frames) }},
	{"agentctl_sse_bytes_total", "counter", "Bytes written to clients' metric streams.", func(s *snapshot) float64 { return float64(s.sse.Bytes) }},
	{"agentctl_streams_over_quota_total", "counter", "Metric streams opened by a tenant above its quota.", func(s *snapshot) float64 { return float64(s.r.metrics.overQuota.Load()) }},
	{"agentctl_mcp_sessions", "gauge", "Sessions of MCP clients.", func(s *snapshot) float64 { return float64(s.mcp.Sessions) }},
	{"agentctl_mcp_streams", "gauge", "Open event streams of MCP clients.", func(s *snapshot) float64 { return float64(s.mcp.Streams) }},
	{"agentctl_mcp_streams_cut_total", "counter", "Event streams of MCP clients cut because the reader stalled.", func(s *snapshot) float64 { return float64(s.mcp.StalledStreams) }},
	{"agentctl_kernel_plugins", "gauge", "Plugins loaded, devices included.", func(s *snapshot) float64 { return float64(s.kernel.Plugins) }},
	{"agentctl_kernel_tools", "gauge", "Tools offered.", func(s *snapshot) float64 { return float64(s.kernel.Tools) }},
	{"agentctl_kernel_calls_in_flight", "gauge", "Calls and reads in progress.", func(s *snapshot) float64 { return float64(s.kernel.InFlight) }},
	{"agentctl_kernel_subscriptions", "gauge", "Subscriptions to changes.", func(s *snapshot) float64 { return float64(s.kernel.Subscriptions) }},
	{"agentctl_kernel_subscriptions_pending", "gauge", "Subscriptions with changes that were not delivered yet.", func(s *snapshot) float64 { return float64(s.kernel.Pending) }},
	{"agentctl_kernel_watches", "gauge", "Watched resources.", func(s *snapshot) float64 { return float64(s.kernel.Watches) }},
	{"agentctl_kernel_breakers_open", "gauge", "Plugins whose circuit breaker is open after repeated failures.", func(s *snapshot) float64 { return float64(s.kernel.BreakersOpen) }},
	{"agentctl_kernel_changes_total", "counter", "Changes of lists and resources.", func(s *snapshot) float64 { return float64(s.kernel.Changes) }},
	{"agentctl_kernel_changes_delivered_total", "counter", "Changes that subscribers received.", func(s *snapshot) float64 { return float64(s.kernel.Delivered) }},
	{"agentctl_kernel_changes_coalesced_total", "counter", "Changes merged into others before a subscriber received them.", func(s *snapshot) float64 { return float64(s.kernel.Coalesced) }},
	{"agentctl_kernel_changes_dropped_total", "counter", "Notifications to subscribers that changes were dropped.", func(s *snapshot) float64 { return float64(s.kernel.Dropped) }},
	{"agentctl_eventlog_events", "gauge", "Events kept.", func(s *snapshot) float64 { return float64(s.events.Events) }},
	{"agentctl_eventlog_calls", "gauge", "Events about calls that are kept.", func(s *snapshot) float64 { return float64(s.events.Calls) }},
	{"agentctl_eventlog_removed_total", "counter", "Events that retention removed.", func(s *snapshot) float64 { return float64(s.events.Removed) }},
	{"agentctl_eventlog_faults", "gauge", "Places at which a chain of the event log is broken, of the newest check; at most 64.", func(s *snapshot) float64 { return float64(len(s.events.Verification.Faults)) }},
	{"agentctl_eventlog_over_bound", "gauge", "1 while the files of the event log are larger than allowed.", func(s *snapshot) float64 { return oneIf(s.events.OverBound) }},
	{"agentctl_eventlog_bytes", "gauge", "Size of the event log on disk.", func(s *snapshot) float64 { return float64(s.events.Bytes) }},
	{"agentctl_eventlog_waiting", "gauge", "Events that wait to be written.", func(s *snapshot) float64 { return float64(s.events.Queued) }},
	{"agentctl_eventlog_appended_total", "counter", "Events made durable.", func(s *snapshot) float64 { return float64(s.events.Appended) }},
	{"agentctl_eventlog_dropped_total", "counter", "Offered events that were not kept.", func(s *snapshot) float64 { return float64(s.events.Dropped) }},
	{"agentctl_eventlog_commits_total", "counter", "Transactions of the event log.", func(s *snapshot) float64 { return float64(s.events.Commits) }},
	{"agentctl_eventlog_failed_total", "counter", "Transactions that the disk refused.", func(s *snapshot) float64 { return float64(s.events.FailedCommits) }},
	{"agentctl_relay_degraded", "gauge", "1 if the relay runs without its event log (--start-degraded).", func(s *snapshot) float64 { return oneIf(s.r.degraded != nil) }},
	{"agentctl_events_waiting", "gauge", "Alerts and changes of presence that wait in memory for the event log.", func(s *snapshot) float64 { return float64(s.queue.Waiting) }},
	{"agentctl_events_lost_total", "counter", "Events that were not kept and are reported as a gap.", func(s *snapshot) float64 { return float64(s.queue.Lost) }},
	{"agentctl_audit_lines_total", "counter", "Audit lines written.", func(s *snapshot) float64 { return float64(s.audit.Lines) }},
	{"agentctl_audit_lost_total", "counter", "Audit lines that could not be written.", func(s *snapshot) float64 { return float64(s.audit.Lost) }},
	{"agentctl_audit_refusals_total", "counter", "Refused requests without a valid identity.", func(s *snapshot) float64 { return float64(s.audit.Refusals) }},
	{"go_goroutines", "gauge", "Goroutines that exist.", func(*snapshot) float64 { return float64(runtime.NumGoroutine()) }},
	{"go_heap_bytes", "gauge", "Bytes of live heap objects and of dead ones that are not swept yet.", func(*snapshot) float64 { return heapBytes() }},
	{"process_cpu_seconds_total", "counter", "User and system CPU time.", func(*snapshot) float64 { return cpuSeconds() }},
	{"process_resident_memory_bytes", "gauge", "Resident memory.", func(*snapshot) float64 { return residentBytes() }},
	{"process_start_time_seconds", "gauge", "Start of the process, Unix time.", func(*snapshot) float64 { return float64(processStart.UnixMilli()) / 1000 }},
}

// processStart is close enough to the start of the process for rates.
var processStart = time.Now()

// writeMetrics appends all families: those of the table, then those with labels.
func (r *Relay) writeMetrics(b []byte) []byte {
	s := r.snapshot()
	for _, m := range families {
		b = appendHeader(b, m.name, m.typ, m.help)
		b = appendSample(b, m.name, "", m.value(s))
	}
	b = appendHeader(b, "agentctl_tool_calls_total", "counter", "Decisions about tool calls and reads of resources, by error code (ok: served).")
	b = appendSample(b, "agentctl_tool_calls_total", `code="ok"`, float64(r.metrics.calls[""].Load()))
	for _, c := range manifest.Codes {
		b = appendSample(b, "agentctl_tool_calls_total", `code="`+string(c)+`"`, float64(r.metrics.calls[c].Load()))
	}
	for _, f := range []struct {
		name, help string
		counts     map[string]*atomic.Uint64
	}{
		{"agentctl_enrollments_total", "Enrollments with an invite code, by result.", r.join.enrolls},
		{"agentctl_token_refreshes_total", "Refreshes of tokens by key, by result.", r.join.refreshes},
	} {
		b = appendHeader(b, f.name, "counter", f.help)
		for _, result := range joinResults {
			b = appendSample(b, f.name, `result="`+result+`"`, float64(f.counts[result].Load()))
		}
	}
	b = appendStores(b, r.storage.Health())
	b = appendHeader(b, "agentctl_audit_losses_total", "counter", "Audit lines that could not be written, by reason and class of the identity.")
	for _, l := range s.audit.Losses {
		b = appendSample(b, "agentctl_audit_losses_total", `reason="`+l.Reason+`",class="`+l.Class+`"`, float64(l.Lines))
	}
	b = r.appendPools(b, s)
	b = appendHeader(b, "agentctl_device_events_total", "counter", "Events of device links, by kind.")
	for _, k := range deviceEventKinds {
		b = appendSample(b, "agentctl_device_events_total", `kind="`+k+`"`, float64(r.metrics.deviceEvents[k].Load()))
	}
	b = appendHeader(b, "agentctl_sse_closes_total", "counter", "Ended metric streams, by close code (0: without a close event).")
	for _, c := range []sse.Code{0, sse.Normal, sse.IdleTimeout, sse.Backpressure, sse.RateLimited, sse.DeviceOffline} {
		b = appendSample(b, "agentctl_sse_closes_total", `code="`+strconv.Itoa(int(c))+`"`, float64(s.sse.Closes[c]))
	}
	b = appendHeader(b, "agentctl_plugin_errors_total", "counter", "Failed plugin calls, by cause: error, panic or timeout.")
	for _, e := range []struct {
		kind string
		n    int64
	}{{"error", s.kernel.Errors - s.kernel.Refused}, {"panic", s.kernel.Panics}, {"timeout", s.kernel.Timeouts}} { // a refusal is no failure
		b = appendSample(b, "agentctl_plugin_errors_total", `kind="`+e.kind+`"`, float64(max(e.n, 0)))
	}
	b = appendPlugins(b, r.kernel.PluginFigures())
	b = appendTransports(b, r.transportFigures(s))
	b = appendHeader(b, "agentctl_fanout_seconds", "gauge", "Time from a change of a resource or list until a subscriber received it, by quantile.")
	for _, q := range []struct {
		q  string
		us int64
	}{{"0.5", s.kernel.FanoutP50US}, {"0.95", s.kernel.FanoutP95US}, {"0.99", s.kernel.FanoutP99US}} {
		b = appendSample(b, "agentctl_fanout_seconds", `quantile="`+q.q+`"`, float64(q.us)/1e6)
	}
	classes := r.stages.Metrics().Stats()
	b = appendHistograms(b, "agentctl_tool_call_seconds", "Time of a call or read inside the relay, including the opening of streams, by class of tool.", classes,
		func(c *stages.ClassStats) *stages.Histogram { return &c.Latency })
	b = appendHistograms(b, "agentctl_request_bytes", "Size of the arguments, by class of tool.", classes,
		func(c *stages.ClassStats) *stages.Histogram { return &c.RequestBytes })
	return appendHistograms(b, "agentctl_response_bytes", "Size of the results, excluding streams, by class of tool.", classes,
		func(c *stages.ClassStats) *stages.Histogram { return &c.ResponseBytes })
}

// appendPlugins appends the figures of each plugin; the boards are one, named devices.
func appendPlugins(b []byte, plugins []kernel.PluginFigures) []byte {
	for _, f := range []struct {
		name, typ, help string
		value           func(*kernel.PluginFigures) int64
	}{
		{"agentctl_plugin_up", "gauge", "Whether the plugin can be called: its program runs and its circuit breaker is not open. Of devices their number.", func(p *kernel.PluginFigures) int64 { return int64(p.Up) }},
		{"agentctl_plugin_calls_total", "counter", "Calls and reads that reached the plugin.", func(p *kernel.PluginFigures) int64 { return p.Calls }},
		{"agentctl_plugin_calls_in_flight", "gauge", "Calls and reads of the plugin in progress.", func(p *kernel.PluginFigures) int64 { return p.InFlight }},
		{"agentctl_plugin_failures_total", "counter", "How often the plugin's program ended, hung or did not start.", func(p *kernel.PluginFigures) int64 { return int64(p.Failures) }},
	} {
		b = appendHeader(b, f.name, f.typ, f.help)
		for i := range plugins {
			b = appendSample(b, f.name, `plugin="`+plugins[i].Name+`"`, float64(f.value(&plugins[i])))
		}
	}
	const failed = "agentctl_plugin_call_errors_total"
	b = appendHeader(b, failed, "counter", "Calls and reads of the plugin that failed, by cause: error, panic or timeout.")
	for i := range plugins {
		p := &plugins[i]
		for _, e := range []struct {
			kind string
			n    int64
		}{{"error", p.Errors - p.Panics - p.Timeouts}, {"panic", p.Panics}, {"timeout", p.Timeouts}} {
			b = appendSample(b, failed, `plugin="`+p.Name+`",kind="`+e.kind+`"`, float64(max(e.n, 0)))
		}
	}
	return b
}

// appendTransports appends the figures of each transport.
func appendTransports(b []byte, list []transportFigures) []byte {
	for _, f := range []struct {
		name, typ, help string
		value           func(*transportFigures) float64
	}{
		{"agentctl_transport_enabled", "gauge", "1 if the transport is served.", func(t *transportFigures) float64 { return oneIf(t.Enabled) }},
		{"agentctl_transport_sessions", "gauge", "Open connections, sessions and streams of the transport.", func(t *transportFigures) float64 { return float64(t.Sessions) }},
		{"agentctl_transport_requests_total", "counter", "Requests that the transport answered: calls and reads (http, mcp), links, streams (sse), scrapes, questions about the status.", func(t *transportFigures) float64 { return float64(t.Requests) }},
		{"agentctl_transport_errors_total", "counter", "Requests of the transport that were refused or failed.", func(t *transportFigures) float64 { return float64(t.Errors) }},
	} {
		b = appendHeader(b, f.name, f.typ, f.help)
		for i := range list {
			if f.typ == "gauge" || list[i].Name != transportPlugins {
				b = appendSample(b, f.name, `transport="`+list[i].Name+`"`, f.value(&list[i]))
			}
		}
	}
	return b
}

// appendStores appends what the monitor of the disk knows of each store.
func appendStores(b []byte, stores []storage.Health) []byte {
	for _, f := range []struct {
		name, typ, help string
		value           func(*storage.Health) float64
	}{
		{"agentctl_storage_healthy", "gauge", "1 if the store works, 0 while it does not.", func(h *storage.Health) float64 { return oneIf(h.OK()) }},
		{"agentctl_storage_problem_since_seconds", "gauge", "Unix time since when the store has its worst problem, 0 without one.", func(h *storage.Health) float64 {
			if len(h.Problems) == 0 {
				return 0
			}
			return float64(h.Problems[0].Since.UnixMilli()) / 1000
		}},
		{"agentctl_storage_oldest_operation_seconds", "gauge", "Age of the oldest disk operation that has not returned.", func(h *storage.Health) float64 { return h.Stats.Oldest.Seconds() }},
		{"agentctl_storage_operations_total", "counter", "Disk operations.", func(h *storage.Health) float64 { return float64(h.Stats.Operations) }},
		{"agentctl_storage_failed_total", "counter", "Disk operations that failed.", func(h *storage.Health) float64 { return float64(h.Stats.Failed) }},
		{"agentctl_storage_slow_total", "counter", "Disk operations that took longer than a second.", func(h *storage.Health) float64 { return float64(h.Stats.Slow) }},
	} {
		b = appendHeader(b, f.name, f.typ, f.help)
		for i := range stores {
			b = appendSample(b, f.name, `store="`+stores[i].Store+`"`, f.value(&stores[i]))
		}
	}
	return b
}

// pool is what clients share, with its name in the metrics.
type pool struct {
	name string
	edge.PoolStats
}

// pools lists what clients share.
func (r *Relay) pools(s *snapshot) []pool {
	list := []pool{
		{"blocked_addresses", r.conns.Blocked()},
		{"bodies", r.bodies.Stats()},
		{"connections_agents", r.conns.Agents()},
		{"connections_strangers", r.conns.Strangers()},
		{"delayed_refusals", r.conns.Refusals().Stats()},
		{"handshakes", edge.PoolStats{InUse: int64(s.hub.Handshaking), Limit: int64(s.hub.MaxHandshaking), Refused: s.hub.RefusedSlots}},
		{"mcp_sessions", s.mcp.SessionPool},
		{"mcp_streams", s.mcp.StreamPool},
		{"streams", r.streamPool.Stats()},
	}
	if r.gateway != nil {
		list = append(list, pool{"subscribers", r.gateway.SubscriberPool()})
	}
	return list
}

// appendPools appends the figures of what clients share (docs/operations.md, "Limits").
func (r *Relay) appendPools(b []byte, s *snapshot) []byte {
	pools := r.pools(s)
	for _, f := range []struct {
		name, typ, help string
		value           func(edge.PoolStats) float64
	}{
		{"agentctl_pool_in_use", "gauge", "Units of a pool that clients hold (bodies: bytes).", func(p edge.PoolStats) float64 { return float64(p.InUse) }},
		{"agentctl_pool_limit", "gauge", "Units that a pool has.", func(p edge.PoolStats) float64 { return float64(p.Limit) }},
		{"agentctl_pool_refused_total", "counter", "Requests, connections and links refused because a pool, or the client's share of it, was used up.", func(p edge.PoolStats) float64 { return float64(p.Refused) }},
	} {
		b = appendHeader(b, f.name, f.typ, f.help)
		for _, p := range pools {
			b = appendSample(b, f.name, `pool="`+p.name+`"`, f.value(p.PoolStats))
		}
	}
	return b
}

// appendHistograms appends a family of histograms with a series for each class of request.
// The stages count each bucket by itself; the format requires cumulative ones, of which the
// last has le="+Inf" and equals _count.
func appendHistograms(b []byte, name, help string, classes []stages.ClassStats, of func(*stages.ClassStats) *stages.Histogram) []byte {
	b = appendHeader(b, name, "histogram", help)
	for i := range classes {
		h, class := of(&classes[i]), `class="`+classes[i].Class+`"`
		var n uint64
		for j, c := range h.Counts {
			n += c
			le := "+Inf"
			if j < len(h.Bounds) {
				le = strconv.FormatFloat(h.Bounds[j], 'g', -1, 64)
			}
			b = appendSample(b, name+"_bucket", class+`,le="`+le+`"`, float64(n))
		}
		b = appendSample(b, name+"_sum", class, h.Sum)
		b = appendSample(b, name+"_count", class, float64(n))
	}
	return b
}

// oneIf is the value of a gauge that is 1 or 0.
func oneIf(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// appendHeader appends the lines that start a family.
func appendHeader(b []byte, name, typ, help string) []byte {
	return fmt.Appendf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, typ)
}

// appendSample appends one line; label is empty or `key="value"` pairs.
func appendSample(b []byte, name, label string, v float64) []byte {
	b = append(b, name...)
	if label != "" {
		b = fmt.Appendf(b, "{%s}", label)
	}
	b = append(b, ' ')
	if v == math.Trunc(v) && math.Abs(v) < 1e15 { // counters read better without an exponent
		b = strconv.AppendInt(b, int64(v), 10)
	} else {
		b = strconv.AppendFloat(b, v, 'g', -1, 64)
	}
	return append(b, '\n')
}

// cpuSeconds is the CPU time of this process, user and system, in all its threads.
func cpuSeconds() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// residentBytes reads the second field of /proc/self/statm, in pages; 0 if it cannot.
func residentBytes() float64 {
	b, _ := os.ReadFile("/proc/self/statm")
	var size, pages int64
	_, _ = fmt.Sscan(string(b), &size, &pages)
	return float64(pages * int64(os.Getpagesize()))
}

// heapBytes is the size of live heap objects and of dead ones that are not swept yet.
func heapBytes() float64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return float64(uint64Of(&s[0]))
}

// metricsRoutes is the surface of the metrics listener. It needs no token, so the listener
// should be bound to loopback or to a monitoring network; no figure names a tenant or a node. Pages
// of other sites read it no more than anything else here: Host and Origin are checked.
func (r *Relay) metricsRoutes() http.Handler {
	mux := http.NewServeMux()
	host, _, _ := net.SplitHostPort(r.opt.MetricsListen)
	guard := r.newGuard(edge.IsLoopback(host))
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		r.metrics.metrics.requests.Add(1)
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = w.Write(r.writeMetrics(make([]byte, 0, 8<<10)))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := guard.Check(req); err != nil {
			r.metrics.metrics.requests.Add(1)
			r.metrics.metrics.errors.Add(1)
			r.fail(w, req, http.StatusForbidden, manifest.SafetyDenied, err.Error())
			return
		}
		cors.SetHeaders(w.Header(), req)
		mux.ServeHTTP(w, req)
	})
}
