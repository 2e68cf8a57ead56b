package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A stage knows method, connection and plugin of a request before it is dispatched, but of
// nothing that the caller may not see; reads go the way of calls.
func TestStagesKnowTheRequest(t *testing.T) {
	var seen []string
	deny := ""
	st := kernel.Stage{Name: "acl", Wrap: func(next kernel.Handler) kernel.Handler {
		return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			seen = append(seen, fmt.Sprintf("%s %s%s by %s to %q", r.Method, r.Tool, r.URI, r.ConnID, r.Plugin()))
			if r.Plugin() == deny && deny != "" {
				return nil, manifest.E(manifest.SafetyDenied, "policy")
			}
			res, err := next(ctx, r)
			if err == nil && r.Method == kernel.MethodRead {
				res.Data = append([]byte("read: "), res.Data...)
			}
			return res, err
		}
	}}
	var log auditLog
	k := kernel.New(kernel.Options{Stages: []kernel.Stage{st}, Audit: log.add})
	p := faultyPlugin()
	load(t, k, p, board("a", nodeA), board("b", nodeB))
	c := caller("a", "x:y", manifest.ScopeCallReadOnly)
	steps := []struct {
		r    *kernel.Request
		want string
	}{
		{&kernel.Request{Tool: "zoo.do", ConnID: "c1"}, `tools/call zoo.do by c1 to "zoo"`},
		{&kernel.Request{Tool: "sysecho_" + nodeA + "_echo_invoke"}, `tools/call ` + echoTool(nodeA) + ` by  to "device:` + nodeA + `"`},
		{&kernel.Request{Tool: echoTool(nodeB)}, `tools/call ` + echoTool(nodeB) + ` by  to ""`},
		{&kernel.Request{Method: kernel.MethodRead, URI: "zoo://all", ConnID: "c2"}, `resources/read zoo://all by c2 to "zoo"`},
		{&kernel.Request{Method: kernel.MethodRead, URI: metricsURI(nodeB)}, `resources/read ` + metricsURI(nodeB) + ` by  to ""`},
	}
	for _, s := range steps {
		s.r.Caller, seen = c, nil
		_, _ = k.Call(t.Context(), s.r)
		if !slices.Equal(seen, []string{s.want}) {
			t.Errorf("got %q, want %q", seen, s.want)
		}
	}
	if _, data, err := k.Read(t.Context(), c, "zoo://all"); err != nil || string(data) != "read: zoo zoo://all" {
		t.Errorf("read %q %v", data, err)
	}
	deny = "zoo"
	before := len(log.all())
	_, _, err := k.Read(t.Context(), c, "zoo://all")
	wantCode(t, "a read that a stage denies", err, manifest.SafetyDenied, "")
	if recs := log.all()[before:]; len(recs) != 1 || recs[0].Decision != kernel.Denied {
		t.Errorf("audited %+v", recs)
	}
}

// A name that goes to another plugin while the stages run is not served: the stages of
// the new one have not seen the request.
func TestNameReassignedDuringStages(t *testing.T) {
	one, two := faultyPlugin(), faultyPlugin()
	two.m.Name = "two"
	var k *kernel.Kernel
	move := kernel.Stage{Name: "move", Wrap: func(next kernel.Handler) kernel.Handler {
		return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			if k.Unload(one) {
				load(t, k, two)
			}
			return next(ctx, r)
		}
	}}
	k = kernel.New(kernel.Options{Stages: []kernel.Stage{move}})
	load(t, k, one)
	wantCode(t, "moved", callFaulty(k), manifest.BadRequest, "name")
	if n := one.calls.Load() + two.calls.Load(); n != 0 {
		t.Errorf("%d plugins were asked", n)
	}
	if err := callFaulty(k); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// Served calls of tools that want it are offered to the log: ids, decision and code, never
