package process

import (
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

func TestBusRights(t *testing.T) {
	p := &busPlugin{name: "asker", bus: `{"call": ["target.*", "kern*"], "read": ["mcp://target/*"]}`}
	var answers []string
	late := ""
	p.run = func(ctx context.Context, srv *jrpc2.Server, token string) (any, error) {
		late = token
		call := map[string]any{"name": "target.run"}
		answers = []string{
			ask(ctx, srv, "call", withToken(token, call)),
			ask(ctx, srv, "call", map[string]any{"name": "target.run", "tenant": "default"}),
			ask(ctx, srv, "call", withToken("NOSUCHCALL", map[string]any{"name": "target.run"})),
			ask(ctx, srv, "call", map[string]any{"name": "other.run", "tenant": "default"}),
			ask(ctx, srv, "call", map[string]any{"name": "kernel.health.get", "tenant": "default"}),
			ask(ctx, srv, "call", withToken(token, map[string]any{"name": "target.run", "tenant": "b"})),
			ask(ctx, srv, "read", map[string]any{"uri": "mcp://kernel/metrics.json", "tenant": "default"}),
		}
		return map[string]bool{"ok": true}, nil
	}
	r := newBusHarness(t, p, leaf("target"), leaf("other"))
	run := func(c *kernel.Caller, want ...string) {
		t.Helper()
		if _, err := r.call(c, "asker.run"); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(answers, want) {
			t.Errorf("got  %q\nwant %q", answers, want)
		}
	}
	const ok = `{"content":[],"structuredContent":{"ok":true}}`
	none := "E_SAFETY_DENIED consent"
	run(all, none, none, none, none, none, none, none)
	r.allow(p, "default", "c")
	run(all, ok, ok, "E_BAD_REQUEST call", "E_SAFETY_DENIED manifest", "E_SAFETY_DENIED manifest", "E_SAFETY_DENIED tenant", "E_SAFETY_DENIED manifest")
	if got := r.audited("tester"); !slices.Contains(got, "default via=plugin:asker tool=target.run target= allow ") {
		t.Errorf("audit of tester: %q", got)
	}
	if got := r.audited("plugin:asker"); !slices.Contains(got, "default via= tool=target.run target= allow ") || !slices.Contains(got, "default via= tool= target=other.run deny manifest") {
		t.Errorf("audit of the plugin: %q", got)
	}
	if got := ask(t.Context(), p.server(), "call", withToken(late, map[string]any{"name": "target.run"})); got != "E_BAD_REQUEST call" {
		t.Errorf("a call that has ended: %s", got)
	}
	if got := ask(t.Context(), p.server(), "call", map[string]any{"name": "target.run"}); got != "E_BAD_REQUEST tenant" {
		t.Errorf("no tenant of two: %s", got)
	}
	// A caller in a tenant without consent gives the plugin no rights there.
	b := *all
	b.Tenant = "b"
	if _, err := r.call(&b, "asker.run"); err != nil || answers[0] != "E_SAFETY_DENIED tenant" {
		t.Errorf("a tenant without consent: %v %q", err, answers)
	}
}

// A plugin has no scope that its caller lacks.
func TestBusIntersectsScopes(t *testing.T) {
	p := &busPlugin{name: "asker", bus: `{"call": ["target.run"]}`}
	var got string
	p.run = func(ctx context.Context, srv *jrpc2.Server, token string) (any, error) {
		got = ask(ctx, srv, "call", withToken(token, map[string]any{"name": "target.run"}))
		return map[string]bool{}, nil
	}
	r := newBusHarness(t, p)
	target := &kernel.Manifest{Name: "target", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "target.run", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsRead}}}}
	if err := r.k.Load(funcPlugin{target, func(context.Context, *kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
	}}, false); err != nil {
		t.Fatal(err)
	}
	r.allow(p, AllTenants)
	for _, c := range []struct {
		caller *kernel.Caller
		want   string
	}{{caller(manifest.ScopeTicketsWrite), "E_SAFETY_DENIED scope"}, {caller(manifest.ScopeTicketsWrite, manifest.ScopeTicketsRead), `{"content":[],"structuredContent":{}}`}} {
		if _, err := r.call(c.caller, "asker.run"); err != nil || got != c.want {
			t.Errorf("got %q, %v, want %q", got, err, c.want)
		}
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

// Two plugins that call each other end after kernel.MaxDepth calls, with the token of the call and
// without it.
func TestBusLoop(t *testing.T) {
	for _, useToken := range []bool{true, false} {
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
			t.Errorf("token %t: %d calls, then %s", useToken, calls, last)
		}
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
	if err := r.k.Load(funcPlugin{&kernel.Manifest{Name: "slow", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "slow.run", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsRead}}}},
		func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			d, _ := ctx.Deadline()
			<-ctx.Done()
			ended <- time.Until(d)
			return nil, ctx.Err()
		}}, false); err != nil {
		t.Fatal(err)
	}
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

