package stages_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

func TestACL(t *testing.T) {
	p, q := &plugin{name: "p", read: "[]"}, &plugin{name: "q", read: "[]"}
	k, m := newKernel(t, stages.Options{}, p, q)
	call := func(tool string) *kernel.Request { return request(agent(), tool, `{"a":1,"b":{"c":[1.50]}}`, "") }
	read := func(uri string) *kernel.Request {
		return &kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: uri}
	}
	as := func(r *kernel.Request, fn func(*kernel.Caller)) *kernel.Request { fn(r.Caller); return r }
	tests := []struct {
		name, rules string
		req         *kernel.Request
		denied      string // by which reason; "": served
		saw         string // arguments that the plugin saw, if it matters
	}{
		{"no rules", `[]`, call("p.do"), "", ""},
		{"a tool", `[{"effect":"deny","tool":"p.do"}]`, call("p.do"), "acl_rule_0", ""},
		{"another tool", `[{"effect":"deny","tool":"p.do"}]`, call("p.other"), "", ""},
		{"a pattern", `[{"effect":"deny","tool":"*.d*"}]`, call("q.do"), "acl_rule_0", ""},
		{"the first decides", `[{"effect":"allow","tool":"p.*"},{"effect":"deny"}]`, call("p.do"), "", ""},
		{"and the next for others", `[{"effect":"allow","tool":"p.*"},{"effect":"deny"}]`, call("q.do"), "acl_rule_1", ""},
		{"every selector has to fit", `[{"effect":"deny","tool":"p.do","agent":"agent-2"}]`, call("p.do"), "", ""},
		{"an agent", `[{"effect":"deny","agent":"agent-2"}]`, as(call("p.do"), func(c *kernel.Caller) { c.Actor = "agent-2" }), "acl_rule_0", ""},
		{"a tenant", `[{"effect":"deny","tenant":"b*"}]`, as(call("p.do"), func(c *kernel.Caller) { c.Tenant = "blue" }), "acl_rule_0", ""},
		{"a transport", `[{"effect":"deny","transport":"stdio"}]`, as(call("p.do"), func(c *kernel.Caller) { c.Transport = "stdio" }), "acl_rule_0", ""},
		{"a capability", `[{"effect":"deny","scope":"x:*"}]`, call("p.do"), "acl_rule_0", ""},
		{"a capability of a resource", `[{"effect":"deny","scope":"x:y"}]`, read("mcp://p/all.json"), "acl_rule_0", ""},
		{"another capability", `[{"effect":"deny","scope":"tools:call:*"}]`, call("p.do"), "", ""},
		{"a resource", `[{"effect":"deny","uri":"mcp://p/*"}]`, read("mcp://p/all.json"), "acl_rule_0", ""},
		{"another resource", `[{"effect":"deny","uri":"mcp://p/*"}]`, read("mcp://q/all.json"), "", ""},
		{"any URI is no call", `[{"effect":"deny","uri":"*"}]`, call("p.do"), "", ""},
		{"any tool is no read", `[{"effect":"deny","tool":"*"}]`, read("mcp://p/all.json"), "", ""},
		{"a method", `[{"effect":"deny","method":"resources/*"}]`, read("mcp://q/all.json"), "acl_rule_0", ""},
		{"another method", `[{"effect":"deny","method":"resources/*"}]`, call("p.do"), "", ""},
		{"a transform", `[{"effect":"transform","set":{"z":{"y":[2.50]},"a":7},"remove":["b","nothing"]}]`, call("p.do"), "", `{"a":7,"z":{"y":[2.50]}}`},
		{"a transform goes on", `[{"effect":"transform","set":{"z":0}},{"effect":"deny","tool":"p.do"}]`, call("p.do"), "acl_rule_1", ""},
		{"two transforms", `[{"effect":"transform","set":{"z":0}},{"effect":"transform","remove":["a","b"]}]`, call("p.do"), "", `{"z":0}`},
		{"a transform of nothing given", `[{"effect":"transform","set":{"z":0}}]`, request(agent(), "p.do", "", ""), "", `{"z":0}`},
		{"a transform is no deny of reads", `[{"effect":"transform","set":{"z":0}}]`, read("mcp://p/all.json"), "", ""},
		{"plugins see what was sent otherwise", `[{"effect":"transform","tool":"q.*","set":{"z":0}}]`, call("p.do"), "", `{"a":1,"b":{"c":[1.50]}}`},
	}
	for _, tt := range tests {
		enable(t, m, "acl", `{"rules":`+tt.rules+`}`)
		if got := isListed(k, tt.req); got != (tt.denied == "") {
			t.Errorf("%s: listed %t, denied %q", tt.name, got, tt.denied)
		}
		for range 2 { // a repetition meets the same
			r := *tt.req
			_, err := k.Call(t.Context(), &r)
			if tt.denied != "" {
				wantCode(t, tt.name, err, manifest.SafetyDenied, tt.denied)
			} else if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			if tt.saw != "" && p.last() != tt.saw {
				t.Errorf("%s: the plugin saw %s, want %s", tt.name, p.last(), tt.saw)
			}
		}
	}
	// A rule about a capability must not reveal whether another tenant's tool exists.
	enable(t, m, "acl", `{"rules":[{"effect":"deny","scope":"*"}]}`)
	_, err := k.Call(t.Context(), call("nobody.do"))
	wantCode(t, "nobody's tool", err, manifest.BadRequest, "name")
}

