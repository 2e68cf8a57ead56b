// Package control is the kernel's control plane as a plugin: the tools kernel.* and the
// resources mcp://kernel/*, for holders of kernel:admin only.
//
//	p := control.New(control.Options{Kernel: k, Log: log, Middleware: manager, ...})
//	err := k.Load(p, false)
//
// It stands beside the data path. Its calls run in their callers' goroutines and take
// no queue, limit or lock that calls of other plugins hold for long, so it answers while
// those are saturated. Every change that it makes is appended to the event log before
// it is answered, with who made it and the trace id; configurations are logged as their
// digest, since they may hold what is to be kept secret.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Name is the plugin's.
const Name = "kernel"

// Resources of the control plane. All of them report changes, MetricsURI and PluginsURI
// at most once a second.
const (
	MiddlewareURI = "mcp://kernel/middleware.json" // the pipeline in force, its order and configuration
	TransportsURI = "mcp://kernel/transports.json" // adapters, listeners, sessions
	MetricsURI    = "mcp://kernel/metrics.json"    // queues, fan-out, calls by class
	PluginsURI    = "mcp://kernel/plugins.json"    // loaded plugins, their versions and states
)

// Types of the events that are appended; the payload is a Change.
const (
	EventMiddleware = "kernel.middleware"
	EventTransport  = "kernel.transport"
	EventPlugin     = "kernel.plugin"
	EventCounters   = "kernel.counters"
	EventLog        = "kernel.log"
)

// Stage is one line of the pipeline. (An alias of a plain struct, so that the room of
// the stages, which this one may not import, makes the same type.)
type Stage = struct {
	Name    string          `json:"name"`
	Scope   string          `json:"scope"`
	Enabled bool            `json:"enabled"`
	Config  json.RawMessage `json:"config"`
}

// Middleware switches the stages of the pipeline. A *manifest.Error of it is told to the
// caller as it is, any other error as text.
type Middleware interface {
	List() []Stage
	Enable(name, scope string) error
	Disable(name, scope string) error
	Configure(name, scope string, config []byte) error
	Reorder(names []string) error
}

// Transport is one way in.
type Transport struct {
	Name     string          `json:"name"`             // "http", "mcp", "link" ...
	Listen   string          `json:"listen,omitempty"` // where it listens, if it does
	Enabled  bool            `json:"enabled"`
	Sessions int             `json:"sessions"`       // open connections, sessions or streams
	Open     []Session       `json:"open,omitempty"` // the first of them by id, where they have one
	Config   json.RawMessage `json:"config"`         // what Configure may change, as an object
}

// Session is one that a stage can be switched for, with the scope connection=ID.
type Session struct {
	ID      string `json:"id"`
	Tenant  string `json:"tenant"`
	AgentID string `json:"agent_id"`
}

// Transports lists and changes the ways in. Configure takes an object with the members
// to change; what it refuses changes nothing. Errors are told as those of Middleware.
type Transports interface {
	List() []Transport
	Configure(name string, config json.RawMessage) error
}

// Plugins loads plugins from the plugin directory, by the name of their folder, and
// unloads them (NAME or NAME@VERSION). Errors are told as those of Middleware.
type Plugins interface {
	Load(ctx context.Context, name string) error
	Unload(ctx context.Context, name string) error
}

// Level is the level of the service log: debug, info, warn or error.
type Level interface {
	Level() string
	SetLevel(level string) error
}

// Options configure a Plugin. Kernel, Log and Middleware must be given.
type Options struct {
	Kernel     *kernel.Kernel
	Log        kernel.Log
	Middleware Middleware
	Transports Transports // nil: there are none to see
	Plugins    Plugins    // nil: none can be loaded
	// Metrics gives what the metrics stage counts, to be encoded as JSON; ResetMetrics
	// begins it anew. Both may be nil.
	Metrics      func() any
	ResetMetrics func()
	// Level is the service log's; nil: it cannot be changed.
	Level Level
	// Health lists what is wrong at the moment, a short sentence each; nil: nothing.
	Health func() []string
}

// Plugin is the control plane. Make one with New.
type Plugin struct {
	opt     Options
	started time.Time
	writing chan struct{} // holds one token: changes and their events are in one order
	loading chan struct{} // holds a token for each load and unload under way
}

// maxLoading bounds the loads and unloads under way.
const maxLoading = 4

