package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"agentctl/manifest"
)

// Call answers a request within CallBudget. The error is always a *manifest.Error, except
// that a resource which is not there, or not for the caller, is ErrNoResource. An opened
// stream outlives the budget: it ends with ctx, by its Close, or by itself.
func (k *Kernel) Call(ctx context.Context, r *Request) (*Result, error) {
	if r.TraceID == "" {
		r.TraceID = manifest.NewTraceID()
	}
	k.resolve(r)
	res, err := k.callInBudget(ctx, r)
	k.total.calls.Add(1)
	rec := Record{Tenant: r.Caller.Tenant, Actor: r.Caller.Actor, TraceID: r.TraceID, Decision: Allowed}
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
	if err != nil {
		k.total.errors.Add(1)
		return nil, k.refused(ctx, r, rec, err)
	}
	k.Audit(rec)
	k.logCall(r)
	return res, nil
}

// refused audits a call that ends with err, and makes the error that its caller sees.
func (k *Kernel) refused(ctx context.Context, r *Request, rec Record, err error) error {
	rec.Decision = Denied
	if r.dispatched {
		rec.Decision = Failed
	} else {
		k.total.refused.Add(1)
	}
	if errors.Is(err, ErrNoResource) {
		rec.Code, rec.Reason = manifest.BadRequest, "resource"
		if _, templates := k.MethodHandler(r.Caller, MethodRead); !templates || r.dispatched { // else that plugin decides
			k.Audit(rec)
		}
		return ErrNoResource
	}
	e := asError(ctx, r, err)
	rec.Code, rec.Reason = e.Code, e.Reason
	k.Audit(rec)
	return e
}

// logCall offers an event about a served call to the log, if its tool wants that.
func (k *Kernel) logCall(r *Request) {
	if k.opt.Log == nil || r.tool == nil || !r.tool.LogCalls {
		return
	}
	if !k.opt.Log.Offer(Event{Tenant: r.Caller.Tenant, Type: eventCall, Aggregate: r.tool.Name, Payload: callPayload(r)}) {
		k.total.unlogged.Add(1)
	}
}

// eventCall is the type of the event about a served call. Its payload holds ids, decision
// and code (RFC-0005 §12).
const eventCall = "call"

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

// appendJSON appends a JSON string; ids are plain and take the short way.
func appendJSON(b []byte, s string) []byte {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(s) // a string: cannot fail
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// resolve finds what the request goes to, before the stages run. What the caller may not
// see is not found; the fixed checks behind the stages say why.
func (k *Kernel) resolve(r *Request) {
	r.tool, r.resource, r.plugin, r.needs, r.dispatched = nil, nil, nil, "", false
	if r.Method == MethodRead {
		if e, err := k.resource(r.Caller, r.URI); err == nil {
			r.plugin, r.needs = e.plugin, e.resource.Scope
		}
		return
	}
	r.Method = MethodCall
	r.Tool = manifest.Canonical(r.Tool)
	if e, ok := k.tool(r.Tool); ok && e.visible(r.Caller) {
		r.plugin, r.needs = e.plugin, e.tool.Scope
	}
}

// errBudget is why a call's context ended when its time was over.
var errBudget = fmt.Errorf("kernel: the call's budget is spent: %w", context.DeadlineExceeded)

// callInBudget ends ctx after CallBudget, or earlier when the plugin says so, unless a
// stream was opened, which keeps it.
func (k *Kernel) callInBudget(ctx context.Context, r *Request) (*Result, error) {
	callCtx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(r.budget(), func() { cancel(errBudget) })
	res, err := k.pipe.Handle(callCtx, r)
	inTime := timer.Stop()
	if err == nil && res != nil && res.Stream != nil {
		if inTime {
			return res, nil // the stream's reader closes it; ctx is the caller's
		}
		res.Stream.Close()
	}
	if err == nil && !inTime { // too late is too late: the caller was promised an end
		res, err = nil, errBudget
	}
	if err != nil && errors.Is(context.Cause(callCtx), context.DeadlineExceeded) && ctx.Err() == nil {
		err = errBudget
	}
	cancel(nil)
	return res, err
}

func (r *Request) budget() time.Duration {
	if r.plugin != nil && r.plugin.manifest.CallTimeout > 0 {
		return min(r.plugin.manifest.CallTimeout, CallBudget)
	}
	return CallBudget
}

func asError(ctx context.Context, r *Request, err error) *manifest.Error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e := &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the device did not answer within 5 s", Reason: "gateway_deadline"}
		if r.plugin != nil && !r.plugin.device() {
			e.Message = "the plugin did not answer in time"
		}
		return e
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the caller gave the call up", Reason: "cancelled"}
	}
	return manifest.AsError(err)
}

