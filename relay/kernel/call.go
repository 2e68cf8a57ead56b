package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// A call passes through these functions:
//
//	Call          resolves the name and writes the audit record, allowed or not
//	callInBudget  ends the call's context when its budget is spent
//	the pipeline  the stages that an operator enabled
//	dispatch      the fixed checks, in their order; no stage can remove or reorder them
//	callPlugin    concurrency, breaker, panics, the check of the result (supervise.go)

// Call answers a request within CallBudget. The error is a *manifest.Error, or
// ErrNoResource for a resource that does not exist or that the caller may not see. An
// open stream outlives the budget: it ends with ctx, by its Close, or by itself.
func (k *Kernel) Call(ctx context.Context, r *Request) (*Result, error) {
	if r.TraceID == "" {
		r.TraceID = manifest.NewTraceID()
	}
	k.resolve(r)
	res, err := k.callInBudget(ctx, r)
	k.total.calls.Add(1)
	rec := r.Record()
	if err != nil {
		k.total.errors.Add(1)
		return nil, k.fail(ctx, r, rec, err)
	}
	k.Audit(rec)
	if !res.IsError && res.RPCError == nil {
		k.logCall(r)
	}
	return res, nil
}

// Record returns the audit record of a served request. It holds only names with the
// syntax of a tool name: others are text of the caller's choice.
func (r *Request) Record() Record {
	rec := Record{Tenant: r.Caller.Tenant, Actor: r.Caller.Actor, Via: r.Caller.Via, Address: r.Caller.Address, Transport: r.Caller.Transport, TraceID: r.TraceID, Decision: Allowed}
	switch {
	case r.Method == MethodRead:
		rec.Reason = "read"
		if r.resource != nil {
			rec.NodeID = r.resource.NodeID
		}
	case r.tool != nil:
		rec.Tool, rec.NodeID = r.tool.Name, r.tool.NodeID
	default:
		if n, ok := manifest.ParseToolName(r.Tool); ok {
			rec.Tool, rec.NodeID = r.Tool, n.NodeID
		}
	}
	return rec
}

// fail audits a request that ends with err, and returns the error that its caller sees.
func (k *Kernel) fail(ctx context.Context, r *Request, rec Record, err error) error {
	rec.Decision = Failed
	if !r.dispatched {
		rec.Decision = Denied
		k.total.refused.Add(1)
	}
	if errors.Is(err, ErrNoResource) {
		rec.Code, rec.Reason = manifest.BadRequest, "resource"
		// A plugin with templates may still serve the URI, and then that is audited.
		if _, hasTemplates := k.MethodHandler(r.Caller, r.ConnID, MethodRead); !hasTemplates || r.dispatched {
			k.Audit(rec)
		}
		return ErrNoResource
	}
	e := asError(ctx, r, err)
	if r.dispatched && e.Reason == reasonDeadline {
		if why := k.explainTimeout(r.plugin); why != nil {
			e = why
		}
	}
	if e.Code == manifest.NodeOffline && rec.NodeID != "" && k.opt.ExplainOffline != nil {
		e = k.opt.ExplainOffline(rec.NodeID, e)
	}
	rec.Code, rec.Reason = e.Code, e.Reason
	k.Audit(rec)
	return e
}

// eventCall is the type of the event about a served call. Its payload holds ids, decision
// and code, never arguments or results (RFC-0005 §12).
const eventCall = "call"

// logCall offers an event about a served call to the log, if its tool wants that.
func (k *Kernel) logCall(r *Request) {
	if k.opt.Log == nil || r.tool == nil || !r.tool.LogCalls {
		return
	}
	if !k.opt.Log.Offer(Event{Tenant: r.Caller.Tenant, Type: eventCall, Aggregate: r.tool.Name, Payload: callPayload(r)}) {
		k.total.unlogged.Add(1)
	}
}

