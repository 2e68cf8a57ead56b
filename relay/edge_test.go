package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/transport/edge"
)

// edgeHandler is one of the handlers behind the same checks.
type edgeHandler struct {
	name, path string
	http.Handler
}

// newEdgeHandlers makes the relay, the event gateway and the MCP handler by itself, as they would serve
// on loopback. Pages of one origin may use them.
func newEdgeHandlers(t *testing.T, page string) []edgeHandler {
	t.Helper()
	r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0", AllowOrigin: []string{page}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	// Without a subscriber's token the gateway is open, so that it checks the Host.
	g, err := gateway.New(gateway.Options{IngestToken: "secret", AllowOrigins: []string{page}})
	if err != nil {
		t.Fatal(err)
	}
	m := mcp.New(mcp.Options{
		Kernel:       kernel.New(kernel.Options{}),
		Authenticate: func(*http.Request) (*kernel.Caller, error) { return nil, errors.New("no token") },
		OnDenied: func(w http.ResponseWriter, r *http.Request, _ error) {
			id, _ := edge.TraceID(r)
			edge.WriteError(w, http.StatusUnauthorized, manifest.E(manifest.SafetyDenied, "no token"), id)
		},
		Guard: edge.NewGuard(edge.GuardOptions{CheckHost: true, Origins: []string{page}}),
	})
	return []edgeHandler{
		{"relay", "/mcp/tools/call", r.routes()},
		{"relay, MCP", "/mcp", r.routes()},
		{"gateway", gateway.IngestPath, g.Handler()},
		{"MCP", "/mcp", m},
	}
}

