package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// machine drives a kernel and a model of it with random interleavings of load, replace,
// unload, subscribe, update and calls, with names that clash and ids that are taken.
type machine struct {
	k      *kernel.Kernel
	loaded map[string]*plugin // by name
	subs   []*modelSub
	audits int
}

type modelSub struct {
	s      *kernel.Subscription
	tenant string
	tools  bool
	uris   map[string]bool
}

var (
	names   = rapid.SampledFrom([]string{"one", "two", "three", "four"})
	tenants = rapid.SampledFrom([]string{"a", "b", ""})
	uris    = rapid.SampledFrom([]string{"x://1", "x://2", "x://3"})
)

// draw makes a plugin whose tools may belong to another one already.
func (m *machine) draw(t *rapid.T) *plugin {
	p := &plugin{m: &kernel.Manifest{Name: names.Draw(t, "name"), Version: "1.0.0", Tenant: tenants.Draw(t, "tenant"), Inline: rapid.Bool().Draw(t, "inline")}}
	for _, n := range rapid.SliceOfN(rapid.IntRange(0, 5), 0, 4).Draw(t, "tools") {
		p.m.Tools = append(p.m.Tools, &kernel.Tool{Name: fmt.Sprintf("t%d.do", n), ToolInfo: &kernel.ToolInfo{Scope: "x:y"}})
	}
	return p
}

// acceptable says whether the model lets p in.
func (m *machine) acceptable(p *plugin, replace bool) bool {
	if m.loaded[p.m.Name] != nil && !replace {
		return false
	}
	taken := make(map[string]bool)
	for name, other := range m.loaded {
		for _, tool := range other.m.Tools {
			taken[tool.Name] = taken[tool.Name] || name != p.m.Name
		}
	}
	own := make(map[string]bool)
	for _, tool := range p.m.Tools {
		if taken[tool.Name] || own[tool.Name] {
			return false
		}
		own[tool.Name] = true
	}
	return true
}

// markToolsChanged records in the model that a tenant's list of tools changed.
func (m *machine) markToolsChanged(tenant string) {
	for _, s := range m.subs {
		s.tools = s.tools || tenant == "" || tenant == s.tenant
	}
}

func surface(p *plugin) string {
	var b []string
	for _, tool := range p.m.Tools {
		b = append(b, tool.Name)
	}
	return p.m.Tenant + " " + strings.Join(b, " ")
}

func (m *machine) load(t *rapid.T) {
	p, replace := m.draw(t), rapid.Bool().Draw(t, "replace")
	ok := m.acceptable(p, replace)
	if err := m.k.Load(p, replace); (err == nil) != ok {
		t.Fatalf("Load(%s, %v): %v, the model says %v", surface(p), replace, err, ok)
	}
	if !ok {
		return
	}
	old := m.loaded[p.m.Name]
	m.loaded[p.m.Name] = p
	if old == nil || surface(old) != surface(p) {
		for _, changed := range []*plugin{old, p} {
			if changed != nil && len(changed.m.Tools) > 0 {
				m.markToolsChanged(changed.m.Tenant)
			}
		}
	}
}

func (m *machine) unload(t *rapid.T) {
	name := names.Draw(t, "name")
	p := m.loaded[name]
	if rapid.Bool().Draw(t, "stale") {
		if m.k.Unload(&plugin{m: &kernel.Manifest{Name: name}}) {
			t.Fatal("a plugin that is not loaded was unloaded")
		}
		return
	}
	if err := m.k.UnloadByName(name); (err == nil) != (p != nil) {
		t.Fatalf("UnloadByName(%s): %v", name, err)
	}
	if p != nil {
		delete(m.loaded, name)
		if len(p.m.Tools) > 0 {
			m.markToolsChanged(p.m.Tenant)
		}
	}
}

func (m *machine) subscribe(t *rapid.T) {
	tenant := tenants.Draw(t, "tenant")
	s, err := m.k.Subscribe(tenant)
	if err != nil {
		t.Fatal(err)
	}
	m.subs = append(m.subs, &modelSub{s: s, tenant: tenant, uris: make(map[string]bool)})
}

func (m *machine) unsubscribe(t *rapid.T) {
	if len(m.subs) == 0 {
		t.Skip("nobody listens")
	}
	i := rapid.IntRange(0, len(m.subs)-1).Draw(t, "i")
	m.subs[i].s.Close()
	m.subs[i].s.Close()
	m.subs = slices.Delete(m.subs, i, i+1)
}

func (m *machine) update(t *rapid.T) {
	tenant, list := tenants.Draw(t, "tenant"), rapid.SliceOfN(uris, 0, 4).Draw(t, "uris")
	m.k.NotifyChange(tenant, kernel.Change{Updated: list})
	for _, s := range m.subs {
		for _, u := range list {
			if tenant == "" || tenant == s.tenant {
				s.uris[u] = true
			}
		}
	}
}

func (m *machine) take(t *rapid.T) {
	if len(m.subs) == 0 {
		t.Skip("nobody listens")
	}
	s := m.subs[rapid.IntRange(0, len(m.subs)-1).Draw(t, "i")]
	want := kernel.Change{Tools: s.tools, PluginTools: s.tools, Updated: slices.Sorted(maps.Keys(s.uris))}
	ready := pending(s.s)
	got := s.s.Next()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("a subscriber of %q was notified of %+v, want %+v", s.tenant, got, want)
	}
	if !ready && (want.Tools || len(want.Updated) > 0) {
		t.Fatal("something was pending and Ready was silent")
	}
	s.tools = false
	clear(s.uris)
}

