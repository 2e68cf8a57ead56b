package relay

import (
	"bytes"
	"context"
	"math"
	"net/http"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/sse"
)

// The metrics are written in the Prometheus text format by hand: the usual client
// library brings protobuf, whose reflection keeps the linker from dropping unused code
// and costs 4.4 MB of the binary (docs/dependencies.md). A test parses the output with
// the reference parser.
//
// The rooms give Stats; no label names a tenant, a node or a tool, so the number of
// series is fixed.

// counters is what the front door itself counts.
type counters struct {
	calls     map[manifest.Code]*atomic.Uint64 // "" is success; fixed keys
	events    map[string]*atomic.Uint64        // by kind; fixed keys
	duration  histogram
	overQuota atomic.Uint64
}

// eventKinds are the kinds of hub.Event.
var eventKinds = []string{"bad_result", "bad_sample", "clone_suspected", "device_connect", "device_disconnect",
	"device_refused", "dup_ack", "foreign_ack", "late_ack", "revoked"}

func newCounters() *counters {
	c := &counters{calls: map[manifest.Code]*atomic.Uint64{"": {}}, events: make(map[string]*atomic.Uint64, len(eventKinds))}
	for _, code := range manifest.Codes {
		c.calls[code] = new(atomic.Uint64)
	}
	for _, k := range eventKinds {
		c.events[k] = new(atomic.Uint64)
	}
	return c
}

func (c *counters) decided(r *kernel.Record) {
	if r.Decision != kernel.Closed {
		c.refused(r.Code)
	}
}

func (c *counters) refused(code manifest.Code) {
	if n := c.calls[code]; n != nil {
		n.Add(1)
	}
}

func (c *counters) deviceEvent(kind string) {
	if n := c.events[kind]; n != nil {
		n.Add(1)
	}
}

// histogram counts durations in fixed buckets.
type histogram struct {
	buckets [len(bounds) + 1]atomic.Uint64
	sumNS   atomic.Int64
}

// bounds are the upper bounds of the buckets, seconds.
var bounds = [...]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}

func (h *histogram) observe(d time.Duration) {
	s, i := d.Seconds(), 0
	for i < len(bounds) && s > bounds[i] {
		i++
	}
	h.buckets[i].Add(1)
	h.sumNS.Add(int64(d))
}

// traceStage is the pipeline's tracing stage: it times every call and logs it with its
// trace id at debug level, never with arguments or results.
func (c *counters) traceStage(log *zap.Logger) kernel.Stage {
	return kernel.Stage{Name: "trace", Wrap: func(next kernel.Handler) kernel.Handler {
		return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			start := time.Now()
			res, err := next(ctx, r)
			took := time.Since(start)
			c.duration.observe(took)
			if ce := log.Check(zap.DebugLevel, "call"); ce != nil && r.Target() != nil {
				ce.Write(zap.String("trace_id", r.TraceID), zap.String("tool", r.Target().Name), zap.String("agent_id", r.Caller.Actor),
					zap.Duration("took", took), zap.Bool("ok", err == nil))
			}
			return res, err
		}
	}}
}

// metric is one family without labels, read at scrape time.
type metric struct {
	name, typ, help string
	get             func(*snapshot) float64
}

var families = []metric{
	{"agentctl_devices_connected", "gauge", "Devices with a ready link.", func(s *snapshot) float64 { return float64(s.hub.Nodes) }},
	{"agentctl_device_streams", "gauge", "Metric streams open on devices.", func(s *snapshot) float64 { return float64(s.hub.Streams) }},
	{"agentctl_device_links_total", "counter", "Device links that got ready.", func(s *snapshot) float64 { return float64(s.hub.Accepted) }},
	{"agentctl_device_links_refused_total", "counter", "Device links that were refused.", func(s *snapshot) float64 { return float64(s.hub.Refused) }},
	{"agentctl_device_takeovers_total", "counter", "Links that superseded an older one of the same node.", func(s *snapshot) float64 { return float64(s.hub.Takeovers) }},
	{"agentctl_commands_total", "counter", "Commands sent to devices.", func(s *snapshot) float64 { return float64(s.hub.Commands) }},
	{"agentctl_late_acks_total", "counter", "Answers that came after the deadline and were dropped.", func(s *snapshot) float64 { return float64(s.hub.LateAcks) }},
	{"agentctl_stray_acks_total", "counter", "Answers to nothing: duplicate or foreign.", func(s *snapshot) float64 { return float64(s.hub.StrayAcks) }},
	{"agentctl_bad_results_total", "counter", "Results that broke their schema or named another node.", func(s *snapshot) float64 { return float64(s.hub.BadResults) }},
	{"agentctl_metric_frames_total", "counter", "Metric frames taken from devices.", func(s *snapshot) float64 { return float64(s.hub.Frames) }},
	{"agentctl_metric_frames_bad_total", "counter", "Metric frames that broke their schema and were dropped.", func(s *snapshot) float64 { return float64(s.hub.BadFrames) }},
	{"agentctl_sse_streams", "gauge", "Open metric streams of clients.", func(s *snapshot) float64 { return float64(s.sse.Open) }},
	{"agentctl_sse_events_total", "counter", "Frames written to clients.", func(s *snapshot) float64 { return float64(s.sse.Frames) }},
	{"agentctl_sse_bytes_total", "counter", "Bytes written to clients' metric streams.", func(s *snapshot) float64 { return float64(s.sse.Bytes) }},
	{"agentctl_streams_over_quota_total", "counter", "Metric streams opened by a tenant above its quota.", func(s *snapshot) float64 { return float64(s.r.metrics.overQuota.Load()) }},
	{"agentctl_mcp_sessions", "gauge", "Sessions of MCP clients.", func(s *snapshot) float64 { return float64(s.mcp.Sessions) }},
	{"agentctl_mcp_streams", "gauge", "Open event streams of MCP clients.", func(s *snapshot) float64 { return float64(s.mcp.Streams) }},
	{"agentctl_mcp_streams_cut_total", "counter", "Event streams of MCP clients cut because the reader stalled.", func(s *snapshot) float64 { return float64(s.mcp.Cut) }},
	{"agentctl_kernel_plugins", "gauge", "Plugins loaded, devices included.", func(s *snapshot) float64 { return float64(s.plugins) }},
	{"agentctl_kernel_tools", "gauge", "Tools offered.", func(s *snapshot) float64 { return float64(s.tools) }},
	{"agentctl_audit_lines_total", "counter", "Audit lines written.", func(s *snapshot) float64 { return float64(s.auditLines) }},
	{"agentctl_audit_lost_total", "counter", "Audit lines that could not be written.", func(s *snapshot) float64 { return float64(s.auditLost) }},
	{"go_goroutines", "gauge", "Goroutines that exist.", func(*snapshot) float64 { return float64(runtime.NumGoroutine()) }},
	{"go_heap_bytes", "gauge", "Bytes of live and dead heap objects.", func(s *snapshot) float64 { return s.heap }},
	{"process_cpu_seconds_total", "counter", "User and system CPU time.", func(*snapshot) float64 { return cpuSeconds() }},
	{"process_resident_memory_bytes", "gauge", "Resident memory.", func(*snapshot) float64 { return residentBytes() }},
	{"process_start_time_seconds", "gauge", "Start of the process, Unix time.", func(*snapshot) float64 { return float64(processStart.UnixMilli()) / 1000 }},
}

