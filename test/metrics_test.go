package test

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/gateway"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

func withMetrics(o *relay.Options) { o.MetricsListen = "127.0.0.1:0" }

func metricsText(t testing.TB, r *testRelay) string {
	t.Helper()
	resp, err := http.Get(r.relay.MetricsURL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || !strings.HasPrefix(ct, "text/plain; version=0.0.4") {
		t.Errorf("/metrics: %d %s", resp.StatusCode, ct)
	}
	return string(b)
}

// series are the values of /metrics, by name and labels: agentctl_tool_calls_total{code=ok}.
type series map[string]float64

// readMetrics reads /metrics with the reference parser, and checks each family: it has HELP and TYPE, its
// name fits its type, and no label could name a tenant, a node or a tool.
func readMetrics(t testing.TB, r *testRelay) series {
	t.Helper()
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(strings.NewReader(metricsText(t, r)))
	if err != nil {
		t.Fatal(err)
	}
	labels := strings.Fields("code kind class plugin pool quantile reason result store transport")
	values := make(series)
	for name, f := range families {
		if f.GetHelp() == "" || f.GetType().String() == "UNTYPED" {
			t.Errorf("%s: HELP %q, TYPE %s", name, f.GetHelp(), f.GetType())
		}
		if strings.HasSuffix(name, "_total") != (f.GetType().String() == "COUNTER") {
			t.Errorf("%s is a %s", name, f.GetType())
		}
		for _, m := range f.GetMetric() {
			key := name
			for _, l := range m.GetLabel() {
				if !slices.Contains(labels, l.GetName()) {
					t.Errorf("%s has a label %s", name, l.GetName())
				}
				key += fmt.Sprintf("{%s=%s}", l.GetName(), l.GetValue())
			}
			switch {
			case m.Counter != nil:
				values[key] = m.GetCounter().GetValue()
			case m.Gauge != nil:
				values[key] = m.GetGauge().GetValue()
			case m.Histogram != nil:
				count := m.GetHistogram().GetSampleCount()
				values[key] = float64(count)
				if b := m.GetHistogram().GetBucket(); b[len(b)-1].GetCumulativeCount() != count {
					t.Errorf("%s: the last bucket has %d of %d", name, b[len(b)-1].GetCumulativeCount(), count)
				}
			}
		}
	}
	return values
}

// What happens is counted. The series are the same before and after it, so that what callers and boards do
// cannot fill a store of metrics.
func TestMetrics(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withMetrics)
	before := readMetrics(t, r)
	m := r.device(mockOptions{})
	gone := r.device(mockOptions{tenant: "other"})
	gone.kill()
	eventually(t, "the device is gone", func() bool { return readMetrics(t, r)["agentctl_devices_connected"] == 1 })
	for range 3 {
		r.call(m.echoTool(), text("x"))
	}
	r.call(m.echoTool(), `{}`)
	r.call(gone.echoTool(), text("x"))
	r.call(m.echoTool(), text("x"), "Authorization", "Bearer x.y.z")
	r.callRaw(`{`)
	s := m.subscribe(`{}`)
	s.metric(time.Second)
	duringStream := readMetrics(t, r)
	s.halfClose()
	s.waitEnd(sse.Normal, time.Second)
	eventually(t, "the stream is gone", func() bool { return readMetrics(t, r)["agentctl_sse_streams"] == 0 })
	after := readMetrics(t, r)

	if len(after) != len(before) || len(after) < 40 {
		t.Errorf("%d series before, %d after; want the same, at least 40", len(before), len(after))
	}
	for key := range after {
		for _, word := range []string{m.node, gone.node, "other", "echo"} {
			if strings.Contains(key, word) {
				t.Errorf("the series %s names a board, a tenant or a tool", key)
			}
		}
	}
	const unbounded = 1e6 // waiting for the device probes it with calls that are refused
	requests := after["agentctl_transport_requests_total{transport=http}"] - before["agentctl_transport_requests_total{transport=http}"]
	for _, tt := range []struct {
		key             string
		atLeast, atMost float64
	}{
		{"agentctl_commands_total", 4, 4},
		{"agentctl_tool_calls_total{code=ok}", 4, 4},
		{"agentctl_tool_calls_total{code=E_BAD_REQUEST}", 1, 1},
		{"agentctl_tool_calls_total{code=E_INTERNAL}", 0, 0},
		{"agentctl_tool_calls_total{code=E_MANIFEST_INVALID}", 1, unbounded},
		{"agentctl_tool_calls_total{code=E_SAFETY_DENIED}", 2, unbounded},
		{"agentctl_tool_call_seconds{class=device}", 5, unbounded},
		{"agentctl_metric_frames_total", 1, 1},
		{"agentctl_sse_events_total", 1, 1},
		{"agentctl_sse_closes_total{code=1000}", 1, 1},
		{"agentctl_device_links_total", 2, 2},
		{"agentctl_device_events_total{kind=late_ack}", 0, 0},
		{"agentctl_transport_requests_total{transport=link}", 2, 2},
		{"agentctl_transport_errors_total{transport=mcp}", 0, 0},
		{"agentctl_transport_errors_total{transport=http}", 4, requests - 1},
		// The frames of a stream are no calls; what was refused before it reached the board is not the board's.
		{"agentctl_plugin_calls_total{plugin=devices}", 4, 5},
		{"agentctl_plugin_call_errors_total{plugin=devices}{kind=timeout}", 0, 0},
	} {
		if got := after[tt.key] - before[tt.key]; got < tt.atLeast || got > tt.atMost {
			t.Errorf("%s grew by %v, want %v to %v", tt.key, got, tt.atLeast, tt.atMost)
		}
	}
	for _, key := range []string{"agentctl_sse_streams", "agentctl_device_streams", "agentctl_devices_connected"} {
		if duringStream[key] != 1 {
			t.Errorf("during the stream %s is %v, want 1", key, duringStream[key])
		}
	}
	if after["process_resident_memory_bytes"] < 1<<20 || after["go_goroutines"] < 1 {
		t.Errorf("the process has %v bytes and %v goroutines", after["process_resident_memory_bytes"], after["go_goroutines"])
	}
	// The audit log is written beside the calls; a caller without a good token is in a separate file.
	eventually(t, "the audit lines", func() bool { return readMetrics(t, r)["agentctl_audit_lines_total"] >= 6 })
	if after["agentctl_audit_refusals_total"] != 1 {
		t.Errorf("%v refusals without an identity, want 1", after["agentctl_audit_refusals_total"])
	}
}

