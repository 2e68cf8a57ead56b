package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/audit"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/eventqueue"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/pipeline"
	"agentctl/relay/plugins/conformance"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/directory"
	"agentctl/relay/plugins/fleet"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/stages"
	"agentctl/transport/edge"
	"agentctl/transport/link"
)

// How the packages of a relay are connected. Hub and gateway import none of the others, and the MCP
// handler and the plugins only the kernel. What they need of each other they take as functions or small
// interfaces, which this package implements. The steps of Open that are here:
//
//	openState     relay.db, the audit log, the event log with its queue, the check of the clock
//	newKernel     kernel, stages, host of external plugins, control plane
//	newFrontEnd   hub and its callbacks, checks of Host and Origin, MCP handler
//	loadPlugins   presence and tickets from the event log, then the plugins inside the relay

// keyDir is the directory below the state directory with the keys of the stage sign.
const keyDir = "keys"

// Names of the stores, as storage.Monitor and everything that shows it has them.
const (
	storeIdentities = "relay.db"
	storeEvents     = eventlog.FileName
	storeAudit      = audit.Store
)

// Each device is a plugin of the kernel. A hub that is full of devices leaves places for 128
// other plugins; otherwise this does not compile.
const _ uint = kernel.MaxPlugins - hub.MaxNodes - 128

// openState opens the files of the state directory. A degraded relay has a queue too, so that nothing
// that appends has to ask whether there is a log.
func (r *Relay) openState() (err error) {
	r.store, err = auth.Open(auth.Options{
		StateDir: r.opt.StateDir, Audience: r.opt.Audience, ScopelessUntil: r.opt.ScopelessUntil, Logger: r.log, Now: r.opt.Now,
		Watch: r.storage.Watch(storeIdentities), WriteTimeout: storeTimeout,
	})
	if err != nil {
		return err
	}
	r.audit, err = audit.Open(audit.Options{
		Dir: r.opt.StateDir, MaxBytes: r.opt.AuditMaxBytes, MaxAge: r.opt.AuditMaxAge, Logger: r.log.Named("audit"),
		Watch: r.storage.Watch(storeAudit), OnLost: r.onAuditLost,
	})
	if err != nil {
		return err
	}
	// A log that another process has open is not damaged: a second relay on the directory must not
	// start, not even degraded.
	if err := r.openEventLog(); err != nil && (!r.opt.StartDegraded || errors.Is(err, eventlog.ErrInUse)) {
		return err
	} else if err != nil {
		r.startDegraded(err)
	}
	queue := eventqueue.Options{Store: storeEvents, Watch: r.storage.Watch(storeEvents), Logger: r.log.Named("events")}
	if r.events != nil { // an interface with a nil pointer is not nil
		queue.Log = r.events
	}
	r.queue = eventqueue.New(queue)
	r.clock = r.newClockGuard()
	if r.events == nil {
		return nil // relay.json keeps what it recorded of the log
	}
	if err := r.store.FollowEventLog(r.eventLogRecord); err != nil {
		r.log.Warn("relay.json is behind: it guards less well against an older event log", zap.Error(err))
	}
	return nil
}

// openEventLog opens the event log, if it is the one that relay.json records.
func (r *Relay) openEventLog() (err error) {
	if r.degraded != nil {
		return r.degraded
	}
	r.events, err = eventlog.Open(eventlog.Options{
		Path: filepath.Join(r.opt.StateDir, eventlog.FileName), Logger: r.log.Named("events"), Snapshot: r.snapshotForRetention, Now: r.opt.Now,
		Watch: r.storage.Watch(storeEvents), Expect: r.expectedEventLog(),
		OnDrop:   func(events []kernel.Event) { r.queue.Dropped(events) }, // from Run, when there is a queue
		MaxBytes: r.opt.Events.MaxBytes, MaxAge: r.opt.Events.MaxAge, MaxTenantBytes: r.opt.Events.TenantMaxBytes,
		Calls: eventlog.Quota{MaxAge: r.opt.Events.CallsMaxAge, MaxBytes: r.opt.Events.TenantCallsMaxBytes},
	})
	if err != nil {
		return r.eventLogError(err)
	}
	return nil
}

