package mcp

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/conformance"
)

// listening is a client that receives notifications of changes, as its era does.
type listening struct {
	cs                        *sdk.ClientSession
	tools, resources, prompts chan struct{}
	updated                   chan string
}

func (e *env) listen(version string) *listening {
	l := &listening{tools: make(chan struct{}, 64), resources: make(chan struct{}, 64), prompts: make(chan struct{}, 64), updated: make(chan string, 64)}
	l.cs = e.client("", version, &sdk.ClientOptions{
		ToolListChangedHandler:     func(context.Context, *sdk.ToolListChangedRequest) { l.tools <- struct{}{} },
		ResourceListChangedHandler: func(context.Context, *sdk.ResourceListChangedRequest) { l.resources <- struct{}{} },
		PromptListChangedHandler:   func(context.Context, *sdk.PromptListChangedRequest) { l.prompts <- struct{}{} },
		ResourceUpdatedHandler:     func(_ context.Context, r *sdk.ResourceUpdatedNotificationRequest) { l.updated <- r.Params.URI },
	})
	return l
}

func TestNotifications(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		b := newBoard("default", nodeA)
		e.load(b)
		fix := conformance.New(e.kernel)
		e.load(fix)
		l := e.listen(version)
		uri := b.m.Resources[0].URI
		if err := l.cs.Subscribe(t.Context(), &sdk.SubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		until(t, "a listener and a watch", func() bool { return e.listeners("default") > 0 && b.watching.Load() == 1 })
		b.changed <- struct{}{}
		if got := wait(t, "update", l.updated); got != uri {
			t.Errorf("updated %q, want %q", got, uri)
		}

		e.load(newBoard("other", nodeB)) // not this tenant's business
		e.load(newBoard("default", "01j8zz3f0v4q7k2m9x5c1b6ada"))
		wait(t, "tools/list_changed", l.tools)
		wait(t, "resources/list_changed", l.resources)
		e.kernel.NotifyChange("", kernel.Change{Prompts: true})
		wait(t, "prompts/list_changed", l.prompts)

		if err := l.cs.Unsubscribe(t.Context(), &sdk.UnsubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		until(t, "release of the watch", func() bool { return b.watching.Load() == 0 })
	})
}

// listeners counts the streams of a tenant that get change notifications.
func (e *env) listeners(tenant string) int {
	e.h.mu.RLock()
	t := e.h.tenants[tenant]
	e.h.mu.RUnlock()
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.listeners)
	for s := range t.sessions {
		n += len(s.streamCallers())
	}
	return n
}

