package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/transport/link"
)

// withBuiltins is a relay as it is started, with its built-in plugins.
func withBuiltins(o *relay.Options) { o.DisabledPlugins = nil }

func (r *testRelay) admin() string {
	r.t.Helper()
	return r.mint(auth.MintRequest{Class: "admin"}).Token
}

// control calls a tool of the control plane, which has to succeed.
func (r *testRelay) control(token, tool, args string) string {
	r.t.Helper()
	a := r.call(tool, args, "Authorization", "Bearer "+token)
	if a.status != http.StatusOK {
		r.t.Fatalf("%s %s: %d %s", tool, args, a.status, a.body)
	}
	return a.body
}

// loadPlugin is a plugin of the tests: number gives its argument back, wait does not end by
// itself, and pulse.json can be watched.
type loadPlugin struct {
	seen []atomic.Int32 // calls of number, by number
}

const pulseURI = "mcp://bench/pulse.json"

func (b *loadPlugin) plugin(*kernel.Kernel) kernel.Plugin { return b }

func (b *loadPlugin) Manifest() *kernel.Manifest {
	tool := func(name string) *kernel.Tool {
		return &kernel.Tool{Name: name, ToolInfo: &kernel.ToolInfo{Description: "A test.", InputSchema: json.RawMessage(`{"type":"object"}`), Scope: manifest.ScopeCallReadOnly}}
	}
	return &kernel.Manifest{Name: "bench", Version: "1.0.0", Tools: []*kernel.Tool{tool("bench.number"), tool("bench.wait")}, Resources: []*kernel.Resource{{
		URI: pulseURI, Name: "pulse", MIME: "application/json", Scope: manifest.ScopeCallReadOnly, Watchable: true}}}
}

func (b *loadPlugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	if r.Tool == "bench.wait" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var a struct{ N int }
	if err := json.Unmarshal(r.Arguments, &a); err != nil {
		return nil, err
	}
	b.seen[a.N].Add(1)
	return &kernel.Result{Structured: append(json.RawMessage(nil), r.Arguments...)}, nil
}

func (b *loadPlugin) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return []byte(`{}`), nil
}

// Watch changes a thousand times a second.
func (b *loadPlugin) Watch(ctx context.Context, _ string, changed func()) error {
	for tick := time.NewTicker(time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return ctx.Err()
		case <-tick.C:
			changed()
		}
	}
}

// Only a token with kernel:admin sees and uses the control plane.
func TestControlScopes(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		admin := r.mcp(r.admin(), version, "")
		agent := r.mcp(r.agent, version, "")
		count := func(c *mcpClient) (tools, resources int) {
			for _, tool := range c.list() {
				if strings.HasPrefix(tool.Name, "kernel.") {
					tools++
				}
			}
			list, err := c.cs.ListResources(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, res := range list.Resources {
				if strings.HasPrefix(res.URI, "mcp://kernel/") {
					resources++
				}
			}
			return tools, resources
		}
		if tools, resources := count(admin); tools < 13 || resources != 4 {
			t.Errorf("an admin sees %d tools and %d resources", tools, resources)
		}
		if tools, resources := count(agent); tools+resources != 0 {
			t.Errorf("an agent sees %d tools and %d resources", tools, resources)
		}
		if res := admin.call("kernel.health.get", nil, nil); res.IsError || !strings.Contains(mustMarshal(t, res.StructuredContent), `"status":"ok"`) {
			t.Errorf("health: %s", mustMarshal(t, res.StructuredContent))
		}
		for _, tool := range []string{"kernel.health.get", "kernel.middleware.enable", "kernel.plugin.unload"} {
			if res := agent.call(tool, map[string]any{"name": "acl"}, nil); !res.IsError || !strings.Contains(mustMarshal(t, res.StructuredContent), "E_SAFETY_DENIED") {
				t.Errorf("an agent's %s: %s", tool, mustMarshal(t, res.StructuredContent))
			}
		}
		if _, err := agent.cs.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: "mcp://kernel/plugins.json"}); err == nil {
			t.Error("an agent reads a resource of the control plane")
		}
		res := admin.call("kernel.plugin.unload", map[string]any{"name": "kernel@1.0.0"}, nil)
		if tools, _ := count(admin); !res.IsError || tools < 13 {
			t.Error("the control plane was unloaded")
		}
	})
}