// post sends a request with a Host and other headers, and returns the answer with the trace id of its
// error envelope.
func (h edgeHandler) post(t *testing.T, host string, header http.Header) (w *httptest.ResponseRecorder, code manifest.Code, traceID string) {
	t.Helper()
	req := httptest.NewRequest(http.MethodPost, h.path, strings.NewReader("{}"))
	req.Host = host
	maps.Copy(req.Header, header)
	w = httptest.NewRecorder()
	h.ServeHTTP(w, req)
	var body struct {
		Error struct {
			Code    manifest.Code `json:"code"`
			TraceID string        `json:"trace_id"`
		} `json:"error"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Errorf("the answer is not an error envelope: %v: %s", err, w.Body)
	}
	return w, body.Error.Code, body.Error.TraceID
}

// TestSameEdge: the relay, the event gateway and the MCP handler answer the same request in the same
// way. No request has a token, so one that passes the checks of Host and Origin gets 401.
func TestSameEdge(t *testing.T) {
	const (
		page    = "https://app.example"
		trace   = "0af7651916cd43dd8448eb211c80319c"
		span    = "b7ad6b7169203331"
		passed  = http.StatusUnauthorized
		refused = http.StatusForbidden
	)
	tests := []struct {
		name   string
		host   string
		header http.Header
		want   int
		traced bool // the answer has the trace id of the request
	}{
		{name: "loopback", host: "127.0.0.1:8460", want: passed},
		{name: "loopback, IPv6", host: "[::1]:8460", want: passed},
		{name: "localhost", host: "localhost", want: passed},
		{name: "localhost in capitals", host: "LOCALHOST", want: passed},
		{name: "another host", host: "evil.example", want: refused},
		{name: "a host that starts like loopback", host: "127.0.0.1.evil.example", want: refused},
		{name: "no host", want: refused},
		{name: "own origin", host: "localhost:8460", header: http.Header{"Origin": {"http://localhost:8460"}}, want: passed},
		{name: "own origin in capitals", host: "localhost:8460", header: http.Header{"Origin": {"http://LOCALHOST:8460"}}, want: passed},
		{name: "allowed origin", host: "localhost", header: http.Header{"Origin": {page}}, want: passed},
		{name: "allowed origin in capitals", host: "localhost", header: http.Header{"Origin": {strings.ToUpper(page)}}, want: passed},
		{name: "another origin", host: "localhost", header: http.Header{"Origin": {"https://evil.example"}}, want: refused},
		{name: "opaque origin", host: "localhost", header: http.Header{"Origin": {"null"}}, want: refused},
		{name: "two origins", host: "localhost", header: http.Header{"Origin": {page, page}}, want: refused},
		{name: "traceparent", host: "localhost", header: http.Header{"Traceparent": {"00-" + trace + "-" + span + "-01"}}, want: passed, traced: true},
		{name: "traceparent of a later version", host: "localhost", header: http.Header{"Traceparent": {"cc-" + trace + "-" + span + "-01-more"}}, want: passed, traced: true},
		{name: "traceparent of a refused request", host: "evil.example", header: http.Header{"Traceparent": {"00-" + trace + "-" + span + "-01"}}, want: refused, traced: true},
		{name: "traceparent without parent", host: "localhost", header: http.Header{"Traceparent": {"00-" + trace + "-0000000000000000-01"}}, want: passed},
		{name: "traceparent of an invalid version", host: "localhost", header: http.Header{"Traceparent": {"ff-" + trace + "-" + span + "-01"}}, want: passed},
		{name: "two traceparents", host: "localhost", header: http.Header{"Traceparent": slices.Repeat([]string{"00-" + trace + "-" + span + "-01"}, 2)}, want: passed},
		{name: "token of another scheme", host: "localhost", header: http.Header{"Authorization": {"Basic c2VjcmV0"}}, want: passed},
		{name: "two tokens", host: "localhost", header: http.Header{"Authorization": {"Bearer secret", "Bearer secret"}}, want: passed},
	}
	for _, h := range newEdgeHandlers(t, page) {
		for _, tt := range tests {
			t.Run(h.name+"/"+tt.name, func(t *testing.T) {
				w, code, traceID := h.post(t, tt.host, tt.header)
				if w.Code != tt.want || code != manifest.SafetyDenied {
					t.Errorf("status %d with %s, want %d with %s", w.Code, code, tt.want, manifest.SafetyDenied)
				}
				if len(traceID) != 32 || (traceID == trace) != tt.traced {
					t.Errorf("trace id %q, want the caller's: %v", traceID, tt.traced)
				}
				if got := w.Header().Get("Cache-Control"); got != "no-store" {
					t.Errorf("Cache-Control %q, want no-store", got)
				}
			})
		}
	}
}

// TestSamePreflight: a preflight needs no token, and its answer names the page that may ask. Upper and
// lower case are the same in an origin.
func TestSamePreflight(t *testing.T) {
	const page, evil = "https://App.example", "https://evil.example"
	tests := []struct {
		origin  string
		want    int
		allowed string // Access-Control-Allow-Origin
	}{
		{page, http.StatusNoContent, page},
		{evil, http.StatusForbidden, ""},
	}
	for _, h := range newEdgeHandlers(t, strings.ToLower(page)) {
		if h.name == "MCP" {
			continue // its preflights are answered by the relay's routes
		}
		for _, tt := range tests {
			w, req := httptest.NewRecorder(), httptest.NewRequest(http.MethodOptions, "http://localhost"+h.path, nil)
			req.Header.Set("Origin", tt.origin)
			req.Header.Set("Access-Control-Request-Method", "POST")
			h.ServeHTTP(w, req)
			if allowed := w.Header().Get("Access-Control-Allow-Origin"); w.Code != tt.want || allowed != tt.allowed {
				t.Errorf("%s from %s: %d, allows %q; want %d, %q", h.name, tt.origin, w.Code, allowed, tt.want, tt.allowed)
			}
		}
	}
}

// TestMetricsGuard checks that /metrics refuses pages of other sites, also those whose name leads
// to loopback.
func TestMetricsGuard(t *testing.T) {
	r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", AllowOrigin: []string{"https://app.example"},
		Public: "https://relay.example"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	for _, tt := range []struct {
		host, origin string
		want         int
	}{
		{"127.0.0.1:8461", "", 200}, {"localhost", "", 200}, {"relay.example", "", 200}, {"127.0.0.1:8461", "https://app.example", 200},
		{"evil.example", "", 403}, {"evil.example:8461", "http://evil.example:8461", 403}, {"127.0.0.1:8461", "https://evil.example", 403}, {"127.0.0.1:8461", "null", 403},
	} {
		req := httptest.NewRequest("GET", "/metrics", nil)
		req.Host = tt.host
		if tt.origin != "" {
			req.Header.Set("Origin", tt.origin)
		}
		w := httptest.NewRecorder()
		r.metricsRoutes().ServeHTTP(w, req)
		if w.Code != tt.want || (tt.want == 200) != strings.Contains(w.Body.String(), "agentctl_devices_connected") {
			t.Errorf("Host %s, Origin %s: %d %.100s", tt.host, tt.origin, w.Code, w.Body)
		}
	}
}

// TestManyMembers: a body with too many members is refused before it is decoded, by both endpoints.
func TestManyMembers(t *testing.T) {
	r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0", Anonymous: true})
	if err != nil {
		t.Fatal(err)
	}
	defer run(t, r)()
	var members strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&members, `,"k%d":0`, i)
	}
	for path, body := range map[string]string{
		"/mcp/tools/call": `{"tool":"agents.list","arguments":{"x":0` + members.String() + "}}",
		"/mcp":            `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"agents.list","arguments":{"x":0` + members.String() + "}}}",
	} {
		resp, err := http.Post(r.URL()+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(b), "more than 10,000 members") {
			t.Errorf("%s: %d %s", path, resp.StatusCode, b)
		}
	}
}
