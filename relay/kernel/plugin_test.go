package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func TestLoadRefuses(t *testing.T) {
	many := newPlugin("many", "", "x:y")
	for i := range kernel.MaxToolsPerPlugin {
		many.m.Tools = append(many.m.Tools, &kernel.Tool{Name: fmt.Sprint("many.", i), ToolInfo: &kernel.ToolInfo{Scope: "x:y"}})
	}
	twice := newPlugin("twice", "", "x:y")
	twice.m.Tools = append(twice.m.Tools, twice.m.Tools[0])
	uris := newPlugin("uris", "", "x:y")
	uris.m.Resources = append(uris.m.Resources, uris.m.Resources[0])
	taken := newPlugin("other", "", "x:y")
	taken.m.Tools[0].Name = "base.do"
	takenURI := newPlugin("other", "b", "x:y")
	takenURI.m.Resources[0].URI = "base://all"
	tests := []struct {
		name string
		p    *plugin
		is   error
	}{
		{"no manifest", &plugin{}, nil},
		{"no name", &plugin{m: &kernel.Manifest{}}, nil},
		{"a name that is taken", newPlugin("base", "", "x:y"), kernel.ErrAlreadyLoaded},
		{"a tool without a name", &plugin{m: &kernel.Manifest{Name: "p", Tools: []*kernel.Tool{{ToolInfo: &kernel.ToolInfo{Scope: "x:y"}}}}}, nil},
		{"a tool without a scope", &plugin{m: &kernel.Manifest{Name: "p", Tools: []*kernel.Tool{{Name: "p.do"}}}}, nil},
		{"a resource without a scope", &plugin{m: &kernel.Manifest{Name: "p", Resources: []*kernel.Resource{{URI: "p://all"}}}}, nil},
		{"a resource without a URI", &plugin{m: &kernel.Manifest{Name: "p", Resources: []*kernel.Resource{{Scope: "x:y"}}}}, nil},
		{"a tool twice", twice, nil},
		{"a resource twice", uris, nil},
		{"257 tools", many, nil},
		{"another plugin's tool", taken, nil},
		{"another plugin's resource", takenURI, nil},
	}
	for _, replace := range []bool{false, true} {
		for _, tt := range tests {
			if replace && tt.is != nil {
				continue // that is what replace is for
			}
			k := kernel.New(kernel.Options{})
			base := newPlugin("base", "", "x:y")
			load(t, k, base)
			sub, err := k.Subscribe("a")
			if err != nil {
				t.Fatal(err)
			}
			if err := k.Load(tt.p, replace); err == nil || (tt.is != nil && !errors.Is(err, tt.is)) {
				t.Errorf("%s (replace %v): got %v", tt.name, replace, err)
			}
			p, tools, resources := k.Counts()
			if p != 1 || tools != 1 || resources != 1 {
				t.Errorf("%s: left %d plugins, %d tools, %d resources", tt.name, p, tools, resources)
			}
			if c := sub.Next(); c.Tools || c.Resources {
				t.Errorf("%s: notified of a change", tt.name)
			}
			if r, data, err := k.Read(t.Context(), caller("a", "x:y"), "base://all"); err != nil || r != base.m.Resources[0] || string(data) != "base base://all" {
				t.Errorf("%s: then base://all is %v %s %v", tt.name, r, data, err)
			}
		}
	}
}

func TestUnload(t *testing.T) {
	k := kernel.New(kernel.Options{})
	old, fresh := board("a", nodeA), board("a", nodeA)
	load(t, k, old)
	if err := k.Load(fresh, true); err != nil {
		t.Fatal(err)
	}
	sub, _ := k.Subscribe("a")
	if k.Unload(old) {
		t.Error("the unload of a replaced plugin did something")
	}
	if got := toolNames(k, reader("a")); len(got) != 3 {
		t.Errorf("then lists %v", got)
	}
	if c := sub.Next(); c.Tools {
		t.Error("and notified of it")
	}
	if k.Unload(newPlugin("never", "", "x:y")) {
		t.Error("the unload of a plugin that was never loaded did something")
	}
	if !k.Unload(fresh) || k.Unload(fresh) {
		t.Error("Unload of the loaded plugin works once")
	}
	if p, tools, resources := k.Counts(); p+tools+resources != 0 {
		t.Errorf("left %d plugins, %d tools, %d resources", p, tools, resources)
	}
	if c := sub.Next(); !c.Tools || !c.Resources {
		t.Errorf("notified %+v", c)
	}
	load(t, k, old) // and again
}

