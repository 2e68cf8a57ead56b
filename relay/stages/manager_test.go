package stages_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/pipeline"
	"agentctl/relay/stages"
)

func lines(m *stages.Manager) (out []string) {
	for _, w := range m.List() {
		state := "off"
		if w.Enabled {
			state = "on"
		}
		out = append(out, w.Name+" "+w.Scope+" "+state)
	}
	return out
}

// The default pipeline: everything off but trace and metrics, each with its
// configuration to see.
func TestDefault(t *testing.T) {
	k, m := newKernel(t, stages.Options{})
	want := []string{"trace global on", "metrics global on", "rate global off", "sign global off", "compress global off", "acl global off", "redact global off"}
	if got := lines(m); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := k.Pipeline().Names(); !slices.Equal(got, []string{"trace", "metrics"}) {
		t.Errorf("in force: %v", got)
	}
	for _, w := range m.List() {
		if !json.Valid(w.Config) {
			t.Errorf("%s: config %s", w.Name, w.Config)
		}
		if w.Name == "sign" {
			continue
		}
		if err := m.Configure(w.Name, "global", w.Config); err != nil { // what is shown can be given back
			t.Errorf("%s: %v", w.Name, err)
		}
	}
}

// A change reaches the requests of its scope and no others; the four kinds of scopes.
func TestOnlyTheTargetedScope(t *testing.T) {
	tickets, other := &plugin{name: "tickets"}, &plugin{name: "other"}
	k, m := newKernel(t, stages.Options{}, tickets, other)
	deny := `{"rules":[{"effect":"deny"}]}`
	denied := func() (out []string) {
		for _, transport := range []string{"http", "stdio"} {
			for _, conn := range []string{"c1", "c2"} {
				for _, p := range []string{"tickets", "other"} {
					c := agent()
					c.Transport = transport
					_, err := k.Call(t.Context(), &kernel.Request{Caller: c, ConnID: transport + conn, Tool: p + ".do"})
					if err != nil {
						wantCode(t, p, err, manifest.SafetyDenied, "acl_rule_0")
						out = append(out, transport+conn+" "+p)
					}
				}
			}
		}
		return out
	}
	all := callersWhere(nil)
	tests := []struct {
		scope string
		fits  func(string) bool
	}{
		{"global", func(string) bool { return true }},
		{"transport=stdio", func(s string) bool { return strings.HasPrefix(s, "stdio") }},
		{"connection=httpc2", func(s string) bool { return strings.HasPrefix(s, "httpc2") }},
		{"plugin=tickets", func(s string) bool { return strings.HasSuffix(s, "tickets") }},
	}
	for _, tt := range tests {
		if err := m.Configure("acl", tt.scope, []byte(deny)); err != nil {
			t.Fatal(err)
		}
		if got := denied(); len(got) != 0 {
			t.Errorf("%s: configured only, and denied %v", tt.scope, got)
		}
		if err := m.Enable("acl", tt.scope); err != nil {
			t.Fatal(err)
		}
		if got, want := denied(), callersWhere(tt.fits); !slices.Equal(got, want) {
			t.Errorf("%s: denied %v, want %v", tt.scope, got, want)
		}
		if err := m.Disable("acl", tt.scope); err != nil {
			t.Fatal(err)
		}
		if got := denied(); len(got) != 0 {
			t.Errorf("%s: disabled, and denied %v", tt.scope, got)
		}
		m.Forget(mustScope(t, tt.scope))
		if err := m.Configure("acl", "global", []byte(`{}`)); err != nil {
			t.Fatal(err)
		}
	}
	// And the other way round: on everywhere, off for one.
	enable(t, m, "acl", deny)
	for _, tt := range tests[1:] {
		m.Forget(mustScope(t, tt.scope))
		if err := m.Disable("acl", tt.scope); err != nil {
			t.Fatal(err)
		}
		if got, want := denied(), callersWhere(func(s string) bool { return !tt.fits(s) }); !slices.Equal(got, want) {
			t.Errorf("off for %s: denied %v, want %v", tt.scope, got, want)
		}
		m.Forget(mustScope(t, tt.scope))
		if got := denied(); !slices.Equal(got, all) {
			t.Errorf("%s forgotten: denied %v", tt.scope, got)
		}
	}
	if got := len(m.List()); got != 7 {
		t.Errorf("left %v", lines(m))
	}
}

// callersWhere lists the eight requests, or those that fit.
func callersWhere(fits func(string) bool) (out []string) {
	for _, transport := range []string{"http", "stdio"} {
		for _, conn := range []string{"c1", "c2"} {
			for _, p := range []string{"tickets", "other"} {
				if s := transport + conn + " " + p; fits == nil || fits(s) {
					out = append(out, s)
				}
			}
		}
	}
	return out
}