// isListed reports whether the caller of a request sees its tool or resource in the lists.
func isListed(k *kernel.Kernel, r *kernel.Request) bool {
	tools, _ := k.ListToolset(r.Caller, r.ConnID, kernel.AllTools, "", 100)
	resources, _ := k.ListResources(r.Caller, r.ConnID, "", 100)
	if r.Method == kernel.MethodRead {
		return slices.ContainsFunc(resources, func(l *kernel.Resource) bool { return l.URI == r.URI }) && k.MayRead(r.Caller, r.ConnID, r.URI)
	}
	return slices.ContainsFunc(tools, func(l *kernel.Tool) bool { return l.Name == r.Tool }) && !k.Refuses(r.Caller, r.ConnID, r.Tool)
}

// TestACLListsInScope: a list leaves out what the rules of the caller's own scopes deny, and a change
// of rules is reported once, also when it is undone.
func TestACLListsInScope(t *testing.T) {
	changes := 0
	p, q := &plugin{name: "p"}, &plugin{name: "q"}
	k, m := newKernel(t, stages.Options{OnListChange: func() { changes++ }}, p, q)
	on := func(conn, tool string) *kernel.Request {
		r := request(agent(), tool, "{}", "")
		r.ConnID = conn
		return r
	}
	steps := []struct {
		name    string
		do      func() error
		changed bool
		listed  map[*kernel.Request]bool
	}{
		{"rules of a stage that is off", func() error { return m.Configure("acl", "global", []byte(`{"rules":[{"effect":"deny"}]}`)) }, false,
			map[*kernel.Request]bool{on("", "p.do"): true}},
		{"on for one connection", func() error { return m.Enable("acl", "connection=c1") }, true,
			map[*kernel.Request]bool{on("", "p.do"): true, on("c1", "p.do"): false, on("c2", "p.do"): true}},
		{"on for a plugin", func() error { return m.Enable("acl", "plugin=q") }, true,
			map[*kernel.Request]bool{on("", "p.do"): true, on("", "q.do"): false}},
		{"another stage", func() error { return m.Enable("redact", "global") }, false, nil},
		{"off for that plugin, on for all", func() error { return errors.Join(m.Enable("acl", "global"), m.Disable("acl", "plugin=q")) }, true,
			map[*kernel.Request]bool{on("", "p.do"): false, on("", "q.do"): true}},
		{"other rules", func() error {
			return m.Configure("acl", "global", []byte(`{"rules":[{"effect":"allow","tool":"*.do"},{"effect":"deny"}]}`))
		}, true, map[*kernel.Request]bool{on("", "p.do"): true, on("", "p.other"): false}},
		{"the same rules", func() error {
			return m.Configure("acl", "global", []byte(`{"rules":[{"effect":"allow","tool":"*.do"},{"effect":"deny"}]}`))
		}, false, nil},
		{"off", func() error { return m.Disable("acl", "global") }, true, map[*kernel.Request]bool{on("", "p.other"): true}},
	}
	for _, s := range steps {
		before := changes
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if (changes > before) != s.changed {
			t.Errorf("%s: %d changes of lists, want some: %t", s.name, changes-before, s.changed)
		}
		for r, want := range s.listed {
			if got := isListed(k, r); got != want {
				t.Errorf("%s: %s on %q listed: %t", s.name, r.Tool, r.ConnID, got)
			}
			if _, err := k.Call(t.Context(), r); (err == nil) != want {
				t.Errorf("%s: %s on %q: %v", s.name, r.Tool, r.ConnID, err)
			}
		}
	}
}