func (m *machine) call(t *rapid.T) {
	tenant, tool := tenants.Draw(t, "tenant"), fmt.Sprintf("t%d.do", rapid.IntRange(0, 5).Draw(t, "tool"))
	var owner *plugin
	for _, p := range m.loaded {
		for _, x := range p.m.Tools {
			if x.Name == tool && (p.m.Tenant == "" || p.m.Tenant == tenant) {
				owner = p
			}
		}
	}
	res, err := m.k.Call(context.Background(), &kernel.Request{Caller: caller(tenant, "x:y"), Tool: tool})
	m.audits--
	switch {
	case (err == nil) != (owner != nil):
		t.Fatalf("call %s of %q: %v", tool, tenant, err)
	case err == nil && string(res.Structured) != `{"by":"`+owner.m.Name+`"}`:
		t.Fatalf("call %s of %q: answered %s, not by %s", tool, tenant, res.Structured, owner.m.Name)
	}
}

// check holds the lists against the model, and the audit against the calls.
func (m *machine) check(t *rapid.T) {
	for _, tenant := range []string{"a", "b", ""} {
		var want []string
		for _, p := range m.loaded {
			for _, tool := range p.m.Tools {
				if p.m.Tenant == "" || p.m.Tenant == tenant {
					want = append(want, tool.Name)
				}
			}
		}
		slices.Sort(want)
		if got := toolNames(m.k, caller(tenant, "x:y")); !slices.Equal(got, want) {
			t.Fatalf("%q lists %v, want %v", tenant, got, want)
		}
	}
	if n, _, _ := m.k.Counts(); n != len(m.loaded) || m.k.Stats().Subscriptions != len(m.subs) || m.audits != 0 {
		t.Fatalf("%d plugins, %d subscriptions, %d audits too many; want %d and %d", n, m.k.Stats().Subscriptions, m.audits, len(m.loaded), len(m.subs))
	}
}

func TestInterleavings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{loaded: make(map[string]*plugin)}
		m.k = kernel.New(kernel.Options{Audit: func(kernel.Record) { m.audits++ }})
		t.Repeat(map[string]func(*rapid.T){
			"load": m.load, "unload": m.unload, "subscribe": m.subscribe, "unsubscribe": m.unsubscribe,
			"update": m.update, "take": m.take, "call": m.call, "": m.check,
		})
	})
}

// FuzzRouter: whatever an endpoint passes on, the answer is a result or one of the seven codes,
// in printable ASCII that quotes nothing, and there is exactly one audit record of it.
func FuzzRouter(f *testing.F) {
	for _, s := range []string{echoTool(nodeA), echoTool(nodeB), subscribeTool(nodeA), "sysecho_" + nodeA + "_echo_invoke", "zoo.do", "zoo.", ".", "", "a.b.c.d", "kernel.x"} {
		f.Add(s, `{"message":"x"}`, "zoo://all", false, uint8(3))
		f.Add(s, ``, s, true, uint8(0))
	}
	f.Fuzz(func(t *testing.T, tool, args, uri string, stream bool, kind uint8) {
		var log auditLog
		k := kernel.New(kernel.Options{Audit: log.add, ExplainMissing: owners(map[string]string{nodeA: "a", nodeB: "b"})})
		p, other := board("a", nodeA), board("b", nodeB)
		p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
			if !json.Valid(r.Arguments) || len(r.Arguments) == 0 || r.Arguments[0] != '{' {
				t.Errorf("the device was sent %q", r.Arguments)
			}
			return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
		}
		load(t, k, p, other, faultyPlugin())
		has := []string{manifest.ScopeCallReadOnly, "x:y"}[:kind%3]
		r := &kernel.Request{Caller: caller("a", has...), Tool: tool, Arguments: []byte(args), URI: uri, Stream: stream}
		if kind%8 >= 4 {
			r.Method = kernel.MethodRead
		}
		res, err := k.Call(context.Background(), r)
		if (res == nil) == (err == nil) {
			t.Fatalf("answered %v and %v", res, err)
		}
		if n := other.calls.Load(); n != 0 {
			t.Errorf("another tenant's device was asked")
		}
		recs := log.all()
		if len(recs) != 1 || (err == nil) != (recs[0].Decision == kernel.Allowed) {
			t.Fatalf("audited %+v for %v", recs, err)
		}
		if utf8.ValidString(tool) && len(tool) > 12 && recs[0].Tool != "" && recs[0].Tool != manifest.Canonical(tool) {
			t.Errorf("audited the name %q for %q", recs[0].Tool, tool)
		}
		if err == nil || errors.Is(err, kernel.ErrNoResource) {
			return
		}
		var e *manifest.Error
		if !errors.As(err, &e) || !e.Code.Valid() || e.Message == "" {
			t.Fatalf("the error is %v", err)
		}
		for _, c := range e.Message {
			if c < ' ' || c > '~' {
				t.Errorf("the message is %q", e.Message)
			}
		}
	})
}
