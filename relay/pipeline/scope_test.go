package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/pipeline"
)

type entry = pipeline.Entry[*request, string]

// request is a request that says where it came from and where it went.
type request struct {
	transport, plugin, connection string
	trail                         string
}

func note(name string) pipeline.Stage[*request, string] {
	return pipeline.Stage[*request, string]{Name: name, Wrap: func(next pipeline.Handler[*request, string]) pipeline.Handler[*request, string] {
		return func(ctx context.Context, r *request) (string, error) {
			r.trail += name + " "
			return next(ctx, r)
		}
	}}
}

func scoped(t *testing.T, name, scope string, on bool) entry {
	t.Helper()
	s, err := pipeline.ParseScope(scope)
	if err != nil {
		t.Fatal(err)
	}
	st := note(name)
	wrap, mark := st.Wrap, strings.ToUpper(scope[:1])
	st.Wrap = func(next pipeline.Handler[*request, string]) pipeline.Handler[*request, string] {
		h := wrap(next)
		return func(ctx context.Context, r *request) (string, error) { r.trail += mark + ":"; return h(ctx, r) }
	}
	e := entry{Stage: st, Scope: s, Enabled: on}
	switch s.Kind {
	case pipeline.Transport:
		e.Match = func(r *request) bool { return r.transport == s.Name }
	case pipeline.Plugin:
		e.Match = func(r *request) bool { return r.plugin == s.Name }
	case pipeline.Connection:
		e.Match = func(r *request) bool { return r.connection == s.Name }
	}
	return e
}

// An entry binds exactly the requests of its scope, and the narrowest one decides.
func TestScopes(t *testing.T) {
	requests := []request{
		{"http", "tickets", "c1", ""}, {"stdio", "tickets", "c2", ""}, {"http", "directory", "c3", ""}, {"stdio", "directory", "c4", ""},
	}
	type scope struct {
		name string
		on   bool
	}
	tests := []struct {
		name   string
		scopes []scope
		want   [4]string
	}{
		{"global", []scope{{"global", true}}, [4]string{"G:a ", "G:a ", "G:a ", "G:a "}},
		{"nowhere", []scope{{"global", false}}, [4]string{}},
		{"one transport", []scope{{"transport=http", true}}, [4]string{"T:a ", "", "T:a ", ""}},
		{"one connection", []scope{{"connection=c2", true}}, [4]string{"", "C:a ", "", ""}},
		{"one plugin", []scope{{"plugin=tickets", true}}, [4]string{"P:a ", "P:a ", "", ""}},
		{"all but one connection", []scope{{"global", true}, {"connection=c3", false}}, [4]string{"G:a ", "G:a ", "", "G:a "}},
		{"the narrowest decides, whatever the order", []scope{{"global", true}, {"transport=http", false}, {"plugin=tickets", true}, {"connection=c1", false}},
			[4]string{"", "P:a ", "", "G:a "}},
		{"connection before plugin before transport", []scope{{"transport=http", true}, {"connection=c1", true}, {"plugin=tickets", true}},
			[4]string{"C:a ", "P:a ", "T:a ", ""}},
	}
	for _, tt := range tests {
		entries := []entry{{Stage: note("x"), Enabled: true}}
		for _, s := range tt.scopes {
			entries = append(entries, scoped(t, "a", s.name, s.on))
		}
		entries = append(entries, entry{Stage: note("z"), Enabled: true})
		p := pipeline.New(func(context.Context, *request) (string, error) { return "", nil })
		if err := p.SwapEntries(entries...); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		for i, r := range requests {
			_, _ = p.Handle(t.Context(), &r)
			if want := "x " + tt.want[i] + "z "; r.trail != want {
				t.Errorf("%s: request %d went %q, want %q", tt.name, i, r.trail, want)
			}
		}
		if got := p.Entries(); len(got) != len(entries) || got[1].Scope != entries[1].Scope {
			t.Errorf("%s: Entries = %v", tt.name, got)
		}
	}
}

func TestParseScope(t *testing.T) {
	for _, good := range []string{"global", "transport=http", "plugin=device:01hzx9k3m4p7q8r9s0t1v2w3xy", "connection=a=b", "plugin=" + strings.Repeat("x", pipeline.MaxScopeName)} {
		if s, err := pipeline.ParseScope(good); err != nil || s.String() != good {
			t.Errorf("%s: %v, %v", good, s, err)
		}
	}
	if s, err := pipeline.ParseScope(""); err != nil || s != (pipeline.Scope{}) {
		t.Errorf("the empty scope: %v, %v", s, err)
	}
	for _, bad := range []string{"globa", "global=x", "transport", "transport=", "tenant=a", "plugin=a b", "plugin=\x7f", "plugin=\xc3\xa4", "Plugin=a", "plugin=" + strings.Repeat("x", pipeline.MaxScopeName+1)} {
		if s, err := pipeline.ParseScope(bad); err == nil {
			t.Errorf("%q: read as %v", bad, s)
		}
	}
}

