package control_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/stages"
)

var _ control.Middleware = (*stages.Manager)(nil)

type scopes string

func (s scopes) Has(scope string) bool { return slices.Contains(strings.Fields(string(s)), scope) }

func caller(actor string, has ...string) *kernel.Caller {
	return &kernel.Caller{Tenant: "a", Actor: actor, Transport: "http", Scopes: scopes(strings.Join(has, " "))}
}

var (
	admin  = caller("root", manifest.ScopeKernelAdmin)
	others = caller("agent", manifest.ScopeCallReadOnly, manifest.ScopeToolsList, manifest.ScopeTicketsWrite)
)

// StaticTransports is two transports in memory.
type StaticTransports struct {
	mu   sync.Mutex // protects list
	list []control.Transport
}

func (s *StaticTransports) List() []control.Transport {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
}

func (s *StaticTransports) Configure(name string, config json.RawMessage) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.list, func(t control.Transport) bool { return t.Name == name })
	if i < 0 {
		return errors.New("no such transport: " + name + "\n\u00fc")
	}
	s.list[i].Config = config
	return nil
}

// harness is a real kernel with stages, a log and the control plane.
type harness struct {
	k          *kernel.Kernel
	m          *stages.Manager
	log        *kernel.MemoryLog
	p          *control.Plugin
	transports *StaticTransports
	loaded     []string
	problems   []string
	loadErr    error
}

func (h *harness) Load(_ context.Context, name string) error {
	h.loaded = append(h.loaded, "+"+name)
	return h.loadErr
}

func (h *harness) Reload(_ context.Context, name string) error {
	h.loaded = append(h.loaded, "="+name)
	return h.loadErr
}

func (h *harness) Unload(_ context.Context, name string) error {
	h.loaded = append(h.loaded, "-"+name)
	return h.loadErr
}

// logLevel is a log's level.
type logLevel string

func (l *logLevel) Level() string { return string(*l) }

func (l *logLevel) SetLevel(to string) error {
	if to != "debug" {
		return manifest.E(manifest.BadRequest, "no such level")
	}
	*l = logLevel(to)
	return nil
}

func newHarness(t testing.TB) *harness {
	t.Helper()
	h := &harness{log: &kernel.MemoryLog{}, transports: &StaticTransports{list: []control.Transport{{Name: "http", Listen: "127.0.0.1:1", Enabled: true, Sessions: 2}, {Name: "link"}}}}
	h.k = kernel.New(kernel.Options{Log: h.log})
	var err error
	if h.m, err = stages.New(h.k.Pipeline(), stages.Options{OnChange: func() { h.p.MiddlewareChanged() }}); err != nil {
		t.Fatal(err)
	}
	lv := logLevel("info")
	h.p = control.New(control.Options{Level: &lv, Kernel: h.k, Log: h.log, Middleware: h.m, Transports: h.transports, Plugins: h, Consents: &consents{},
		Metrics: func() any { return h.m.Metrics().Stats() }, ResetMetrics: h.m.Metrics().Reset, Health: func() []string { return h.problems }})
	if err := h.k.Load(h.p, false); err != nil {
		t.Fatal(err)
	}
	return h
}

// call answers a tool as its JSON.
func (h *harness) call(c *kernel.Caller, tool, args string) (string, error) {
	res, err := h.k.Call(context.Background(), &kernel.Request{Caller: c, Tool: tool, Arguments: json.RawMessage(args), TraceID: "4bf92f3577b34da6a3ce929d0e0e4736"})
	if err != nil {
		return "", err
	}
	return string(res.Structured), nil
}

