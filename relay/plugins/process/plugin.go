package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Supervision of a plugin: run connects, offers the plugin to the kernel after the first
// success, and connects again with back-off when the connection ends. The states are
//
//	starting    not offered yet: Load waits for the first connection, or fails
//	up          conn is set: calls go to it
//	down        conn is nil: calls wait up to maxRestartWait for the next connection
//
// A call in flight when the connection ends fails. It is not sent again, since the plugin may
// have acted on it.
const (
	initializeTimeout = 10 * time.Second // from the start to the checked lists
	maxRestartWait    = 2 * time.Second  // of a call, for a plugin that is down
	minBackoff        = 100 * time.Millisecond
	maxBackoff        = 30 * time.Second
	stableAfter       = time.Minute // a connection of this length resets the back-off
)

// Plugin is a plugin in another process. It implements kernel.Plugin, Reader and Watcher.
type Plugin struct {
	dial     func(ctx context.Context) (*lineChannel, error)
	manifest *kernel.Manifest
	version  string // of the relay
	log      *zap.Logger

	mu       sync.Mutex    // protects the fields below
	conn     *conn         // nil while the plugin is down
	changed  chan struct{} // closed and replaced when conn or lastErr changes
	watches  map[string]map[*func()]struct{}
	failures int
	lastErr  string
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// newPlugin makes a plugin that connects with dial. Nothing starts before run.
func newPlugin(m *kernel.Manifest, dial func(context.Context) (*lineChannel, error), version string, log *zap.Logger) *Plugin {
	return &Plugin{
		dial: dial, manifest: m, version: version, log: log.With(zap.String("plugin", m.Name)),
		changed: make(chan struct{}), watches: make(map[string]map[*func()]struct{}),
	}
}

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest { return p.manifest }

// run keeps the plugin running until ctx ends. It calls onUp after the first successful
// handshake; an error of onUp ends it.
//
// Before each further attempt run waits half to all of the back-off, at random, so that
// plugins that failed together do not all restart together.
func (p *Plugin) run(ctx context.Context, onUp func() error) error {
	attempts, isUp := 0, false
	for {
		start := time.Now()
		c, err := p.connect(ctx)
		if err == nil && !isUp {
			if err := onUp(); err != nil {
				c.close()
				return err
			}
			isUp = true
		}
		if err == nil {
			err = p.serve(ctx, c)
		} else if !isUp && ctx.Err() == nil {
			p.setState(nil, err) // Load waits for it
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(start) >= stableAfter {
			attempts = 0
		}
		// The shift is bounded against overflow: minBackoff<<12 is above maxBackoff already.
		wait := min(minBackoff<<min(attempts, 12), maxBackoff)
		wait = wait/2 + rand.N(wait/2)
		attempts++
		p.log.Warn("plugin is down", zap.Error(err), zap.Duration("next_try_in", wait))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// serve makes calls go to a connection until it or ctx ends. It returns why.
func (p *Plugin) serve(ctx context.Context, c *conn) (err error) {
	p.log.Info("plugin is up", zap.String("mcp", c.version))
	p.setState(c, nil)
	p.resubscribe(ctx, c)
	select {
	case <-c.ended:
		err = errors.New("its connection ended")
	case <-ctx.Done():
	}
	// In this order, so that no new call chooses a connection that is being closed.
	p.setState(nil, err)
	c.close()
	return err
}

// connect starts the server, initializes it and compares its lists with the manifest, all
// within initializeTimeout. A process that it started outlives that context; the caller
// closes the connection.
func (p *Plugin) connect(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	ch, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := newConn(ch, p.notifyWatchers)
	if err = c.initialize(ctx, p.version); err == nil {
		err = p.checkServed(ctx, c)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// resubscribe subscribes to the watched resources at a new server. A Watch that begins from
// now on finds the connection and subscribes itself.
func (p *Plugin) resubscribe(ctx context.Context, c *conn) {
	p.mu.Lock()
	uris := slices.Sorted(maps.Keys(p.watches))
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	for _, uri := range uris {
		p.subscribe(ctx, c, uri)
		p.notifyWatchers(uri) // it may have changed while the plugin was down
	}
}

// subscribe asks the server to report changes of a resource. A refusal is only logged: the
// watch goes on, and the next server may accept it.
func (p *Plugin) subscribe(ctx context.Context, c *conn, uri string) {
	switch _, err := c.call(ctx, "resources/subscribe", map[string]any{"uri": uri}); {
	case err == nil:
		p.log.Debug("plugin accepted a subscription", zap.String("uri", uri))
	case ctx.Err() == nil:
		p.log.Warn("plugin refused a subscription", zap.String("uri", uri), zap.Error(err))
	}
}

// checkServed checks that the server has everything that the manifest declares. Anything more
// that the server lists is ignored. A list is not requested when the manifest declares
// nothing of its kind, since the server may not support the method.
func (p *Plugin) checkServed(ctx context.Context, c *conn) error {
	var tools, uris []string
	for _, t := range p.manifest.Tools {
		tools = append(tools, t.Name)
	}
	for _, r := range p.manifest.Resources {
		uris = append(uris, r.URI)
	}
	for _, l := range []struct {
		noun, method, list, key string
		declared                []string
	}{{"tool", "tools/list", "tools", "name", tools}, {"resource", "resources/list", "resources", "uri", uris}} {
		if len(l.declared) == 0 {
			continue
		}
		served, err := c.listNames(ctx, l.method, l.list, l.key)
		if err != nil {
			return err
		}
		for _, name := range l.declared {
			if _, ok := served[name]; !ok {
				return fmt.Errorf("plugin.json has the %s %s, %s of the server has not", l.noun, name, l.method)
			}
		}
	}
	return nil
}

// setState stores the connection, or why there is none, and wakes Load and waitConn. A nil
// error, as at a stop by Unload, keeps the last one and counts no failure.
func (p *Plugin) setState(c *conn, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn = c
	if err != nil {
		p.lastErr = printable(err.Error()) // it may quote the plugin
		p.failures++
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// waitConn returns the connection. While there is none it waits up to maxRestartWait,
// which is below kernel.CallBudget, so that the call still has time to run.
func (p *Plugin) waitConn(ctx context.Context) (*conn, error) {
	timer := time.NewTimer(maxRestartWait)
	defer timer.Stop()
	for {
		p.mu.Lock()
		c, changed := p.conn, p.changed
		p.mu.Unlock()
		if c != nil {
			return c, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-timer.C:
			err := internal("plugin_down", "the plugin is down and is being restarted")
			err.RetryAfterMS, err.Outcome = 1000, manifest.NotSent
			return nil, err
		}
	}
}

// internal is an error that is the plugin's fault: the kernel counts it, and
// repeated ones open its breaker.
func internal(reason, message string) *manifest.Error {
	return &manifest.Error{Code: manifest.Internal, Message: message, Reason: reason}
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	c, err := p.waitConn(ctx)
	if err != nil {
		return nil, err
	}
	token, done := c.followProgress(ctx, r.Session)
	defer done()
	// traceparent is a header of W3C Trace Context, version 00: the caller's trace id and a new
	// span id. The plugin learns who calls, but never gets the caller's token.
	meta := map[string]any{
		"traceparent":     "00-" + r.TraceID + "-" + manifest.NewTraceID()[:16] + "-01",
		"agentctl/caller": map[string]string{"agent_id": r.Caller.Actor, "tenant": r.Caller.Tenant},
	}
	if token != 0 {
		meta["progressToken"] = token
	}
	raw, err := c.call(ctx, "tools/call", map[string]any{"name": r.Target().Name, "arguments": r.Arguments, "_meta": meta})
	if err != nil {
		return callError(ctx, c, err)
	}
	var res struct {
		Content    []json.RawMessage `json:"content"`
		Structured json.RawMessage   `json:"structuredContent"`
		IsError    bool              `json:"isError"`
		Meta       json.RawMessage   `json:"_meta"`
	}
	if err := json.Unmarshal(raw, &res); err != nil {
		return nil, internal(manifest.ReasonBadResult, "the plugin's answer is not a tool result")
	}
	return &kernel.Result{Content: res.Content, Structured: res.Structured, IsError: res.IsError, Meta: res.Meta}, nil
}

// callError converts the error of a call: the caller's deadline, the end of the plugin, a
// JSON-RPC error that the plugin answered with, or an internal error.
//
// A JSON-RPC error other than an internal one is the plugin's answer. It becomes a result,
// so that the kernel counts no fault and its breaker stays closed.
func callError(ctx context.Context, c *conn, err error) (*kernel.Result, error) {
	var rpc *jrpc2.Error
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case c.rpc.IsStopped():
		err := internal("plugin_died", "the plugin ended before it answered; whether it acted is not known")
		err.Outcome = manifest.OutcomeUnknown
		return nil, err
	case errors.As(err, &rpc) && rpc.Code != jrpc2.InternalError:
		return &kernel.Result{RPCError: &kernel.RPCError{Code: int64(rpc.Code), Message: rpc.Message, Data: rpc.Data}}, nil
	}
	return nil, internal("plugin_error", "the plugin failed to answer this call")
}

// Read implements kernel.Reader. The plugin must answer with one content, under the URI that
// was asked for; a JSON-RPC error is a fault here, since a Reader has no other form for it.
func (p *Plugin) Read(ctx context.Context, _ *kernel.Caller, uri string) ([]byte, error) {
	c, err := p.waitConn(ctx)
	if err != nil {
		return nil, err
	}
	raw, err := c.call(ctx, "resources/read", map[string]any{"uri": uri})
	if err != nil {
		if _, err = callError(ctx, c, err); err == nil { // a JSON-RPC error
			err = internal("plugin_error", "the plugin refused to read this resource")
		}
		return nil, err
	}
	var res struct {
		Contents []struct {
			URI  string  `json:"uri"`
			Text *string `json:"text"`
			Blob []byte  `json:"blob"`
		} `json:"contents"`
	}
	if err := json.Unmarshal(raw, &res); err != nil || len(res.Contents) != 1 || res.Contents[0].URI != uri {
		return nil, internal(manifest.ReasonBadResult, "the plugin's answer is not the content of this resource")
	}
	if t := res.Contents[0].Text; t != nil {
		return []byte(*t), nil
	}
	return res.Contents[0].Blob, nil
}

// Watch implements kernel.Watcher. A watch outlasts restarts of the plugin. The first one
// of a URI subscribes at the server, the last one unsubscribes.
func (p *Plugin) Watch(ctx context.Context, uri string, changed func()) error {
	// Functions cannot be compared, so the pointer identifies this watch.
	key := &changed
	p.mu.Lock()
	watchers := p.watches[uri]
	if watchers == nil {
		watchers = make(map[*func()]struct{})
		p.watches[uri] = watchers
	}
	watchers[key] = struct{}{}
	isFirst, c := len(watchers) == 1, p.conn
	p.mu.Unlock()
	if isFirst && c != nil {
		p.subscribe(ctx, c, uri)
	}
	<-ctx.Done()
	p.mu.Lock()
	delete(watchers, key)
	isLast := len(watchers) == 0
	if isLast {
		delete(p.watches, uri)
	}
	c = p.conn
	p.mu.Unlock()
	if isLast && c != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = c.call(ctx, "resources/unsubscribe", map[string]any{"uri": uri})
	}
	return ctx.Err()
}

// notifyWatchers calls the watchers of uri. They run without the lock, since the kernel may
// start or end a watch meanwhile; one that has just ended may be called once more.
func (p *Plugin) notifyWatchers(uri string) {
	p.mu.Lock()
	watchers := slices.Collect(maps.Keys(p.watches[uri]))
	p.mu.Unlock()
	for _, changed := range watchers {
		(*changed)()
	}
}

// State is the state of a plugin as operators see it.
type State struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"` // up, down
	// Failures counts how often the plugin ended or did not start.
	Failures  int    `json:"failures"`
	LastError string `json:"last_error,omitempty"`
	Sandbox   string `json:"sandbox"` // SandboxLandlock and the like
}

// state returns a copy of the current state.
func (p *Plugin) state() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{Name: p.manifest.Name, Version: p.manifest.Version, State: "up", Failures: p.failures, LastError: p.lastErr, Sandbox: p.manifest.Sandbox}
	if p.conn == nil {
		s.State = "down"
	}
	return s
}
