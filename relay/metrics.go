package relay

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/sse"
)

// metrics is the relay's registry. The rooms give Stats; no label names a tenant, a
// node or a tool, so that the number of series is fixed.
type metrics struct {
	registry  *prometheus.Registry
	calls     map[manifest.Code]prometheus.Counter // "" is success
	events    *prometheus.CounterVec
	duration  prometheus.Histogram
	overQuota prometheus.Counter
}

func newMetrics(r *Relay) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), calls: make(map[manifest.Code]prometheus.Counter)}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "agentctl_tool_calls_total", Help: "Decisions about tool calls, by error code (ok for served)."}, []string{"code"})
	m.calls[""] = calls.WithLabelValues("ok")
	for _, c := range manifest.Codes {
		m.calls[c] = calls.WithLabelValues(string(c))
	}
	m.events = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "agentctl_device_events_total", Help: "Remarkable things about devices, by kind."}, []string{"kind"})
	m.duration = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "agentctl_tool_call_seconds", Help: "Time of a tool call inside the relay, the opening of streams included.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}})
	m.overQuota = prometheus.NewCounter(prometheus.CounterOpts{Name: "agentctl_streams_over_quota_total", Help: "Streams opened by a tenant above its quota."})
	m.registry.MustRegister(calls, m.events, m.duration, m.overQuota, (*rooms)(r))
	return m
}

func (m *metrics) decided(r *kernel.Record) {
	if r.Decision == kernel.Closed {
		return
	}
	if c := m.calls[r.Code]; c != nil {
		c.Inc()
	}
}

func (m *metrics) refused(code manifest.Code) {
	if c := m.calls[code]; c != nil {
		c.Inc()
	}
}

func (m *metrics) deviceEvent(kind string) { m.events.WithLabelValues(kind).Inc() }

// traceStage is the pipeline's tracing stage: it times every call and logs it with its
// trace id at debug level, never with arguments or results.
func (m *metrics) traceStage(log *zap.Logger) kernel.Stage {
	return kernel.Stage{Name: "trace", Wrap: func(next kernel.Handler) kernel.Handler {
		return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			start := time.Now()
			res, err := next(ctx, r)
			took := time.Since(start)
			m.duration.Observe(took.Seconds())
			if ce := log.Check(zap.DebugLevel, "call"); ce != nil && r.Target() != nil {
				ce.Write(zap.String("trace_id", r.TraceID), zap.String("tool", r.Target().Name), zap.String("agent_id", r.Caller.Actor),
					zap.Duration("took", took), zap.Bool("ok", err == nil))
			}
			return res, err
		}
	}}
}

// rooms collects the Stats of the rooms at scrape time.
type rooms Relay

type roomMetric struct {
	desc *prometheus.Desc
	typ  prometheus.ValueType
	get  func(*Relay) float64
}

func gauge(name, help string, get func(*Relay) float64) roomMetric {
	return roomMetric{prometheus.NewDesc(name, help, nil, nil), prometheus.GaugeValue, get}
}

func counter(name, help string, get func(*Relay) float64) roomMetric {
	return roomMetric{prometheus.NewDesc(name, help, nil, nil), prometheus.CounterValue, get}
}

var roomMetrics = []roomMetric{
	gauge("agentctl_devices_connected", "Devices with a ready link.", func(r *Relay) float64 { return float64(r.hub.Stats().Nodes) }),
	gauge("agentctl_device_streams", "Metric streams open on devices.", func(r *Relay) float64 { return float64(r.hub.Stats().Streams) }),
	counter("agentctl_device_links_total", "Device links that got ready.", func(r *Relay) float64 { return float64(r.hub.Stats().Accepted) }),
	counter("agentctl_device_links_refused_total", "Device links that were refused.", func(r *Relay) float64 { return float64(r.hub.Stats().Refused) }),
	counter("agentctl_device_takeovers_total", "Links that superseded an older one of the same node.", func(r *Relay) float64 { return float64(r.hub.Stats().Takeovers) }),
	counter("agentctl_commands_total", "Commands sent to devices.", func(r *Relay) float64 { return float64(r.hub.Stats().Commands) }),
	counter("agentctl_late_acks_total", "Answers that came after the deadline and were dropped.", func(r *Relay) float64 { return float64(r.hub.Stats().LateAcks) }),
	counter("agentctl_stray_acks_total", "Answers to nothing: duplicate or foreign.", func(r *Relay) float64 { return float64(r.hub.Stats().StrayAcks) }),
	counter("agentctl_bad_results_total", "Results that broke their schema or named another node.", func(r *Relay) float64 { return float64(r.hub.Stats().BadResults) }),
	counter("agentctl_metric_frames_total", "Metric frames taken from devices.", func(r *Relay) float64 { return float64(r.hub.Stats().Frames) }),
	counter("agentctl_metric_frames_bad_total", "Metric frames that broke their schema and were dropped.", func(r *Relay) float64 { return float64(r.hub.Stats().BadFrames) }),
	gauge("agentctl_sse_streams", "Open event streams of clients.", func(r *Relay) float64 { return float64(r.streams.Stats().Open) }),
	counter("agentctl_sse_events_total", "Frames written to clients.", func(r *Relay) float64 { return float64(r.streams.Stats().Frames) }),
	counter("agentctl_sse_bytes_total", "Bytes written to clients' streams.", func(r *Relay) float64 { return float64(r.streams.Stats().Bytes) }),
	gauge("agentctl_kernel_plugins", "Plugins loaded, devices included.", func(r *Relay) float64 { p, _, _ := r.kernel.Counts(); return float64(p) }),
	gauge("agentctl_kernel_tools", "Tools offered.", func(r *Relay) float64 { _, t, _ := r.kernel.Counts(); return float64(t) }),
	counter("agentctl_audit_lines_total", "Audit lines written.", func(r *Relay) float64 { n, _ := r.audit.stats(); return float64(n) }),
	counter("agentctl_audit_lost_total", "Audit lines that could not be written.", func(r *Relay) float64 { _, n := r.audit.stats(); return float64(n) }),
}

var closesDesc = prometheus.NewDesc("agentctl_sse_closes_total", "Ended event streams, by close code (0: without a close event).", []string{"code"}, nil)

// Describe implements prometheus.Collector.
func (c *rooms) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range roomMetrics {
		ch <- m.desc
	}
	ch <- closesDesc
}

// Collect implements prometheus.Collector.
func (c *rooms) Collect(ch chan<- prometheus.Metric) {
	r := (*Relay)(c)
	for _, m := range roomMetrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.typ, m.get(r))
	}
	for code, n := range r.streams.Stats().Closes {
		ch <- prometheus.MustNewConstMetric(closesDesc, prometheus.CounterValue, float64(n), codeLabel(code))
	}
}

func codeLabel(c sse.Code) string {
	switch c {
	case sse.Normal:
		return "1000"
	case sse.IdleTimeout:
		return "4408"
	case sse.Backpressure:
		return "4413"
	case sse.RateLimited:
		return "4429"
	case sse.DeviceOffline:
		return "4503"
	}
	return "0"
}

// metricsRoutes is the surface of the metrics listener.
func (r *Relay) metricsRoutes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r.metrics.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 5 * time.Second}))
	return mux
}