// A stage that is switched for one scope leaves every other request alone, and its
// subscribers are notified.
func TestMiddlewareScopes(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		admin := r.admin()
		one, two := r.device(mockOptions{}), r.device(mockOptions{})
		first, second := r.mcp(r.agent, "2025-11-25", ""), r.mcp(r.agent, "2025-11-25", "")
		watcher := r.mcp(admin, "2025-11-25", "")
		if err := watcher.cs.Subscribe(t.Context(), &mcp.SubscribeParams{URI: "mcp://kernel/middleware.json"}); err != nil {
			t.Fatal(err)
		}
		transports := r.control(admin, "kernel.transport.list", `{}`)
		for _, id := range []string{first.cs.ID(), second.cs.ID()} {
			if !strings.Contains(transports, `"id":"`+id+`"`) {
				t.Errorf("session %s is not in %s", id, transports)
			}
		}
		served := func() string {
			var b strings.Builder
			for _, m := range []*mockDevice{one, two} {
				b.WriteString(fmt.Sprint(r.call(m.echoTool(), text("x")).status/100, " "))
				for _, c := range []*mcpClient{first, second} {
					b.WriteString(fmt.Sprint(!c.call(m.echoTool(), map[string]any{"message": "x"}, nil).IsError, " "))
				}
			}
			time.Sleep(time.Second) // rates
			return b.String()
		}
		const all = "2 true true 2 true true "
		for _, tt := range []struct{ scope, want string }{
			{"transport=http", "4 true true 4 true true "},
			{"transport=mcp", "2 false false 2 false false "},
			{"connection=" + first.cs.ID(), "2 false true 2 false true "},
			{"plugin=device:" + two.node, "2 true true 4 false false "},
			{"global", "4 false false 4 false false "},
		} {
			if got := served(); got != all {
				t.Errorf("before %s: %s", tt.scope, got)
			}
			time.Sleep(time.Second)
			for len(watcher.updated) > 0 {
				<-watcher.updated
			}
			args := func(config string) string { return fmt.Sprintf(`{"name":"acl","scope":%q%s}`, tt.scope, config) }
			r.control(admin, "kernel.middleware.configure", args(`,"config":{"rules":[{"effect":"deny"}]}`))
			r.control(admin, "kernel.middleware.enable", args(""))
			if got := served(); got != tt.want {
				t.Errorf("%s: %s, want %s", tt.scope, got, tt.want)
			}
			select {
			case <-watcher.updated:
			case <-time.After(2 * time.Second):
				t.Errorf("%s: no resources/updated", tt.scope)
			}
			r.control(admin, "kernel.middleware.disable", args(""))
		}
	})
}

// Numbered calls over HTTP while the pipeline is swapped: each is answered,
// and each was handled once.
func TestSwapsLoseNothing(t *testing.T) {
	t.Parallel()
	const swaps, workers = 50, 8
	calls := int64(1_000) // 10,000 take ten seconds with the race detector
	if os.Getenv("AGENTCTL_SLOW") != "" {
		calls = 10_000
	}
	b := &loadPlugin{seen: make([]atomic.Int32, calls)}
	r := newTestRelay(t, func(o *relay.Options) { o.Plugins = append(o.Plugins, b.plugin) })
	admin := r.admin()
	r.control(admin, "kernel.middleware.configure", `{"name":"acl","config":{"rules":[{"effect":"transform","set":{"by":"acl"}}]}}`)
	var next, transformed atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for n := next.Add(1) - 1; n < calls; n = next.Add(1) - 1 {
				a, err := r.tryRequest(http.MethodPost, "/mcp/tools/call", strings.NewReader(fmt.Sprintf(`{"tool":"bench.number","arguments":{"n":%d}}`, n)), r.headers())
				var got struct {
					N  int64
					By string
				}
				if err != nil || a.status != http.StatusOK || json.Unmarshal([]byte(a.body), &got) != nil || got.N != n {
					t.Errorf("call %d: %v %v", n, a, err)
					return
				}
				if got.By != "" {
					transformed.Add(1)
				}
			}
		})
	}
	for i := range swaps {
		for next.Load() < int64(i)*calls/swaps && !t.Failed() {
			time.Sleep(100 * time.Microsecond)
		}
		r.control(admin, "kernel.middleware."+[]string{"enable", "disable"}[i%2], fmt.Sprintf(`{"name":%q}`, []string{"acl", "redact"}[i/2%2]))
	}
	wg.Wait()
	for n := range b.seen {
		if got := b.seen[n].Load(); got != 1 {
			t.Fatalf("call %d was handled %d times", n, got)
		}
	}
	if got := transformed.Load(); got == 0 || got == calls {
		t.Errorf("the stage changed %d of %d calls: the swaps were not felt", got, calls)
	}
}

