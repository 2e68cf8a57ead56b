// Package kernel is the relay's inside: a router from tool names to plugins, with the
// fixed checks in front of every call and a pipeline of stages around them.
//
// A door (HTTP, MCP) makes a Request with the Caller that the token proved, and Call
// answers it:
//
//	audit -> pipeline stages -> name -> scope -> ownership -> tool -> online
//	      -> schema -> rate and concurrency -> breaker -> plugin -> result check
//
// A refusal anywhere before the plugin means that the plugin, and so the device behind
// it, saw nothing of the call. Reading a resource goes the same way. Load and Unload change
// what is offered; Subscribe tells about such changes; Heartbeat and ListPresence know who is
// there; Info and Stats tell how it goes.
//
// A plugin is trusted with its own tools and nothing else: its panics, its silence and its
// lies end in an error of the call, and after repeated ones it is left alone for a while.
package kernel

import (
	"context"
	"sync"
	"time"

	"agentctl/relay/pipeline"
)

// CallBudget is the gateway's end-to-end budget of a call, seen by the caller
// (RFC-0005 §7). For a stream it covers the opening.
const CallBudget = 5 * time.Second

// Stage is middleware around every call.
type Stage = pipeline.Stage[*Request, *Result]

// Handler is what a stage wraps.
type Handler = pipeline.Handler[*Request, *Result]

// Options configure a Kernel. All fields may be left empty.
type Options struct {
	// ExplainMissing explains why no loaded plugin has a tool: somebody else's, offline, or no
	// such tool. It returns a *manifest.Error. Without it the answer is E_BAD_REQUEST.
	ExplainMissing func(c *Caller, tool string) error
	// Audit receives one record a decision. It must not block.
	Audit func(Record)
	// Stages are in force from the start, outermost first.
	Stages []Stage
	// Log receives events: calls of tools that say LogCalls, changes of presence. The
	// kernel only offers them and never waits. nil: none.
	Log Log
	// PresenceTimeout is how long after its last sign of life somebody is offline;
	// default 90 s.
	PresenceTimeout time.Duration
}

// Kernel routes calls to plugins. Make one with New.
type Kernel struct {
	opt  Options
	pipe *pipeline.Pipeline[*Request, *Result]

	mu        sync.RWMutex // protects the fields below
	plugins   map[string]*loaded
	tools     map[string]entry
	resources map[string]resourceEntry
	methods   map[string][]*loaded // of Methods plugins, ascending by name
	views     map[string]*view

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
		tools:     make(map[string]entry),
		resources: make(map[string]resourceEntry),
		methods:   make(map[string][]*loaded),
		views:     make(map[string]*view),
	}
	k.watcher.watches = make(map[watchKey]*watch)
	k.presence.init(opt, &k.total.unlogged)
	k.pipe = pipeline.New(k.dispatch, opt.Stages...)
	return k
}

// Run owns the goroutines of watched resources and marks the silent as offline; it
// returns after ctx ends and all of them have.
func (k *Kernel) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { k.presence.run(ctx) })
	err := k.watcher.run(ctx)
	wg.Wait()
	return err
}

// Pipeline gives the stages around every call, to be swapped at run time.
func (k *Kernel) Pipeline() *pipeline.Pipeline[*Request, *Result] { return k.pipe }

// Audit writes a record on behalf of a door (a stream's end, a late answer).
func (k *Kernel) Audit(r Record) {
	if k.opt.Audit != nil {
		k.opt.Audit(r)
	}
}
