// Package control is the kernel's control plane as a plugin: the tools kernel.* and the
// resources mcp://kernel/*, for callers with the scope kernel:admin.
//
//	p := control.New(control.Options{Kernel: k, Log: log, Middleware: manager, ...})
//	err := k.Load(p, false)
//
// It is outside of the data path. Its calls run in their callers' goroutines and take no
// queue, limit or lock that calls of other plugins hold for long, so that it answers while
// those are saturated.
//
// A change is made in this order: record in the audit log that it begins, acquire the change slot,
// apply the change, notify the subscribers of its resource, append an event with the actor and the
// trace id, release the slot, answer. So the event log has the order of the changes. Configurations
// are logged as their digest, since they may hold secrets.
//
//	control.go  Plugin, its resources, and how a change is made (Plugin.change)
//	tools.go    the tools, one row each
//	args.go     their arguments
//	plugins.go  the list of plugins with their manifests
//	consent.go  what plugins may use of the relay
package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Name is the name of the plugin.
const Name = "kernel"

// Resources of the control plane. All of them report changes; MetricsURI and PluginsURI at
// most once a second.
const (
	MiddlewareURI = "mcp://kernel/middleware.json" // the pipeline in force, its order and configuration
	TransportsURI = "mcp://kernel/transports.json" // adapters, listeners, sessions
	MetricsURI    = "mcp://kernel/metrics.json"    // queues, fan-out, calls by class
	PluginsURI    = "mcp://kernel/plugins.json"    // loaded plugins, their versions, states and manifests
)

// Types of the events that are appended; the payload is a Change.
const (
	EventMiddleware = "kernel.middleware"
	EventTransport  = "kernel.transport"
	EventPlugin     = "kernel.plugin"
	EventCounters   = "kernel.counters"
	EventLog        = "kernel.log"
)

// Stage is one entry of the pipeline. It is an alias of a plain struct, so that package
// stages, which this package does not import, has the same type.
type Stage = struct {
	Name    string          `json:"name"`
	Scope   string          `json:"scope"`
	Enabled bool            `json:"enabled"`
	Config  json.RawMessage `json:"config"`
}

// Middleware switches the stages of the pipeline. The caller gets a *manifest.Error of it
// unchanged, and the text of any other error. A method that returns an error must have changed
// nothing: no event is appended for it. Calls that change something come one at a time.
type Middleware interface {
	List() []Stage
	Enable(name, scope string) error
	Disable(name, scope string) error
	Configure(name, scope string, config []byte) error
	Reorder(names []string) error
}

// Transport is one way into the relay.
type Transport struct {
	Name    string `json:"name"`              // "http", "mcp", "link" ...
	Adapter string `json:"adapter,omitempty"` // how it is spoken: "http", "websocket", "sse", "unix", "stdio"
	Listen  string `json:"listen,omitempty"`  // the address or path, if it has one
	Enabled bool   `json:"enabled"`
	// Sessions counts open connections, sessions or streams. Open lists the first of them
	// by id, where they have one.
	Sessions int       `json:"sessions"`
	Open     []Session `json:"open,omitempty"`
	// Config is an object with the members that Configure may change; empty: none.
	Config json.RawMessage `json:"config"`
}

// Session is an open session; stages can be switched for it with the scope connection=ID.
type Session struct {
	ID      string `json:"id"`
	Tenant  string `json:"tenant"`
	AgentID string `json:"agent_id"`
}

// Transports lists and configures the ways into the relay. Configure takes an object with
// the members to change; a refused one changes nothing. Errors are as for Middleware.
type Transports interface {
	List() []Transport
	Configure(name string, config json.RawMessage) error
}

// Plugins loads plugins from the plugin directory, by the name of their folder, replaces them by
// what their folder has now, and unloads them (NAME or NAME@VERSION). Errors are as for Middleware. Up
// to maxLoading calls run at the same time, each under the context of its caller.
type Plugins interface {
	Load(ctx context.Context, name string) error
	Reload(ctx context.Context, name string) error
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
	Transports Transports // nil: none are listed
	Plugins    Plugins    // nil: none can be loaded
	Consents   Consents   // nil: no plugin can be allowed anything
	// Metrics returns the figures of the metrics stage, to be encoded as JSON;
	// ResetMetrics sets them to zero. Both may be nil.
	Metrics      func() any
	ResetMetrics func()
	// TransportFigures returns the figures of the transports, to be encoded as JSON. nil: none.
	TransportFigures func() any
	// Level is the service log's; nil: it cannot be changed.
	Level Level
	// BeginChange records that a request is about to change target, and returns once the record
	// is on the disk. After an error nothing is changed, and the caller gets the error. nil:
	// changes are not recorded before they are made.
	BeginChange func(ctx context.Context, r *kernel.Request, target string) error
	// Health lists the current problems, a short sentence each; nil: none.
	Health func() []string
}