// callPayload writes the payload by hand: it is on the path of every device call, and
// encoding/json would take more time and memory than the rest of the kernel.
func callPayload(r *Request) json.RawMessage {
	b := make([]byte, 0, 224+len(r.Caller.Actor))
	b = append(b, `{"tool":`...)
	b = appendJSON(b, r.tool.Name)
	if r.tool.NodeID != "" {
		b = append(b, `,"node_id":`...)
		b = appendJSON(b, r.tool.NodeID)
	}
	b = append(b, `,"decision":"`+Allowed+`","code":"","actor":`...)
	b = appendJSON(b, r.Caller.Actor)
	b = append(b, `,"trace_id":`...)
	return append(appendJSON(b, r.TraceID), '}')
}

// appendJSON appends a JSON string, without allocating.
func appendJSON(b []byte, s string) []byte {
	b, _ = jsontext.AppendQuote(b, s) // an error reports that U+FFFD replaced bad UTF-8
	return b
}

// resolve finds the tool or resource of a request before the stages run, so that they can
// select by plugin and scope. What the caller may not see is not found; dispatch says why.
func (k *Kernel) resolve(r *Request) {
	r.tool, r.resource, r.plugin, r.scope, r.dispatched = nil, nil, nil, "", false
	if r.Method == MethodRead {
		if e, err := k.resource(r.Caller, r.URI); err == nil {
			r.plugin, r.scope = e.plugin, e.resource.Scope
		}
		return
	}
	r.Method = MethodCall
	r.Tool = manifest.Canonical(r.Tool)
	if e, ok := k.tool(r.Tool); ok && e.plugin.visibleTo(r.Caller) {
		r.plugin, r.scope = e.plugin, e.tool.Scope
	}
}

// ErrStopping is the cause of a context that ended because the relay stops. A call under it ends with
// its outcome and the reason "stopping".
var ErrStopping = errors.New("kernel: the relay is stopping")

// errBudget is the cause of a context that ended because its call's time was over.
var errBudget = fmt.Errorf("kernel: the call's budget is spent: %w", context.DeadlineExceeded)

// callInBudget ends ctx after the request's budget, unless a stream was opened, which
// keeps it. It uses a timer and not context.WithTimeout, which would end an open stream.
func (k *Kernel) callInBudget(ctx context.Context, r *Request) (*Result, error) {
	callCtx, cancel := context.WithCancelCause(ctx)
	budget := r.budget()
	timer := time.AfterFunc(budget, func() { cancel(errBudget) })
	res, err := k.pipe.Handle(deadlineContext{callCtx, time.Now().Add(budget)}, r)
	inTime := timer.Stop()
	if err == nil && res != nil && res.Stream != nil {
		if inTime {
			return res, nil // the stream's reader closes it; ctx is the caller's
		}
		res.Stream.Close()
	}
	if err == nil && !inTime { // an answer after the deadline is not delivered
		res, err = nil, errBudget
	}
	if err != nil && errors.Is(context.Cause(callCtx), context.DeadlineExceeded) && ctx.Err() == nil && !saysOutcome(err) {
		err = errBudget
	}
	cancel(nil)
	return res, err
}

// deadlineContext says when the budget of a call is spent, for a plugin that has to know it in
// advance: a device must not start a command whose caller has been answered.
type deadlineContext struct {
	context.Context
	deadline time.Time
}

// Deadline is the end of the call's budget, or that of the caller's context if it is earlier.
func (c deadlineContext) Deadline() (time.Time, bool) {
	if d, ok := c.Context.Deadline(); ok && d.Before(c.deadline) {
		return d, true
	}
	return c.deadline, true
}

// saysOutcome reports whether a plugin knows what became of the call that it could not answer,
// such as a device that never got it.
func saysOutcome(err error) bool {
	e, ok := errors.AsType[*manifest.Error](err)
	return ok && e.Outcome != ""
}

