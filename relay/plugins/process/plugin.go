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

// Times of a plugin's life.
const (
	greetTimeout = 10 * time.Second // from its start to its lists
	downWait     = 2 * time.Second  // that a call waits for a plugin that is being restarted
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 30 * time.Second
	steady       = time.Minute // a life of this length forgets the failures before it
)

// Plugin is a plugin outside of this process. It implements kernel.Plugin, Reader and
// Watcher.
type Plugin struct {
	dial     func(ctx context.Context) (*lines, error)
	manifest *kernel.Manifest
	version  string // of the relay
	log      *zap.Logger

	mu       sync.Mutex // protects the fields below
	conn     *conn      // nil while it is down
	change   chan struct{}
	watches  map[string]map[*func()]struct{}
	failures int
	lastErr  string
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

func newPlugin(m *kernel.Manifest, dial func(context.Context) (*lines, error), version string, log *zap.Logger) *Plugin {
	return &Plugin{
		dial: dial, manifest: m, version: version, log: log.With(zap.String("plugin", m.Name)),
		change: make(chan struct{}), watches: make(map[string]map[*func()]struct{}),
	}
}

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest { return p.manifest }

// run keeps the plugin up until ctx ends, and calls up after the first good handshake.
// An error of up ends it.
func (p *Plugin) run(ctx context.Context, up func() error) error {
	failures := 0
	for first := true; ; {
		begin := time.Now()
		c, err := p.connect(ctx)
		if err == nil && first {
			if err := up(); err != nil {
				c.close()
				<-c.ended
				return err
			}
			first = false
		}
		if err == nil {
			p.log.Info("plugin is up", zap.String("mcp", c.version))
			p.set(c, nil)
			p.resubscribe(ctx, c)
			select {
			case <-c.ended:
				err = errors.New("its connection ended")
			case <-ctx.Done():
			}
			p.set(nil, err)
			c.close() // reaps its process
			<-c.ended
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if first {
			p.set(nil, err)
		}
		if time.Since(begin) >= steady {
			failures = 0
		}
		wait := min(firstBackoff<<min(failures, 12), maxBackoff)
		wait = wait/2 + rand.N(wait/2)
		failures++
		p.log.Warn("plugin is down", zap.Error(err), zap.Duration("next_try_in", wait))
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// connect starts the server, greets it and holds its lists against the manifest.
func (p *Plugin) connect(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	ch, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := newConn(ch, p.updated)
	if err = c.greet(ctx, p.version); err == nil {
		err = p.fits(ctx, c)
	}
	if err != nil {
		c.close()
		<-c.ended
		return nil, err
	}
	return c, nil
}

// resubscribe has a new server tell about what is watched. Whoever begins to watch from
// now on finds the connection and asks itself.
func (p *Plugin) resubscribe(ctx context.Context, c *conn) {
	p.mu.Lock()
	uris := slices.Sorted(maps.Keys(p.watches))
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	for _, uri := range uris {
		p.subscribe(ctx, c, uri)
		p.updated(uri) // it may have changed while nobody looked
	}
}

func (p *Plugin) subscribe(ctx context.Context, c *conn, uri string) {
	switch _, err := c.call(ctx, "resources/subscribe", map[string]any{"uri": uri}); {
	case err == nil:
		p.log.Debug("plugin took a subscription", zap.String("uri", uri))
	case ctx.Err() == nil:
		p.log.Warn("plugin takes no subscription", zap.String("uri", uri), zap.Error(err))
	}
}

// fits checks that the server has everything its manifest promises.
func (p *Plugin) fits(ctx context.Context, c *conn) error {
	if len(p.manifest.Tools) > 0 {
		served, err := c.names(ctx, "tools/list", "tools", "name")
		if err != nil {
			return err
		}
		for _, t := range p.manifest.Tools {
			if _, ok := served[t.Name]; !ok {
				return fmt.Errorf("plugin.json has the tool %s, tools/list of the server has not", t.Name)
			}
		}
	}
	if len(p.manifest.Resources) > 0 {
		served, err := c.names(ctx, "resources/list", "resources", "uri")
		if err != nil {
			return err
		}
		for _, r := range p.manifest.Resources {
			if _, ok := served[r.URI]; !ok {
				return fmt.Errorf("plugin.json has the resource %s, resources/list of the server has not", r.URI)
			}
		}
	}
	return nil
}

// set says how the plugin is now, to whoever waits for a change.
func (p *Plugin) set(c *conn, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn = c
	if err != nil {
		p.lastErr = graphic(err.Error()) // perhaps the plugin's own words
		p.failures++
	}
	close(p.change)
	p.change = make(chan struct{})
}

// current is the connection, waited for a while when there is none.
func (p *Plugin) current(ctx context.Context) (*conn, error) {
	timer := time.NewTimer(downWait)
	defer timer.Stop()
	for {
		p.mu.Lock()
		c, change := p.conn, p.change
		p.mu.Unlock()
		if c != nil {
			return c, nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-timer.C:
			return nil, &manifest.Error{Code: manifest.Internal, Message: "the plugin is down and is being restarted", Reason: "plugin_down", RetryAfterMS: 1000}
		}
	}
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	c, err := p.current(ctx)
	if err != nil {
		return nil, err
	}
	token, done := c.follow(ctx, r.Session)
	defer done()
	meta := map[string]any{
		"traceparent":     "00-" + r.TraceID + "-" + manifest.NewTraceID()[:16] + "-01",
		"agentctl/caller": map[string]string{"agent_id": r.Caller.Actor, "tenant": r.Caller.Tenant},
	}
	if token != 0 {
		meta["progressToken"] = token
	}
	raw, err := c.call(ctx, "tools/call", map[string]any{"name": r.Target().Name, "arguments": r.Arguments, "_meta": meta})
	if err != nil {
		return failed(ctx, c, err)
	}
	var res struct {
		Content    []json.RawMessage `json:"content"`
		Structured json.RawMessage   `json:"structuredContent"`
		IsError    bool              `json:"isError"`
		Meta       json.RawMessage   `json:"_meta"`
	}
	if err := json.Unmarshal(raw, &res); err != nil {
		return nil, &manifest.Error{Code: manifest.Internal, Message: "the plugin's answer is no tool result", Reason: manifest.ReasonBadResult}
	}
	return &kernel.Result{Content: res.Content, Structured: res.Structured, IsError: res.IsError, Meta: res.Meta}, nil
}

// failed sorts a call's error: the caller's time, the plugin's death, its own fault.
func failed(ctx context.Context, c *conn, err error) (*kernel.Result, error) {
	var fault *jrpc2.Error
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case c.rpc.IsStopped():
		return nil, &manifest.Error{Code: manifest.Internal, Message: "the plugin ended before it answered; whether it acted is not known", Reason: "plugin_died"}
	case errors.As(err, &fault) && fault.Code != jrpc2.InternalError:
		return &kernel.Result{RPCError: &kernel.RPCError{Code: int64(fault.Code), Message: fault.Message, Data: fault.Data}}, nil
	}
	return nil, &manifest.Error{Code: manifest.Internal, Message: "the plugin failed to answer this call", Reason: "plugin_error"}
}

// Read implements kernel.Reader.
func (p *Plugin) Read(ctx context.Context, _ *kernel.Caller, uri string) ([]byte, error) {
	c, err := p.current(ctx)
	if err != nil {
		return nil, err
	}
	raw, err := c.call(ctx, "resources/read", map[string]any{"uri": uri})
	if err != nil {
		_, err = failed(ctx, c, err)
		if err == nil {
			err = &manifest.Error{Code: manifest.Internal, Message: "the plugin does not give this resource", Reason: "plugin_error"}
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
		return nil, &manifest.Error{Code: manifest.Internal, Message: "the plugin's answer is not the content of this resource", Reason: manifest.ReasonBadResult}
	}
	if t := res.Contents[0].Text; t != nil {
		return []byte(*t), nil
	}
	return res.Contents[0].Blob, nil
}

// Watch implements kernel.Watcher; it lasts over restarts of the plugin.
func (p *Plugin) Watch(ctx context.Context, uri string, changed func()) error {
	key := &changed
	p.mu.Lock()
	set := p.watches[uri]
	if set == nil {
		set = make(map[*func()]struct{})
		p.watches[uri] = set
	}
	set[key] = struct{}{}
	first, c := len(set) == 1, p.conn
	p.mu.Unlock()
	if first && c != nil {
		p.subscribe(ctx, c, uri)
	}
	<-ctx.Done()
	p.mu.Lock()
	delete(set, key)
	last := len(set) == 0
	if last {
		delete(p.watches, uri)
	}
	c = p.conn
	p.mu.Unlock()
	if last && c != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = c.call(ctx, "resources/unsubscribe", map[string]any{"uri": uri})
	}
	return ctx.Err()
}

// updated tells the watchers of uri.
func (p *Plugin) updated(uri string) {
	p.mu.Lock()
	var fns []func()
	for fn := range p.watches[uri] {
		fns = append(fns, *fn)
	}
	p.mu.Unlock()
	for _, fn := range fns {
		fn()
	}
}

// State is how a plugin is.
type State struct {
	Name      string `json:"name"`
	Version   string `json:"version"`
	State     string `json:"state"`    // up, down
	Failures  int    `json:"failures"` // how often it ended or did not come up
	LastError string `json:"last_error,omitempty"`
}

func (p *Plugin) state() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{Name: p.manifest.Name, Version: p.manifest.Version, State: "up", Failures: p.failures, LastError: p.lastErr}
	if p.conn == nil {
		s.State = "down"
	}
	return s
}