// storeTimeout bounds how long a request waits for a store. It is below kernel.CallBudget, so
// that the caller learns that the disk was the reason.
const storeTimeout = kernel.CallBudget - 500*time.Millisecond

// explainTimeout explains to the caller of a built-in plugin that did not answer in time when the
// event log was the reason.
func (r *Relay) explainTimeout(plugin string) *manifest.Error {
	if plugin != control.Name && r.builtins[plugin] == nil {
		return nil
	}
	if err := r.queue.Fault(); err != nil {
		return manifest.AsError(err)
	}
	return nil
}

// snapshotForRetention returns events that stand for those which retention is about to
// delete, so that a replay of the rest rebuilds the same state.
func (r *Relay) snapshotForRetention(context.Context) ([]kernel.Event, error) {
	// A snapshot has to have whatever loadPlugins rebuilds from the log.
	events := r.kernel.PresenceSnapshot()
	if r.tickets != nil {
		events = append(events, r.tickets.Snapshot()...)
	}
	return events, nil
}

// newKernel makes the kernel with its stages, the host of external plugins and the control
// plane. The kernel and the packages around it refer to each other, so some get functions
// that look up a field of Relay when they are called, after Open has set it.
func (r *Relay) newKernel() (err error) {
	r.metrics = newCounters()
	r.kernel = kernel.New(kernel.Options{ExplainMissing: r.explainMissing, ExplainOffline: r.explainOffline, ExplainTimeout: r.explainTimeout, Audit: r.recordDecision, Log: r.queue})
	r.stages, err = stages.New(r.kernel.Pipeline(), stages.Options{
		Log: r.log, LogFilter: r.logFilter, KeyDir: filepath.Join(r.opt.StateDir, keyDir), OnChange: func() {
			if r.control != nil { // nil while the stages are made
				r.control.MiddlewareChanged()
			}
		},
		OnListChange: func() {
			r.kernel.NotifyChange("", kernel.Change{Tools: true, PluginTools: true, Resources: true, Prompts: true})
		},
	})
	if err != nil {
		return err
	}
	r.bus = r.newBus()
	r.processes = process.New(r.processOptions())
	r.endpoints.init(&r.opt)
	r.control = control.New(control.Options{
		Kernel: r.kernel, Log: r.queue, Middleware: r.stages, Transports: transports{r}, Plugins: pluginLoader{r}, Consents: consents{r},
		Health: r.healthProblems, Level: newLogLevel(r),
		BeginChange: func(ctx context.Context, kr *kernel.Request, target string) error {
			rec := kr.Record()
			rec.Target = target
			return r.beginChange(ctx, rec)
		},
		Metrics:          func() any { return r.stages.Metrics().Stats() },
		ResetMetrics:     func() { r.stages.Metrics().Reset() },
		TransportFigures: func() any { return r.transportFigures(r.snapshot()) },
	})
	return nil
}

// newGuard makes the check of Host and Origin for a listener, before the relay serves. Reload changes
// its origins.
func (r *Relay) newGuard(isLoopback bool) *edge.Guard {
	var hosts []string
	if r.public != nil { // a proxy on this machine may pass the public name on
		hosts = append(hosts, r.public.Hostname())
	}
	g := edge.NewGuard(edge.GuardOptions{CheckHost: isLoopback, Hosts: hosts, Origins: r.origins()})
	r.guards = append(r.guards, g)
	return g
}