func (h *harness) events(t testing.TB) (out []string) {
	t.Helper()
	if err := h.log.Replay(context.Background(), 0, func(e kernel.Event) error {
		out = append(out, e.Tenant+" "+e.Type+" "+e.Aggregate+" "+string(e.Payload))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func compile(t testing.TB, raw []byte) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource("mem:x", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("mem:x")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Every tool answers as its schema says, and says what it should.
func TestTools(t *testing.T) {
	h := newHarness(t)
	h.m.Metrics() // counts the calls below
	tests := []struct{ tool, args, says string }{
		{"kernel.middleware.list", ``, `{"middleware":[{"name":"trace","scope":"global","enabled":true,"config":{"level":"debug","sample":1}},{"name":"metrics"`},
		{"kernel.middleware.enable", `{"name":"acl"}`, `{"name":"acl","scope":"global","enabled":true,"config":{"rules":[]}}`},
		{"kernel.middleware.enable", `{"name":"redact","scope":"plugin=tickets"}`, `{"name":"redact","scope":"plugin=tickets","enabled":true,`},
		{"kernel.middleware.disable", `{"name":"acl","scope":"global"}`, `{"name":"acl","scope":"global","enabled":false,`},
		{"kernel.middleware.configure", `{"name":"compress","config":{"min_bytes":2048},"scope":"transport=mcp"}`, `{"name":"compress","scope":"transport=mcp","enabled":false,"config":{"min_bytes":2048,`},
		{"kernel.middleware.configure", `{"order":["trace","rate","metrics","sign","compress","acl","redact"]}`, `"scope":"global","enabled":true,"config":{"level":"debug","sample":1}},{"name":"rate"`},
		{"kernel.transport.list", `{}`, `{"transports":[{"name":"http","listen":"127.0.0.1:1","enabled":true,"sessions":2,"config":{}},{"name":"link","enabled":false,"sessions":0,"config":{}}]}`},
		{"kernel.transport.configure", `{"name":"link","config":{"max_streams":5}}`, `"config":{"max_streams":5}`},
		{"kernel.introspection.router", ``, `{"stages":["trace","rate","metrics","sign","compress","acl","redact"]`},
		{"kernel.introspection.router", `{"tool":"kernel.health.get"}`, `"route":{"tool":"kernel.health.get","plugin":"kernel","scope":"kernel:admin","streams":false}`},
		{"kernel.introspection.subscriptions", ``, `{"tenants":[],"watches":[],"total_tenants":0,"total_watches":0}`},
		{"kernel.introspection.plugins", `{"limit":1.0}`, `{"total":1,"plugins":[{"name":"kernel","version":"1.0.0","state":"loaded",`},
		{"kernel.introspection.plugins", `{"after":"kernel"}`, `{"total":1,"plugins":[]}`},
		{"kernel.plugin.load", `{"name":"weather"}`, `{"name":"weather"}`},
		{"kernel.plugin.reload", `{"name":"weather"}`, `{"name":"weather"}`},
		{"kernel.plugin.unload", `{"name":"weather@1.0.0"}`, `{"name":"weather@1.0.0"}`},
		{"kernel.plugin.show", `{"name":"weather"}`, `"subscribe":["alert"],"append":[],"allowed":false,"tenants":[]}`},
		{"kernel.plugin.allow", `{"name":"weather","tenants":["a","*"]}`, `"allowed":true,"tenants":["a","*"],"by":"root"`},
		{"kernel.plugin.allow", `{"name":"weather"}`, `"allowed":true,"tenants":["a"],"by":"root"`},
		{"kernel.plugin.disallow", `{"name":"weather"}`, `"allowed":false,"tenants":[]}`},
		{"kernel.log.configure", `{"level":"debug"}`, `{"previous":"info","current":"debug"}`},
		{"kernel.health.get", ``, `{"status":"ok","problems":[],"uptime_ms":`},
		{"kernel.health.reset_counters", ``, `{"reset":true}`},
	}
	seen := map[string]bool{}
	for _, tt := range tests {
		tool, ok := h.k.Tool(admin, tt.tool)
		if !ok {
			t.Fatalf("no tool %s", tt.tool)
		}
		seen[tt.tool] = true
		got, err := h.call(admin, tt.tool, tt.args)
		if strings.HasPrefix(tt.says, `{"stages"`) {
			tt.says = `{"stages":["trace","metrics"],"plugins":1,"tools":18,"resources":4,` // only what is enabled somewhere
			if strings.Contains(got, `"redact"`) {
				tt.says = `{"stages":["trace","metrics","redact"],"plugins":1,"tools":18,"resources":4,`
			}
		}
		if err != nil || !strings.Contains(got, tt.says) {
			t.Errorf("%s %s: got %s, %v; want %s", tt.tool, tt.args, got, err, tt.says)
			continue
		}
		doc, err := jsonschema.UnmarshalJSON(strings.NewReader(got))
		if err != nil {
			t.Fatal(err)
		}
		if err := compile(t, tool.OutputSchema).Validate(doc); err != nil {
			t.Errorf("%s: %v", tt.tool, err)
		}
	}
	tools, more := h.k.ListTools(admin, "", 100)
	for _, tool := range tools {
		if !seen[tool.Name] || tool.Scope != manifest.ScopeKernelAdmin {
			t.Errorf("tool %s is not tried here, or has scope %s", tool.Name, tool.Scope)
		}
	}
	if more || len(tools) != 18 || !slices.Equal(h.loaded, []string{"+weather", "=weather", "-weather@1.0.0"}) {
		t.Errorf("%d tools; loaded %v", len(tools), h.loaded)
	}
}

// Every change leaves one event with who made it and the trace id, and without secrets;
// what is refused and what only reads leaves none.
func TestEvents(t *testing.T) {
	h := newHarness(t)
	by := `"actor":"root","trace_id":"4bf92f3577b34da6a3ce929d0e0e4736"}`
	steps := []struct{ tool, args, event string }{
		{"kernel.middleware.enable", `{"name":"acl"}`, `a kernel.middleware acl {"action":"enable","name":"acl","scope":"global",` + by},
		{"kernel.middleware.disable", `{"name":"acl","scope":"transport=http"}`, `a kernel.middleware acl {"action":"disable","name":"acl","scope":"transport=http",` + by},
		{"kernel.middleware.configure", `{"name":"redact","config":{"patterns":["hunter2"]}}`, `a kernel.middleware redact {"action":"configure","name":"redact","scope":"global","config_sha256":"` + digest(`{"patterns":["hunter2"]}`) + `",` + by},
		{"kernel.middleware.configure", `{"order":["trace","rate","metrics","sign","compress","acl","redact"]}`, `a kernel.middleware reorder {"action":"reorder","order":["trace","rate","metrics","sign","compress","acl","redact"],` + by},
		{"kernel.transport.configure", `{"name":"http","config":{"token":"hunter2"}}`, `a kernel.transport http {"action":"configure","name":"http","config_sha256":"` + digest(`{"token":"hunter2"}`) + `",` + by},
		{"kernel.plugin.load", `{"name":"weather"}`, `a kernel.plugin weather {"action":"load","name":"weather",` + by},
		{"kernel.plugin.unload", `{"name":"weather"}`, `a kernel.plugin weather {"action":"unload","name":"weather",` + by},
		{"kernel.plugin.allow", `{"name":"weather","tenants":["b"]}`, `a kernel.plugin weather {"action":"allow","name":"weather","config_sha256":"` + strings.Repeat("0a", 32) + `","tenants":["b"],` + by},
		{"kernel.plugin.disallow", `{"name":"weather"}`, `a kernel.plugin weather {"action":"disallow","name":"weather","config_sha256":"` + strings.Repeat("0a", 32) + `",` + by},
		{"kernel.plugin.allow", `{"name":"nothing"}`, ""},
		{"kernel.plugin.show", `{"name":"weather"}`, ""},
		{"kernel.health.reset_counters", ``, `a kernel.counters reset {"action":"reset",` + by},
		{"kernel.middleware.list", ``, ""},
		{"kernel.log.configure", `{"level":"debug"}`, `a kernel.log debug {"action":"configure","name":"debug",` + by},
		{"kernel.health.get", ``, ""},
		{"kernel.middleware.enable", `{"name":"sign"}`, ""},
		{"kernel.middleware.enable", `{"name":"nothing"}`, ""},
		{"kernel.middleware.configure", `{"order":["trace"]}`, ""},
		{"kernel.middleware.configure", `{"order":["trace","metrics","rate","compress","sign","acl","redact"]}`, ""},
		{"kernel.transport.configure", `{"name":"nothing","config":{}}`, ""},
	}
	for _, s := range steps {
		before := len(h.events(t))
		_, err := h.call(admin, s.tool, s.args)
		got := h.events(t)[before:]
		if s.event == "" {
			if len(got) != 0 {
				t.Errorf("%s %s (%v): left %v", s.tool, s.args, err, got)
			}
			continue
		}
		if err != nil || len(got) != 1 || got[0] != s.event {
			t.Errorf("%s %s: %v\n got %v\nwant %s", s.tool, s.args, err, got, s.event)
		}
	}
	if got, _ := h.call(others, "kernel.middleware.enable", `{"name":"acl"}`); got != "" {
		t.Errorf("others: %s", got)
	}
	h.loadErr = errors.New("no plugin of this name\u2028")
	before := len(h.events(t))
	for tool, says := range map[string]string{"kernel.plugin.load": "no plugin of this name?", "kernel.transport.configure": "no such transport: x??"} {
		args := `{"name":"x"}`
		if tool == "kernel.transport.configure" {
			args = `{"name":"x","config":{}}`
		}
		_, err := h.call(admin, tool, args)
		if e := manifest.AsError(err); e.Code != manifest.BadRequest || e.Message != says {
			t.Errorf("%s: %+v", tool, e)
		}
	}
	if got := h.events(t)[before:]; len(got) != 0 {
		t.Errorf("refused: left %v", got)
	}
}

func digest(config string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(config))) }

// failingLog refuses to append.
type failingLog struct{ kernel.MemoryLog }

func (*failingLog) Append(context.Context, ...kernel.Event) (uint64, error) {
	return 0, kernel.ErrLogFull
}

// A change that the log did not keep is notified so.
func TestLogFails(t *testing.T) {
	k := kernel.New(kernel.Options{})
	m, err := stages.New(k.Pipeline(), stages.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Load(control.New(control.Options{Kernel: k, Log: &failingLog{}, Middleware: m}), false); err != nil {
		t.Fatal(err)
	}
	h := &harness{k: k}
	_, err = h.call(admin, "kernel.middleware.enable", `{"name":"acl"}`)
	if e := manifest.AsError(err); e.Code != manifest.Internal || e.Reason != "log" || !strings.Contains(e.Message, "the change is made") {
		t.Errorf("got %+v", e)
	}
	for _, tool := range []string{"kernel.transport.configure", "kernel.plugin.load"} { // nothing to configure or load
		if _, err := h.call(admin, tool, `{"name":"x"}`); err == nil {
			t.Errorf("%s: served", tool)
		}
	}
	if got, err := h.call(admin, "kernel.transport.list", ""); err != nil || got != `{"transports":[]}` {
		t.Errorf("transports: %s, %v", got, err)
	}
}

// Who is no administrator sees nothing of the control plane and is refused.
func TestAdminOnly(t *testing.T) {
	h := newHarness(t)
	if err := h.k.Load(blockingPlugin{}, false); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*kernel.Caller{others, caller("nobody"), {Tenant: "a", Actor: "x"}} {
		tools, _ := h.k.ListTools(c, "", 100)
		resources, _ := h.k.ListResources(c, "", "", 100)
		for _, tool := range tools {
			if strings.HasPrefix(tool.Name, "kernel.") {
				t.Errorf("%s sees %s", c.Actor, tool.Name)
			}
		}
		for _, r := range resources {
			if strings.HasPrefix(r.URI, "mcp://kernel/") {
				t.Errorf("%s sees %s", c.Actor, r.URI)
			}
		}
		all, _ := h.k.ListTools(admin, "", 100)
		for _, tool := range all {
			if !strings.HasPrefix(tool.Name, "kernel.") {
				continue
			}
			_, err := h.call(c, tool.Name, `{"name":"acl"}`)
			if e := manifest.AsError(err); err == nil || e.Code != manifest.SafetyDenied {
				t.Errorf("%s calls %s: %v", c.Actor, tool.Name, err)
			}
		}
		for _, uri := range []string{control.MiddlewareURI, control.TransportsURI, control.MetricsURI, control.PluginsURI} {
			if _, data, err := h.k.Read(t.Context(), c, uri); !errors.Is(err, kernel.ErrNoResource) {
				t.Errorf("%s reads %s: %s, %v", c.Actor, uri, data, err)
			}
			if _, err := h.k.Watch(c, uri); !errors.Is(err, kernel.ErrNoResource) {
				t.Errorf("%s watches %s: %v", c.Actor, uri, err)
			}
		}
	}
	if got := h.events(t); len(got) != 0 {
		t.Errorf("left %v", got)
	}
}

// blockingPlugin is a plugin with one tool; Call may block.
type blockingPlugin struct{ block chan struct{} }

func (blockingPlugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "simple", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "simple.do", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeCallReadOnly}}}}
}