func mustScope(t *testing.T, s string) pipeline.Scope {
	t.Helper()
	scope, err := pipeline.ParseScope(s)
	if err != nil {
		t.Fatal(err)
	}
	return scope
}

// Lines that say what the wider ones say disappear; those with a configuration stay.
func TestNoEmptyLines(t *testing.T) {
	_, m := newKernel(t, stages.Options{})
	steps := []struct {
		do   func() error
		want int // lines beyond the global ones
	}{
		{func() error { return m.Disable("acl", "plugin=a") }, 0}, // off as it is anyhow
		{func() error { return m.Enable("acl", "plugin=a") }, 1},
		{func() error { return m.Enable("acl", "plugin=a") }, 1},
		{func() error { return m.Enable("acl", "connection=c") }, 2}, // the plugin's line does not reach every request of it
		{func() error { return m.Enable("acl", "global") }, 0},
		{func() error { return m.Disable("acl", "transport=http") }, 1},
		{func() error { return m.Enable("acl", "plugin=a") }, 2}, // on for the plugin, over http too
		{func() error { return m.Configure("acl", "connection=c", []byte(`{}`)) }, 3},
		{func() error { return m.Disable("acl", "global") }, 2}, // the transport's line says nothing now
		{func() error { m.Forget(mustScope(t, "connection=c")); return nil }, 1},
		{func() error { m.Forget(pipeline.Scope{}); return nil }, 1},
	}
	for i, s := range steps {
		if err := s.do(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		if got := len(m.List()) - 7; got != s.want {
			t.Errorf("step %d: %d lines beyond the global ones, want %d: %v", i, got, s.want, lines(m))
		}
	}
}

// wantRefused checks that a change of the list failed with a text, and changed nothing.
func wantRefused(t *testing.T, m *stages.Manager, name string, before string, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: got %v, want %q", name, err, text)
	}
	if e := manifest.AsError(err); e.Code != manifest.ManifestInvalid && e.Code != manifest.BadRequest {
		t.Errorf("%s: code %s, want %s or %s", name, e.Code, manifest.ManifestInvalid, manifest.BadRequest)
	}
	if got := fmt.Sprint(m.List()); got != before {
		t.Fatalf("%s: it was refused, but changed the list to %s", name, got)
	}
}

// TestRefusedOrder: an order that breaks a rule, or does not have each stage once, is refused.
func TestRefusedOrder(t *testing.T) {
	changes := 0
	_, m := newKernel(t, stages.Options{OnChange: func() { changes++ }})
	before := fmt.Sprint(m.List())
	for _, tt := range []struct{ name, order, want string }{
		{"compress outside sign", "trace metrics rate compress sign acl redact", "sign has to come before compress: a signature covers what is sent"},
		{"redact outside sign", "trace redact metrics rate sign compress acl", "sign has to come before redact"},
		{"trace inside metrics", "metrics trace rate sign compress acl redact", "trace has to come before metrics"},
		{"a stage is missing", "trace metrics rate sign compress acl", "order: each of trace"},
		{"a stage twice", "trace metrics rate sign compress acl acl", "order: each of trace"},
	} {
		wantRefused(t, m, tt.name, before, m.Reorder(strings.Fields(tt.order)), tt.want)
	}
	if changes != 0 {
		t.Errorf("refused orders were reported as %d changes", changes)
	}
	if err := m.Reorder(strings.Fields("trace rate sign compress redact acl metrics")); err != nil || changes != 1 {
		t.Errorf("an order that breaks no rule: %v, %d changes reported; want no error and 1", err, changes)
	}
}

// TestRefusedEnable: a stage is enabled only by its name, for a scope that there is, and when it is
// configured.
func TestRefusedEnable(t *testing.T) {
	_, m := newKernel(t, stages.Options{KeyDir: keyDir(t)})
	before := fmt.Sprint(m.List())
	wantRefused(t, m, "no such stage", before, m.Enable("gzip", ""), "the stages are trace, metrics, rate")
	wantRefused(t, m, "no such scope", before, m.Enable("acl", "tenant=a"), "scope: a scope is global, transport=NAME")
	wantRefused(t, m, "sign without a key", before, m.Enable("sign", ""), "sign: configure it first")
}