// Plugin is the control plane. Make one with New. It owns no goroutine and no state of its
// parts: the answers are read from Options at each call.
type Plugin struct {
	opt     Options
	started time.Time
	// The slots are channels, since a caller that waits for a mutex could not give up when its context ends.
	changeSlot chan struct{} // capacity 1: held while a change is made
	loadSlots  chan struct{} // capacity maxLoading: held by loads and unloads in progress
}

// maxLoading bounds the loads and unloads in progress: each holds its call while a
// plugin starts or stops.
const maxLoading = 4

// New makes the plugin.
func New(opt Options) *Plugin {
	return &Plugin{opt: opt, started: time.Now(), changeSlot: make(chan struct{}, 1), loadSlots: make(chan struct{}, maxLoading)}
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: Name, Version: "1.0.0", Inline: true}
	for _, t := range tools() {
		m.Tools = append(m.Tools, t.tool)
	}
	for _, r := range []struct{ uri, title, about string }{
		{MiddlewareURI, "Middleware", "The pipeline in force: stages in their order, scopes and configuration."},
		{TransportsURI, "Transports", "The ways into the relay: adapters, listeners, sessions."},
		{MetricsURI, "Metrics", "Queues, fan-out latency, dropped and coalesced changes, calls by class."},
		{PluginsURI, "Plugins", "The loaded plugins with versions, states and manifests; of the boards the first 200, without manifests."},
	} {
		m.Resources = append(m.Resources, &kernel.Resource{URI: r.uri, Name: strings.TrimPrefix(r.uri, "mcp://kernel/"), Title: r.title, Description: r.about,
			MIME: "application/json", Scope: manifest.ScopeKernelAdmin, Watchable: true})
	}
	return m
}

// Call implements kernel.Plugin. It runs in the caller's goroutine (Inline), so every tool must
// obey ctx while it waits.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for _, t := range tools() {
		if t.tool.Name != r.Tool {
			continue
		}
		a := &args{}
		if err := json.Unmarshal(r.Arguments, a); err != nil { // CheckArguments accepted it
			return nil, fmt.Errorf("%s: %w", r.Tool, err)
		}
		v, err := t.run(ctx, p, r, a)
		if err != nil {
			return nil, callerError(err)
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
		content, err := p.pluginsResource()
		if err != nil {
			return nil, err
		}
		return json.Marshal(content)
	}
	return nil, kernel.ErrNoResource
}

// Watch implements kernel.Watcher. A change of the pipeline or of a transport notifies the
// subscribers itself; metrics and plugins are compared once a second while they are watched.
func (p *Plugin) Watch(ctx context.Context, uri string, changed func()) error {
	var fingerprint func() string
	switch uri {
	case MetricsURI:
		fingerprint = p.metricsFingerprint
	case PluginsURI:
		fingerprint = p.pluginsFingerprint
	default:
		<-ctx.Done()
		return ctx.Err()
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := fingerprint()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if now := fingerprint(); now != last {
				last = now
				changed()
			}
		}
	}
}

// metricsFingerprint changes with the metrics. It leaves out the figures that the
// notification itself changes: otherwise each would cause the next.
func (p *Plugin) metricsFingerprint() string {
	s := p.opt.Kernel.Stats()
	s.Pending, s.Changes, s.Delivered, s.Coalesced = 0, 0, 0, 0
	s.FanoutP50US, s.FanoutP95US, s.FanoutP99US = 0, 0, 0
	return fmt.Sprint(s)
}

// pluginsFingerprint changes with the plugins, their versions and states. It leaves out the
// counters, which every call changes: subscribers are to learn of loads and faults.
func (p *Plugin) pluginsFingerprint() string {
	var b strings.Builder
	for _, i := range p.opt.Kernel.Info().Plugins {
		fmt.Fprintf(&b, "%s@%s %s %d %d %d %s %s\n", i.Name, i.Version, i.State, i.Tools, i.Resources, i.Failures, i.Digest, i.LastError)
	}
	return b.String()
}

// MiddlewareChanged notifies the subscribers of MiddlewareURI of a change made elsewhere.
func (p *Plugin) MiddlewareChanged() { p.notifyChanged(MiddlewareURI) }