// newFrontEnd makes what talks to devices and clients: the hub with its upgrader, and the
// MCP handler behind the guard. The callbacks of the hub are in device_link.go and
// device_alert.go; package hub says which locks are held when they run.
func (r *Relay) newFrontEnd() error {
	r.hub = hub.New(hub.Options{
		Authenticate:       r.authenticateDevice,
		DelayRefusal:       func(ctx context.Context, a netip.Addr) { r.conns.Refusals().Delay(ctx, nil, edge.OfAddress(a)) },
		Now:                r.opt.Now,
		ValidateCapability: r.capabilities.validate,
		CheckResult:        manifest.CheckAnswer,
		CheckSample:        manifest.CheckFrame,
		EncodeSSE:          encodeFrame,
		OnAnnounce:         r.onDeviceAnnounce,
		OnReady:            r.onDeviceReady,
		OnLost:             r.onDeviceLost,
		OnGone:             r.onDeviceGone,
		OnSuspect:          r.onDeviceSuspect,
		RecentNodes:        func() int { return r.store.SeenWithin(hub.RecentWindow) },
		SaveLastSeen:       func(ids []string) { r.store.MarkSeen(ids...) },
		OnPing:             r.onDevicePing,
		GrantRevision:      r.store.Revision,
		OnDeviceEvent:      r.onDeviceEvent,
		SaveBoot:           r.saveBoot,
		LastBoot:           func(nodeID string) string { return r.store.Served(nodeID).BootID },
		SaveCloneTime:      r.saveCloneTime,
		CloneTimes:         r.store.CloneTimes(),
		OnCloneSuspected:   r.onCloneSuspected,
		Audit:              r.auditDevice,
	})
	r.sessions = r.hub
	r.guard = r.newGuard(r.loopback)
	r.upgrader = link.NewUpgrader(r.guard.OriginAllowed)
	r.mcp = mcp.New(mcp.Options{
		Notice: r.notice(), Label: r.boardLabel,
		Kernel: r.kernel, Authenticate: r.mcpCaller, Bodies: r.bodies, OnDenied: r.writeDenied, Guard: r.guard, Version: r.opt.Version, Logger: r.log,
		MayPack: func(c *kernel.Caller, connID string, t *kernel.Tool) bool {
			return r.kernel.Applies("compress", c, connID, t)
		},
		SessionKeys:     r.store.SessionKeys,
		OnSessionClosed: func(id string) { r.stages.Forget(pipeline.Scope{Kind: pipeline.Connection, Name: id}) },
	})
	return nil
}

// builtinPlugin is a plugin that Options.DisabledPlugins may name. Run does its work in the
// background; it continues while the plugin is unloaded, so that the state stays current.
type builtinPlugin interface {
	kernel.Plugin
	Run(ctx context.Context) error
}

// loadPlugins rebuilds the state that the event log holds, and loads the plugins that run inside the
// relay. External ones are started by Run.
func (r *Relay) loadPlugins() error {
	ctx := context.Background() // a local file; Open has no caller to wait for
	if err := r.kernel.RestorePresence(ctx, r.queue); err != nil {
		return fmt.Errorf("rebuild presence from the event log: %w", err)
	}
	r.log.Info("presence rebuilt from the event log", zap.Int("known", r.kernel.Stats().Presences))
	// Plugins are loaded after their state is restored: the first call must not see a relay without
	// tickets.
	plugins := []kernel.Plugin{r.control}
	r.builtins = make(map[string]builtinPlugin)
	add := func(name string, p builtinPlugin) { plugins, r.builtins[name] = append(plugins, p), p }
	if r.pluginEnabled(PluginTickets) {
		p, err := r.restoreTickets(ctx)
		if err != nil {
			return err
		}
		add(PluginTickets, p)
	}
	if r.pluginEnabled(PluginDirectory) {
		add(PluginDirectory, r.newDirectory())
	}
	if r.pluginEnabled(PluginFleet) {
		add(PluginFleet, r.newFleet())
	}
	if r.opt.Conformance {
		plugins = append(plugins, conformance.New(r.kernel))
	}
	for _, newPlugin := range r.opt.Plugins {
		plugins = append(plugins, newPlugin(r.kernel))
	}
	for _, p := range plugins {
		if err := r.kernel.Load(p, false); err != nil {
			return err
		}
	}
	return nil
}