// budget is the time that the request may take: the plugin's CallTimeout, at most
// CallBudget.
func (r *Request) budget() time.Duration {
	if r.plugin != nil && r.plugin.manifest.CallTimeout > 0 {
		return min(r.plugin.manifest.CallTimeout, CallBudget)
	}
	return CallBudget
}

// asError converts the error of a call to the one that its caller sees. A retry of a call that
// may have run is safe if it only reads, which the kernel knows from the tool.
func asError(ctx context.Context, r *Request, err error) *manifest.Error {
	e := endOfCall(ctx, r, err)
	if e.Outcome == manifest.OutcomeUnknown && r.readsOnly() {
		c := *e // plugins return shared errors
		c.ReadOnly = true
		return &c
	}
	return e
}

// readsOnly reports whether the request changes nothing.
func (r *Request) readsOnly() bool {
	return r.Method == MethodRead || (r.tool != nil && r.tool.SafetyClass == manifest.ReadOnly)
}

// reasonDeadline is the reason of an answer to a call whose budget was spent.
const reasonDeadline = "gateway_deadline"

// explainTimeout is Options.ExplainTimeout for a plugin that is not a device.
func (k *Kernel) explainTimeout(l *loaded) *manifest.Error {
	if k.opt.ExplainTimeout == nil || l == nil || l.isDevice() {
		return nil
	}
	return k.opt.ExplainTimeout(l.manifest.Name)
}

// endOfCall is asError without what the tool's safety class adds. A call that ended before its
// plugin got it was not sent; the end of its context says nothing about a later one.
func endOfCall(ctx context.Context, r *Request, err error) *manifest.Error {
	outcome := manifest.NotSent
	if r.dispatched {
		outcome = manifest.OutcomeUnknown
	}
	switch {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), ErrStopping) && !saysOutcome(err):
		return &manifest.Error{Code: manifest.NodeOffline, Message: "the relay stopped during the call", Reason: "stopping", Outcome: outcome, RetryAfterMS: 1000}
	case errors.Is(err, context.DeadlineExceeded):
		message := "the device did not answer within 5 s"
		if r.plugin != nil && !r.plugin.isDevice() {
			message = "the plugin did not answer in time"
		}
		return &manifest.Error{Code: manifest.DeadlineExceeded, Message: message, Reason: reasonDeadline, Outcome: outcome}
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the caller canceled the call", Reason: "cancelled", Outcome: outcome}
	}
	return manifest.AsError(err)
}

// dispatch is the innermost handler: the fixed checks in their order, then the plugin. It begins
// again with the next version of a plugin that was replaced meanwhile.
func (k *Kernel) dispatch(ctx context.Context, r *Request) (*Result, error) {
	do := k.dispatchCall
	if r.Method == MethodRead {
		do = k.dispatchRead
	}
	for range maxVersions {
		if res, err := do(ctx, r); err != error(ErrReplaced) {
			return res, err
		}
	}
	return nil, ErrReplaced
}

// maxVersions bounds how often a call begins again because its plugin was replaced.
const maxVersions = 8

func (k *Kernel) dispatchCall(ctx context.Context, r *Request) (*Result, error) {
	e, ok := k.tool(r.Tool)
	// Another tenant's tool is answered like a missing one, so that tenants cannot be probed.
	if !ok || !e.plugin.visibleTo(r.Caller) || reassigned(r, e.plugin) {
		return nil, k.missingTool(r)
	}
	if err := e.tool.missingScope(r.Caller); err != nil {
		return nil, err
	}
	t := e.tool
	r.tool = t
	if t.SafetyClass != "" && t.SafetyClass != manifest.ReadOnly {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Message: "tools of this safety class need an approval, which this release does not support", Reason: "safety_class"}
	}
	if t.Streams && !r.Stream {
		if t.NodeID == "" { // POST /mcp/tools/call has streams of boards only
			return nil, &manifest.Error{Code: manifest.BadRequest, Message: "this tool takes up to half a minute and is served over /mcp only", Reason: "unary_on_stream", ShowReason: true}
		}
		return nil, &manifest.Error{Code: manifest.BadRequest, Message: "this tool is a stream: send Accept: text/event-stream, or call metrics.snapshot for one reading", Reason: "unary_on_stream"}
	}
	if len(r.Arguments) == 0 {
		r.Arguments = []byte("{}")
	}
	if t.CheckArguments != nil {
		args, err := t.checkArguments(r.Arguments)
		if err != nil {
			return nil, err
		}
		r.Arguments = args
	}
	if t.Limit != nil && !t.Streams {
		if err := t.Limit.Acquire(time.Now()); err != nil {
			return nil, err
		}
		defer t.Limit.Release()
	}
	return k.callPlugin(ctx, e.plugin, r)
}