// TransportsChanged notifies the subscribers of TransportsURI of a change made elsewhere.
func (p *Plugin) TransportsChanged() { p.notifyChanged(TransportsURI) }

// PluginsChanged notifies the subscribers of PluginsURI of a change made elsewhere.
func (p *Plugin) PluginsChanged() { p.notifyChanged(PluginsURI) }

// notifyChanged notifies the subscribers of a resource, of all tenants: the control plane
// belongs to none.
func (p *Plugin) notifyChanged(uri string) {
	p.opt.Kernel.NotifyChange("", kernel.Change{Updated: []string{uri}})
}

// callerError returns the error that a caller sees: administrators see the text of every
// error, on one line, in printable ASCII and of bounded length.
func callerError(err error) error {
	var e *manifest.Error
	if errors.As(err, &e) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return err
	}
	text := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, listOnOneLine.Replace(err.Error()))
	return &manifest.Error{Code: manifest.BadRequest, Message: text[:min(len(text), 500)], Reason: "control"}
}

// listOnOneLine joins the lines of an error that lists problems, such as those of a manifest.
var listOnOneLine = strings.NewReplacer(":\n  ", ": ", "\n  ", "; ")

// Change is the payload of an event of the control plane.
type Change struct {
	Action string   `json:"action"` // enable, disable, configure, reorder, load, reload, unload, restart, allow, disallow, reset
	Name   string   `json:"name,omitempty"`
	Scope  string   `json:"scope,omitempty"`
	Digest string   `json:"config_sha256,omitempty"` // hex, of the new configuration
	Order  []string `json:"order,omitempty"`
	// Tenants are those of a consent.
	Tenants []string `json:"tenants,omitempty"`
	Reason  string   `json:"reason,omitempty"` // of a restart
	Actor   string   `json:"actor"`            // ActorRelay: nobody asked for it
	Trace   string   `json:"trace_id,omitempty"`
}

// ActorRelay is the actor of changes that the relay makes by itself: it starts a plugin again, or
// reloads one on SIGHUP.
const ActorRelay = "relay"

// target is what a change is about, for the audit log.
func (c *Change) target() string {
	if c.Scope != "" && c.Scope != "global" {
		return c.Name + " " + c.Scope
	}
	return c.Name
}

// begin calls BeginChange.
func (p *Plugin) begin(ctx context.Context, r *kernel.Request, target string) error {
	if p.opt.BeginChange == nil {
		return nil
	}
	return p.opt.BeginChange(ctx, r, target)
}

// appendTimeout bounds the append of the event of a change that has been made. It is below
// kernel.CallBudget, so that the caller learns that the event is missing.
const appendTimeout = 2 * time.Second

// change makes a change and appends its event, with the change slot held. uri is the
// resource that changes.
//
// The audit record is written before the slot is acquired, so that a slow disk delays only this caller.
// Records may therefore be in another order than the changes; events are in the order of the changes.
//
// A change whose event cannot be appended stays in force, and the error says so: undoing it
// could fail as well. Subscribers are notified before the append, which may take long.
func (p *Plugin) change(ctx context.Context, r *kernel.Request, typ, uri string, c Change, do func() error) error {
	if err := p.begin(ctx, r, c.target()); err != nil {
		return err
	}
	return p.apply(ctx, r, typ, uri, c, do)
}

// apply is change without the record in the audit log of its beginning.
func (p *Plugin) apply(ctx context.Context, r *kernel.Request, typ, uri string, c Change, do func() error) error {
	select {
	case p.changeSlot <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.changeSlot }()
	if err := do(); err != nil {
		return err
	}
	p.notifyChanged(uri)
	return p.record(ctx, r, typ, c)
}

// record appends the event of a change. It does not end with ctx: the caller may be gone,
// but the change is made.
func (p *Plugin) record(ctx context.Context, r *kernel.Request, typ string, c Change) error {
	c.Actor, c.Trace = r.Caller.Actor, r.TraceID
	payload, err := json.Marshal(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), appendTimeout)
	defer cancel()
	if _, err := p.opt.Log.Append(ctx, kernel.Event{Tenant: r.Caller.Tenant, Type: typ, Aggregate: cmp.Or(c.Name, c.Action), Payload: payload}); err != nil {
		e := &manifest.Error{Code: manifest.Internal, Message: "the change is made, but the event log did not keep it; see the relay's log", Reason: "log"}
		if why := manifest.AsError(err); why.Reason == "storage" { // NoRetry: a repeat would make the change twice
			e.Reason, e.NoRetry = why.Reason, true
		}
		return e
	}
	return nil
}