// While a device's plugin is replaced over and over, no list and no call finds its tools
// missing, and every call is answered by one of the two.
func TestReplaceLeavesNoGap(t *testing.T) {
	const rounds = 2000
	k := kernel.New(kernel.Options{})
	boards := [2]*plugin{board("a", nodeA), board("a", nodeA)}
	for i, p := range boards {
		for _, tool := range p.m.Tools {
			tool.Limit = nil
		}
		p.m.Tools[0].Description = fmt.Sprint("version ", i) // so that a change is notified
	}
	load(t, k, boards[0], board("a", nodeB))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := k.Call(context.Background(), &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)}); err != nil {
					t.Errorf("call: %v", err)
					return
				}
				if got := toolNames(k, reader("a")); len(got) != 6 {
					t.Errorf("lists %v", got)
					return
				}
				if _, _, err := k.Read(context.Background(), reader("a"), metricsURI(nodeA)); err != nil {
					t.Errorf("read: %v", err)
					return
				}
			}
		})
	}
	for i := 0; i < rounds || boards[0].calls.Load() == 0 || boards[1].calls.Load() == 0; i++ {
		if t.Failed() {
			break
		}
		if err := k.Load(boards[(i+1)%2], true); err != nil {
			t.Error(err)
		}
		if k.Unload(boards[i%2]) {
			t.Error("the replaced one could still be unloaded")
		}
	}
	close(stop)
	wg.Wait()
}

// newPageKernel has two boards of tenant a, one of tenant b, and two plugins for everybody: tickets,
// whose tool needs tickets:read, and zoo.
func newPageKernel(t *testing.T) *kernel.Kernel {
	k := kernel.New(kernel.Options{})
	load(t, k, board("a", nodeB), board("a", nodeA), board("b", unknown), newPlugin("tickets", "", manifest.ScopeTicketsRead), newPlugin("zoo", "", manifest.ScopeCallReadOnly))
	return k
}

// listAllTools reads a list page by page. Between two pages a board comes and goes.
func listAllTools(t *testing.T, k *kernel.Kernel, c *kernel.Caller, limit int) (names []string) {
	t.Helper()
	for after, more := "", true; more; {
		var page []*kernel.Tool
		if page, more = k.ListTools(c, after, limit); len(page) > limit || more && len(page) < limit {
			t.Fatalf("a page of %d tools, more %v; want %d unless it is the last one", len(page), more, limit)
		}
		for _, tool := range page {
			names = append(names, tool.Name)
			after = tool.Name
		}
		if len(names) > 20 {
			t.Fatalf("the list does not end: %v", names)
		}
		passing := board("a", "01hzx9k3m4p7q8r9s0t1v2w3x0")
		load(t, k, passing)
		k.Unload(passing)
	}
	return names
}

// TestVisibleTools: a caller finds the tools of its tenant and of everybody for which it has the scope,
// in a list of pages of any size and by name, and no others.
func TestVisibleTools(t *testing.T) {
	k := newPageKernel(t)
	for _, tt := range []struct {
		name  string
		c     *kernel.Caller
		tools []string
	}{
		{"a reader", reader("a"), []string{
			snapshotTool(nodeA), subscribeTool(nodeA), snapshotTool(nodeB), subscribeTool(nodeB), echoTool(nodeA), echoTool(nodeB), "zoo.do"}},
		{"a reader of the other tenant", reader("b"), []string{snapshotTool(unknown), subscribeTool(unknown), echoTool(unknown), "zoo.do"}},
		{"tickets:read only", caller("a", manifest.ScopeTicketsRead), []string{"tickets.do"}},
		{"no tenant", reader(""), []string{"zoo.do"}},
		{"no scopes", caller("a"), nil},
		{"unknown scopes", &kernel.Caller{Tenant: "a"}, nil},
	} {
		want := slices.Sorted(slices.Values(tt.tools))
		for _, limit := range []int{1, 2, 3, 100} {
			if got := listAllTools(t, k, tt.c, limit); !slices.Equal(got, want) {
				t.Errorf("%s, pages of %d: got %v, want %v", tt.name, limit, got, want)
			}
		}
		for _, name := range append(tt.tools, "tickets.do", echoTool(nodeA)) {
			_, ok := k.Tool(tt.c, name)
			if want := slices.Contains(tt.tools, name); ok != want {
				t.Errorf("%s: Tool(%s) = %v, want %v", tt.name, name, ok, want)
			}
		}
	}
}

