package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// The order of the checks decides the code: a call that is wrong in every way is refused for
// the first, and once that is right of the next. No refusal reaches the plugin.
func TestOrderOfChecks(t *testing.T) {
	var log auditLog
	k := kernel.New(kernel.Options{Audit: log.add, ExplainMissing: owners(map[string]string{nodeA: "a", nodeB: "b"})})
	p := board("a", nodeA)
	info := *p.m.Tools[0].ToolInfo
	info.SafetyClass = manifest.Mutating
	danger := &kernel.Tool{Name: "sys." + nodeA + ".metrics.wipe", NodeID: nodeA, Limit: p.m.Tools[0].Limit, ToolInfo: &info}
	p.m.Tools = append(p.m.Tools, danger)
	foreign := board("b", nodeB)
	load(t, k, p, foreign)

	none, mine := caller("a"), reader("a")
	bad, good := json.RawMessage(`{"interval_ms":1}`), json.RawMessage(`{"message":"canary9876"}`)
	steps := []struct {
		name   string
		c      *kernel.Caller
		tool   string
		args   json.RawMessage
		stream bool
		code   manifest.Code
		reason string
	}{
		{"name before scope", none, "system.echo", bad, false, manifest.BadRequest, "name"},
		{"name in upper case", none, strings.ToUpper(echoTool(nodeA)), bad, false, manifest.BadRequest, "name"},
		{"five segments", none, echoTool(nodeA) + ".now", bad, false, manifest.BadRequest, "name"},
		{"scope before ownership", none, echoTool(nodeB), bad, false, manifest.SafetyDenied, "scope"},
		{"scope before existence", none, echoTool(unknown), bad, false, manifest.SafetyDenied, "scope"},
		{"scope on an own node", none, echoTool(nodeA), bad, false, manifest.SafetyDenied, "scope"},
		{"ownership", mine, echoTool(nodeB), bad, false, manifest.SafetyDenied, "tenant"},
		{"an unknown node", mine, echoTool(unknown), bad, false, manifest.SafetyDenied, "tenant"},
		{"safety class before schema", mine, danger.Name, bad, false, manifest.SafetyDenied, "safety_class"},
		{"mode before schema", mine, subscribeTool(nodeA), bad, false, manifest.BadRequest, "unary_on_stream"},
		{"schema", mine, echoTool(nodeA), bad, false, manifest.ManifestInvalid, ""},
		{"schema of a stream", mine, subscribeTool(nodeA), bad, true, manifest.ManifestInvalid, ""},
		{"no arguments are {}", mine, echoTool(nodeA), nil, false, manifest.ManifestInvalid, ""},
	}
	for _, s := range steps {
		_, err := k.Call(t.Context(), &kernel.Request{Caller: s.c, Tool: s.tool, Arguments: s.args, Stream: s.stream})
		wantCode(t, s.name, err, s.code, s.reason)
	}
	if n := p.calls.Load() + foreign.calls.Load(); n != 0 {
		t.Errorf("the plugins saw %d of the refused calls", n)
	}
	for i, r := range log.all() {
		if r.Decision != kernel.Denied || r.Code != steps[i].code {
			t.Errorf("%s: audited as %+v", steps[i].name, r)
		}
	}
	// All of that cost no rate: ten calls are left, the eleventh is one too many, and a bad
	// one is still refused for its arguments.
	for i := range 10 {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: mine, Tool: echoTool(nodeA), Arguments: good}); err != nil {
			t.Errorf("call %d: %v", i+1, err)
		}
	}
	_, err := k.Call(t.Context(), &kernel.Request{Caller: mine, Tool: echoTool(nodeA), Arguments: good})
	wantCode(t, "the eleventh", err, manifest.RateLimited, "rate")
	_, err = k.Call(t.Context(), &kernel.Request{Caller: mine, Tool: echoTool(nodeA), Arguments: bad})
	wantCode(t, "schema before rate", err, manifest.ManifestInvalid, "")
	if n := p.calls.Load(); n != 10 {
		t.Errorf("the plugin saw %d calls, want 10", n)
	}
	k.Unload(p)
	_, err = k.Call(t.Context(), &kernel.Request{Caller: mine, Tool: echoTool(nodeA), Arguments: bad})
	wantCode(t, "online before schema", err, manifest.NodeOffline, "offline")
}