func (s blockingPlugin) Call(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
	if s.block != nil {
		select {
		case <-s.block:
		case <-ctx.Done():
		}
	}
	return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
}

// watchedResources is a harness whose resources of the control plane are all watched, with the notifications of
// the tenant that watches.
func watchedResources(t *testing.T) (*harness, *kernel.Subscription) {
	h := newHarness(t)
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.k.Run(ctx) })
	sub, err := h.k.Subscribe("a")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sub.Close(); stop(); wg.Wait() })
	for _, uri := range []string{control.MiddlewareURI, control.TransportsURI, control.MetricsURI, control.PluginsURI} {
		release, err := h.k.Watch(admin, uri)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(release)
	}
	synctest.Wait()
	return h, sub
}

// notified lists the resources that the subscribers are notified of within two seconds.
func notified(sub *kernel.Subscription) []string {
	time.Sleep(2 * time.Second)
	synctest.Wait()
	return sub.Next().Updated
}

// read returns what a resource has.
func (h *harness) read(t *testing.T, uri string) string {
	t.Helper()
	_, data, err := h.k.Read(t.Context(), admin, uri)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Each change is announced by the resource that shows it, and no other but the metrics, which every call
// changes.
func TestResourcesAnnounceChanges(t *testing.T) {
	for _, tt := range []struct {
		name  string
		do    func(h *harness, sub *kernel.Subscription) error
		uri   string
		shows string
	}{
		{"nothing", func(*harness, *kernel.Subscription) error { return nil }, "", ""},
		{"a stage is enabled by a tool", func(h *harness, _ *kernel.Subscription) error {
			_, err := h.call(admin, "kernel.middleware.enable", `{"name":"acl"}`)
			return err
		}, control.MiddlewareURI, `{"name":"acl","scope":"global","enabled":true,`},
		{"a stage is disabled elsewhere", func(h *harness, sub *kernel.Subscription) error {
			_, err := h.call(admin, "kernel.middleware.enable", `{"name":"acl"}`)
			notified(sub) // of that
			return errors.Join(err, h.m.Disable("acl", "global"))
		}, control.MiddlewareURI, `{"name":"acl","scope":"global","enabled":false,`},
		{"a transport is configured", func(h *harness, _ *kernel.Subscription) error {
			_, err := h.call(admin, "kernel.transport.configure", `{"name":"http","config":{"a":1}}`)
			return err
		}, control.TransportsURI, `"config":{"a":1}`},
		{"a plugin is loaded", func(h *harness, _ *kernel.Subscription) error { return h.k.Load(blockingPlugin{}, false) },
			control.PluginsURI, `"tool_names":["simple.do"]`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, sub := watchedResources(t)
				if err := tt.do(h, sub); err != nil {
					t.Fatal(err)
				}
				got := slices.DeleteFunc(notified(sub), func(uri string) bool { return uri == control.MetricsURI })
				if tt.uri == "" {
					if len(got) != 0 {
						t.Errorf("notified of %v without a change", got)
					}
					return
				}
				if !slices.Equal(got, []string{tt.uri}) {
					t.Errorf("notified of %v, want %s", got, tt.uri)
				}
				if got := h.read(t, tt.uri); !strings.Contains(got, tt.shows) {
					t.Errorf("%s is %s, want %s in it", tt.uri, got, tt.shows)
				}
			})
		})
	}
}