func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, q := &plugin{name: "p"}, &plugin{name: "q"}
		k, m := newKernel(t, stages.Options{}, p, q)
		call := func(tenant, actor, tool string) error {
			c := agent()
			c.Tenant, c.Actor = tenant, actor
			_, err := k.Call(t.Context(), request(c, tool, "", ""))
			return err
		}
		refused := func(what string, err error, wait int64) {
			t.Helper()
			wantCode(t, what, err, manifest.RateLimited, "operator_rate")
			if e := manifest.AsError(err); err != nil && e.RetryAfterMS != wait {
				t.Errorf("%s: retry after %d ms, want %d", what, e.RetryAfterMS, wait)
			}
		}
		served := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		enable(t, m, "rate", `{"limits":[{"per":"agent","rps":2,"burst":2}]}`)
		served("1", call("a", "x", "p.do"))
		served("2", call("a", "x", "q.do"))
		refused("3", call("a", "x", "p.do"), 500)
		served("another agent", call("a", "y", "p.do"))
		served("an agent of that name elsewhere", call("b", "x", "p.do"))
		time.Sleep(499 * time.Millisecond)
		refused("too early; a refusal costs nothing", call("a", "x", "p.do"), 1)
		time.Sleep(time.Millisecond)
		served("in time", call("a", "x", "p.do"))

		// What one limit refuses costs the others nothing.
		enable(t, m, "rate", `{"limits":[{"per":"tenant","rps":1,"burst":3},{"per":"plugin","rps":0.5,"burst":1}]}`)
		served("p", call("a", "x", "p.do"))
		for range 5 {
			refused("p again", call("a", "x", "p.do"), 2000)
		}
		served("q", call("a", "x", "q.do"))
		if err := m.Configure("rate", "global", []byte(`{"limits":[{"per":"agent","rps":0.001,"burst":1}],"max_keys":2}`)); err != nil {
			t.Fatal(err)
		}
		// The table is bounded: the one not seen for longest is forgotten.
		served("x", call("a", "x", "p.do"))
		served("y", call("a", "y", "p.do"))
		refused("x is remembered", call("a", "x", "p.do"), 1_000_000)
		served("z", call("a", "z", "p.do"))
		refused("x still", call("a", "x", "p.do"), 1_000_000)
		served("y was forgotten", call("a", "y", "p.do"))
	})
}

// progress is a client with a progress token, which keeps what it is notified.
type progress struct {
	token    any
	notified []string
}

func (s *progress) ProgressToken() any            { return s.token }
func (s *progress) Capabilities() json.RawMessage { return nil }