// Metrics are on their own listener only, and nothing else is on it.
func TestMetricsListener(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withMetrics)
	if a := r.do(http.MethodGet, "/metrics", "", r.headers()); a.status != http.StatusNotFound {
		t.Errorf("/metrics on the public listener: %d", a.status)
	}
	for _, path := range []string{"/", "/mcp", "/v1/nodes", "/healthz"} {
		resp, err := http.Get(strings.TrimSuffix(r.relay.MetricsURL(), "/metrics") + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s on the metrics listener: %d", path, resp.StatusCode)
		}
	}
}

// A refused token counts once.
func TestMetricsCountOnce(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withMetrics)
	for range 7 {
		r.wantRefusal(r.callRaw(`{}`, "Authorization", ""), http.StatusUnauthorized, manifest.SafetyDenied)
	}
	if want := `agentctl_tool_calls_total{code="E_SAFETY_DENIED"} 7` + "\n"; !strings.Contains(metricsText(t, r), want) {
		t.Errorf("no %s in\n%s", want, metricsText(t, r))
	}
}

// /healthz and /readyz need no token; readiness ends before the relay does.
func TestHealth(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for path, want := range map[string]string{"/healthz": "ok\n", "/readyz": "ready\n"} {
			if a := r.do(http.MethodGet, path, "", nil); a.status != http.StatusOK || a.body != want {
				t.Errorf("%s: %d %q", path, a.status, a.body)
			}
			if a := r.do(http.MethodPost, path, "", nil); a.status != http.StatusMethodNotAllowed {
				t.Errorf("POST %s: %d", path, a.status)
			}
		}
		// A stalled stream keeps the relay draining for a moment; new streams and links are refused
		// meanwhile.
		m := r.device(mockOptions{cadence: true})
		r.stream(m.subscribeTool(), `{"interval_ms":1000}`, streamOptions{stalled: true})
		time.Sleep(1500 * time.Millisecond)
		ended := make(chan error, 1)
		go func() { ended <- r.stop() }()
		time.Sleep(100 * time.Millisecond)
		seen := make(map[string]int)
		for range 5 {
			a, err := r.tryRequest(http.MethodGet, "/readyz", strings.NewReader(""), nil)
			if err != nil {
				break // the listener has gone
			}
			seen[a.body]++
			time.Sleep(50 * time.Millisecond)
		}
		if seen["ready\n"] != 0 || seen["draining\n"] == 0 {
			t.Errorf("while it ended: %v", seen)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// Calls that are in flight when the relay stops are answered, not dropped.
func TestShutdownAnswers(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{script: func(*mockDevice) func(string, link.Cmd) { return func(string, link.Cmd) {} }})
		var calls []<-chan *answer
		for range 3 {
			calls = append(calls, r.callAsync(m.echoTool(), text("x")))
		}
		opening := r.callAsync(m.subscribeTool(), `{}`, "Accept", "text/event-stream")
		eventually(t, "four commands", func() bool { return len(m.cmds()) == 4 })
		start := time.Now()
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("it took %s to stop", took)
		}
		for _, c := range append(calls, opening) {
			r.wantRefusal(<-c, http.StatusServiceUnavailable, manifest.NodeOffline)
		}
	})
}