// The unloading of a plugin is a change, too.
func TestResourcesAnnounceUnload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, sub := watchedResources(t)
		if err := h.k.Load(blockingPlugin{}, false); err != nil {
			t.Fatal(err)
		}
		notified(sub)
		h.k.Unload(blockingPlugin{})
		if got := notified(sub); !slices.Contains(got, control.PluginsURI) {
			t.Errorf("notified of %v, want %s", got, control.PluginsURI)
		}
		if got := h.read(t, control.PluginsURI); !strings.Contains(got, `{"total":1,`) {
			t.Errorf("the resource is %s, want the control plane only", got)
		}
	})
}

// Metrics are announced at most once a second, and not while nothing happens.
func TestMetricsAnnounceAtMostOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, sub := watchedResources(t)
		if err := h.k.Load(blockingPlugin{}, false); err != nil {
			t.Fatal(err)
		}
		notified(sub)
		count := 0
		for range 40 { // 4 s
			time.Sleep(100 * time.Millisecond)
			_, _ = h.call(others, "simple.do", "")
			synctest.Wait()
			if slices.Contains(sub.Next().Updated, control.MetricsURI) {
				count++
			}
		}
		if count < 3 || count > 5 {
			t.Errorf("notified %d times in 4 s of calls, want 3 to 5", count)
		}
		notified(sub) // the last calls
		time.Sleep(10 * time.Second)
		if got := notified(sub); len(got) != 0 {
			t.Errorf("notified of %v while nothing happened", got)
		}
	})
}