// Another tenant's node answers exactly as one that does not exist, in the reply and in
// what the audit log says, whatever is wrong with the call.
func TestTenantsCannotBeProbed(t *testing.T) {
	theirs := []kernel.Plugin{board("b", nodeB), newPlugin("acme", "b", manifest.ScopeTicketsRead)}
	full := caller("a", manifest.ScopeCallReadOnly, manifest.ScopeTicketsRead)
	for _, missing := range []func(*kernel.Caller, string) error{nil, owners(map[string]string{nodeB: "b"})} {
		for _, c := range []*kernel.Caller{caller("a"), reader("a"), full} {
			var logs [2]auditLog
			for i := range logs {
				k := kernel.New(kernel.Options{Audit: logs[i].add, ExplainMissing: missing})
				if i == 1 {
					load(t, k, theirs...)
				}
				for _, tool := range []string{echoTool(nodeB), subscribeTool(nodeB), "acme.do", "sysecho_" + nodeB + "_echo_invoke"} {
					res, err := k.Call(t.Context(), &kernel.Request{Caller: c, Tool: tool, TraceID: strings.Repeat("1", 32), Arguments: json.RawMessage(`{"message":"x"}`)})
					if err == nil {
						t.Fatalf("%s was served to a foreign tenant: %s", tool, res.Structured)
					}
					logs[i].add(kernel.Record{Reason: fmt.Sprintf("%#v", *manifest.AsError(err))})
				}
				if got := toolNames(k, c); len(got) != 0 {
					t.Errorf("a foreign tenant lists %v", got)
				}
				if page, _ := k.ListResources(c, "", "", 10); len(page) != 0 {
					t.Errorf("a foreign tenant lists %v", page[0].URI)
				}
				for _, uri := range []string{metricsURI(nodeB), "acme://all"} {
					if _, _, err := k.Read(t.Context(), c, uri); !errors.Is(err, kernel.ErrNoResource) {
						t.Errorf("read %s: %v", uri, err)
					}
					if _, err := k.Watch(c, uri); !errors.Is(err, kernel.ErrNoResource) {
						t.Errorf("watch %s: %v", uri, err)
					}
				}
				if _, ok := k.Tool(c, "acme.do"); ok {
					t.Error("Tool gives away acme.do")
				}
			}
			for i := range logs {
				for j := range logs[i].recs {
					logs[i].recs[j].TraceID = "" // of reads it is made up
				}
			}
			if a, b := fmt.Sprintf("%+v", logs[0].all()), fmt.Sprintf("%+v", logs[1].all()); a != b {
				t.Errorf("a node that is not there and a foreign one differ:\n%s\n%s", a, b)
			}
		}
	}
}