// The control plane answers while the data path is full of calls that do not end.
func TestControlUnderLoad(t *testing.T) {
	b := &loadPlugin{}
	r := newTestRelay(t, func(o *relay.Options) { o.Plugins = append(o.Plugins, b.plugin) })
	silent := r.device(mockOptions{script: func(*mockDevice) func(string, link.Cmd) { return func(string, link.Cmd) {} }})
	admin := r.admin()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 100 {
		tool := []string{"bench.wait", silent.echoTool()}[i%2]
		wg.Go(func() {
			for ctx.Err() == nil {
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/mcp/tools/call", strings.NewReader(`{"tool":"`+tool+`","arguments":{"message":"x"}}`))
				for k, v := range r.headers() {
					req.Header.Set(k, v)
				}
				if resp, err := r.http.Do(req); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}
		})
	}
	eventually(t, "calls in flight", func() bool {
		var h struct {
			Figures struct {
				InFlight int `json:"in_flight"`
			}
		}
		return json.Unmarshal([]byte(r.control(admin, "kernel.health.get", `{}`)), &h) == nil && h.Figures.InFlight >= 50
	})
	var took []time.Duration
	for range 20 {
		start := time.Now()
		r.control(admin, "kernel.health.get", `{}`)
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	if median := took[len(took)/2]; median > 2*time.Second { // a busy machine delays some
		t.Errorf("half of the calls of kernel.health.get took %s or more", median)
	}
}

// A hundred subscribers that never read cost little memory, and the healthy one is notified
// of every second's change.
func TestStalledSubscribers(t *testing.T) {
	b := &loadPlugin{}
	r := newTestRelay(t, func(o *relay.Options) { o.Plugins = append(o.Plugins, b.plugin) }, withMetrics)
	healthy := r.mcp(r.agent, "2025-11-25", "")
	if err := healthy.cs.Subscribe(t.Context(), &mcp.SubscribeParams{URI: pulseURI}); err != nil {
		t.Fatal(err)
	}
	body := `{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{"notifications":{"toolsListChanged":true,"resourceSubscriptions":["` + pulseURI + `"]},` +
		`"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
	for range 100 {
		conn, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_ = conn.(*net.TCPConn).SetReadBuffer(2304)
		fmt.Fprintf(conn, "POST /mcp HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"+
			"MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\nContent-Length: %d\r\n\r\n%s", r.addr, r.agent, len(body), body)
	}
	eventually(t, "101 streams", func() bool { return strings.Contains(metricsText(t, r), "agentctl_mcp_streams 101\n") })
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	seconds := 4
	if os.Getenv("AGENTCTL_SLOW") != "" {
		seconds = 120
	}
	for i := range seconds {
		select {
		case <-healthy.updated:
		case <-time.After(patience):
			t.Fatalf("second %d: the healthy subscriber was not notified", i)
		}
	}
	if grown := heap() - before; grown > 4<<20 {
		t.Errorf("100 stalled subscribers and %d changes: %d bytes more", seconds*1000, grown)
	}
}

// A built-in plugin that was unloaded can be loaded again, with all that it knew.
func TestBuiltinReload(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withBuiltins)
	token := r.admin()
	r.control(token, "tickets.create", `{"title":"kept"}`)
	r.control(token, "kernel.plugin.unload", `{"name":"tickets"}`)
	if a := r.call("tickets.list", `{}`, "Authorization", "Bearer "+token); a.status != http.StatusBadRequest {
		t.Errorf("unloaded: %d %s", a.status, a.body)
	}
	r.control(token, "kernel.plugin.load", `{"name":"tickets"}`)
	if got := r.control(token, "tickets.list", `{}`); !strings.Contains(got, `"title":"kept"`) {
		t.Error(got)
	}
	if a := r.call("kernel.plugin.load", `{"name":"tickets"}`, "Authorization", "Bearer "+token); a.status != http.StatusBadRequest {
		t.Errorf("loaded twice: %d %s", a.status, a.body)
	}
}