// what was said; failures and refusals leave nothing.
func TestCallsAreLogged(t *testing.T) {
	var log kernel.MemoryLog
	k := kernel.New(kernel.Options{Log: &log})
	p := board("a", nodeA)
	p.m.Tools[0].LogCalls, p.m.Tools[0].Limit = true, nil
	p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
		if strings.Contains(string(r.Arguments), "fail") {
			return nil, errors.New("canary9876")
		}
		return &kernel.Result{Structured: r.Arguments}, nil
	}
	quiet := faultyPlugin()
	load(t, k, p, quiet)
	c := caller("a", "x:y", manifest.ScopeCallReadOnly)
	c.Actor = "agent \"1\"\n"
	const trace = "0af7651916cd43dd8448eb211c80319c"
	for _, r := range []*kernel.Request{
		{Tool: echoTool(nodeA), Arguments: []byte(`{"message":"canary9876"}`)},
		{Tool: echoTool(nodeA), Arguments: []byte(`{"message":"fail"}`)},
		{Tool: echoTool(nodeA), Arguments: []byte(`{"canary":9876}`)},
		{Tool: "zoo.do"},
		{Tool: "nothing.there"},
	} {
		r.Caller, r.TraceID = c, trace
		_, _ = k.Call(t.Context(), r)
	}
	var got []string
	_ = log.Replay(t.Context(), 0, func(e kernel.Event) error {
		got = append(got, fmt.Sprint(e.Tenant, " ", e.Type, " ", e.Aggregate, " ", string(e.Payload)))
		if !json.Valid(e.Payload) {
			t.Errorf("payload %s", e.Payload)
		}
		return nil
	})
	want := "a call " + echoTool(nodeA) + ` {"tool":"` + echoTool(nodeA) + `","node_id":"` + nodeA + `","decision":"allow","code":"","actor":"agent \"1\"\n","trace_id":"` + trace + `"}`
	if len(got) != 1 || got[0] != want {
		t.Errorf("logged %q,\nwant %q", got, want)
	}
}

// fullLog takes nothing.
type fullLog struct{ kernel.Log }

func (fullLog) Offer(kernel.Event) bool { return false }

// What a full log does not take is counted, and nobody waits for it.
func TestFullLog(t *testing.T) {
	k := kernel.New(kernel.Options{Log: fullLog{}})
	p := faultyPlugin()
	p.m.Tools[0].LogCalls = true
	load(t, k, p)
	if err := callFaulty(k); err != nil {
		t.Error(err)
	}
	k.Heartbeat(agent("a", "one"))
	if n := k.Stats().Unlogged; n != 2 {
		t.Errorf("%d events were not taken, want 2", n)
	}
}

func TestUnloadByName(t *testing.T) {
	k := kernel.New(kernel.Options{})
	load(t, k, faultyPlugin(), board("a", nodeA))
	for _, ref := range []string{"zoo@1.0.1", "zo", "", "zoo@", "device:" + nodeA, "device:" + nodeA + "@1.0.0"} {
		if err := k.UnloadByName(ref); err == nil {
			t.Errorf("%q was unloaded", ref)
		}
	}
	sub := subscribe(t, k, "a")
	if err := k.UnloadByName("zoo@1.0.0"); err != nil || !sub.Next().Tools {
		t.Errorf("unload: %v", err)
	}
	if err := k.UnloadByName("zoo"); !errors.Is(err, kernel.ErrNotLoaded) {
		t.Errorf("again: %v", err)
	}
	load(t, k, faultyPlugin())
	if err := k.UnloadByName("zoo"); err != nil {
		t.Error(err)
	}
}

// What Load refuses of a manifest beyond its names.
func TestLoadRefusesForms(t *testing.T) {
	for version, ok := range map[string]bool{
		"1.0.0": true, "0.0.0": true, "10.20.30": true, "1.0.0-alpha": true, "1.0.0-alpha.1": true, "1.0.0-0.3.7": true, "1.0.0-x-y-z.--": true,
		"1.0.0+build.5": true, "1.0.0-rc.1+001": true, "1.0.0+21AF26D3---117B344092BD": true,
		"": false, "1": false, "1.0": false, "1.0.0.0": false, "v1.0.0": false, "01.0.0": false, "1.00.0": false, "1.0.0-": false, "1.0.0-01": false,
		"1.0.0-a..b": false, "1.0.0+": false, "1.0.0+a+b": false, "1.0.0-ä": false, " 1.0.0": false, "1.0.-1": false, "a.b.c": false,
		"1.0.0-" + strings.Repeat("x", 60): false,
	} {
		p := faultyPlugin()
		p.m.Version = version
		if err := kernel.New(kernel.Options{}).Load(p, false); (err == nil) != ok {
			t.Errorf("version %q: %v", version, err)
		}
	}
	for name, change := range map[string]func(*kernel.Manifest){
		"a device's tool":   func(m *kernel.Manifest) { m.Tools[0].Name = echoTool(nodeA) },
		"negative places":   func(m *kernel.Manifest) { m.MaxConcurrency = -1 },
		"a negative budget": func(m *kernel.Manifest) { m.CallTimeout = -1 },
	} {
		p := faultyPlugin()
		change(p.m)
		if err := kernel.New(kernel.Options{}).Load(p, false); err == nil {
			t.Errorf("%s was loaded", name)
		}
	}
}
