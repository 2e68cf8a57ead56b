package relay

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/eventlog"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/directory"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/stages"
)

// Directories below the state directory.
const (
	pluginDir = "plugins" // of Options.PluginDir, unless given
	keyDir    = "keys"
)

// Built-in plugins that every relay loads, unless Options.Without names them. The
// control plane is always there.
const (
	PluginTickets   = "tickets"
	PluginDirectory = "directory"
)

// Each device is a plugin: a relay full of them still has room for those of its own.
const _ uint = kernel.MaxPlugins - hub.MaxNodes - 128

// openEventLog opens the event log.
func (r *Relay) openEventLog() (err error) {
	r.events, err = eventlog.Open(eventlog.Options{
		Path: filepath.Join(r.opt.StateDir, eventlog.FileName), Logger: r.log.Named("events"), Snapshot: r.snapshotForRetention,
	})
	return err
}

// snapshotForRetention is what a replay needs of the events that retention is about to take.
func (r *Relay) snapshotForRetention(context.Context) ([]kernel.Event, error) {
	events := r.kernel.PresenceSnapshot()
	if r.tickets != nil {
		events = append(events, r.tickets.Snapshot()...)
	}
	return events, nil
}

// newKernel makes the kernel with its stages, and the plugins of the relay's own.
func (r *Relay) newKernel() (err error) {
	r.kernel = kernel.New(kernel.Options{ExplainMissing: r.explainMissing, Audit: r.recordDecision, Log: r.events})
	if r.stages, err = stages.New(r.kernel.Pipeline(), stages.Options{
		Log: r.log, KeyDir: filepath.Join(r.opt.StateDir, keyDir), OnChange: func() {
			if r.control != nil { // not while it is made
				r.control.MiddlewareChanged()
			}
		},
	}); err != nil {
		return err
	}
	if r.opt.PluginDir == "" {
		r.opt.PluginDir = filepath.Join(r.opt.StateDir, pluginDir)
	}
	r.processes = process.New(process.Options{Dir: r.opt.PluginDir, Kernel: r.kernel, Version: r.opt.Version, Logger: r.log})
	r.endpoints.init(&r.opt)
	r.control = control.New(control.Options{
		Kernel: r.kernel, Log: r.events, Middleware: r.stages, Transports: transports{r}, Plugins: plugins{r}, Health: r.healthProblems, Level: newLogLevel(r),
		Metrics: func() any { return r.stages.Metrics().Stats() }, ResetMetrics: func() { r.stages.Metrics().Reset() },
	})
	return nil
}

// loadPlugins rebuilds what the log remembers and loads the plugins.
func (r *Relay) loadPlugins() error {
	for _, name := range r.opt.DisabledPlugins {
		if !slices.Contains([]string{PluginTickets, PluginDirectory}, name) {
			return optionError{fmt.Errorf("plugin %s cannot be left out; %s and %s can", name, PluginTickets, PluginDirectory)}
		}
	}
	for _, name := range r.opt.ExternalPlugins {
		if err := r.processes.Check(name); err != nil {
			return optionError{fmt.Errorf("plugin %s: %w", name, err)}
		}
	}
	ctx := context.Background() // a local file; Open has no caller to wait for
	if err := r.kernel.RestorePresence(ctx, r.events); err != nil {
		return fmt.Errorf("rebuild presence from the event log: %w", err)
	}
	r.log.Info("presence rebuilt from the event log", zap.Int("known", r.kernel.Stats().Presences))
	plugins := []kernel.Plugin{r.control}
	if !slices.Contains(r.opt.DisabledPlugins, PluginTickets) {
		r.tickets = tickets.New(r.kernel, r.events)
		done, err := r.tickets.Restore(ctx, r.events)
		if err != nil {
			return fmt.Errorf("rebuild the tickets from the event log: %w", err)
		}
		r.log.Info("tickets rebuilt from the event log", zap.Any("restored", done))
		plugins = append(plugins, r.tickets)
	}
	if !slices.Contains(r.opt.DisabledPlugins, PluginDirectory) {
		r.directory = directory.New(r.kernel)
		plugins = append(plugins, r.directory)
	}
	for _, p := range plugins {
		if err := r.kernel.Load(p, false); err != nil {
			return err
		}
	}
	for _, make := range r.opt.Plugins {
		if err := r.kernel.Load(make(r.kernel), false); err != nil {
			return err
		}
	}
	return nil
}

// runComponents runs what stands around the kernel until ctx ends.
func (r *Relay) runComponents(ctx context.Context, wg *sync.WaitGroup) {
	wg.Go(func() { _ = r.kernel.Run(ctx) })
	wg.Go(func() { r.expireOffline(ctx) })
	wg.Go(func() { _ = r.processes.Run(ctx, r.opt.ExternalPlugins...) })
	if r.tickets != nil {
		wg.Go(func() { _ = r.tickets.Run(ctx) })
	}
	if r.directory != nil {
		wg.Go(func() { _ = r.directory.Run(ctx) })
	}
}

// onDevicePing and agentHeartbeat are signs of life.
func (r *Relay) onDevicePing(n *hub.Node) {
	r.kernel.Heartbeat(kernel.Presence{Tenant: n.Tenant(), Kind: kernel.PresenceDevice, ID: n.ID(), Name: n.Name(), Transport: "link"})
}

func (r *Relay) agentHeartbeat(c *kernel.Caller) {
	r.kernel.Heartbeat(kernel.Presence{Tenant: c.Tenant, Kind: kernel.PresenceAgent, ID: c.Actor, Transport: c.Transport})
}

// plugins is what the control plane loads and unloads.
type plugins struct{ r *Relay }

// Load starts a plugin of the plugin directory.
func (p plugins) Load(ctx context.Context, name string) error {
	switch { // built in, and perhaps unloaded
	case name == PluginTickets && p.r.tickets != nil:
		return p.builtin(p.r.tickets)
	case name == PluginDirectory && p.r.directory != nil:
		return p.builtin(p.r.directory)
	}
	_, err := p.r.processes.Load(ctx, name)
	return err
}

func (p plugins) builtin(b kernel.Plugin) error {
	err := p.r.kernel.Load(b, false)
	if errors.Is(err, kernel.ErrAlreadyLoaded) {
		return manifest.E(manifest.BadRequest, "this plugin is loaded already")
	}
	return err
}

// Unload ends one: NAME or NAME@VERSION. What is built in can be loaded again.
func (p plugins) Unload(_ context.Context, name string) error {
	if base, _, _ := strings.Cut(name, "@"); base == control.Name {
		return manifest.E(manifest.BadRequest, "the control plane stays: without it nothing could be loaded again")
	}
	err := p.r.processes.Unload(name)
	if errors.Is(err, process.ErrNotLoaded) && !strings.Contains(name, ":") {
		return p.r.kernel.UnloadByName(name)
	}
	return err
}