// TestNotifyScopes: what a session has subscribed to with one token is not announced on a stream of
// another token of the same subject, which may not read it; nor is it on a listen stream.
func TestNotifyScopes(t *testing.T) {
	k := kernel.New(kernel.Options{})
	b := newBoard("default", nodeA)
	uri := b.m.Resources[0].URI
	b.m.Resources[0].Scope = manifest.ScopeKernelAdmin
	if err := k.Load(b, false); err != nil {
		t.Fatal(err)
	}
	h := New(Options{Kernel: k})
	var sent []string
	h.sendNotification = func(_ context.Context, method string, _ sdk.Request) (sdk.Result, error) {
		sent = append(sent, method)
		return nil, nil
	}
	h.ctx = t.Context()
	ten, e := h.acquireTenant("default")
	if e != nil {
		t.Fatal(e)
	}
	admin := &exchange{caller: &kernel.Caller{Tenant: "default", Actor: "ann", Scopes: scopes{manifest.ScopeKernelAdmin, manifest.ScopeToolsList}}}
	reader := &exchange{caller: &kernel.Caller{Tenant: "default", Actor: "ann", Scopes: scopes{manifest.ScopeCallReadOnly}}}
	subscriber := &exchange{caller: &kernel.Caller{Tenant: "default", Actor: "ann", Scopes: scopes{"events:subscribe"}}}
	for _, tt := range []struct {
		name    string
		streams []*exchange
		want    []string
	}{
		{"none", nil, nil},
		{"the token that subscribed", []*exchange{admin}, []string{"notifications/tools/list_changed", "notifications/resources/updated"}},
		{"another of the same subject", []*exchange{reader}, []string{"notifications/tools/list_changed"}},
		{"both", []*exchange{admin, reader}, []string{"notifications/tools/list_changed"}},
		{"one that may list no tools", []*exchange{subscriber}, nil},
	} {
		s := &session{subscriptions: map[string]func(){uri: func() {}}}
		ten.sessions = map[*session]struct{}{s: {}}
		for _, x := range tt.streams {
			s.addStream(x)
		}
		sent = nil
		ten.notify(t.Context(), kernel.Change{Tools: true}, map[string]bool{uri: true})
		if !slices.Equal(sent, tt.want) {
			t.Errorf("session, %s: %q, want %q", tt.name, sent, tt.want)
		}
		for _, x := range tt.streams {
			s.removeStream(x)
		}
	}
	ten.sessions = nil
	for x, want := range map[*exchange]int{admin: 1, reader: 0} {
		ten.listeners = map[*listener]struct{}{{x: x, uris: map[string]bool{uri: true}}: {}}
		sent = nil
		if ten.notify(t.Context(), kernel.Change{}, map[string]bool{uri: true}); len(sent) != want {
			t.Errorf("listen stream of %v: %q", x.caller.Scopes, sent)
		}
	}
}

// TestNotifyRate lets devices come and go all the time: clients are notified once a second,
// no more often and no more seldom.
func TestNotifyRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		h := New(Options{Kernel: k})
		var sent, updated atomic.Int64
		h.sendNotification = func(_ context.Context, method string, _ sdk.Request) (sdk.Result, error) {
			switch method {
			case "notifications/tools/list_changed":
				sent.Add(1)
			case "notifications/resources/updated":
				updated.Add(1)
			}
			return nil, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		h.ctx = ctx
		ten, e := h.acquireTenant("default")
		if e != nil {
			t.Fatal(e)
		}
		s := &session{subscriptions: map[string]func(){"u:1": func() {}}}
		s.addStream(&exchange{caller: &kernel.Caller{Tenant: "default", Scopes: scopes{manifest.ScopeToolsList}}})
		ten.mu.Lock()
		ten.sessions[s] = struct{}{}
		ten.mu.Unlock()
		b := newBoard("default", nodeA)
		for range 200 { // 10 s of churn
			if err := k.Load(b, true); err != nil {
				t.Fatal(err)
			}
			time.Sleep(25 * time.Millisecond)
			k.Unload(b)
			k.NotifyChange("default", kernel.Change{Updated: []string{"u:1", "u:2"}})
			time.Sleep(25 * time.Millisecond)
		}
		synctest.Wait()
		if n := sent.Load(); n < 10 || n > 11 {
			t.Errorf("%d notifications of tools in 10 s of churn, want 10 or 11", n)
		}
		if n := updated.Load(); n < 10 || n > 11 {
			t.Errorf("%d updates of a resource in 10 s, want 10 or 11", n)
		}
		time.Sleep(3 * time.Second)
		quiet := sent.Load()
		_ = k.Load(b, true)
		synctest.Wait()
		if sent.Load() != quiet+1 {
			t.Error("a change after a quiet time did not go out at once")
		}
		cancel()
		h.wg.Wait()
	})
}

