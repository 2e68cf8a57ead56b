package process

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/creachadair/jrpc2"
	"github.com/creachadair/jrpc2/channel"
	"github.com/creachadair/jrpc2/handler"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// memoryEvents is Events of a MemoryLog that tests append to.
type memoryEvents struct {
	log     *kernel.MemoryLog
	onSeqAt *func()
}

func (m memoryEvents) Follow(ctx context.Context, after uint64, tenants []string, fn func(string, *kernel.Event) error) error {
	for {
		err := m.log.Replay(ctx, after, func(e kernel.Event) error {
			after = e.Seq
			if len(tenants) > 0 && !slices.Contains(tenants, e.Tenant) {
				return nil
			}
			topic, _, _ := strings.Cut(e.Type, ".")
			return fn(topic, &e)
		})
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

func (m memoryEvents) SeqAt(context.Context, time.Duration) (uint64, error) {
	if fn := *m.onSeqAt; fn != nil {
		fn()
	}
	return 0, nil
}

// busHarness is a kernel with plugins that are functions of the test.
type busHarness struct {
	t   *testing.T
	k   *kernel.Kernel
	h   *Host
	bus *Bus
	log *kernel.MemoryLog
	// onSeqAt runs while a subscription with since_s reads the log; nil: nothing. Set it before.
	onSeqAt func()

	mu       sync.Mutex // protects the fields below
	consents map[string][]string
	records  []kernel.Record
}

func newBusHarness(t *testing.T, plugins ...*busPlugin) *busHarness {
	t.Helper()
	r := &busHarness{t: t, log: &kernel.MemoryLog{}, consents: make(map[string][]string)}
	r.k = kernel.New(kernel.Options{Log: r.log, Audit: func(rec kernel.Record) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.records = append(r.records, rec)
	}})
	r.bus = NewBus(BusOptions{Kernel: r.k, Log: r.log, Events: memoryEvents{r.log, &r.onSeqAt}, Consent: func(plugin, digest string) []string {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.consents[plugin+" "+digest]
	}})
	bundled := make(map[string]Bundled)
	for _, p := range plugins {
		bundled[p.name] = Bundled{Manifest: []byte(p.manifest()), Serve: p.serve}
	}
	r.h = New(Options{Kernel: r.k, Version: "test", Bus: r.bus, Bundled: bundled})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.k.Run(ctx) })
	wg.Go(func() { _ = r.h.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	hr := harness{t: t, k: r.k, h: r.h}
	for _, p := range plugins {
		p.t = t
		if err := hr.load(p.name); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// allow sets the consent for a plugin.
func (r *busHarness) allow(p *busPlugin, tenants ...string) {
	r.mu.Lock()
	r.consents[p.name+" "+Digest([]byte(p.manifest()))] = tenants
	r.mu.Unlock()
	r.bus.Refresh(p.name)
}

// audited returns the records of an actor as text.
func (r *busHarness) audited(actor string) (list []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.records {
		if rec.Actor == actor {
			list = append(list, fmt.Sprintf("%s via=%s tool=%s target=%s %s %s", rec.Tenant, rec.Via, rec.Tool, rec.Target, rec.Decision, rec.Reason))
		}
	}
	return list
}

func (r *busHarness) call(c *kernel.Caller, tool string) (*kernel.Result, error) {
	return r.k.Call(context.Background(), &kernel.Request{Caller: c, Tool: tool})
}

// busPlugin is a plugin with one tool, NAME.run, that is a function of the test.
type busPlugin struct {
	t      *testing.T
	name   string
	bus    string
	run    func(ctx context.Context, srv *jrpc2.Server, token string) (any, error)
	notify chan string // notifications of the relay; nil: not kept

	mu  sync.Mutex // protects the field below
	srv *jrpc2.Server
}

func (p *busPlugin) manifest() string {
	return `{"name":"` + p.name + `","version":"1.0.0","capabilities":["tickets.write"],"tools":[{"name":"` + p.name + `.run","description":"runs","inputSchema":{"type":"object"}}],"bus":` + p.bus + `}`
}

// server is the plugin's side of its present connection.
func (p *busPlugin) server() *jrpc2.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.srv
}

func (p *busPlugin) serve(ctx context.Context, rw io.ReadWriteCloser) error {
	keep := func(method string) handler.Func {
		return func(_ context.Context, req *jrpc2.Request) (any, error) {
			if p.notify != nil {
				p.notify <- method + " " + req.ParamString()
			}
			return nil, nil
		}
	}
	srv := jrpc2.NewServer(handler.Map{
		"initialize": func(context.Context, *jrpc2.Request) (any, error) {
			return map[string]any{"protocolVersion": protocolVersion, "capabilities": map[string]any{}}, nil
		},
		"notifications/initialized": keep("initialized"),
		"notifications/cancelled":   keep("cancelled"),
		"agentctl/consent":          keep("consent"),
		"agentctl/event":            keep("event"),
		"agentctl/ended":            keep("ended"),
		"tools/list": func(context.Context, *jrpc2.Request) (any, error) {
			return map[string]any{"tools": []any{map[string]any{"name": p.name + ".run", "inputSchema": map[string]any{"type": "object"}}}}, nil
		},
		"tools/call": func(ctx context.Context, req *jrpc2.Request) (any, error) {
			var params struct {
				Meta map[string]json.RawMessage `json:"_meta"`
			}
			var token string
			_ = req.UnmarshalParams(&params)
			_ = json.Unmarshal(params.Meta[busCallKey], &token)
			v, err := p.run(ctx, p.server(), token)
			if err != nil {
				return nil, err
			}
			return map[string]any{"content": []any{}, "structuredContent": v}, nil
		},
	}, &jrpc2.ServerOptions{AllowPush: true, Concurrency: 64})
	p.mu.Lock()
	p.srv = srv
	p.mu.Unlock()
	srv.Start(channel.Line(rw, rw))
	stop := context.AfterFunc(ctx, func() { _ = rw.Close() }) // not srv.Stop, which panics if a message arrives meanwhile
	defer stop()
	return srv.Wait()
}

// ask sends a request to the bus and returns the result, or the reason of the refusal.
func ask(ctx context.Context, srv *jrpc2.Server, method string, params map[string]any) string {
	rsp, err := srv.Callback(ctx, busPrefix+method, params)
	if err != nil {
		e, ok := err.(*jrpc2.Error)
		if !ok {
			return err.Error()
		}
		var data struct{ Code, Reason string }
		_ = json.Unmarshal(e.Data, &data)
		return strings.TrimSpace(data.Code + " " + data.Reason)
	}
	return rsp.ResultString()
}

func withToken(token string, params map[string]any) map[string]any {
	params["_meta"] = map[string]string{busCallKey: token}
	return params
}

// leaf is a tool whose result says who called it.
func leaf(name string) *busPlugin {
	return &busPlugin{name: name, bus: `{}`, run: func(context.Context, *jrpc2.Server, string) (any, error) { return map[string]bool{"ok": true}, nil }}
}

// askingPlugin is a plugin with a tool that makes one request to the bus.
type askingPlugin struct {
	*busPlugin
	request func(ctx context.Context, srv *jrpc2.Server, token string) (answer string)
	answer  string
}

// newAskingPlugin makes the plugin asker, which asks for bus.
func newAskingPlugin(bus string) *askingPlugin {
	a := &askingPlugin{busPlugin: &busPlugin{name: "asker", bus: bus}}
	a.run = func(ctx context.Context, srv *jrpc2.Server, token string) (any, error) {
		a.answer = a.request(ctx, srv, token)
		return map[string]bool{}, nil
	}
	return a
}

// askDuringCall makes a request while the plugin serves a call of c, and returns what ask returns. The request
// names that call, or the one whose token is given; with "none" it names no call.
func (a *askingPlugin) askDuringCall(r *busHarness, c *kernel.Caller, token, method string, params map[string]any) string {
	r.t.Helper()
	a.request = func(ctx context.Context, srv *jrpc2.Server, tokenOfCall string) string {
		if token != "none" {
			params = withToken(cmp.Or(token, tokenOfCall), params)
		}
		return ask(ctx, srv, method, params)
	}
	if _, err := r.call(c, "asker.run"); err != nil {
		r.t.Fatal(err)
	}
	return a.answer
}

// What a request may do follows from the manifest, the consent, and the call that it names.
func TestBusRights(t *testing.T) {
	const ok = `{"content":[],"structuredContent":{"ok":true}}`
	type params = map[string]any
	for _, tt := range []struct {
		name, token, method string
		params              params
		want                string // with a consent for the tenants default and c
	}{
		{"a tool for the caller", "", "call", params{"name": "target.run"}, ok},
		{"a tool for itself", "none", "call", params{"name": "target.run", "tenant": "default"}, ok},
		{"a call that does not exist", "NOSUCHCALL", "call", params{"name": "target.run"}, "E_BAD_REQUEST call"},
		{"a tool that the manifest does not name", "none", "call", params{"name": "other.run", "tenant": "default"}, "E_SAFETY_DENIED manifest"},
		{"a tool of the control plane", "none", "call", params{"name": "kernel.health.get", "tenant": "default"}, "E_SAFETY_DENIED manifest"},
		{"a resource of the control plane", "none", "read", params{"uri": "mcp://kernel/metrics.json", "tenant": "default"}, "E_SAFETY_DENIED manifest"},
		{"another tenant than the caller's", "", "call", params{"name": "target.run", "tenant": "b"}, "E_SAFETY_DENIED tenant"},
		{"no tenant of two", "none", "call", params{"name": "target.run"}, "E_BAD_REQUEST tenant"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newAskingPlugin(`{"call": ["target.*", "kern*"], "read": ["mcp://target/*", "mcp://kern*"]}`)
			r := newBusHarness(t, p.busPlugin, leaf("target"), leaf("other"))
			if got := p.askDuringCall(r, all, tt.token, tt.method, tt.params); got != "E_SAFETY_DENIED consent" {
				t.Errorf("without consent: %s", got)
			}
			r.allow(p.busPlugin, "default", "c")
			if got := p.askDuringCall(r, all, tt.token, tt.method, tt.params); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// A caller in a tenant without consent gives the plugin no rights there.
func TestBusTenantWithoutConsent(t *testing.T) {
	p := newAskingPlugin(`{"call": ["target.*"]}`)
	r := newBusHarness(t, p.busPlugin, leaf("target"))
	r.allow(p.busPlugin, "default")
	c := *all
	c.Tenant = "b"
	if got := p.askDuringCall(r, &c, "", "call", map[string]any{"name": "target.run"}); got != "E_SAFETY_DENIED tenant" {
		t.Errorf("got %s", got)
	}
}

// The token of a call is of no use after the call.
func TestBusTokenEnds(t *testing.T) {
	p := newAskingPlugin(`{"call": ["target.*"]}`)
	r := newBusHarness(t, p.busPlugin, leaf("target"))
	r.allow(p.busPlugin, "default")
	var token string
	p.request = func(_ context.Context, _ *jrpc2.Server, t string) string { token = t; return "" }
	if _, err := r.call(all, "asker.run"); err != nil {
		t.Fatal(err)
	}
	if got := ask(t.Context(), p.server(), "call", withToken(token, map[string]any{"name": "target.run"})); got != "E_BAD_REQUEST call" {
		t.Errorf("got %s", got)
	}
}

// The audit log has the caller of a request for a call, and the plugin through which it came; of others the
// plugin itself; and what was refused before the kernel.
func TestBusAudit(t *testing.T) {
	p := newAskingPlugin(`{"call": ["target.*"]}`)
	r := newBusHarness(t, p.busPlugin, leaf("target"), leaf("other"))
	r.allow(p.busPlugin, "default")
	for _, tt := range []struct {
		token, tool string
		actor, want string
	}{
		{"", "target.run", "tester", "default via=plugin:asker tool=target.run target= allow "},
		{"none", "target.run", "plugin:asker", "default via= tool=target.run target= allow "},
		{"none", "other.run", "plugin:asker", "default via= tool= target=other.run deny manifest"},
	} {
		p.askDuringCall(r, all, tt.token, "call", map[string]any{"name": tt.tool})
		if got := r.audited(tt.actor); !slices.Contains(got, tt.want) {
			t.Errorf("%s: the records of %s are %q, want %q", tt.tool, tt.actor, got, tt.want)
		}
	}
}

// A plugin has no scope that its caller lacks.
func TestBusIntersectsScopes(t *testing.T) {
	p := newAskingPlugin(`{"call": ["target.run"]}`)
	r := newBusHarness(t, p.busPlugin)
	r.load("target", func(context.Context, *kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
	})
	r.allow(p.busPlugin, AllTenants)
	for _, tt := range []struct {
		scopes []string
		want   string
	}{
		{[]string{manifest.ScopeTicketsWrite}, "E_SAFETY_DENIED scope"}, // enough for asker.run, not for target.run
		{[]string{manifest.ScopeTicketsWrite, manifest.ScopeTicketsRead}, `{"content":[],"structuredContent":{}}`},
	} {
		if got := p.askDuringCall(r, caller(tt.scopes...), "", "call", map[string]any{"name": "target.run"}); got != tt.want {
			t.Errorf("a caller with %q: got %s, want %s", tt.scopes, got, tt.want)
		}
	}
}

// load loads a plugin of the kernel with one tool, NAME.run, which needs tickets:read.
func (r *busHarness) load(name string, run func(context.Context, *kernel.Request) (*kernel.Result, error)) {
	r.t.Helper()
	m := &kernel.Manifest{Name: name, Version: "1.0.0", Tools: []*kernel.Tool{{Name: name + ".run", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsRead}}}}
	if err := r.k.Load(funcPlugin{m, run}, false); err != nil {
		r.t.Fatal(err)
	}
}

// funcPlugin is a plugin of the kernel that is a function.
type funcPlugin struct {
	m   *kernel.Manifest
	run func(context.Context, *kernel.Request) (*kernel.Result, error)
}

func (p funcPlugin) Manifest() *kernel.Manifest { return p.m }
func (p funcPlugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	return p.run(ctx, r)
}

// Two plugins that call each other end after kernel.MaxDepth calls, whether they name the call that they
// serve or not.
func TestBusLoop(t *testing.T) {
	t.Run("with the token of the call", func(t *testing.T) { testBusLoop(t, true) })
	t.Run("without a token", func(t *testing.T) { testBusLoop(t, false) })
}

func testBusLoop(t *testing.T, useToken bool) {
	var mu sync.Mutex
	calls, last := 0, ""
	loop := func(other string) func(context.Context, *jrpc2.Server, string) (any, error) {
		return func(ctx context.Context, srv *jrpc2.Server, token string) (any, error) {
			mu.Lock()
			calls++
			mu.Unlock()
			params := map[string]any{"name": other + ".run", "tenant": "default"}
			if useToken {
				params = withToken(token, params)
			}
			if got := ask(ctx, srv, "call", params); strings.HasPrefix(got, "E_") {
				last = got
			}
			return map[string]bool{}, nil
		}
	}
	a := &busPlugin{name: "ping", bus: `{"call": ["pong.run"]}`, run: loop("pong")}
	b := &busPlugin{name: "pong", bus: `{"call": ["ping.run"]}`, run: loop("ping")}
	r := newBusHarness(t, a, b)
	r.allow(a, "default")
	r.allow(b, "default")
	if _, err := r.call(all, "ping.run"); err != nil {
		t.Fatal(err)
	}
	if calls != 1+kernel.MaxDepth || last != "E_SAFETY_DENIED depth" {
		t.Errorf("%d calls, then %s; want %d, then a refusal", calls, last, 1+kernel.MaxDepth)
	}
}

// What a plugin asks for within a call ends with that call, and is no fault of the plugin that it
// asked.
func TestBusBudget(t *testing.T) { synctest.Test(t, testBusBudget) }

func testBusBudget(t *testing.T) {
	answer := make(chan struct{})
	defer close(answer)
	p := &busPlugin{name: "asker", bus: `{"call": ["slow.run"]}`}
	p.run = func(ctx context.Context, srv *jrpc2.Server, token string) (any, error) {
		_ = ask(ctx, srv, "call", withToken(token, map[string]any{"name": "slow.run"}))
		<-answer // after the deadline: an answer at that very moment might count
		return map[string]bool{}, nil
	}
	r := newBusHarness(t, p)
	r.allow(p, "default")
	ended := make(chan time.Duration, 16)
	r.load("slow", func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
		d, _ := ctx.Deadline()
		<-ctx.Done()
		ended <- time.Until(d)
		return nil, ctx.Err()
	})
	for range 8 { // more than open a breaker
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if _, err := r.k.Call(ctx, &kernel.Request{Caller: all, Tool: "asker.run"}); err == nil {
			t.Fatal("the call did not end in time")
		}
		cancel()
		answer <- struct{}{}
		if left := <-ended; left != 0 {
			t.Errorf("the inner call ended %s before the deadline of the outer one", left)
		}
	}
	for _, i := range r.k.Info().Plugins {
		if i.Name == "slow" && (i.State != kernel.StateLoaded || i.Timeouts != 0) {
			t.Errorf("the plugin that was asked: %+v", i)
		}
	}
}

// notification returns the next notification of the relay to a plugin.
func (p *busPlugin) notification(t *testing.T) string {
	t.Helper()
	select {
	case got := <-p.notify:
		return got
	case <-time.After(5 * time.Second):
		t.Fatal("no notification in 5 s")
		return ""
	}
}

// newNotesPlugin makes the plugin notes, which keeps its notifications and has a consent for the tenant
// default.
func newNotesPlugin(t *testing.T, bus string) (*busPlugin, *busHarness) {
	t.Helper()
	p := &busPlugin{name: "notes", bus: bus, notify: make(chan string, 64)}
	r := newBusHarness(t, p)
	// The first one is of the start. If the consent came before it, there would be two of the same.
	for p.notification(t) != `consent {"tenants":[]}` {
	}
	r.allow(p, "default")
	if got, want := p.notification(t), `consent {"tenants":["default"]}`; got != want {
		t.Fatalf("got %s, want %s", got, want)
	}
	return p, r
}

// A plugin is notified of the tenants of its consent: when it has started, and at each change.
func TestBusConsentIsAnnounced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &busPlugin{name: "notes", bus: `{"append": ["notes.*"]}`, notify: make(chan string, 64)}
		r := newBusHarness(t, p)
		for _, want := range []string{"initialized ", `consent {"tenants":[]}`} {
			if got := p.notification(t); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		}
		r.allow(p, "default")
		if got, want := p.notification(t), `consent {"tenants":["default"]}`; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

func TestBusRequests(t *testing.T) {
	type params = map[string]any
	for _, tt := range []struct {
		name, method string
		params       params
		want         string
	}{
		{"a type that its consent names", "append", params{"type": "notes.added", "aggregate_id": "n1", "payload": params{"n": 1}}, `{"seq":1}`},
		{"an event that the manifest does not name", "append", params{"type": "notes.removed"}, "E_SAFETY_DENIED manifest"},
		{"an event of others", "append", params{"type": "ticket.created"}, "E_SAFETY_DENIED manifest"},
		{"an event that is too large", "append", params{"type": "notes.added", "payload": params{"x": strings.Repeat("x", maxAppend)}}, "E_BAD_REQUEST"},
		{"topics of the manifest", "subscribe", params{"topics": []string{"alert", "presence*"}, "after": 0}, `{"seq":0,"subscription":"1"}`},
		{"another topic", "subscribe", params{"topics": []string{"ticket"}}, "E_SAFETY_DENIED manifest"},
		{"all topics", "subscribe", params{"topics": []string{"*"}}, "E_SAFETY_DENIED manifest"},
		{"a topic of another tenant", "subscribe", params{"topics": []string{"alert"}, "tenant": "b"}, "E_SAFETY_DENIED tenant"},
		{"topics and a resource", "subscribe", params{"topics": []string{"alert"}, "uri": "mcp://x/y"}, "E_BAD_REQUEST"},
		{"two places to begin", "subscribe", params{"topics": []string{"alert"}, "since_s": 60, "after": 0}, "E_BAD_REQUEST"},
		{"another resource", "subscribe", params{"uri": "mcp://x/y"}, "E_SAFETY_DENIED manifest"},
		{"no such subscription", "unsubscribe", params{"subscription": "7"}, "E_BAD_REQUEST"},
		{"no such method", "publish", params{}, ""},
		{"no such parameter", "call", params{"nam": "x"}, "E_BAD_REQUEST"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, _ := newNotesPlugin(t, `{"subscribe": ["alert", "presence*"], "append": ["notes.added"]}`)
				if got := ask(t.Context(), p.server(), tt.method, tt.params); got != tt.want {
					t.Errorf("got %s, want %s", got, tt.want)
				}
			})
		})
	}
}

