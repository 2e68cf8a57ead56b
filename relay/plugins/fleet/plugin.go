// Package fleet is the plugin with which a language model works with many boards: a few tools
// that name boards in their arguments, in place of one tool for each verb of each board. Clients
// list them with /mcp?toolset=fleet.
//
//	p := fleet.New(fleet.Options{Call: k.Call, Boards: boards, Events: events})
//	err := k.Load(p, false)
//
// Each tool is a row of tools, in a separate file:
//
//	fleet.find      find.go      boards by name, tag, status, or a condition on figures (where.go)
//	fleet.describe  describe.go  one board and its tools
//	fleet.call      call.go      one tool of one board
//	fleet.query     query*.go    figures of many boards, now (query_now.go) or from the boards' own
//	                             history (query_history.go); query.go has the steps
//	fleet.watch     watch.go     some boards for some seconds, as a stream
//	fleet.events    events.go    what the event log has about boards
//
// # Asking boards
//
// A tool reaches boards through the kernel as the caller itself (ask.go), so that the scopes, limits,
// audit records and events of the board's tools apply. Three bounds keep a call from taking the relay:
//
//   - An identity has maxAskingCalls calls at a time that ask many boards (Plugin.acquireAsking).
//   - A tenant asks maxAsked boards at a time. A board that is slow frees its slot for the next
//     one (askSlots).
//   - A call ends at its deadline with what it has. Each board without a value is counted with a
//     reason (reasons.go).
//
// Figures of the last 30 s are not asked for again: figureCache keeps them, and frames of metric
// streams that are open for somebody count too (figures.go).
//
// Answers have at most MaxAnswer bytes, a budget of a model's context. Those of fleet.describe,
// fleet.watch and fleet.events with a limit have other bounds.
//
// # Time
//
// The kernel drops an answer that comes after kernel.CallBudget (5 s), so a tool that asks many boards or
// searches the event log stops before:
//
//	fleet.find, fleet.describe   askAllTimeout for all boards, askTimeout for one
//	fleet.query                  allTime for all its steps
//	fleet.events                 eventsTime, with the wait for other searches
//	fleet.watch                  as many seconds as the caller asks for: a stream outlives the budget
//
// # State
//
// The plugin stores nothing on disk. After a restart of the relay its caches are empty, and boards are
// asked once more.
//
// # Trust
//
// Answers have text of boards (proposed names, models, alerts), which a model might take for
// instructions; the plugin's manifest marks them as untrusted. Errors are not marked, so those of this
// package have ids, names that operators gave, and constant text, and do not repeat an argument. A value
// that a metric cannot have is dropped when it is read (metric.possible).
package fleet

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// maxCalls bounds the calls in flight of all tenants. It is more than other plugins have, because a
// call of a board that does not answer takes seconds, and boards have their own limits.
const maxCalls = 1024

// Name is the plugin's name.
const Name = "fleet"

// Options configure a Plugin. All fields but Differs, Refuses and Now must be given.
type Options struct {
	// Call answers a request as kernel.Kernel.Call does.
	Call func(ctx context.Context, r *kernel.Request) (*kernel.Result, error)
	// Boards is what the relay knows about boards without asking them.
	Boards Boards
	// Events is what the relay recorded.
	Events Events
	// Differs reports whether a stage of the relay may answer callers differently: by its rules, or by
	// removing secrets. While it does, figures that boards gave one caller are not shown to others. It
	// is called for each board of a call, so it must only read memory. Default: false.
	Differs func() bool
	// Refuses reports whether a stage of the relay refuses a tool to the caller of r, so that answers
	// do not list it. Default: false.
	Refuses func(r *kernel.Request, tool string) bool
	// Now is the wall clock; default time.Now.
	Now func() time.Time
}

// Plugin serves the tools. Make one with New; it starts no goroutine.
type Plugin struct {
	opt     Options
	figures figureCache
	models  modelCache
	slots   askSlots

	mu   sync.Mutex    // protects used; a leaf
	used map[share]int // calls in progress; without an entry: none
}

// New makes the plugin.
func New(o Options) *Plugin {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Differs == nil {
		o.Differs = func() bool { return false }
	}
	if o.Refuses == nil {
		o.Refuses = func(*kernel.Request, string) bool { return false }
	}
	return &Plugin{opt: o, used: make(map[share]int)}
}

var _ kernel.Plugin = (*Plugin)(nil)

// tool is a tool of the plugin. Its texts, with those of all others, have 2,000 tokens together
// (TestToolsetSize): a model reads them in every conversation.
type tool struct {
	name, title, description string
	input                    arguments.Object
	// scope is needed to see and call the tool. A tool that ends in one of a board is subject to
	// that one's scope as well.
	scope string
	// streams and mayStream are Streams and MayStream of kernel.Tool.
	streams, mayStream bool
	call               func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error)
}

// tools lists the tools. Those of other plugins that belong to the toolset fleet have the group
// kernel.GroupFleet.
func tools() []tool {
	return []tool{findTool, describeTool, queryTool, watchTool, callTool, eventsTool}
}

// Run waits for ctx: the plugin has nothing to do in the background. The relay runs all built-in plugins.
func (p *Plugin) Run(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	// No tool has an output schema: clients would pass it to the model, and the toolset has a budget of
	// tokens (TestToolsetSize). Inline saves a goroutine for each call; the tools return when their context
	// ends, as it requires.
	m := &kernel.Manifest{Name: Name, Version: "1.0.0", Inline: true, Forwards: true, Untrusted: true, MaxConcurrency: maxCalls}
	for _, t := range tools() {
		// fleet.call is ReadOnly as well: the kernel refuses a board's tool of another class.
		m.Tools = append(m.Tools, &kernel.Tool{Name: t.name, ToolInfo: &kernel.ToolInfo{
			Title: t.title, Description: t.description, InputSchema: t.input.Schema(), CheckArguments: t.input.Check,
			SafetyClass: manifest.ReadOnly, Scope: t.scope, Streams: t.streams, MayStream: t.mayStream, Group: kernel.GroupFleet,
		}})
	}
	return m
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for _, t := range tools() {
		if t.name == r.Target().Name {
			return t.call(ctx, p, r)
		}
	}
	// A bug of the relay. The kernel converts the panic to an error.
	panic("fleet: the kernel routed a tool that this plugin does not have")
}

// readArguments decodes arguments that the kernel has checked against the tool's input.
func readArguments(r *kernel.Request, into any) error {
	if err := json.Unmarshal(r.Arguments, into); err != nil {
		return arguments.Invalid("arguments: must be one strict JSON object")
	}
	return nil
}

// answer is the result of a tool with a structured answer.
func answer(v any) (*kernel.Result, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: data}, nil
}