// TestRefusedConfigurations: the error names the member that is wrong, and what it accepts.
func TestRefusedConfigurations(t *testing.T) {
	_, m := newKernel(t, stages.Options{KeyDir: keyDir(t)})
	before := fmt.Sprint(m.List())
	for _, tt := range []struct{ name, stage, config, want string }{
		{"too long", "acl", strings.Repeat(" ", stages.MaxConfig+1), "acl: a configuration has at most 16384 bytes"},
		{"no object", "acl", `[]`, "acl: a strict JSON object"},
		{"a key twice", "compress", `{"force":true,"force":false}`, "compress: a strict JSON object"},
		{"an unknown key", "compress", `{"forced":true}`, "compress: forced is not a field of it; the fields are min_bytes, force, level"},
		{"another case", "compress", `{"Force":true}`, "compress: a key here is unknown"},
		{"null", "compress", `{"force":null}`, "compress.force: true or false"},
		{"a small minimum", "compress", `{"min_bytes":255}`, "compress.min_bytes: a whole number from 256"},
		{"a level", "compress", `{"level":10}`, "compress.level: a whole number from 1 to 9"},
		{"streams", "compress", `{"streams":true}`, "compress.streams: only false: metric streams are never compressed"},
		{"a trace level", "trace", `{"level":"loud"}`, "trace.level: one of debug, info"},
		{"a sample", "trace", `{"sample":1.5}`, "trace.sample: a number from 0 to 1"},
		{"metrics", "metrics", `{"x":1}`, "metrics: x is not a field"},
		{"an effect", "acl", `{"rules":[{"effect":"allow"},{"effect":"maybe"}]}`, "acl.rules[1].effect: one of allow, deny, transform"},
		{"a field of a rule", "acl", `{"rules":[{"effect":"allow","node":"x"}]}`, "acl.rules[0]: node is not a field"},
		{"a long pattern", "acl", `{"rules":[{"effect":"allow","tool":"` + strings.Repeat("a", 129) + `"}]}`, "acl.rules[0].tool: a pattern of 1 to 128"},
		{"a deny that sets", "acl", `{"rules":[{"effect":"deny","set":{"a":1}}]}`, "acl.rules[0]: set and remove belong"},
		{"a transform of nothing", "acl", `{"rules":[{"effect":"transform"}]}`, "acl.rules[0]: a transform needs"},
		{"257 rules", "acl", `{"rules":[` + strings.Repeat(`{},`, 256) + `{}]}`, "acl.rules: at most 256"},
		{"a rate per node", "rate", `{"limits":[{"per":"node","rps":1}]}`, "rate.limits[0].per: one of agent, tenant, plugin"},
		{"a rate of nothing", "rate", `{"limits":[{"per":"agent","rps":0}]}`, "rate.limits[0].rps: a number above 0"},
		{"a burst", "rate", `{"limits":[{"per":"agent","rps":1,"burst":0}]}`, "rate.limits[0].burst: a whole number from 1"},
		{"keys", "rate", `{"max_keys":0}`, "rate.max_keys: a whole number from 1 to 65536"},
		{"a bad pattern", "redact", `{"patterns":["x","("]}`, "redact.patterns[1]: a list of at most 32 patterns"},
		{"a pattern of nothing", "redact", `{"patterns":["a*"]}`, "redact.patterns[0]: a pattern that matches neither"},
		{"a pattern of the replacement", "redact", `{"patterns":["redact"]}`, "redact.patterns[0]: a pattern that matches neither"},
		{"an empty field", "redact", `{"fields":[""]}`, "redact.fields[0]"},
		{"a key in the config", "sign", `{"kid":"k","key":"abc"}`, "sign: key is not a field of it"},
		{"no key", "sign", `{"kid":"k"}`, "sign.key_file: the name of a file in the relay's key directory"},
		{"no kid", "sign", `{"key_file":"k1"}`, "sign.kid: a name of 1 to 64"},
		{"a short key", "sign", `{"kid":"k","key_file":"short"}`, "sign.key_file"},
		{"an open key", "sign", `{"kid":"k","key_file":"open"}`, "sign.key_file"},
		{"a large key", "sign", `{"kid":"k","key_file":"large"}`, "sign.key_file"},
		{"a way out", "sign", `{"kid":"k","key_file":"../k1"}`, "sign.key_file"},
		{"a link out", "sign", `{"kid":"k","key_file":"link"}`, "sign.key_file"},
		{"a directory", "sign", `{"kid":"k","key_file":"dir"}`, "sign.key_file"},
		{"one kid twice", "sign", `{"kid":"k","key_file":"k1","accept":[{"kid":"k","key_file":"k2"}]}`, "sign.accept[0].kid"},
	} {
		wantRefused(t, m, tt.name, before, m.Configure(tt.stage, "global", []byte(tt.config)), tt.want)
	}
}

