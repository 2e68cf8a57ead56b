package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const (
	nodeA   = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	nodeB   = "01hzx9k3m4p7q8r9s0t1v2w3xz"
	unknown = "01hzx9k3m4p7q8r9s0t1v2w3aa"
)

// scopes are the scopes of a caller by name.
type scopes string

func (s scopes) Has(scope string) bool { return slices.Contains(strings.Fields(string(s)), scope) }

func caller(tenant string, has ...string) *kernel.Caller {
	return &kernel.Caller{Tenant: tenant, Actor: "agent-" + tenant, Scopes: scopes(strings.Join(has, " "))}
}

// reader is a caller who may use what devices offer.
func reader(tenant string) *kernel.Caller { return caller(tenant, manifest.ScopeCallReadOnly) }

// plugin is a plugin by hand; its calls are counted.
type plugin struct {
	m     *kernel.Manifest
	calls atomic.Int64
	call  func(context.Context, *kernel.Request) (*kernel.Result, error)
	read  func(context.Context, *kernel.Caller, string) ([]byte, error)
	watch func(ctx context.Context, uri string, changed func()) error
}

func (p *plugin) Manifest() *kernel.Manifest { return p.m }

func (p *plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	p.calls.Add(1)
	if p.call != nil {
		return p.call(ctx, r)
	}
	return &kernel.Result{Structured: json.RawMessage(`{"by":"` + p.m.Name + `"}`)}, nil
}

func (p *plugin) Read(ctx context.Context, c *kernel.Caller, uri string) ([]byte, error) {
	if p.read != nil {
		return p.read(ctx, c, uri)
	}
	return []byte(p.m.Name + " " + uri), nil
}

func (p *plugin) Watch(ctx context.Context, uri string, changed func()) error {
	return p.watch(ctx, uri, changed)
}

var (
	_ kernel.Plugin  = (*plugin)(nil)
	_ kernel.Reader  = (*plugin)(nil)
	_ kernel.Watcher = (*plugin)(nil)
)

// board is a device as the relay makes a plugin of it: echo and metrics, with the real
// checks and limits.
func board(tenant, node string) *plugin {
	m := &kernel.Manifest{Name: "device:" + node, Version: "1.0.0", Tenant: tenant, Inline: true}
	for _, c := range []manifest.Capability{manifest.Echo(), manifest.Metrics()} {
		tools, err := manifest.Project(node, &c)
		if err != nil {
			panic(err)
		}
		limit := manifest.NewLimit(c.Constraints, manifest.RelayWindow)
		for _, t := range tools {
			in, _ := manifest.Schema(t.Verb.Input)
			m.Tools = append(m.Tools, &kernel.Tool{Name: t.Canonical, NodeID: node, Limit: limit, ToolInfo: &kernel.ToolInfo{
				Description: t.Verb.Description, InputSchema: in, SafetyClass: c.SafetyClass,
				Scope: manifest.ScopeForClass(c.SafetyClass), Streams: t.Verb.Stream(),
				CheckArguments: func(args []byte) ([]byte, error) { return manifest.CheckArgs(t.Verb.Input, args) },
			}})
		}
	}
	m.Resources = []*kernel.Resource{{URI: metricsURI(node), Name: "metrics", Scope: manifest.ScopeCallReadOnly, NodeID: node, Watchable: true}}
	return &plugin{m: m}
}

func metricsURI(node string) string { return "mcp://devices/" + node + "/metrics.json" }

func echoTool(node string) string { return "sysecho." + node + ".echo.invoke" }

func snapshotTool(node string) string { return "sys." + node + ".metrics.snapshot" }

func subscribeTool(node string) string { return "sys." + node + ".metrics.subscribe" }

// newPlugin is a plugin with one tool of a scope and one resource.
func newPlugin(name, tenant, scope string) *plugin {
	return &plugin{m: &kernel.Manifest{
		Name: name, Version: "1.0.0", Tenant: tenant,
		Tools:     []*kernel.Tool{{Name: name + ".do", ToolInfo: &kernel.ToolInfo{Scope: scope}}},
		Resources: []*kernel.Resource{{URI: name + "://all", Scope: scope}},
	}}
}

// auditLog collects audit records.
type auditLog struct {
	mu   sync.Mutex
	recs []kernel.Record
}

func (j *auditLog) add(r kernel.Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.recs = append(j.recs, r)
}

func (j *auditLog) all() []kernel.Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.recs)
}

// owners explains missing tools as package relay does.
func owners(of map[string]string) func(*kernel.Caller, string) error {
	return func(c *kernel.Caller, tool string) error {
		n, _ := manifest.ParseToolName(tool)
		switch owner, known := of[n.NodeID]; {
		case !known || owner != c.Tenant:
			return kernel.NodeDenied()
		default:
			return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", Reason: "offline"}
		}
	}
}

