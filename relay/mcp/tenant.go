package mcp

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

const instructions = "A board's tools are the verbs of its capabilities: {kind}.{node_id}.{capability}.{verb}, with _ for . where names " +
	"are flat. The list holds the boards that are connected now; agents.list, where it is offered, tells which node_id has which name, and " +
	"which boards are offline. The other tools are the relay's own: tickets.*, and what its operator added. Units are in the names of " +
	"fields: _ms is milliseconds (ts_ms since 1970), _pct percent of 0 to 100, _bytes bytes; load_1m is the load average of one minute. " +
	"A call that fails has isError and {\"error\":{code,message,retryable,trace_id}}; E_NODE_OFFLINE passes when the board is back."

// tenant is what one tenant's clients talk to: an SDK server for sessions, one for
// modern calls and one for listen streams. They are apart because the SDK walks all
// sessions of a server when one of them ends, and modern calls end all the time.
type tenant struct {
	h    *Handler
	name string

	legacy, call, listen *sdk.Server
	mux                  *mux
	sub                  *kernel.Subscription
	stop                 func()
	quit                 chan struct{}

	busy      atomic.Int64 // requests in progress
	streaming atomic.Int64 // of them open streams
	used      atomic.Int64 // moment of the last request's end

	mu        sync.Mutex // protects the fields below
	sessions  map[*session]struct{}
	listeners map[*listener]struct{}
	watched   map[string]int    // watches by URI
	flat      map[string]string // names of plugin tools by their flat spelling; nil: unknown
	flatAge   uint64            // counts the changes of the list of tools
}

// listener is one open subscriptions/listen stream.
type listener struct {
	x    *exchange
	ss   *sdk.ServerSession
	want sdk.NotificationSubscriptions
	uris map[string]bool
}

// newTenant makes a tenant; run starts it.
func newTenant(h *Handler, name string) (*tenant, error) {
	sub, err := h.opt.Kernel.Subscribe(name)
	if err != nil {
		return nil, err
	}
	t := &tenant{
		h: h, name: name, sub: sub, mux: newMux(), quit: make(chan struct{}),
		sessions: make(map[*session]struct{}), listeners: make(map[*listener]struct{}),
		watched: make(map[string]int),
	}
	t.stop = sync.OnceFunc(func() { close(t.quit) })
	t.used.Store(moment(time.Now()))
	t.legacy, t.call, t.listen = t.server(), t.server(), t.server()
	return t, nil
}

// server makes an SDK server without a single feature: the middleware answers.
func (t *tenant) server() *sdk.Server {
	s := sdk.NewServer(t.h.impl, &sdk.ServerOptions{
		Instructions: instructions,
		Capabilities: &sdk.ServerCapabilities{
			Tools:       &sdk.ToolCapabilities{ListChanged: true},
			Resources:   &sdk.ResourceCapabilities{ListChanged: true, Subscribe: true},
			Prompts:     &sdk.PromptCapabilities{ListChanged: true},
			Completions: &sdk.CompletionCapabilities{},
			//lint:ignore SA1019 logging belongs to the versions with sessions
			Logging: &sdk.LoggingCapabilities{},
		},
		SetCacheable: func(_ context.Context, _ sdk.Request, c *sdk.Cacheable) {
			c.TTLMs, c.CacheScope = int(listTTL.Milliseconds()), "private"
		},
		// No Logger: the SDK logs results of handlers. No KeepAlive: it loses results of
		// stateless requests.
	})
	s.AddReceivingMiddleware(t.middleware)
	return s
}

// leave counts a request out.
func (t *tenant) leave() {
	t.used.Store(moment(time.Now()))
	t.busy.Add(-1)
}

// unused tells how long nobody has used the tenant; 0 while somebody does.
func (t *tenant) unused(now time.Time) time.Duration {
	if t.busy.Load() > 0 {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.sessions) > 0 || len(t.listeners) > 0 {
		return 0
	}
	return time.Duration(moment(now) - t.used.Load())
}