// TestPageAfterMissingName: a page may begin after a name that no tool has any more.
func TestPageAfterMissingName(t *testing.T) {
	page, more := newPageKernel(t).ListTools(reader("a"), "sys.~", 1)
	if len(page) != 1 || page[0].Name != echoTool(nodeA) || !more {
		t.Errorf("after sys.~: %v, more %v; want %s, more", page, more, echoTool(nodeA))
	}
}

// TestVisibleResources: resources are listed like tools.
func TestVisibleResources(t *testing.T) {
	k := newPageKernel(t)
	var uris []string
	for after, more := "", true; more; {
		var page []*kernel.Resource
		page, more = k.ListResources(reader("a"), "", after, 1)
		for _, r := range page {
			uris = append(uris, r.URI)
			after = r.URI
		}
		if len(uris) > 20 {
			t.Fatalf("the list does not end: %v", uris)
		}
	}
	if want := []string{metricsURI(nodeA), metricsURI(nodeB), "zoo://all"}; !slices.Equal(uris, want) {
		t.Errorf("got %v, want %v", uris, want)
	}
}

// methods is a plugin that answers MCP methods.
type methods struct {
	*plugin
	serves []string
	serve  func() (json.RawMessage, error)
}

func (m *methods) Methods() []string { return m.serves }

func (m *methods) HandleMethod(context.Context, *kernel.Caller, kernel.Session, string, json.RawMessage) (json.RawMessage, error) {
	if m.serve != nil {
		return m.serve()
	}
	return json.RawMessage(`"` + m.m.Name + `"`), nil
}

func TestMethodFindsTheFirstByName(t *testing.T) {
	k := kernel.New(kernel.Options{})
	second := &methods{plugin: newPlugin("second", "", "x:y"), serves: []string{"prompts/list", "completion/complete"}}
	first := &methods{plugin: newPlugin("first", "", "x:y"), serves: []string{"prompts/list"}}
	theirs := &methods{plugin: newPlugin("aaa", "b", "x:y"), serves: []string{"prompts/list", "logging/setLevel"}}
	load(t, k, second, first, theirs)
	answers := func(method, want string) {
		t.Helper()
		got, ok := k.MethodHandler(reader("a"), "", method)
		if ok != (want != "") {
			t.Fatalf("Method(%s): %v", method, ok)
		}
		if !ok {
			return
		}
		if data, err := got.HandleMethod(t.Context(), reader("a"), nil, method, nil); err != nil || string(data) != want {
			t.Fatalf("%s was answered by %s, %v, want %s", method, data, err, want)
		}
	}
	answers("prompts/list", `"first"`)
	answers("completion/complete", `"second"`)
	answers("logging/setLevel", "") // another tenant's
	answers("x", "")
	first.serves = nil // what it says now is too late
	k.Unload(first)
	answers("prompts/list", `"second"`)
	k.Unload(second)
	answers("prompts/list", "")
}