// TestScopesAreBounded: one scope more than pipeline.MaxScoped is refused.
func TestScopesAreBounded(t *testing.T) {
	_, m := newKernel(t, stages.Options{})
	for i := range pipeline.MaxScoped {
		if err := m.Enable("acl", fmt.Sprint("connection=", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Enable("acl", "connection=x"); err == nil || !strings.Contains(err.Error(), "64 scopes already") {
		t.Errorf("one scope more: %v, want an error", err)
	}
}

// A line without a configuration follows the global one.
func TestConfigurationsAreInherited(t *testing.T) {
	p := &plugin{name: "p"}
	k, m := newKernel(t, stages.Options{}, p)
	if err := m.Enable("acl", "plugin=p"); err != nil {
		t.Fatal(err)
	}
	call := func() error { _, err := k.Call(t.Context(), request(agent(), "p.do", "", "")); return err }
	if err := call(); err != nil {
		t.Error(err)
	}
	if err := m.Configure("acl", "global", []byte(`{"rules":[{"effect":"deny"}]}`)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, "inherited", call(), manifest.SafetyDenied, "acl_rule_0")
	if err := m.Configure("acl", "plugin=p", []byte(`{"rules":[{"effect":"allow"},{"effect":"deny"}]}`)); err != nil {
		t.Fatal(err)
	}
	if err := call(); err != nil {
		t.Errorf("its own: %v", err)
	}
}

// 10,000 numbered messages over 100 swaps from concurrent goroutines: each is answered
// once with its own number, and by one whole list: either transformed and packed (one
// configuration) or neither.
func TestSwapsUnderLoad(t *testing.T) {
	const messages, swaps, callers = 4000, 100, 8
	p := &plugin{name: "p", call: func(r *kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: append(json.RawMessage(nil), r.Arguments...)}, nil
	}}
	k, m := newKernel(t, stages.Options{}, p)
	for _, scope := range []string{"global", "plugin=p"} {
		if err := m.Configure("acl", scope, []byte(`{"rules":[{"effect":"transform","set":{"mark":true}}]}`)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Configure("redact", "global", []byte(`{"fields":["mark"]}`)); err != nil {
		t.Fatal(err)
	}
	toggles := []func() error{
		func() error { return m.Enable("acl", "global") },
		func() error { return m.Enable("redact", "global") },
		func() error { return m.Disable("acl", "plugin=p") },
		func() error { return m.Disable("redact", "global") },
		func() error { return m.Enable("acl", "plugin=p") },
	}
	tickets := make(chan int)
	var answered [messages]atomic.Int32
	var forms sync.Map
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for n := range tickets {
				res, err := k.Call(context.Background(), request(agent(), "p.do", fmt.Sprintf(`{"n":%d}`, n), ""))
				if err != nil {
					t.Errorf("message %d: %v", n, err)
					continue
				}
				var got struct {
					N    *int `json:"n"`
					Mark any  `json:"mark"`
				}
				if json.Unmarshal(res.Structured, &got) != nil || got.N == nil || *got.N != n {
					t.Errorf("message %d was answered %s", n, res.Structured)
				}
				forms.Store(fmt.Sprint(got.Mark), true)
				answered[n].Add(1)
			}
		})
	}
	for n := range messages {
		if n%(messages/swaps) == 0 {
			if err := toggles[n/(messages/swaps)%len(toggles)](); err != nil {
				t.Error(err)
			}
		}
		tickets <- n
	}
	close(tickets)
	wg.Wait()
	for n := range answered {
		if got := answered[n].Load(); got != 1 {
			t.Errorf("message %d was answered %d times", n, got)
		}
	}
	for _, form := range []string{"<nil>", "true", stages.Redacted} { // each list was met
		if _, ok := forms.Load(form); !ok {
			t.Errorf("no message had mark %s", form)
		}
	}
	if calls := m.Metrics().Stats()[2].Calls; calls != messages {
		t.Errorf("%d calls counted", calls)
	}
}

// No stage can lock the operator out of the control plane, unless it is meant to.
func TestControlPlaneIsExempt(t *testing.T) {
	control := &plugin{name: "kernel"}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, control)
	enable(t, m, "acl", `{"rules":[{"effect":"deny"}]}`)
	enable(t, m, "sign", `{"kid":"k","key_file":"k1","require":true}`)
	enable(t, m, "rate", `{"limits":[{"per":"tenant","rps":0.001,"burst":1}]}`)
	if err := m.Enable("acl", "transport=http"); err != nil {
		t.Fatal(err)
	}
	admin := agent(manifest.ScopeKernelAdmin)
	for range 3 {
		if res, err := k.Call(t.Context(), request(admin, "kernel.do", "", "")); err != nil || res.Meta != nil {
			t.Errorf("an administrator: %v, %v", res, err)
		}
	}
	if _, err := k.Call(t.Context(), request(agent(), "kernel.do", "", "")); err == nil {
		t.Error("somebody else was spared too")
	}
	if err := m.Enable("acl", "plugin=kernel"); err != nil {
		t.Fatal(err)
	}
	if err := m.Configure("acl", "plugin=kernel", []byte(`{"rules":[{"effect":"deny"}]}`)); err != nil {
		t.Fatal(err)
	}
	_, err := k.Call(t.Context(), request(admin, "kernel.do", "", ""))
	wantCode(t, "plugin=kernel", err, manifest.SafetyDenied, "acl_rule_0")
}