func TestTrace(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	p := &plugin{name: "tickets", read: "{}"}
	k, m := newKernel(t, stages.Options{Log: zap.New(core)}, p)
	id := "4bf92f3577b34da6a3ce929d0e0e4736"
	do := func(r *kernel.Request) map[string]any {
		t.Helper()
		_, _ = k.Call(t.Context(), r)
		all := logs.TakeAll()
		if len(all) != 1 {
			t.Fatalf("%d lines", len(all))
		}
		f := all[0].ContextMap()
		if _, ok := f["took"]; !ok {
			t.Errorf("no duration in %v", f)
		}
		delete(f, "took")
		return f
	}
	tests := []struct {
		name string
		req  *kernel.Request
		want map[string]any
	}{
		{"a call", &kernel.Request{Caller: agent(), Tool: "tickets.do", TraceID: id, Arguments: []byte(`{"id":"T-1","body":"canary"}`), Session: &progress{token: "p1"}},
			map[string]any{"trace_id": id, "agent_id": "agent-1", "tenant": "a", "transport": "http", "method": "tools/call", "tool": "tickets.do", "plugin": "tickets", "ticket_id": "T-1", "progressToken": "p1", "ok": true}},
		{"a ticket in the answer", &kernel.Request{Caller: agent(), Tool: "tickets.other", TraceID: id},
			map[string]any{"trace_id": id, "agent_id": "agent-1", "tenant": "a", "transport": "http", "method": "tools/call", "tool": "tickets.other", "plugin": "tickets", "ticket_id": "T-2", "ok": true}},
		{"what is no id", &kernel.Request{Caller: agent(), Tool: "tickets.do", TraceID: id, Arguments: []byte(`{"ticket_id":"the canary"}`), Session: &progress{token: 7}},
			map[string]any{"trace_id": id, "agent_id": "agent-1", "tenant": "a", "transport": "http", "method": "tools/call", "tool": "tickets.do", "plugin": "tickets", "progressToken": "7", "ok": false, "code": "E_SAFETY_DENIED", "reason": "no"}},
		{"a read", &kernel.Request{Caller: agent(), Method: kernel.MethodRead, URI: "mcp://tickets/all.json", TraceID: id},
			map[string]any{"trace_id": id, "agent_id": "agent-1", "tenant": "a", "transport": "http", "method": "resources/read", "uri": "mcp://tickets/all.json", "plugin": "tickets", "ok": true}},
		{"an unknown agent's words", &kernel.Request{Caller: agent(), Tool: "canary.do", TraceID: id},
			map[string]any{"trace_id": id, "agent_id": "agent-1", "tenant": "a", "transport": "http", "ok": false, "code": "E_BAD_REQUEST", "reason": "name"}},
	}
	p.call = func(r *kernel.Request) (*kernel.Result, error) {
		if strings.Contains(string(r.Arguments), "the canary") {
			return nil, &manifest.Error{Code: manifest.SafetyDenied, Message: "canary", Reason: "no"}
		}
		return &kernel.Result{Structured: json.RawMessage(`{"id":"T-2","body":"canary"}`)}, nil
	}
	for _, tt := range tests {
		if got := do(tt.req); fmt.Sprint(got) != fmt.Sprint(tt.want) {
			t.Errorf("%s:\n got %v\nwant %v", tt.name, got, tt.want)
		}
	}
	// Redaction covers log lines, whatever its scope.
	if err := m.Configure("redact", "plugin=other", []byte(`{"patterns":["canary[0-9]*"]}`)); err != nil {
		t.Fatal(err)
	}
	if err := m.Enable("redact", "plugin=other"); err != nil {
		t.Fatal(err)
	}
	c := agent()
	c.Actor = "canary1"
	got := do(&kernel.Request{Caller: c, Tool: "tickets.do", Arguments: []byte(`{"id":"canary2"}`), Session: &progress{token: "x" + strings.Repeat("y", 200) + "canary3"}})
	if s := fmt.Sprint(got); strings.Contains(s, "canary") || got["ticket_id"] != stages.Redacted {
		t.Errorf("logged %s", s)
	}
	// Sampling is by trace id; failures are always logged.
	enable(t, m, "trace", `{"sample":0.25,"level":"info"}`)
	for i := range 1000 {
		_, _ = k.Call(t.Context(), &kernel.Request{Caller: agent(), Tool: "tickets.do", TraceID: fmt.Sprintf("%024x%08x", 1, uint32(i)*4294967)})
	}
	if n := logs.FilterLevelExact(zapcore.InfoLevel).Len(); n < 245 || n > 255 {
		t.Errorf("%d of 1000 calls logged, want 250", n)
	}
	logs.TakeAll()
	enable(t, m, "trace", `{"sample":0}`)
	if got := do(&kernel.Request{Caller: agent(), Tool: "none.do"}); got["ok"] != false {
		t.Errorf("a failure: %v", got)
	}
}

