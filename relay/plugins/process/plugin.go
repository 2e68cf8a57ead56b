package process

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Plugin is one version of a plugin in another process: its manifest, how it is reached, and its
// present connection. A reload makes another Plugin for the new version. It implements
// kernel.Plugin, Reader and Watcher.
//
//	loadedPlugin  the plugin as the Host has it, from Load to Unload: what outlasts versions (watches)
//	Plugin        a version: what outlasts restarts (manifest, digest, failures)
//	conn          a connection: what ends with the program
type Plugin struct {
	source
	relayVersion string // for initialize
	log          *zap.Logger
	watches      *watchSet // shared by all versions
	// onDown is called after each end of a plugin that was offered, and each failed restart. nil: not.
	onDown  func(plugin, reason string)
	active  atomic.Int64 // requests of the kernel in flight
	retired atomic.Bool  // it was replaced or unloaded: it is not started again

	// The kernel calls Health, which takes mu, with Kernel.mu held. So mu is not held while the kernel is
	// called.
	mu       sync.Mutex    // protects the fields below
	conn     *conn         // nil while the plugin is down
	changed  chan struct{} // closed and replaced when conn or lastErr changes
	failures int
	lastErr  string
	offer    offer             // what of the manifest the server has
	links    []kernel.Resource // that the server linked to, at most maxLinks
	retryAt  time.Time         // when it is started again; zero: at once
	lostAt   time.Time         // when the last connection ended
}

// source is what the folder of a plugin says. It is read only.
type source struct {
	manifest *kernel.Manifest
	declared *PluginManifest // what manifest was made from
	digest   string          // of plugin.json, see Digest
	program  string          // the fileID of each file that is started; "" for none
	temp     string          // its folder for temporary files, one of tempFolders
	socket   string          // the path of the socket of a server that the relay does not start
	dial     func(ctx context.Context) (*lineChannel, error)
	// tools and templates are those of declared in the form that calls need.
	tools     map[string]serverTool
	templates []template
	kernel    *kernel.Kernel
	events    kernel.Log // nil: none
	bus       *Bus       // nil: there is none
}

var (
	_ kernel.Plugin           = (*Plugin)(nil)
	_ kernel.Reader           = (*Plugin)(nil)
	_ kernel.Watcher          = (*Plugin)(nil)
	_ kernel.TemplateResolver = (*Plugin)(nil)
	_ kernel.MethodHandler    = (*Plugin)(nil)
	_ kernel.HealthReporter   = (*Plugin)(nil)
	_ kernel.Declarer         = (*Plugin)(nil)
)

// newPlugin makes a version of a plugin. Nothing starts before run.
func newPlugin(s source, watches *watchSet, relayVersion string, log *zap.Logger) *Plugin {
	return &Plugin{source: s, relayVersion: relayVersion, log: log.With(zap.String("plugin", s.manifest.Name)), watches: watches, changed: make(chan struct{})}
}

// Manifest implements kernel.Plugin: what is offered at present.
func (p *Plugin) Manifest() *kernel.Manifest {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer.manifest != nil {
		return p.offer.manifest
	}
	return p.manifest
}

// Declaration implements kernel.Declarer: the PluginManifest and the digest of its file.
func (p *Plugin) Declaration() (document any, digest string) { return p.declared, p.digest }

// setUp makes calls go to a connection.
func (p *Plugin) setUp(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn = c
	p.notifyLocked()
}

// clearConn makes calls wait for another connection. It counts no failure: run calls setDown for that,
// but not when the plugin is stopped.
func (p *Plugin) clearConn() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn = nil
	p.retryAt, p.lostAt = time.Time{}, time.Now()
	p.notifyLocked()
}

// setDown stores why the plugin is down, and when it is started again.
func (p *Plugin) setDown(err error, retryAt time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastErr = printable(err.Error()) // it may quote the plugin
	p.failures++
	p.retryAt = retryAt
	p.notifyLocked()
}

// retire makes calls that wait for a restart go to the version that the kernel has by now.
func (p *Plugin) retire() {
	p.retired.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.notifyLocked()
}