func load(t testing.TB, k *kernel.Kernel, ps ...kernel.Plugin) {
	t.Helper()
	for _, p := range ps {
		if err := k.Load(p, false); err != nil {
			t.Fatal(err)
		}
	}
}

func wantCode(t testing.TB, what string, err error, code manifest.Code, reason string) {
	t.Helper()
	var e *manifest.Error
	if !errors.As(err, &e) || e.Code != code || e.Reason != reason {
		t.Errorf("%s: got %v (%+v), want %s %s", what, err, e, code, reason)
	}
}

func toolNames(k *kernel.Kernel, c *kernel.Caller) []string {
	var names []string
	page, more := k.ListTools(c, "", 1<<20)
	for _, t := range page {
		names = append(names, t.Name)
	}
	if more {
		names = append(names, "more?")
	}
	return names
}

// stream is a kernel.Stream by hand.
type stream struct{ closed atomic.Int64 }

func newStream() *stream { return new(stream) }

func (s *stream) Notify(func())                 {}
func (s *stream) Next() (*manifest.Frame, bool) { return nil, false }
func (s *stream) Err() error                    { return nil }
func (s *stream) Close()                        { s.closed.Add(1) }

var _ kernel.Stream = (*stream)(nil)

func ExampleKernel() {
	k := kernel.New(kernel.Options{Audit: func(r kernel.Record) { fmt.Printf("audit: %s %q %q\n", r.Decision, r.Tool, r.Code) }})
	clock := &plugin{m: &kernel.Manifest{Name: "clock", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "clock.now", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeToolsList}}}}}
	clock.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(`{"year":` + fmt.Sprint(time.Unix(1_750_000_000, 0).UTC().Year()) + `}`)}, nil
	}
	if err := k.Load(clock, false); err != nil {
		fmt.Println(err)
	}
	who := caller("default", manifest.ScopeToolsList)
	res, err := k.Call(context.Background(), &kernel.Request{Caller: who, Tool: "clock.now"})
	fmt.Println(string(res.Structured), err)
	k.Unload(clock)
	_, err = k.Call(context.Background(), &kernel.Request{Caller: who, Tool: "clock.now"})
	fmt.Println(err)
	// Output:
	// audit: allow "clock.now" ""
	// {"year":2025} <nil>
	// audit: deny "" "E_BAD_REQUEST"
	// E_BAD_REQUEST: no tool has this name; tools/list shows the names
}

// A tool that inspects a board needs a second scope. A caller without it neither sees nor calls the
// tool, whether the board is connected or not, and learns which scope it lacks.
func TestInspectingToolsNeedTheirScope(t *testing.T) {
	explained := 0
	k := kernel.New(kernel.Options{ExplainMissing: func(*kernel.Caller, string) error {
		explained++
		return manifest.E(manifest.NodeOffline, "offline")
	}})
	name := "sysproc." + nodeA + ".processes.top"
	load(t, k, &plugin{m: &kernel.Manifest{Name: "device:" + nodeA, Version: "1.0.0", Tenant: "a", Tools: []*kernel.Tool{
		{Name: name, ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeCallReadOnly, Inspects: true}},
		{Name: "sysinfo." + nodeA + ".info.get", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeCallReadOnly}},
	}}})
	old := caller("a", manifest.ScopeCallReadOnly)
	full := caller("a", manifest.ScopeCallReadOnly, manifest.ScopeBoardsInspect)
	alone := caller("a", manifest.ScopeBoardsInspect)
	for _, tt := range []struct {
		name    string
		caller  *kernel.Caller
		lists   int
		refused string
	}{
		{"both scopes", full, 2, ""},
		{"a token from before the scope existed", old, 1, "boards:inspect"},
		{"the scope alone", alone, 0, "the scope tools:call:read_only that this tool needs"},
	} {
		tools, _ := k.ListTools(tt.caller, "", 10)
		_, visible := k.Tool(tt.caller, name)
		if len(tools) != tt.lists || visible != (tt.refused == "") {
			t.Errorf("%s: lists %d tools, sees the tool: %v", tt.name, len(tools), visible)
		}
		for _, tool := range []string{name, "sysproc." + nodeB + ".processes.top"} { // connected, and not
			_, err := k.Call(t.Context(), &kernel.Request{Caller: tt.caller, Tool: tool})
			e := manifest.AsError(err)
			switch {
			case tt.refused != "" && (err == nil || e.Code != manifest.SafetyDenied || !strings.Contains(e.Message, tt.refused)):
				t.Errorf("%s: %s answers %v", tt.name, tool, err)
			case tt.refused == "" && err != nil && e.Code != manifest.NodeOffline:
				t.Errorf("%s: %s answers %v", tt.name, tool, err)
			}
		}
	}
	if explained != 1 {
		t.Errorf("%d callers learned about the board that is not connected, want 1", explained)
	}
}