// checkArguments runs CheckArguments while it holds a slot, which large arguments wait for.
func (t *Tool) checkArguments(args []byte) ([]byte, error) {
	defer strictjson.AcquireSlot(len(args))()
	return t.CheckArguments(args)
}

func (k *Kernel) dispatchRead(ctx context.Context, r *Request) (*Result, error) {
	e, err := k.resource(r.Caller, r.URI)
	if err != nil {
		return nil, err
	}
	if _, ok := e.plugin.plugin.(Reader); !ok || reassigned(r, e.plugin) {
		return nil, ErrNoResource
	}
	r.resource = e.resource
	return k.callPlugin(ctx, e.plugin, r)
}

// reassigned reports whether a name went to another plugin while the stages ran. The stages
// of the new one have not seen the request, so it is refused like a missing name. A new
// version of the same plugin is fine.
func reassigned(r *Request, l *loaded) bool {
	return r.plugin == nil || (r.plugin != l && r.plugin.manifest.Name != l.manifest.Name)
}

// Refusals of dispatch.
var (
	// A token keeps the scopes that it was made with, so that one from before boards:inspect existed
	// needs a successor.
	errInspect = &manifest.Error{Code: manifest.SafetyDenied, Message: "the token lacks the scope boards:inspect that this tool needs; newly made agent tokens carry it: agentctl token create --class agent", Reason: "scope"}
	errNoTool  = &manifest.Error{Code: manifest.BadRequest, Message: "no tool has this name; tools/list shows the names", Reason: "name"}
)

// lacksScope is the error of a caller without a scope. It names the scope, which is the same for all
// boards' tools that need no other, so that it reveals nothing about a board.
func lacksScope(scope string) *manifest.Error {
	return &manifest.Error{Code: manifest.SafetyDenied, Message: "the token lacks the scope " + scope + " that this tool needs", Reason: "scope"}
}

// missingScope returns the refusal of a caller who lacks a scope that the tool needs, else nil.
func (t *Tool) missingScope(c *Caller) *manifest.Error {
	switch {
	case !c.Has(t.Scope):
		return lacksScope(t.Scope)
	case t.Inspects && !c.Has(manifest.ScopeBoardsInspect):
		return errInspect
	}
	return nil
}

// missingTool explains a tool that none of the caller's plugins has. The scope is checked
// first, so that a token without it learns nothing about names.
func (k *Kernel) missingTool(r *Request) error {
	name, ok := manifest.ParseToolName(r.Tool)
	if !ok {
		return errNoTool
	}
	kind, ok := manifest.LookupShort(name.Short)
	t := Tool{ToolInfo: &ToolInfo{Scope: manifest.ScopeCallReadOnly, Inspects: ok && kind.ExtraScope == manifest.ScopeBoardsInspect}}
	if err := t.missingScope(r.Caller); err != nil {
		return err
	}
	if k.opt.ExplainMissing != nil {
		return k.opt.ExplainMissing(r.Caller, r.Tool)
	}
	return errNoTool
}

// NodeDenied is the answer for another tenant's node as well as for a node that does not
// exist, so that tenants cannot be probed.
func NodeDenied() *manifest.Error {
	return &manifest.Error{Code: manifest.SafetyDenied, Message: "this token may not use that node", Reason: "tenant"}
}