// run carries modern calls and change notifications until ctx ends or the tenant is
// dropped.
func (t *tenant) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer t.sub.Close()
	ss, err := t.call.Connect(ctx, t.mux, modernSession())
	if err != nil {
		t.h.log.Error("mcp connect", zap.Error(err))
		t.mux.end()
		return
	}
	defer func() { t.mux.end(); _ = ss.Wait() }()
	var (
		pending kernel.Change
		updated = make(map[string]bool)
		due     <-chan time.Time
		last    time.Time
	)
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.quit:
			return
		case <-t.sub.Ready():
			c := t.sub.Next()
			pending.Tools = pending.Tools || c.Tools
			pending.Resources = pending.Resources || c.Resources
			pending.Prompts = pending.Prompts || c.Prompts
			for _, u := range c.Updated {
				if len(updated) < kernel.MaxWatched {
					updated[u] = true
				}
			}
			if c.Missed { // more changed than the kernel keeps: all that is watched may have
				t.mu.Lock()
				for u := range t.watched {
					updated[u] = true
				}
				t.mu.Unlock()
			}
			if c.Tools {
				t.forgetNames()
			}
			// The first change goes out at once, what follows within the second together:
			// a debounce would never fire while devices come and go.
			if wait := notifyEvery - time.Since(last); wait > 0 {
				if due == nil {
					due = time.After(wait)
				}
				continue
			}
		case <-due:
		}
		due, last = nil, time.Now()
		t.notify(ctx, pending, updated)
		pending = kernel.Change{}
		clear(updated)
	}
}

// notify sends one round of notifications. Writers of streams do not block, so one
// stalled reader holds nobody up.
func (t *tenant) notify(ctx context.Context, c kernel.Change, updated map[string]bool) {
	t.mu.Lock()
	sessions := make([]*session, 0, len(t.sessions))
	for s := range t.sessions {
		if s.listening.Load() > 0 {
			sessions = append(sessions, s)
		}
	}
	listeners := make([]*listener, 0, len(t.listeners))
	for l := range t.listeners {
		listeners = append(listeners, l)
	}
	t.mu.Unlock()
	if len(sessions)+len(listeners) == 0 {
		return
	}
	t.h.count.notified.Add(1)
	ctx, cancel := context.WithTimeout(ctx, notifyWait)
	defer cancel()
	for _, s := range sessions {
		t.tell(ctx, s.ss, nil, c.Tools, c.Resources, c.Prompts)
		for u := range updated {
			if s.watching(u) {
				t.tellUpdated(ctx, s.ss, nil, u)
			}
		}
	}
	for _, l := range listeners {
		meta := func() sdk.Meta { return sdk.Meta{sdk.MetaKeySubscriptionID: rawJSON(l.x.id)} }
		t.tell(ctx, l.ss, meta, c.Tools && l.want.ToolsListChanged, c.Resources && l.want.ResourcesListChanged,
			c.Prompts && l.want.PromptsListChanged)
		for u := range updated {
			if l.uris[u] {
				t.tellUpdated(ctx, l.ss, meta, u)
			}
		}
	}
}

// tell sends list_changed notifications; each gets a meta of its own, since the SDK
// keeps what it is given. Failing to reach one client is that client's business.
func (t *tenant) tell(ctx context.Context, ss *sdk.ServerSession, meta func() sdk.Meta, tools, resources, prompts bool) {
	m := func() sdk.Meta {
		if meta == nil {
			return nil
		}
		return meta()
	}
	if tools {
		_, _ = t.h.send(ctx, "notifications/tools/list_changed",
			&sdk.ServerRequest[*sdk.ToolListChangedParams]{Session: ss, Params: &sdk.ToolListChangedParams{Meta: m()}})
	}
	if resources {
		_, _ = t.h.send(ctx, "notifications/resources/list_changed",
			&sdk.ServerRequest[*sdk.ResourceListChangedParams]{Session: ss, Params: &sdk.ResourceListChangedParams{Meta: m()}})
	}
	if prompts {
		_, _ = t.h.send(ctx, "notifications/prompts/list_changed",
			&sdk.ServerRequest[*sdk.PromptListChangedParams]{Session: ss, Params: &sdk.PromptListChangedParams{Meta: m()}})
	}
}

func (t *tenant) tellUpdated(ctx context.Context, ss *sdk.ServerSession, meta func() sdk.Meta, uri string) {
	p := &sdk.ResourceUpdatedNotificationParams{URI: uri}
	if meta != nil {
		p.Meta = meta()
	}
	_, _ = t.h.send(ctx, "notifications/resources/updated",
		&sdk.ServerRequest[*sdk.ResourceUpdatedNotificationParams]{Session: ss, Params: p})
}