// restoreTickets sets r.tickets, rebuilt from the event log, and returns the plugin to load: a
// degraded relay refuses the calls of tickets.
func (r *Relay) restoreTickets(ctx context.Context) (builtinPlugin, error) {
	r.tickets = tickets.New(r.kernel, r.queue)
	r.tickets.UseBoards(tickets.Boards{Find: fleetBoards{r}.find, Name: fleetBoards{r}.name})
	r.tickets.FitLog(cmp.Or(r.opt.Events.MaxBytes, eventlog.DefaultMaxBytes))
	restored, err := r.tickets.Restore(ctx, r.queue)
	if err != nil {
		return nil, fmt.Errorf("rebuild the tickets from the event log: %w", err)
	}
	r.log.Info("tickets rebuilt from the event log", zap.Any("restored", restored))
	if r.degraded != nil {
		return unavailableTickets{r.tickets}, nil
	}
	return r.tickets, nil
}

func (r *Relay) newDirectory() *directory.Plugin {
	return directory.New(directory.Options{Kernel: r.kernel, Seen: r.store.SeenNodes,
		Lookup: func(nodeID string) (directory.Node, bool) {
			a, ok := r.store.NodeAttributes(nodeID)
			return directory.Node(a), ok
		}})
}

func (r *Relay) newFleet() *fleet.Plugin {
	return fleet.New(fleet.Options{Call: r.kernel.Call, Boards: fleetBoards{r}, Events: fleetEvents{r, make(chan struct{}, maxSearches)}, Differs: r.stagesDiffer,
		Refuses: func(kr *kernel.Request, tool string) bool { return r.kernel.Refuses(kr.Caller, kr.ConnID, tool) }})
}

// runComponents runs the components that need no order among themselves, a goroutine each,
// until ctx ends:
//
//	kernel       watches of resources, offline devices and agents
//	store        changes of the state directory by other processes, last-seen times
//	processes    external plugins
//	audit        writes what is queued
//	storage      faults of the disk: probes and log lines
//	status       the socket of agentctl relay status, and the sizes of the stores
//	offline      expiry of offline plugins
//	registry     entries of boards that relay.db could not store
//	memory       size of the heap
//	tickets      expiry of approvals
//	directory    notifications when a board or an agent comes or goes
func (r *Relay) runComponents(ctx context.Context, wg *sync.WaitGroup) {
	wg.Go(func() { _ = r.kernel.Run(ctx) })
	wg.Go(func() { _ = r.store.Run(ctx) })
	if r.authority != nil {
		wg.Go(func() { r.authority.Run(ctx) })
	}
	if r.listener != nil {
		wg.Go(func() { r.followAddresses(ctx) })
	}
	wg.Go(func() {
		_ = r.processes.Run(ctx, slices.Concat(slices.Sorted(maps.Keys(r.bundledPlugins())), r.opt.ExternalPlugins)...)
	})
	wg.Go(func() {
		if err := r.audit.Run(ctx); err != nil {
			r.log.Error("the last lines of the audit log are not written", zap.Error(err))
		}
	})
	wg.Go(func() { _ = r.storage.Run(ctx) })
	wg.Go(func() { r.serveStatus(ctx) })
	wg.Go(func() { r.measure(ctx) })
	if r.degraded != nil {
		wg.Go(func() { r.remindDegraded(ctx) })
	}
	wg.Go(func() { r.expireOffline(ctx) })
	wg.Go(func() { r.retryRegistry(ctx) })
	if !r.opt.NoMemoryTuning {
		wg.Go(func() {
			newMemoryTuner(func() (int, uint64) { s := r.hub.Stats(); return s.Nodes, s.Accepted }).run(ctx)
		})
	}
	for _, b := range r.builtins {
		wg.Go(func() { _ = b.Run(ctx) })
	}
}