func TestMetrics(t *testing.T) {
	node := "01hzx9k3m4p7q8r9s0t1v2w3xy"
	p := &plugin{name: "p", read: strings.Repeat("x", 300)}
	control := &plugin{name: "kernel"}
	device := &device{node: node}
	k, m := newKernel(t, stages.Options{}, p, control)
	if err := k.Load(device, false); err != nil {
		t.Fatal(err)
	}
	p.call = func(r *kernel.Request) (*kernel.Result, error) {
		if len(r.Arguments) > 2 {
			return nil, manifest.E(manifest.RateLimited, "no")
		}
		return &kernel.Result{Structured: json.RawMessage(`{"a":1}`), Content: []json.RawMessage{json.RawMessage(`"` + strings.Repeat("x", 100) + `"`)}}, nil
	}
	for _, r := range []*kernel.Request{
		request(agent(), "p.do", "", ""), request(agent(), "p.do", `{"n":`+strings.Repeat("1", 100)+`}`, ""), request(agent(), "kernel.do", "", ""),
		request(agent(), device.tool(), "", ""), request(agent(), "gone.do", "", ""), {Caller: agent(), Method: kernel.MethodRead, URI: "mcp://p/all.json"},
	} {
		_, _ = k.Call(t.Context(), r)
	}
	stats := m.Metrics().Stats()
	want := []string{"device 1 0 map[]", "kernel 1 0 map[]", "plugin 2 1 map[E_RATE_LIMITED:1]", "resource 1 0 map[]", "unknown 1 1 map[E_BAD_REQUEST:1]"}
	for i, s := range stats {
		if got := fmt.Sprint(s.Class, " ", s.Calls, " ", s.Errors, " ", s.Codes); got != want[i] {
			t.Errorf("got %s, want %s", got, want[i])
		}
		var n uint64
		for _, c := range s.Latency.Counts {
			n += c
		}
		if n != s.Calls || s.Latency.Sum <= 0 {
			t.Errorf("%s: %d latencies of %d calls, sum %v", s.Class, n, s.Calls, s.Latency.Sum)
		}
	}
	if s := stats[2]; s.RequestBytes.Sum != 106 || s.RequestBytes.Counts[1] != 1 || s.ResponseBytes.Sum != 109 || s.ResponseBytes.Counts[1] != 1 {
		t.Errorf("sizes of plugin: %+v, %+v", s.RequestBytes, s.ResponseBytes)
	}
	if s := stats[3].ResponseBytes; s.Sum != 300 || s.Counts[2] != 1 {
		t.Errorf("sizes of resource: %+v", s)
	}
	if text, _ := json.Marshal(stats); strings.Contains(string(text), node) || strings.Contains(string(text), "agent") {
		t.Errorf("labels of a node or an agent: %s", text)
	}
	m.Metrics().Reset()
	for _, s := range m.Metrics().Stats() {
		if s.Calls+s.Errors+uint64(len(s.Codes)) != 0 || s.Latency.Sum+s.RequestBytes.Sum+s.ResponseBytes.Sum != 0 {
			t.Errorf("after the reset: %+v", s)
		}
	}
}

// The default pipeline adds little to a call: at most 5 microseconds and 10 allocations.
func TestDefaultPipelineIsCheap(t *testing.T) {
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return empty, nil }}
	k, _ := newKernel(t, stages.Options{}, p)
	plain := kernel.New(kernel.Options{})
	if err := plain.Load(p, false); err != nil {
		t.Fatal(err)
	}
	measure := func(k *kernel.Kernel) float64 {
		r := &kernel.Request{Caller: agent(), Tool: "p.do", TraceID: "4bf92f3577b34da6a3ce929d0e0e4736"}
		return testing.AllocsPerRun(200, func() { _, _ = k.Call(t.Context(), r) })
	}
	if with, without := measure(k), measure(plain); with-without > 1 || with > 12 {
		t.Errorf("%v allocations with the default pipeline, %v without stages", with, without)
	}
}

var empty = &kernel.Result{Structured: json.RawMessage(`{}`)}

func BenchmarkDefaultPipeline(b *testing.B) {
	k := kernel.New(kernel.Options{})
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return empty, nil }}
	if err := k.Load(p, false); err != nil {
		b.Fatal(err)
	}
	run := func(b *testing.B) {
		b.ReportAllocs()
		r := &kernel.Request{Caller: agent(), Tool: "p.do", TraceID: "4bf92f3577b34da6a3ce929d0e0e4736"}
		for b.Loop() {
			_, _ = k.Call(b.Context(), r)
			p.seen = p.seen[:0]
		}
	}
	b.Run("none", run)
	m, err := stages.New(k.Pipeline(), stages.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("default", run)
	for _, name := range []string{"rate", "acl", "redact"} {
		if err := m.Enable(name, "global"); err != nil {
			b.Fatal(err)
		}
	}
	if err := m.Configure("rate", "global", []byte(`{"limits":[{"per":"agent","rps":100000,"burst":100000}]}`)); err != nil {
		b.Fatal(err)
	}
	b.Run("policy", run)
}