// An order that breaks a rule is refused, enabled or not, and says what is wrong.
func TestOrderRules(t *testing.T) {
	sign, pack, trace := note("sign"), note("pack"), note("trace")
	sign.OuterTo = []pipeline.OrderRule{{Stage: "pack", Reason: "it signs what is sent"}}
	trace.OuterTo = []pipeline.OrderRule{{Stage: pipeline.AnyStage, Reason: "it times them"}}
	tests := []struct {
		name    string
		stages  []pipeline.Stage[*request, string]
		refused string
	}{
		{"as it should be", []pipeline.Stage[*request, string]{trace, sign, note("x"), pack}, ""},
		{"without the other", []pipeline.Stage[*request, string]{note("x"), sign}, ""},
		{"the wrong way round", []pipeline.Stage[*request, string]{trace, pack, note("x"), sign}, "sign has to come before pack: it signs what is sent"},
		{"not the outermost", []pipeline.Stage[*request, string]{note("x"), trace}, "trace has to come before x: it times them"},
	}
	for _, tt := range tests {
		for _, on := range []bool{true, false} {
			var entries []entry
			for _, s := range tt.stages {
				entries = append(entries, entry{Stage: s, Enabled: on})
			}
			p := pipeline.New(func(context.Context, *request) (string, error) { return "", nil })
			err := p.SwapEntries(entries...)
			if (err == nil) != (tt.refused == "") {
				t.Errorf("%s: %v", tt.name, err)
			}
			if err != nil && (!errors.Is(err, pipeline.ErrOrder) || !strings.Contains(err.Error(), tt.refused) || len(p.Entries()) != 0) {
				t.Errorf("%s: %v, then %v", tt.name, err, p.Entries())
			}
		}
	}
}

func TestRefusedEntries(t *testing.T) {
	many := []entry{scoped(t, "a", "global", true)}
	for i := range pipeline.MaxScoped + 1 {
		many = append(many, scoped(t, "a", fmt.Sprint("plugin=", i), true))
	}
	noMatch := scoped(t, "a", "plugin=x", true)
	noMatch.Match = nil
	tests := map[string][]entry{
		"a scope without a match":   {noMatch},
		"one scope twice":           {scoped(t, "a", "plugin=x", true), scoped(t, "a", "plugin=x", false)},
		"not side by side":          {scoped(t, "a", "global", true), scoped(t, "b", "global", true), scoped(t, "a", "plugin=x", true)},
		"65 scopes beside a global": many,
	}
	for name, entries := range tests {
		p := pipeline.New(func(context.Context, *request) (string, error) { return "", nil })
		if err := p.SwapEntries(entries...); err == nil || len(p.Entries()) != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := pipeline.New(func(context.Context, *request) (string, error) { return "", nil })
	if err := p.SwapEntries(many[:pipeline.MaxScoped+1]...); err != nil {
		t.Error(err)
	}
	if err := p.SwapEntries(scoped(t, "a", "global", false), scoped(t, "b", "global", true), scoped(t, "b", "plugin=x", true)); err != nil || !slices.Equal(p.Names(), []string{"b"}) {
		t.Errorf("Names = %v, %v", p.Names(), err)
	}
}

// With global entries only, a list costs what its stages cost.
func TestGlobalEntriesCostNothing(t *testing.T) {
	p := pipeline.New(func(context.Context, *request) (string, error) { return "", nil })
	pass := pipeline.Stage[*request, string]{Name: "a", Wrap: func(next pipeline.Handler[*request, string]) pipeline.Handler[*request, string] { return next }}
	if err := p.SwapEntries(entry{Stage: pass, Enabled: true}, entry{Stage: note("b")}); err != nil {
		t.Fatal(err)
	}
	r := &request{}
	if n := testing.AllocsPerRun(100, func() { _, _ = p.Handle(context.Background(), r) }); n != 0 || r.trail != "" {
		t.Errorf("%v allocations, went %q", n, r.trail)
	}
}

// TestRefuses: the narrowest entry that matches decides whether a request is refused, and whether a
// stage applies to it.
func TestRefuses(t *testing.T) {
	has := func(s string) func(string) bool { return func(r string) bool { return strings.Contains(r, s) } }
	pass := func(next pipeline.Handler[string, string]) pipeline.Handler[string, string] { return next }
	entry := func(name string, scope pipeline.Scope, enabled bool, match, refuses func(string) bool) pipeline.Entry[string, string] {
		return pipeline.Entry[string, string]{Stage: pipeline.Stage[string, string]{Name: name, Wrap: pass, Refuses: refuses}, Scope: scope, Enabled: enabled, Match: match}
	}
	p := pipeline.New(func(_ context.Context, r string) (string, error) { return r, nil })
	if p.MayRefuse() || p.Refuses("x") || p.Applies("a", "x") {
		t.Error("an empty list refuses or applies")
	}
	if err := p.SwapEntries(
		entry("a", pipeline.Scope{}, true, nil, has("bad")),
		entry("a", pipeline.Scope{Kind: pipeline.Transport, Name: "t"}, false, has("t:"), has("bad")),
		entry("a", pipeline.Scope{Kind: pipeline.Connection, Name: "c"}, true, has("c:"), nil),
		entry("b", pipeline.Scope{}, false, nil, has("")),
	); err != nil {
		t.Fatal(err)
	}
	for r, want := range map[string][2]bool{ // refused; a applies
		"good": {false, true}, "bad": {true, true}, "t:bad": {false, false}, "c:bad": {false, true}, "c:t:bad": {false, true},
	} {
		if p.Refuses(r) != want[0] || p.Applies("a", r) != want[1] {
			t.Errorf("%s: refused %t, applies %t", r, p.Refuses(r), p.Applies("a", r))
		}
	}
	if !p.MayRefuse() || p.Applies("b", "x") {
		t.Error("a stage that is off applies, or one that is on does not")
	}
}