// A MethodHandler plugin is supervised like others; an RPCError of it is not a fault.
func TestMethodsAreSupervised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := &methods{plugin: newPlugin("p", "", "x:y"), serves: []string{"prompts/list"}}
		var serve atomic.Pointer[func() (json.RawMessage, error)]
		p.serve = func() (json.RawMessage, error) { return (*serve.Load())() }
		will := func(fn func() (json.RawMessage, error)) { serve.Store(&fn) }
		load(t, k, p)
		call := func() error {
			m, _ := k.MethodHandler(reader("a"), "", "prompts/list")
			_, err := m.HandleMethod(t.Context(), reader("a"), nil, "prompts/list", nil)
			return err
		}
		for _, fault := range []error{&kernel.RPCError{Code: -32602, Message: "no such prompt"}, kernel.ErrNoResource} {
			will(func() (json.RawMessage, error) { return nil, fault })
			for range 10 {
				if err := call(); !errors.Is(err, fault) {
					t.Fatalf("got %v, want %v", err, fault)
				}
			}
		}
		will(func() (json.RawMessage, error) {
			time.Sleep(time.Minute)
			return nil, nil
		})
		start := time.Now()
		wantCode(t, "slow", call(), manifest.DeadlineExceeded, "gateway_deadline")
		if took := time.Since(start); took != kernel.CallBudget {
			t.Errorf("took %v", took)
		}
		will(func() (json.RawMessage, error) { panic("canary9876") })
		for range 4 {
			wantCode(t, "panic", call(), manifest.Internal, "panic")
		}
		wantCode(t, "then", call(), manifest.Internal, "breaker")
		time.Sleep(time.Hour)
	})
}

// The kernel is deterministic: the same script gives the same transcript, a thousand
// times, with nothing but memory in it.
func TestSameSeedSameTranscript(t *testing.T) {
	first := transcript(t, 42)
	if !strings.Contains(first, " allow ") || !strings.Contains(first, " deny ") || !strings.Contains(first, "changed") {
		t.Fatalf("the script does too little:\n%s", first)
	}
	if other := transcript(t, 43); other == first {
		t.Fatal("two seeds give one transcript: the script says nothing")
	}
	runs := 1000
	if raceEnabled {
		runs = 200
	}
	for i := range runs {
		if got := transcript(t, 42); got != first {
			t.Fatalf("run %d differs:\n%s\nfrom\n%s", i, got, first)
		}
	}
}

// transcript runs a script drawn from seed against a new kernel and writes down all that
// can be seen of it.
func transcript(t *testing.T, seed uint64) string {
	rng := rand.New(rand.NewPCG(seed, 1))
	var b strings.Builder
	k := kernel.New(kernel.Options{
		Audit:          func(r kernel.Record) { fmt.Fprintln(&b, "audit", r) },
		ExplainMissing: owners(map[string]string{nodeA: "a", nodeB: "b"}),
	})
	fleet := []*plugin{board("a", nodeA), board("b", nodeB), board("a", unknown), newPlugin("zoo", "", manifest.ScopeCallReadOnly)}
	for _, p := range fleet {
		for _, tool := range p.m.Tools {
			tool.Limit = nil // by the clock, which is no part of this
		}
	}
	sub, err := k.Subscribe("a")
	if err != nil {
		t.Fatal(err)
	}
	for step := range 70 {
		p := fleet[rng.IntN(len(fleet))]
		c := reader([]string{"a", "b"}[rng.IntN(2)])
		switch rng.IntN(6) {
		case 0, 1:
			fmt.Fprintln(&b, "load", p.m.Name, k.Load(p, rng.IntN(2) == 0))
		case 2:
			fmt.Fprintln(&b, "unload", p.m.Name, k.Unload(p))
		case 3:
			tool := p.m.Tools[rng.IntN(len(p.m.Tools))]
			if rng.IntN(2) == 0 {
				c.Tenant = p.m.Tenant // else most calls would be refused
			}
			args := []string{`{}`, `{"message":"x"}`}[rng.IntN(2)]
			res, err := k.Call(context.Background(), &kernel.Request{Caller: c, Tool: tool.Name, Arguments: []byte(args), TraceID: fmt.Sprintf("%032x", step+1)})
			fmt.Fprintln(&b, "call", tool.Name, res != nil, err)
		case 4:
			fmt.Fprintln(&b, "list", toolNames(k, c))
		case 5:
			k.NotifyChange("a", kernel.Change{Updated: []string{metricsURI(nodeA), metricsURI(unknown), "zoo://all"}})
			fmt.Fprintln(&b, "changed", sub.Next())
		}
	}
	return b.String()
}