// TestListenFilter: a listen stream gets what it asked for and may see, no more.
func TestListenFilter(t *testing.T) {
	t.Parallel() // it waits for notifyInterval
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	e.load(b)
	e.load(newBoard("other", nodeB))
	uri := b.m.Resources[0].URI
	c := dial(t, e.srv.Listener.Addr().String())
	body := `{"jsonrpc":"2.0","id":"sub-1","method":"subscriptions/listen","params":{` + modernMeta + `,"notifications":{"toolsListChanged":true,"promptsListChanged":true,
		"resourceSubscriptions":["` + uri + `","` + uri + `","mcp://devices/` + nodeB + `/metrics.json","file:///etc/passwd"]}}}`
	events := c.stream("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\n", body)
	ack := wait(t, "acknowledgement", events)
	params := ack["params"].(map[string]any)
	n := params["notifications"].(map[string]any)
	if subs := n["resourceSubscriptions"].([]any); ack["method"] != "notifications/subscriptions/acknowledged" || n["toolsListChanged"] != true ||
		n["promptsListChanged"] != nil || len(subs) != 1 || subs[0] != uri {
		t.Fatalf("acknowledged %v", ack)
	}
	if id := params["_meta"].(map[string]any)["io.modelcontextprotocol/subscriptionId"]; id != "sub-1" {
		t.Errorf("subscription id %v, want sub-1", id)
	}
	e.kernel.NotifyChange("default", kernel.Change{Resources: true, Prompts: true}) // not asked for
	b.changed <- struct{}{}
	got := wait(t, "update", events)
	if got["method"] != "notifications/resources/updated" || got["params"].(map[string]any)["_meta"].(map[string]any)["io.modelcontextprotocol/subscriptionId"] != "sub-1" {
		t.Errorf("got %v, want the update with its subscription", got)
	}
	if s := e.h.Stats(); s.Streams != 1 {
		t.Errorf("stats %+v, want one stream", s)
	}
	_ = c.c.Close()
	until(t, "end of the stream", func() bool { return e.h.Stats().Streams == 0 && e.listeners("default") == 0 })
}

func TestWatchBounds(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	for i := range maxWatchedPerStream + 1 {
		r := *b.m.Resources[0]
		r.URI += "?" + string(rune('0'+i))
		b.m.Resources = append(b.m.Resources, &r)
	}
	r := *b.m.Resources[0]
	r.URI, r.Watchable = "mcp://still", false
	b.m.Resources = append(b.m.Resources, &r)
	e.load(b)
	cs := e.client("", legacyEra, nil)
	for i, r := range b.m.Resources[:maxWatchedPerStream+1] {
		err := cs.Subscribe(t.Context(), &sdk.SubscribeParams{URI: r.URI})
		if (err == nil) != (i < maxWatchedPerStream) {
			t.Fatalf("subscription %d: %v", i, err)
		}
	}
	e.h.mu.RLock()
	ten := e.h.tenants["default"]
	e.h.mu.RUnlock()
	held := func() int {
		ten.mu.Lock()
		defer ten.mu.Unlock()
		return len(ten.watchCounts)
	}
	if n := held(); n != maxWatchedPerStream {
		t.Errorf("%d resources are watched, want %d", n, maxWatchedPerStream)
	}
	ten.mu.Lock()
	for i := range maxWatchedPerTenant {
		ten.watchCounts[string(rune(0x4e00+i))] = 1
	}
	ten.mu.Unlock()
	other := e.client("", legacyEra, nil)
	if err := other.Subscribe(t.Context(), &sdk.SubscribeParams{URI: b.m.Resources[0].URI}); err != nil {
		t.Errorf("another watch of a watched resource: %v", err)
	}
	if err := other.Subscribe(t.Context(), &sdk.SubscribeParams{URI: b.m.Resources[maxWatchedPerStream].URI}); err == nil {
		t.Error("a tenant watches more than its share")
	}
	ten.mu.Lock()
	for i := range maxWatchedPerTenant {
		delete(ten.watchCounts, string(rune(0x4e00+i)))
	}
	ten.mu.Unlock()
	for _, uri := range []string{"mcp://still", "mcp://none", ""} {
		if err := cs.Subscribe(t.Context(), &sdk.SubscribeParams{URI: uri}); err == nil {
			t.Errorf("subscribed to %q", uri)
		}
	}
	// The end of the sessions gives everything back.
	_, _ = cs.Close(), other.Close()
	until(t, "release of all watches", func() bool { return held() == 0 })
}