// docs/operations.md has a row for each family; -update writes them.
func TestMetricsDocs(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withMetrics, func(o *relay.Options) { o.SSE = &gateway.Options{Listen: "127.0.0.1:0"} })
	p := expfmt.NewTextParser(model.LegacyValidation)
	text := metricsText(t, r)
	families, err := p.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	rows := "| metric | type | labels | meaning |\n|---|---|---|---|\n"
	for _, name := range slices.Sorted(maps.Keys(families)) {
		f := families[name]
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		rows += fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), f.GetHelp())
		// The conventions of Prometheus for names and help.
		if f.GetType().String() == "COUNTER" != strings.HasSuffix(name, "_total") || strings.HasSuffix(name, "_ms") || !strings.HasSuffix(f.GetHelp(), ".") || strings.Contains(f.GetHelp(), "|") {
			t.Errorf("%s: %s", name, f.GetHelp())
		}
	}
	const file, begin, end = "../docs/operations.md", "<!-- metrics: go test ./test -run TestMetricsDocs -update -->\n", "<!-- end of metrics -->\n"
	doc, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(doc), begin)
	old, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no table of metrics", file)
	}
	switch {
	case old == rows:
	case *update:
		if err := os.WriteFile(file, []byte(before+begin+rows+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("the table of metrics in %s is not that of /metrics; write it with: go test ./test -run TestMetricsDocs -update", file)
	}
}

// A relay whose address of /metrics is taken does not start if somebody chose that address, by the flag or by
// the variable: a monitoring system would miss it. The default address is left out instead.
func TestMetricsAddressTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) // after the subtests, which are parallel
	address := l.Addr().String()
	for _, tt := range []struct {
		name      string
		env, args []string
	}{
		{"flag", nil, []string{"--metrics-listen", address}},
		{"variable", []string{"AGENTCTL_METRICS_LISTEN=" + address}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(binary(t, "agentctl", ""), append([]string{"relay", "--state-dir", t.TempDir(), "--listen", "127.0.0.1:0"}, tt.args...)...)
			cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}, tt.env...)
			p, err := startCommand(cmd)
			if err != nil {
				t.Fatal(err)
			}
			defer p.kill()
			line, err := p.waitLine(func(line string) bool { return strings.Contains(line, `"ready":true`) })
			if err == nil {
				t.Fatalf("the relay serves: %s", line)
			}
			if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(p.err.String(), "choose another address with --listen or --metrics-listen") {
				t.Errorf("got exit code %d\n%s\nwant 1 and the advice to choose another address", code, p.err)
			}
		})
	}
}