// The audit words, in their order, for one call of each kind.
func TestAuditGolden(t *testing.T) {
	var log auditLog
	k := kernel.New(kernel.Options{Audit: log.add})
	p := board("a", nodeA)
	p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
		if r.Stream {
			return &kernel.Result{Stream: newStream()}, nil
		}
		if strings.Contains(string(r.Arguments), "fail") {
			return nil, &manifest.Error{Code: manifest.NodeOffline, Message: "gone", Reason: "link_lost"}
		}
		if strings.Contains(string(r.Arguments), "bug") {
			return nil, errors.New("canary9876 in an error of the plugin's own")
		}
		return &kernel.Result{Structured: json.RawMessage(`{"message":"canary9876"}`)}, nil
	}
	load(t, k, p)
	calls := []struct {
		c    *kernel.Caller
		tool string
		args string
	}{
		{reader("a"), echoTool(nodeA), `{"message":"canary9876"}`},
		{reader("a"), "sysecho_" + nodeA + "_echo_invoke", `{"message":"canary9876"}`},
		{reader("a"), echoTool(nodeA), `{"message":"fail canary9876"}`},
		{reader("a"), echoTool(nodeA), `{"message":"bug canary9876"}`},
		{reader("a"), echoTool(nodeA), `{"canary9876":"canary9876"}`},
		{caller("a"), echoTool(nodeA), `{"message":"canary9876"}`},
		{reader("a"), "canary9876", `{}`},
		{reader("a"), "canary9876.canary9876.canary9876.canary9876", `{}`},
		{reader("b"), echoTool(nodeA), `{"message":"canary9876"}`},
		{reader("a"), subscribeTool(nodeA), `{"interval_ms":5000}`},
	}
	for _, c := range calls {
		_, _ = k.Call(t.Context(), &kernel.Request{Caller: c.c, Tool: c.tool, Arguments: []byte(c.args), TraceID: "0af7651916cd43dd8448eb211c80319c", Stream: c.tool == subscribeTool(nodeA)})
	}
	k.Audit(kernel.Record{Tenant: "a", Actor: "agent-a", Tool: subscribeTool(nodeA), NodeID: nodeA, Decision: kernel.Closed, Reason: "1000", TraceID: "0af7651916cd43dd8448eb211c80319c"})
	const (
		echo = "sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke 01hzx9k3m4p7q8r9s0t1v2w3xy"
		sub  = "sys.01hzx9k3m4p7q8r9s0t1v2w3xy.metrics.subscribe 01hzx9k3m4p7q8r9s0t1v2w3xy"
	)
	want := []string{
		"a agent-a " + echo + " allow  ",
		"a agent-a " + echo + " allow  ",
		"a agent-a " + echo + " fail E_NODE_OFFLINE link_lost",
		"a agent-a " + echo + " fail E_INTERNAL internal",
		"a agent-a " + echo + " deny E_MANIFEST_INVALID ",
		"a agent-a " + echo + " deny E_SAFETY_DENIED scope",
		"a agent-a   deny E_BAD_REQUEST name",
		"a agent-a   deny E_BAD_REQUEST name",
		"b agent-b " + echo + " deny E_BAD_REQUEST name",
		"a agent-a " + sub + " allow  ",
		"a agent-a " + sub + " close  1000",
	}
	recs := log.all()
	if len(recs) != len(want) {
		t.Fatalf("%d records, want %d: %+v", len(recs), len(want), recs)
	}
	for i, r := range recs {
		got := fmt.Sprint(r.Tenant, " ", r.Actor, " ", r.Tool, " ", r.NodeID, " ", r.Decision, " ", r.Code, " ", r.Reason)
		if got != want[i] {
			t.Errorf("record %d: got %q, want %q", i, got, want[i])
		}
		if all := fmt.Sprintf("%+v", r); strings.Contains(all, "canary9876") {
			t.Errorf("record %d holds what was sent: %s", i, all)
		}
		if r.TraceID != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("record %d: trace id %q", i, r.TraceID)
		}
	}
}

// Every call is audited exactly once, and a missing trace id is made up.
func TestTraceIDs(t *testing.T) {
	var log auditLog
	k := kernel.New(kernel.Options{Audit: log.add})
	load(t, k, board("a", nodeA))
	seen := map[string]bool{}
	for range 50 {
		r := &kernel.Request{Caller: reader("a"), Tool: "nothing"}
		_, _ = k.Call(t.Context(), r)
		if !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(r.TraceID) || seen[r.TraceID] {
			t.Fatalf("trace id %q", r.TraceID)
		}
		seen[r.TraceID] = true
	}
	for _, r := range log.all() {
		if !seen[r.TraceID] {
			t.Errorf("audited with trace id %q, which no request has", r.TraceID)
		}
		delete(seen, r.TraceID)
	}
	if len(seen) != 0 {
		t.Errorf("%d calls were not audited", len(seen))
	}
}

func TestPluginGetsNormalForm(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := board("a", nodeA)
	var got []string
	p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
		got = append(got, r.Tool+" "+r.Target().Name+" "+string(r.Arguments))
		return &kernel.Result{}, nil
	}
	load(t, k, p)
	alias := "sys_" + nodeA + "_metrics_subscribe"
	for _, args := range []string{`{ "interval_ms" : 5e3 }`, ``} {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: reader("a"), Tool: alias, Arguments: []byte(args), Stream: true}); err != nil {
			t.Fatal(err)
		}
	}
	s := subscribeTool(nodeA)
	if want := fmt.Sprint([]string{s + " " + s + ` {"interval_ms":5000}`, s + " " + s + " {}"}); fmt.Sprint(got) != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Stages run around the fixed checks: they see every call, and none of them can let a