// An event of a plugin is in the log under the plugin's own types.
func TestBusAppend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"append": ["notes.added"]}`)
		ask(t.Context(), p.server(), "append", map[string]any{"type": "notes.added"})
		var events []string
		_ = r.log.Replay(t.Context(), 0, func(e kernel.Event) error { events = append(events, e.Tenant+" "+e.Type); return nil })
		if want := []string{"default plugin.notes.added"}; !slices.Equal(events, want) {
			t.Errorf("the log has %q, want %q", events, want)
		}
	})
}

// A subscription gets the events of its topics in the tenants of the consent, until the consent ends.
func TestBusSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"subscribe": ["alert"]}`)
		ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}})
		for _, e := range []kernel.Event{
			{Tenant: "b", Type: "alert.raised", Aggregate: "x"}, // of another tenant
			{Type: "alert.raised"},                              // the relay's own
			{Tenant: "default", Type: "ticket.created"},         // of another topic
			{Tenant: "default", Type: "alert.raised", Aggregate: "node", Payload: json.RawMessage(`{"level":"warn"}`), CreatedMS: 5},
		} {
			if _, err := r.log.Append(t.Context(), e); err != nil {
				t.Fatal(err)
			}
		}
		want := `event {"subscription":"1","tenant":"default","topic":"alert","seq":4,"type":"alert.raised","aggregate_id":"node","created_at":5,"payload":{"level":"warn"}}`
		if got := p.notification(t); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		r.allow(p) // takes the consent back
		got := []string{p.notification(t), p.notification(t)}
		slices.Sort(got)
		if want := []string{`consent {"tenants":[]}`, `ended {"reason":"the consent was changed","subscription":"1"}`}; !slices.Equal(got, want) {
			t.Errorf("after the consent was taken back: got %q, want %q", got, want)
		}
		if got := ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}}); got != "E_SAFETY_DENIED consent" {
			t.Errorf("another subscription without consent: %s", got)
		}
	})
}