func TestBusEvents(t *testing.T) {
	p := &busPlugin{name: "notes", bus: `{"subscribe": ["alert", "presence*"], "append": ["notes.added"]}`, notify: make(chan string, 64)}
	r := newBusHarness(t, p)
	next := func(want string) {
		t.Helper()
		select {
		case got := <-p.notify:
			if got != want {
				t.Fatalf("got  %s\nwant %s", got, want)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("no %s", want)
		}
	}
	next("initialized ")
	next(`consent {"tenants":[]}`)
	r.allow(p, "default")
	next(`consent {"tenants":["default"]}`)
	srv, ctx := p.server(), t.Context()
	for _, c := range []struct {
		method string
		params map[string]any
		want   string
	}{
		{"append", map[string]any{"type": "notes.added", "aggregate_id": "n1", "payload": map[string]any{"n": 1}}, `{"seq":1}`},
		{"append", map[string]any{"type": "notes.removed"}, "E_SAFETY_DENIED manifest"},
		{"append", map[string]any{"type": "ticket.created"}, "E_SAFETY_DENIED manifest"},
		{"append", map[string]any{"type": "notes.added", "payload": map[string]any{"x": strings.Repeat("x", maxAppend)}}, "E_BAD_REQUEST"},
		{"subscribe", map[string]any{"topics": []string{"ticket"}}, "E_SAFETY_DENIED manifest"},
		{"subscribe", map[string]any{"topics": []string{"*"}}, "E_SAFETY_DENIED manifest"},
		{"subscribe", map[string]any{"topics": []string{"alert"}, "tenant": "b"}, "E_SAFETY_DENIED tenant"},
		{"subscribe", map[string]any{"topics": []string{"alert"}, "uri": "mcp://x/y"}, "E_BAD_REQUEST"},
		{"subscribe", map[string]any{"uri": "mcp://x/y"}, "E_SAFETY_DENIED manifest"},
		{"subscribe", map[string]any{"topics": []string{"alert", "presence*"}, "after": 0}, `{"seq":1,"subscription":"1"}`},
		{"unsubscribe", map[string]any{"subscription": "7"}, "E_BAD_REQUEST"},
		{"publish", map[string]any{}, ""},
		{"call", map[string]any{"nam": "x"}, "E_BAD_REQUEST"},
	} {
		if got := ask(ctx, srv, c.method, c.params); got != c.want {
			t.Errorf("%s %v: got %s, want %s", c.method, c.params, got, c.want)
		}
	}
	for _, e := range []kernel.Event{{Tenant: "b", Type: "alert.raised", Aggregate: "x"}, {Type: "alert.raised"}, {Tenant: "default", Type: "ticket.created"},
		{Tenant: "default", Type: "alert.raised", Aggregate: "node", Payload: json.RawMessage(`{"level":"warn"}`), CreatedMS: 5}} {
		if _, err := r.log.Append(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	next(`event {"subscription":"1","tenant":"default","topic":"alert","seq":5,"type":"alert.raised","aggregate_id":"node","created_at":5,"payload":{"level":"warn"}}`)
	var types []string
	_ = r.log.Replay(ctx, 0, func(e kernel.Event) error { types = append(types, e.Tenant+" "+e.Type); return nil })
	if types[0] != "default plugin.notes.added" {
		t.Errorf("the log has %q", types)
	}
	r.allow(p)
	got := []string{<-p.notify, <-p.notify}
	slices.Sort(got)
	if want := []string{`consent {"tenants":[]}`, `ended {"reason":"the consent was changed","subscription":"1"}`}; !slices.Equal(got, want) {
		t.Errorf("after the consent was withdrawn: %q", got)
	}
	if got := ask(ctx, srv, "append", map[string]any{"type": "notes.added"}); got != "E_SAFETY_DENIED consent" {
		t.Errorf("without consent: %s", got)
	}
}

// A consent that is withdrawn while a subscription begins ends it.
func TestConsentEndsWhileSubscribing(t *testing.T) {
	p := &busPlugin{name: "notes", bus: `{"subscribe": ["alert"]}`, notify: make(chan string, 64)}
	r := newBusHarness(t, p)
	r.allow(p, "default")
	r.onSeqAt = func() { r.allow(p) }
	if got := ask(t.Context(), p.server(), "subscribe", map[string]any{"topics": []string{"alert"}, "since_s": 60}); got != `{"seq":0,"subscription":"1"}` {
		t.Fatalf("subscribe: %s", got)
	}
	for deadline := time.After(5 * time.Second); ; {
		select {
		case got := <-p.notify:
			if got == `ended {"reason":"the consent was changed","subscription":"1"}` {
				return
			}
		case <-deadline:
			t.Fatal("the subscription goes on without a consent")
		}
	}
}

// A plugin that floods the bus is refused beyond its shares.
func TestBusShares(t *testing.T) {
	p := &busPlugin{name: "notes", bus: `{"subscribe": ["alert"], "append": ["notes.*"], "call": ["slow.run"]}`}
	r := newBusHarness(t, p)
	r.allow(p, "default")
	count := map[string]int{}
	for range busBurst + 20 {
		count[ask(t.Context(), p.server(), "append", map[string]any{"type": "notes.x"})]++
	}
	if n := count["E_RATE_LIMITED rate"]; n < 50 || r.log.Last() > appendBurst+10 {
		t.Errorf("%d appended, %v", r.log.Last(), count)
	}

	q := &busPlugin{name: "busy", bus: `{"call": ["slow.run"], "subscribe": ["alert"]}`}
	r = newBusHarness(t, q)
	r.allow(q, "default")
	release := make(chan struct{})
	if err := r.k.Load(funcPlugin{&kernel.Manifest{Name: "slow", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "slow.run", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsRead}}}},
		func(context.Context, *kernel.Request) (*kernel.Result, error) {
			<-release
			return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
		}}, false); err != nil {
		t.Fatal(err)
	}
	answers := make(chan string, 64)
	for range maxBusRequests + 4 {
		go func() { answers <- ask(t.Context(), q.server(), "call", map[string]any{"name": "slow.run"}) }()
	}
	for range 4 {
		if got := <-answers; got != "E_RATE_LIMITED concurrency" {
			t.Errorf("beyond the share: %s", got)
		}
	}
	close(release)
	for range maxBusRequests {
		if got := <-answers; !strings.HasPrefix(got, "{") {
			t.Errorf("within the share: %s", got)
		}
	}
	for i := range maxSubscriptions + 1 {
		got := ask(t.Context(), q.server(), "subscribe", map[string]any{"topics": []string{"alert"}})
		if (i == maxSubscriptions) != (got == "E_RATE_LIMITED subscriptions") {
			t.Errorf("subscription %d: %s", i, got)
		}
	}
}