// call past a check.
func TestStagesCannotSkipChecks(t *testing.T) {
	var seen []string
	watch := func(name string) kernel.Stage {
		return kernel.Stage{Name: name, Wrap: func(next kernel.Handler) kernel.Handler {
			return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
				seen = append(seen, "+"+name)
				res, err := next(ctx, r)
				seen = append(seen, fmt.Sprintf("-%s %v", name, err != nil))
				return res, err
			}
		}}
	}
	k := kernel.New(kernel.Options{Stages: []kernel.Stage{watch("trace"), watch("acl")}})
	p := board("a", nodeA)
	load(t, k, p)
	good := &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)}
	bad := &kernel.Request{Caller: caller("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)}
	_, _ = k.Call(t.Context(), good)
	_, _ = k.Call(t.Context(), bad)
	if got := strings.Join(seen, ","); got != "+trace,+acl,-acl false,-trace false,+trace,+acl,-acl true,-trace true" {
		t.Errorf("went %s", got)
	}
	if err := k.Pipeline().Swap(); err != nil {
		t.Fatal(err)
	}
	_, err := k.Call(t.Context(), bad)
	wantCode(t, "with all stages off", err, manifest.SafetyDenied, "scope")
	if n := p.calls.Load(); n != 1 {
		t.Errorf("the plugin saw %d calls, want 1", n)
	}
}

func TestRead(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := board("a", nodeA)
	load(t, k, p)
	r, data, err := k.Read(t.Context(), reader("a"), metricsURI(nodeA))
	if err != nil || r.URI != metricsURI(nodeA) || string(data) != "device:"+nodeA+" "+metricsURI(nodeA) {
		t.Errorf("got %v %s %v", r, data, err)
	}
	for what, c := range map[string]*kernel.Caller{"no scope": caller("a"), "another tenant": reader("b")} {
		if _, _, err := k.Read(t.Context(), c, metricsURI(nodeA)); !errors.Is(err, kernel.ErrNoResource) {
			t.Errorf("%s: %v", what, err)
		}
	}
	p.read = func(context.Context, *kernel.Caller, string) ([]byte, error) { return nil, errors.New("canary9876") }
	_, _, err = k.Read(t.Context(), reader("a"), metricsURI(nodeA))
	wantCode(t, "a plugin's own error", err, manifest.Internal, "internal")
	synctest.Test(t, func(t *testing.T) {
		p.read = func(ctx context.Context, _ *kernel.Caller, _ string) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		start := time.Now()
		_, _, err := k.Read(context.Background(), reader("a"), metricsURI(nodeA))
		wantCode(t, "a plugin that hangs", err, manifest.DeadlineExceeded, "gateway_deadline")
		if took := time.Since(start); took != kernel.CallBudget {
			t.Errorf("took %v", took)
		}
	})
}

func TestPanickingPlugin(t *testing.T) {
	const canary = "the-message-of-the-caller"
	p := newPlugin("bad", "a", manifest.ScopeCallReadOnly)
	p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) { panic(string(r.Arguments)) }
	var records []kernel.Record
	k := kernel.New(kernel.Options{Audit: func(r kernel.Record) { records = append(records, r) }})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	_, err := k.Call(t.Context(), &kernel.Request{Caller: reader("a"), Tool: "bad.do", Arguments: []byte(`{"m":"` + canary + `"}`)})
	e := manifest.AsError(err)
	if e.Code != manifest.Internal || e.Reason != "panic" || strings.Contains(e.Error(), canary) {
		t.Errorf("got %v, want E_INTERNAL that quotes nothing", err)
	}
	if len(records) != 1 || records[0].Decision != kernel.Failed || records[0].Reason != "panic" {
		t.Errorf("audit %+v, want one failed record", records)
	}
}