// kernel.health.reset_counters sets the counters of the kernel, and those of the stage metrics, to zero.
func TestResetCounters(t *testing.T) {
	h := newHarness(t)
	metrics := func() (m struct {
		Kernel  kernel.Stats        `json:"kernel"`
		Classes []stages.ClassStats `json:"classes"`
	}) {
		t.Helper()
		if err := json.Unmarshal([]byte(h.read(t, control.MetricsURI)), &m); err != nil || len(m.Classes) != 5 {
			t.Fatalf("%d classes, %v; want 5", len(m.Classes), err)
		}
		return m
	}
	for range 40 {
		_, _ = h.call(others, "simple.do", "")
	}
	if m := metrics(); m.Kernel.Calls < 40 || m.Classes[4].Calls < 40 {
		t.Errorf("after 40 calls: %+v", m)
	}
	if _, err := h.call(admin, "kernel.health.reset_counters", ""); err != nil {
		t.Error(err)
	}
	if m := metrics(); m.Kernel.Calls > 2 || m.Kernel.Errors != 0 || m.Classes[4].Calls != 0 {
		t.Errorf("after the reset: %+v", m)
	}
}

// consents is a relay with the plugin weather.
type consents struct{ now control.PluginBus }

func (c *consents) Show(name string) (*control.PluginBus, error) {
	if name != "weather" {
		return nil, errors.New("no such folder")
	}
	b := c.now
	b.Name, b.Version, b.Digest, b.Subscribe = name, "1.0.0", strings.Repeat("0a", 32), []string{"alert"}
	b.Call, b.Read, b.Append, b.Tenants = []string{}, []string{}, []string{}, append([]string{}, b.Tenants...)
	return &b, nil
}

func (c *consents) Set(_ context.Context, name, _ string, tenants []string, actor string) (*control.PluginBus, error) {
	c.now = control.PluginBus{Allowed: len(tenants) > 0, Tenants: tenants}
	if c.now.Allowed {
		c.now.By = actor
	}
	return c.Show(name)
}