// A consent for all tenants does not cover the relay's own events, which have none.
func TestBusSubscriptionToAllTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"subscribe": ["alert"]}`)
		r.allow(p, AllTenants)
		p.notification(t) // of the consent
		ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}})
		for _, tenant := range []string{"", "b"} {
			if _, err := r.log.Append(t.Context(), kernel.Event{Tenant: tenant, Type: "alert.raised", CreatedMS: 5}); err != nil {
				t.Fatal(err)
			}
		}
		want := `event {"subscription":"1","tenant":"b","topic":"alert","seq":2,"type":"alert.raised","created_at":5,"payload":{}}`
		if got := p.notification(t); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
}

// A consent that is taken back while a subscription begins ends it.
func TestConsentEndsWhileSubscribing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"subscribe": ["alert"]}`)
		r.onSeqAt = func() { r.allow(p) }
		if got := ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}, "since_s": 60}); got != `{"seq":0,"subscription":"1"}` {
			t.Fatalf("subscribe: %s", got)
		}
		for p.notification(t) != `ended {"reason":"the consent was changed","subscription":"1"}` {
		}
	})
}

// Events beyond the share of a plugin are refused.
func TestBusShareOfEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"append": ["notes.*"]}`)
		count := map[string]int{}
		for range appendBurst + 20 {
			count[ask(t.Context(), p.server(), "append", map[string]any{"type": "notes.x"})]++
		}
		if r.log.Last() != appendBurst || count["E_RATE_LIMITED rate"] != 20 {
			t.Errorf("%d events appended, %d refused; want %d, 20", r.log.Last(), count["E_RATE_LIMITED rate"], appendBurst)
		}
	})
}

// Requests beyond those that a plugin may have in flight are refused; those in flight are answered.
func TestBusShareInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, r := newNotesPlugin(t, `{"call": ["slow.run"]}`)
		release := make(chan struct{})
		r.load("slow", func(context.Context, *kernel.Request) (*kernel.Result, error) {
			<-release
			return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
		})
		answers := make(chan string, 64)
		call := func() { answers <- ask(t.Context(), p.server(), "call", map[string]any{"name": "slow.run"}) }
		for range maxBusRequests {
			go call()
		}
		synctest.Wait()
		if call(); <-answers != "E_RATE_LIMITED concurrency" {
			t.Error("one more was not refused")
		}
		close(release)
		for range maxBusRequests {
			if got := <-answers; !strings.HasPrefix(got, "{") {
				t.Errorf("within the share: %s", got)
			}
		}
	})
}

// Subscriptions of a connection are bounded.
func TestBusShareOfSubscriptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := newNotesPlugin(t, `{"subscribe": ["alert"]}`)
		for i := range maxSubscriptions + 1 {
			got := ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}})
			if isRefused := got == "E_RATE_LIMITED subscriptions"; isRefused != (i == maxSubscriptions) {
				t.Errorf("subscription %d: %s", i+1, got)
			}
		}
	})
}