// Read returns a resource's content for a caller who may see it. It is Call with
// MethodRead.
func (k *Kernel) Read(ctx context.Context, c *Caller, uri string) (*Resource, []byte, error) {
	res, err := k.Call(ctx, &Request{Method: MethodRead, Caller: c, URI: uri})
	if err != nil {
		return nil, nil, err
	}
	return res.Resource, res.Data, nil
}

// ErrNoResource is returned for a URI that does not exist as well as for one that the
// caller may not see.
var ErrNoResource = errors.New("kernel: no such resource")

// resource finds a resource that the caller may read.
func (k *Kernel) resource(c *Caller, uri string) (resourceEntry, error) {
	e, ok := k.findResource(uri)
	if !ok || !c.Has(e.resource.Scope) || !e.plugin.visibleTo(c) {
		return resourceEntry{}, ErrNoResource
	}
	return e, nil
}

// findResource finds a resource of whatever tenant: a listed one, or one of a template of the plugin
// that the URI names.
func (k *Kernel) findResource(uri string) (resourceEntry, bool) {
	k.mu.RLock()
	e, ok := k.resources[uri]
	var owner *loaded
	if rest, isOurs := strings.CutPrefix(uri, "mcp://"); !ok && isOurs {
		name, _, _ := strings.Cut(rest, "/")
		owner = k.plugins[name]
	}
	k.mu.RUnlock()
	if owner != nil { // called without the lock, as all code of plugins
		if t, isResolver := owner.plugin.(TemplateResolver); isResolver {
			if r := t.ResolveURI(uri); r != nil {
				return resourceEntry{resource: r, plugin: owner}, true
			}
		}
	}
	return e, ok
}

// MayRead reports whether a caller may read a resource: it has the scope, and no stage refuses it on
// the connection connID ("": none). A resource that is gone, as a device's may be for a while,
// reveals nothing and may be read by everybody who could name it.
func (k *Kernel) MayRead(c *Caller, connID, uri string) bool {
	k.mu.RLock()
	e, ok := k.resources[uri]
	k.mu.RUnlock()
	return !ok || c.Has(e.resource.Scope) && e.plugin.visibleTo(c) &&
		!(k.pipe.MayRefuse() && k.pipe.Refuses(e.resource.request(c, connID, e.plugin)))
}

// MethodHandler finds the plugin that serves an MCP method beyond tools and resources; the
// first by name, when there are several. It is called within the plugin's bounds. A plugin whose
// method a stage refuses to this caller, on the connection connID, is not found.
func (k *Kernel) MethodHandler(c *Caller, connID, method string) (MethodHandler, bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, l := range k.methods[method] {
		if l.visibleTo(c) && !k.refusesMethod(&Request{Caller: c, Method: method, ConnID: connID, plugin: l}) {
			return supervisedHandler{k, l}, true
		}
	}
	return nil, false
}

// useOf has the method that uses what the method of a list shows: who may not use it does not see the
// list either.
var useOf = map[string]string{"prompts/list": "prompts/get", "resources/templates/list": MethodRead}

// refusesMethod reports whether a stage refuses a method of a plugin, or the use of what it lists.
func (k *Kernel) refusesMethod(r *Request) bool {
	if !k.pipe.MayRefuse() {
		return false
	}
	if k.pipe.Refuses(r) {
		return true
	}
	r.Method = useOf[r.Method]
	return r.Method != "" && k.pipe.Refuses(r)
}

// MethodHandlers are all plugins that serve an MCP method beyond tools and resources and that
// MethodHandler could find, ascending by name.
func (k *Kernel) MethodHandlers(c *Caller, connID, method string) (list []MethodHandler) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, l := range k.methods[method] {
		if l.visibleTo(c) && !k.refusesMethod(&Request{Caller: c, Method: method, ConnID: connID, plugin: l}) {
			list = append(list, supervisedHandler{k, l})
		}
	}
	return list
}