// New makes the plugin.
func New(opt Options) *Plugin {
	return &Plugin{opt: opt, started: time.Now(), writing: make(chan struct{}, 1), loading: make(chan struct{}, maxLoading)}
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: Name, Version: "1.0.0", Inline: true}
	for i := range tools {
		m.Tools = append(m.Tools, tools[i].tool)
	}
	for _, r := range []struct{ uri, title, about string }{
		{MiddlewareURI, "Middleware", "The pipeline in force: stages in their order, scopes and configuration."},
		{TransportsURI, "Transports", "The ways into the relay: adapters, listeners, sessions."},
		{MetricsURI, "Metrics", "Queues, fan-out latency, dropped and coalesced changes, calls by class."},
		{PluginsURI, "Plugins", "The loaded plugins with versions, states and what they offer."},
	} {
		m.Resources = append(m.Resources, &kernel.Resource{URI: r.uri, Name: strings.TrimPrefix(r.uri, "mcp://kernel/"), Title: r.title, Description: r.about,
			MIME: "application/json", Scope: manifest.ScopeKernelAdmin, Watchable: true})
	}
	return m
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for i := range tools {
		if tools[i].tool.Name != r.Tool {
			continue
		}
		a := &args{}
		if err := json.Unmarshal(r.Arguments, a); err != nil { // Check let it through
			return nil, fmt.Errorf("%s: %w", r.Tool, err)
		}
		v, err := tools[i].run(ctx, p, r, a)
		if err != nil {
			return nil, told(err)
		}
		data, err := json.Marshal(v)
		return &kernel.Result{Structured: data}, err
	}
	return nil, manifest.E(manifest.BadRequest, "no tool has this name; tools/list shows the names")
}

// Read implements kernel.Reader.
func (p *Plugin) Read(_ context.Context, _ *kernel.Caller, uri string) ([]byte, error) {
	switch uri {
	case MiddlewareURI:
		return json.Marshal(p.middleware())
	case TransportsURI:
		return json.Marshal(p.transports())
	case MetricsURI:
		return json.Marshal(p.metrics())
	case PluginsURI:
		return json.Marshal(p.plugins("", maxRead))
	}
	return nil, kernel.ErrNoResource
}

// Watch implements kernel.Watcher. Changes of the pipeline and of transports are told
// by whoever makes them; the rest is looked at once a second while somebody watches.
func (p *Plugin) Watch(ctx context.Context, uri string, changed func()) error {
	var look func() string
	switch uri {
	case MetricsURI:
		look = p.activity
	case PluginsURI:
		look = p.states
	default:
		<-ctx.Done()
		return ctx.Err()
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := look()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if now := look(); now != last {
				last = now
				changed()
			}
		}
	}
}

// activity is what a change of the metrics is seen by. What telling about it moves
// itself is left out: it would go on for ever.
func (p *Plugin) activity() string {
	s := p.opt.Kernel.Stats()
	s.Pending, s.Changes, s.Delivered, s.Coalesced = 0, 0, 0, 0
	s.FanoutP50US, s.FanoutP95US, s.FanoutP99US = 0, 0, 0
	return fmt.Sprint(s)
}

// states is what a change of the plugins is seen by.
func (p *Plugin) states() string {
	var b strings.Builder
	for _, i := range p.opt.Kernel.Info().Plugins {
		fmt.Fprintf(&b, "%s@%s %s %d %d\n", i.Name, i.Version, i.State, i.Tools, i.Resources)
	}
	return b.String()
}

// MiddlewareChanged tells the watchers of the pipeline, for changes made elsewhere.
func (p *Plugin) MiddlewareChanged() { p.changed(MiddlewareURI) }

// TransportsChanged tells the watchers of the transports, for changes made elsewhere.
func (p *Plugin) TransportsChanged() { p.changed(TransportsURI) }

func (p *Plugin) changed(uri string) {
	p.opt.Kernel.NotifyChange("", kernel.Change{Updated: []string{uri}})
}

// told is the error that a caller sees. Administrators are told what went wrong.
func told(err error) error {
	var e *manifest.Error
	if errors.As(err, &e) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return err
	}
	text := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, err.Error())
	return &manifest.Error{Code: manifest.BadRequest, Message: text[:min(len(text), 500)], Reason: "control"}
}

// Change is the payload of an event of the control plane.
type Change struct {
	Action string   `json:"action"` // enable, disable, configure, reorder, load, unload, reset
	Name   string   `json:"name,omitempty"`
	Scope  string   `json:"scope,omitempty"`
	Digest string   `json:"config_sha256,omitempty"` // hex, of the configuration that was given
	Order  []string `json:"order,omitempty"`
	Actor  string   `json:"actor"`
	Trace  string   `json:"trace_id"`
}

// appendTime bounds the append of an event whose change is made already.
const appendTime = 2 * time.Second

// change makes a change and appends its event; both happen in one order for all
// callers. uri is what it changes.
func (p *Plugin) change(ctx context.Context, r *kernel.Request, typ, uri string, c Change, do func() error) error {
	select {
	case p.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.writing }()
	if err := do(); err != nil {
		return err
	}
	p.changed(uri)
	return p.record(ctx, r, typ, c)
}

func (p *Plugin) record(ctx context.Context, r *kernel.Request, typ string, c Change) error {
	c.Actor, c.Trace = r.Caller.Actor, r.TraceID
	payload, err := json.Marshal(c)
	if err != nil {
		return err
	}
	about := c.Name
	if about == "" {
		about = c.Action
	}
	// The caller may be gone by now; the change is not.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), appendTime)
	defer cancel()
	if _, err := p.opt.Log.Append(ctx, kernel.Event{Tenant: r.Caller.Tenant, Type: typ, Aggregate: about, Payload: payload}); err != nil {
		return &manifest.Error{Code: manifest.Internal, Message: "the change is made, but the event log did not keep it; see the relay's log", Reason: "log"}
	}
	return nil
}