var processStart = time.Now()

func (r *Relay) writeMetrics(b []byte) []byte {
	s := r.snapshot()
	for _, m := range families {
		b = appendHead(b, m.name, m.typ, m.help)
		b = appendSample(b, m.name, "", m.get(s))
	}
	b = appendHead(b, "agentctl_tool_calls_total", "counter", "Decisions about tool calls and reads of resources, by error code (ok: served).")
	b = appendSample(b, "agentctl_tool_calls_total", `code="ok"`, float64(r.metrics.calls[""].Load()))
	for _, c := range manifest.Codes {
		b = appendSample(b, "agentctl_tool_calls_total", `code="`+string(c)+`"`, float64(r.metrics.calls[c].Load()))
	}
	b = appendHead(b, "agentctl_device_events_total", "counter", "Remarkable things about devices, by kind.")
	for _, k := range eventKinds {
		b = appendSample(b, "agentctl_device_events_total", `kind="`+k+`"`, float64(r.metrics.events[k].Load()))
	}
	b = appendHead(b, "agentctl_sse_closes_total", "counter", "Ended metric streams, by close code (0: without a close event).")
	for _, c := range []sse.Code{0, sse.Normal, sse.IdleTimeout, sse.Backpressure, sse.RateLimited, sse.DeviceOffline} {
		b = appendSample(b, "agentctl_sse_closes_total", `code="`+strconv.Itoa(int(c))+`"`, float64(s.sse.Closes[c]))
	}
	return r.metrics.duration.appendTo(b, "agentctl_tool_call_seconds", "Time of a tool call inside the relay, the opening of streams included.")
}

func (h *histogram) appendTo(b []byte, name, help string) []byte {
	b = appendHead(b, name, "histogram", help)
	var n uint64
	for i := range h.buckets {
		n += h.buckets[i].Load()
		le := "+Inf"
		if i < len(bounds) {
			le = strconv.FormatFloat(bounds[i], 'g', -1, 64)
		}
		b = appendSample(b, name+"_bucket", `le="`+le+`"`, float64(n))
	}
	b = appendSample(b, name+"_sum", "", float64(h.sumNS.Load())/1e9)
	return appendSample(b, name+"_count", "", float64(n))
}

func appendHead(b []byte, name, typ, help string) []byte {
	b = append(append(append(append(b, "# HELP "...), name...), ' '), help...)
	b = append(append(append(b, "\n# TYPE "...), name...), ' ')
	return append(append(b, typ...), '\n')
}

func appendSample(b []byte, name, label string, v float64) []byte {
	b = append(b, name...)
	if label != "" {
		b = append(append(append(b, '{'), label...), '}')
	}
	b = append(b, ' ')
	if v == math.Trunc(v) && math.Abs(v) < 1e15 {
		b = strconv.AppendInt(b, int64(v), 10)
	} else {
		b = strconv.AppendFloat(b, v, 'g', -1, 64)
	}
	return append(b, '\n')
}

func cpuSeconds() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// residentBytes reads the second word of /proc/self/statm, pages.
func residentBytes() float64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	f := bytes.Fields(b)
	if len(f) < 2 {
		return 0
	}
	pages, err := strconv.ParseInt(string(f[1]), 10, 64)
	if err != nil {
		return 0
	}
	return float64(pages * int64(os.Getpagesize()))
}

func heapBytes() float64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return float64(s[0].Value.Uint64())
}

// metricsRoutes is the surface of the metrics listener.
func (r *Relay) metricsRoutes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = w.Write(r.writeMetrics(make([]byte, 0, 8<<10)))
	})
	return mux
}
