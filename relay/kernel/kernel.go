// Package kernel routes calls to plugins: from a tool name or resource URI to the plugin
// that provides it, with fixed checks before every call and a pipeline of stages around
// them.
//
// An endpoint (HTTP, MCP) makes a Request with the Caller whom the token authenticated,
// and Call answers it. The order of the checks is fixed:
//
//	audit -> pipeline stages -> name -> scope -> tenant -> tool -> online
//	      -> schema -> rate and concurrency -> breaker -> plugin -> result check
//
// A refusal before the plugin means that the plugin, and so the device behind it, saw
// nothing of the call. Reading a resource takes the same way.
//
//	k := kernel.New(kernel.Options{Audit: record, Log: log})
//	err := k.Load(plugin, false)                 // offer its tools and resources
//	res, err := k.Call(ctx, &kernel.Request{...}) // one call
//	sub, err := k.Subscribe(tenant)              // changes of what is offered
//	err = k.Run(ctx)                             // presence and watches
//
// # Supervision
//
// A plugin is trusted with its own tools and nothing else. Its panics, its silence and
// answers that break its schema are faults: they end the call with an error, and repeated
// faults open the plugin's breaker (see breaker.go for its states). Devices and the
// control plane have no breaker; that of a plugin that forwards calls counts only panics.
//
// # Locks
//
// Locks that are held together are taken in this order:
//
//	Kernel.mu       the registry: plugins, tools, resources, views
//	presence.order  changes of status, their events and OnPresence functions, in one order
//	presence.mu     the entries of presence; released before a status is reported
//	notifier.mu     the tenants with subscriptions
//	topic.mu        the changes of one tenant
//	Kernel.drainMu  the plugins that are being drained
//
// watcher.mu is taken alone. No lock is held while a plugin or a stage handles a request. Under
// Kernel.mu their state is read (Health, Declaration, Stage.Refuses), which must not block nor call the
// kernel: a lock of theirs comes after Kernel.mu. OnPresence
// functions run under presence.order; load and unload notify subscribers under Kernel.mu,
// so that notifications have the order of the changes.
package kernel

import (
	"context"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/pipeline"
)

// CallBudget is the end-to-end time of a call as the caller sees it (RFC-0005 §7). For a
// stream it covers the opening.
const CallBudget = 5 * time.Second

// Stage is middleware around every call.
type Stage = pipeline.Stage[*Request, *Result]

// Handler is the function that a stage wraps.
type Handler = pipeline.Handler[*Request, *Result]

// Options configure a Kernel. All fields may be left empty.
type Options struct {
	// ExplainMissing says why no loaded plugin has a tool: another tenant's, offline, or
	// no such tool. It returns a *manifest.Error. nil: the answer is E_BAD_REQUEST.
	ExplainMissing func(c *Caller, tool string) error
	// ExplainOffline returns the answer to a call or read of a device of the caller's that ended
	// with E_NODE_OFFLINE: e, or a copy with another message. It must not block.
	ExplainOffline func(nodeID string, e *manifest.Error) *manifest.Error
	// ExplainTimeout says why a plugin that is not a device did not answer in time, when the
	// relay knows: its disk hangs. nil, or a nil result: the answer is E_DEADLINE_EXCEEDED, and
	// the timeout is a fault of the plugin.
	ExplainTimeout func(plugin string) *manifest.Error
	// Audit receives one record a decision. It must not block.
	Audit func(Record)
	// Stages are in force from the start, outermost first.
	Stages []Stage
	// Log receives events: calls of tools with LogCalls, changes of presence. The kernel
	// offers them without waiting. nil: none.
	Log Log
	// PresenceTimeout is how long after the last heartbeat a device or agent is offline;
	// default 90 s.
	PresenceTimeout time.Duration
}

// Kernel routes calls to plugins. Make one with New; its methods may be called from any
// goroutine.
type Kernel struct {
	opt  Options
	pipe *pipeline.Pipeline[*Request, *Result]

	mu             sync.RWMutex             // protects the fields below
	plugins        map[string]*loaded       // by name
	tools          map[string]toolEntry     // by canonical name
	resources      map[string]resourceEntry // by URI
	methods        map[string][]*loaded     // MethodHandler plugins by MCP method, ascending by name
	views          map[string]*view         // what lists show, by tenant; "" is shared by all
	unloadedBoards counters                 // sums of boards that were unloaded

	drainMu  sync.Mutex                // protects draining
	draining map[*loaded]chan struct{} // by retired plugin; see drainLocked

	notify   notifier
	watcher  watcher
	presence presence
	total    totals
}

// New makes a kernel with no plugin loaded.
func New(opt Options) *Kernel {
	k := &Kernel{
		opt:       opt,
		plugins:   make(map[string]*loaded),
		tools:     make(map[string]toolEntry),
		resources: make(map[string]resourceEntry),
		methods:   make(map[string][]*loaded),
		views:     make(map[string]*view),
		draining:  make(map[*loaded]chan struct{}),
	}
	k.notify.topics = make(map[string]*topic)
	k.watcher.watches = make(map[watchKey]*watch)
	k.presence.init(opt, &k.total.unlogged)
	k.pipe = pipeline.New(k.dispatch, opt.Stages...)
	return k
}

// Run runs the watches of resources and marks silent devices and agents as offline. It
// returns after ctx ends and all of its goroutines have.
func (k *Kernel) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { k.presence.run(ctx) })
	err := k.watcher.run(ctx)
	wg.Wait()
	return err
}

// Pipeline returns the stages around every call, to be swapped at run time.
func (k *Kernel) Pipeline() *pipeline.Pipeline[*Request, *Result] { return k.pipe }

// Audit writes a record on behalf of an endpoint (a stream's end, a late answer).
func (k *Kernel) Audit(r Record) {
	if k.opt.Audit != nil {
		k.opt.Audit(r)
	}
}