// dispatch is the innermost handler: the fixed checks in their order, then the plugin.
// No stage can remove or reorder them.
func (k *Kernel) dispatch(ctx context.Context, r *Request) (*Result, error) {
	if r.Method == MethodRead {
		return k.dispatchRead(ctx, r)
	}
	e, ok := k.tool(r.Tool)
	if !ok || !e.visible(r.Caller) || movedTo(r, e.plugin) { // one way, so that tenants cannot be probed
		return nil, k.missing(r)
	}
	if !r.Caller.Has(e.tool.Scope) {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Message: "the token lacks the scope that this tool needs", Reason: "scope"}
	}
	t := e.tool
	r.tool = t
	if t.SafetyClass != "" && t.SafetyClass != manifest.ReadOnly {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Message: "tools of this safety class need an approval that this release does not give", Reason: "safety_class"}
	}
	if t.Streams && !r.Stream {
		return nil, &manifest.Error{Code: manifest.BadRequest, Message: "this tool is a stream: send Accept: text/event-stream, or call metrics.snapshot for one reading", Reason: "unary_on_stream"}
	}
	if len(r.Arguments) == 0 {
		r.Arguments = []byte("{}")
	}
	if t.CheckArguments != nil {
		args, err := t.CheckArguments(r.Arguments)
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
	return k.ask(ctx, e.plugin, r)
}

func (k *Kernel) dispatchRead(ctx context.Context, r *Request) (*Result, error) {
	e, err := k.resource(r.Caller, r.URI)
	if err != nil {
		return nil, err
	}
	if _, ok := e.plugin.plugin.(Reader); !ok || movedTo(r, e.plugin) {
		return nil, ErrNoResource
	}
	r.resource = e.resource
	return k.ask(ctx, e.plugin, r)
}

// movedTo tells whether a name went to another plugin while the stages ran: those of the
// new one have not seen the request. It is as if the name were not there.
func movedTo(r *Request, l *loaded) bool {
	return r.plugin == nil || (r.plugin != l && r.plugin.manifest.Name != l.manifest.Name)
}

// missing explains a tool that none of the caller's plugins has. The scope is checked
// first, so that a token without it learns nothing about names.
func (k *Kernel) missing(r *Request) error {
	if _, ok := manifest.ParseToolName(r.Tool); !ok {
		return &manifest.Error{Code: manifest.BadRequest, Message: "no tool has this name; tools/list shows the names", Reason: "name"}
	}
	if !r.Caller.Has(manifest.ScopeCallReadOnly) {
		return &manifest.Error{Code: manifest.SafetyDenied, Message: "the token lacks the scope that this tool needs", Reason: "scope"}
	}
	if k.opt.ExplainMissing != nil {
		return k.opt.ExplainMissing(r.Caller, r.Tool)
	}
	return &manifest.Error{Code: manifest.BadRequest, Message: "no tool has this name; tools/list shows the names", Reason: "name"}
}

// NodeDenied is the one answer for another tenant's node and for a node that does not
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

// ErrNoResource is returned for a URI that does not exist or that the caller may not
// see; the two are not told apart.
var ErrNoResource = errors.New("kernel: no such resource")

func (k *Kernel) resource(c *Caller, uri string) (resourceEntry, error) {
	k.mu.RLock()
	e, ok := k.resources[uri]
	k.mu.RUnlock()
	if !ok || !c.Has(e.resource.Scope) || (e.plugin.manifest.Tenant != "" && e.plugin.manifest.Tenant != c.Tenant) {
		return resourceEntry{}, ErrNoResource
	}
	return e, nil
}

// MethodHandler finds the plugin that serves an MCP method beyond tools and resources: the first
// by name, when there are several. It is served within the plugin's bounds.
func (k *Kernel) MethodHandler(c *Caller, method string) (MethodHandler, bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, l := range k.methods[method] {
		if l.manifest.Tenant == "" || l.manifest.Tenant == c.Tenant {
			return supervised{k, l}, true
		}
	}
	return nil, false
}