// notifyLocked wakes the calls that wait. mu is held.
func (p *Plugin) notifyLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// waitConn returns the connection. While there is none it waits up to maxRestartWait,
// which is below kernel.CallBudget, so that the call still has time to run. It does not wait for a
// restart that is later than that, unless a server of somebody else has just gone: its
// successor is connected when its socket is there.
//
// The error is no fault: the end of the connection was one, and the restarts have a back-off of
// their own.
func (p *Plugin) waitConn(ctx context.Context) (*conn, error) {
	timer := time.NewTimer(maxRestartWait)
	defer timer.Stop()
	for isLate := false; ; {
		p.mu.Lock()
		c, changed, in := p.conn, p.changed, time.Until(p.retryAt)
		if p.socket != "" && time.Since(p.lostAt) < maxRestartWait {
			in = 0 // a new socket may be there at any moment
		}
		p.mu.Unlock()
		if c != nil && !c.isLost() {
			return c, nil
		}
		if p.retired.Load() {
			return nil, kernel.ErrReplaced
		}
		if isLate || in > maxRestartWait {
			err := internal("plugin_down", "the plugin is down and is being restarted; `agentctl plugin ls` shows why")
			err.RetryAfterMS, err.Outcome = max(in.Milliseconds(), 1000), manifest.NotSent
			return nil, kernel.SharedFault(err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-timer.C:
			isLate = true
		}
	}
}

// withConn runs f with the connection, and with the next one if nothing of its request was sent, until ctx
// or maxRestartWait (waitConn) ends. It counts the request in active: a reload waits for it before it stops
// the program.
func withConn[T any](ctx context.Context, p *Plugin, f func(c *conn) (T, error)) (T, error) {
	p.active.Add(1)
	defer p.active.Add(-1)
	for {
		c, err := p.waitConn(ctx)
		if err != nil {
			var none T
			return none, err
		}
		v, err := f(c)
		var notSent notSentError
		if !errors.As(err, &notSent) {
			return v, err
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
	return withConn(ctx, p, func(c *conn) (*kernel.Result, error) { return p.callOn(ctx, c, r) })
}

// callOn is Call with a connection.
func (p *Plugin) callOn(ctx context.Context, c *conn, r *kernel.Request) (*kernel.Result, error) {
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
	callToken, end := c.bus.begin(ctx, r.Caller, r.TraceID)
	defer end()
	if callToken != "" {
		meta[busCallKey] = callToken
	}
	raw, err := c.call(ctx, "tools/call", map[string]any{"name": p.serverName(r.Target().Name), "arguments": r.Arguments, "_meta": meta})
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
	p.publishLinks(res.Content)
	return &kernel.Result{Content: res.Content, Structured: res.Structured, IsError: res.IsError, Meta: res.Meta}, nil
}

// callError converts the error of a call: the caller's deadline, the end of the plugin, a
// JSON-RPC error that the plugin answered with, or an internal error. A notSentError stays as it is.
//
// A JSON-RPC error other than an internal one is the plugin's answer. It becomes a result,
// so that the kernel counts no fault and its breaker stays closed.
func callError(ctx context.Context, c *conn, err error) (*kernel.Result, error) {
	var rpc *jrpc2.Error
	var notSent notSentError
	switch {
	// First, since jrpc2 returns another error when the context ends, and the caller's deadline is no
	// fault of the plugin.
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.As(err, &notSent):
		return nil, err
	case c.isLost():
		err := internal("plugin_died", "the plugin ended before it answered; whether it acted is not known")
		err.Outcome = manifest.OutcomeUnknown
		if c.endReported.Swap(true) {
			return nil, kernel.SharedFault(err)
		}
		return nil, err
	case errors.As(err, &rpc) && rpc.Code != jrpc2.InternalError:
		return &kernel.Result{RPCError: &kernel.RPCError{Code: int64(rpc.Code), Message: rpc.Message, Data: rpc.Data}}, nil
	}
	return nil, internal("plugin_error", "the plugin failed to answer this call")
}

// Read implements kernel.Reader. The plugin must answer with one content. A JSON-RPC error is a fault here,
// since a Reader has no other form for it.
func (p *Plugin) Read(ctx context.Context, caller *kernel.Caller, uri string) ([]byte, error) {
	return withConn(ctx, p, func(c *conn) ([]byte, error) { return p.readOn(ctx, c, caller, uri) })
}

// readOn is Read with a connection.
func (p *Plugin) readOn(ctx context.Context, c *conn, caller *kernel.Caller, uri string) ([]byte, error) {
	params := map[string]any{"uri": serverURI(p.manifest.Name, uri)}
	callToken, end := c.bus.begin(ctx, caller, "")
	defer end()
	if callToken != "" {
		params["_meta"] = map[string]any{busCallKey: callToken}
	}
	raw, err := c.call(ctx, "resources/read", params)
	if err != nil {
		if _, err = callError(ctx, c, err); err == nil { // a JSON-RPC error
			err = internal("plugin_error", "the plugin refused to read this resource")
		}
		return nil, err
	}
	var res struct {
		Contents []struct {
			Text *string `json:"text"`
			Blob []byte  `json:"blob"`
		} `json:"contents"`
	}
	// MCP allows several contents for a URI, such as the files of a folder; the kernel has one document.
	if err := json.Unmarshal(raw, &res); err != nil || len(res.Contents) != 1 {
		return nil, internal(manifest.ReasonBadResult, "the plugin's answer is not the content of this resource")
	}
	if t := res.Contents[0].Text; t != nil {
		return []byte(*t), nil
	}
	return res.Contents[0].Blob, nil
}

// Watch implements kernel.Watcher. A watch outlasts restarts of the plugin and new versions of it.
func (p *Plugin) Watch(ctx context.Context, uri string, changed func()) error {
	return p.watches.watch(ctx, uri, changed)
}

// isWatchable reports whether this version has a resource of that URI that reports changes.
func (p *Plugin) isWatchable(uri string) bool {
	for _, r := range p.Manifest().Resources {
		if r.URI == uri {
			return r.Watchable
		}
	}
	r := p.ResolveURI(uri)
	return r != nil && r.Watchable
}

// State is the state of a plugin as operators see it.
type State struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"` // up, down; up: there is a connection, whatever the server answers
	// Failures counts how often the plugin ended or did not start.
	Failures  int    `json:"failures"`
	LastError string `json:"last_error,omitempty"`
	Sandbox   string `json:"sandbox"` // SandboxLandlock and the like
	// Notes say what of the manifest is not offered, and why.
	Notes []string `json:"notes,omitempty"`
}

// Health implements kernel.HealthReporter.
func (p *Plugin) Health() kernel.Health {
	s := p.state()
	return kernel.Health{Down: s.State == "down", Failures: s.Failures, LastError: s.LastError, Notes: s.Notes}
}

// state returns a copy of the current state.
func (p *Plugin) state() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{Name: p.manifest.Name, Version: p.manifest.Version, State: "up", Failures: p.failures, LastError: p.lastErr, Sandbox: p.manifest.Sandbox, Notes: p.offer.notes}
	if p.conn == nil {
		s.State = "down"
	}
	return s
}
