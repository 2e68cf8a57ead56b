package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/creachadair/jrpc2"
	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// busPrefix begins the methods of the bus.
const busPrefix = "agentctl/"

// busCallKey is the member of _meta that has the token of a call: in what the relay sends, and in a
// request that the plugin makes for that call.
const busCallKey = "agentctl/call"

// busParams are the parameters of all methods; each method uses some of them.
type busParams struct {
	Name         string         `json:"name"`
	Arguments    strictjson.Raw `json:"arguments"`
	URI          string         `json:"uri"`
	Type         string         `json:"type"`
	Aggregate    string         `json:"aggregate_id"`
	Payload      strictjson.Raw `json:"payload"`
	Topics       []string       `json:"topics"`
	After        *uint64        `json:"after"`
	SinceS       int64          `json:"since_s"`
	Subscription string         `json:"subscription"`
	Tenant       string         `json:"tenant"`
	Meta         struct {
		Call string `json:"agentctl/call"`
	} `json:"_meta"`
}

// handle answers a request of the plugin.
//
//	in flight -> rate -> parameters -> consent -> call or tenant -> depth -> manifest -> kernel
func (bc *busConn) handle(req *jrpc2.Request) (any, error) {
	if bc == nil {
		return nil, busError(&manifest.Error{Code: manifest.SafetyDenied, Reason: "manifest", ShowReason: true,
			Message: "plugin.json of this plugin has no key bus, so that it may only answer calls"})
	}
	select {
	case bc.member.slots <- struct{}{}:
		defer func() { <-bc.member.slots }()
	default:
		return nil, busError(errBusy)
	}
	// The rate is checked before the parameters are parsed, so that refused requests cost little.
	if err := take(bc.member.requests, 1, "requests"); err != nil {
		return nil, busError(err)
	}
	var p busParams
	if err := parseBusParams(req, &p); err != nil {
		return nil, busError(err)
	}
	switch method := strings.TrimPrefix(req.Method(), busPrefix); method {
	case "call":
		return bc.perform(&p, p.Name, bc.call)
	case "read":
		return bc.perform(&p, p.URI, bc.read)
	case "append":
		return bc.perform(&p, p.Type, bc.append)
	case "subscribe":
		v, err := bc.subscribe(&p)
		bc.audit(bc.noRights(&p), "subscribe", p.target(), err)
		return v, busError(err)
	case "unsubscribe": // without consent: it only gives something up
		if !bc.unsubscribe(p.Subscription) {
			return nil, busError(manifest.E(manifest.BadRequest, "no subscription has this id"))
		}
		return struct{}{}, nil
	}
	return nil, jrpc2.Errorf(jrpc2.MethodNotFound, "the bus has agentctl/call, read, append, subscribe and unsubscribe")
}

// parseBusParams reads the parameters strictly.
func parseBusParams(req *jrpc2.Request, p *busParams) error {
	raw := req.ParamString()
	if int64(len(raw)) > maxBusArguments {
		return manifest.E(manifest.BadRequest, "the request is larger than 1 MiB")
	}
	if raw == "" {
		return nil
	}
	defer strictjson.AcquireSlot(len(raw))()
	if strictjson.Unmarshal([]byte(raw), p) != nil || len(p.Arguments) > 0 && p.Arguments[0] != '{' || len(p.Payload) > 0 && p.Payload[0] != '{' {
		return manifest.E(manifest.BadRequest, "the parameters are not strict JSON of the form that docs/kernel.md shows")
	}
	return nil
}

// target is what a subscription is about, for the audit log.
func (p *busParams) target() string {
	if p.URI != "" {
		return p.URI
	}
	return strings.Join(p.Topics, " ")
}

// perform finds the rights of a request and runs it with them. Refusals before the kernel are
// audited here, the others by the kernel.
func (bc *busConn) perform(p *busParams, target string, run func(*busRights, *busParams) (any, error)) (any, error) {
	r, err := bc.rights(p.Meta.Call, p.Tenant)
	if err != nil {
		bc.audit(bc.noRights(p), "", target, err)
		return nil, busError(err)
	}
	defer r.cancel()
	v, err := run(r, p)
	return v, busError(err)
}

// noRights are the plugin's in the tenant of the call that a request names, or in one that it names
// and the consent covers: what else the plugin says is no tenant for the audit log.
func (bc *busConn) noRights(p *busParams) *busRights {
	c := &kernel.Caller{Actor: bc.actor()}
	bc.mu.Lock()
	call := bc.calls[p.Meta.Call]
	bc.mu.Unlock()
	tenants := bc.tenants()
	switch {
	case call != nil:
		c.Tenant = call.caller.Tenant
	case manifest.ValidTenant(p.Tenant) && covers(tenants, p.Tenant):
		c.Tenant = p.Tenant
	case len(tenants) > 0 && tenants[0] != AllTenants:
		c.Tenant = tenants[0]
	}
	return &busRights{caller: c}
}

// audit records a decision that the kernel does not.
func (bc *busConn) audit(r *busRights, reason, target string, err error) {
	rec := kernel.Record{Tenant: r.caller.Tenant, Actor: r.caller.Actor, Via: r.caller.Via, Target: auditable(target), Decision: kernel.Allowed, Reason: reason, TraceID: r.trace}
	if err != nil {
		e := manifest.AsError(err)
		rec.Decision, rec.Code, rec.Reason = kernel.Denied, e.Code, e.Reason
	}
	bc.bus.o.Kernel.Audit(rec)
}

// auditable is a name of the plugin's choice as a log may have it.
func auditable(s string) string { return printable(s[:min(len(s), 128)]) }

// deny refuses a request for something that the manifest does not ask for.
func (bc *busConn) deny(r *busRights, target, key string) error {
	err := &manifest.Error{Code: manifest.SafetyDenied, Reason: "manifest", ShowReason: true, Message: "plugin.json does not ask for this under bus." + key}
	bc.audit(r, "", target, err)
	return err
}

// call answers agentctl/call with the result of a tool, as MCP has it.
func (bc *busConn) call(r *busRights, p *busParams) (any, error) {
	name := manifest.Canonical(p.Name)
	if !covers(bc.declared().Call, name) || isControl(name) {
		return nil, bc.deny(r, name, "call")
	}
	res, err := bc.bus.o.Kernel.Call(r.ctx, &kernel.Request{
		Caller: r.caller, Tool: name, Arguments: []byte(p.Arguments), TraceID: r.trace, ConnID: bc.actor(), Inner: true,
	})
	switch {
	case err != nil:
		return nil, err
	case res.RPCError != nil:
		return nil, &jrpc2.Error{Code: jrpc2.Code(res.RPCError.Code), Message: res.RPCError.Message, Data: res.RPCError.Data}
	case res.Stream != nil:
		res.Stream.Close()
		return nil, manifest.E(manifest.BadRequest, "this tool is a stream, which plugins cannot read")
	case res.InputRequests != nil:
		return nil, manifest.E(manifest.BadRequest, "this tool asks a person, which plugins cannot answer")
	}
	out := struct {
		Content    []json.RawMessage `json:"content"`
		Structured json.RawMessage   `json:"structuredContent,omitempty"`
		IsError    bool              `json:"isError,omitempty"`
		Meta       json.RawMessage   `json:"_meta,omitempty"`
	}{res.Content, res.Structured, res.IsError, res.Meta}
	if out.Content == nil {
		out.Content = []json.RawMessage{}
	}
	return out, nil
}

// isControl reports whether a name is the control plane's, which no pattern may reach.
func isControl(name string) bool {
	return slices.ContainsFunc(controlPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// read answers agentctl/read with the content of a resource, as MCP has it.
func (bc *busConn) read(r *busRights, p *busParams) (any, error) {
	if !covers(bc.declared().Read, p.URI) || isControl(p.URI) {
		return nil, bc.deny(r, p.URI, "read")
	}
	res, err := bc.bus.o.Kernel.Call(r.ctx, &kernel.Request{Method: kernel.MethodRead, Caller: r.caller, URI: p.URI, TraceID: r.trace, ConnID: bc.actor(), Inner: true})
	if err != nil {
		return nil, err
	}
	content := map[string]any{"uri": p.URI, "mimeType": res.Resource.MIME}
	if utf8.Valid(res.Data) {
		content["text"] = string(res.Data)
	} else {
		content["blob"] = res.Data
	}
	return map[string]any{"contents": []any{content}}, nil
}

// appendTimeout bounds how long an event waits for the disk. It is below kernel.CallBudget.
const appendTimeout = 4 * time.Second

// EventPrefix begins the types of the events of plugins in the log: "plugin.notes.added" is
// notes.added of the plugin notes. No other event has such a type.
const EventPrefix = "plugin."

// append answers agentctl/append with the seq of the event.
func (bc *busConn) append(r *busRights, p *busParams) (any, error) {
	if !covers(bc.declared().Append, p.Type) || !strings.HasPrefix(p.Type, bc.name()+".") {
		return nil, bc.deny(r, p.Type, "append")
	}
	e := kernel.Event{Tenant: r.caller.Tenant, Type: EventPrefix + p.Type, Aggregate: p.Aggregate, Payload: json.RawMessage(p.Payload)}
	if err := e.Check(); err != nil || len(e.Payload) > maxAppend || auditable(e.Aggregate) != e.Aggregate {
		err := manifest.E(manifest.BadRequest, "an event has a type of a-z, 0-9, dots and _, an aggregate_id of at most 128 printable bytes, and a payload of at most 16 KiB")
		bc.audit(r, "append", p.Type, err)
		return nil, err
	}
	if err := errors.Join(take(bc.member.appends, 1, "events"), take(bc.member.bytes, len(e.Payload), "bytes of events")); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.ctx, appendTimeout)
	defer cancel()
	seq, err := bc.bus.o.Log.Append(ctx, e)
	bc.audit(r, "append", p.Type, err)
	return map[string]uint64{"seq": seq}, err
}

// take takes n from a limiter, or returns an error that says when to try again. A refused request gives
// its reservation back, so that it does not delay the next one.
func take(l *rate.Limiter, n int, what string) error {
	now := time.Now()
	r := l.ReserveN(now, n)
	if !r.OK() {
		return &manifest.Error{Code: manifest.RateLimited, Reason: "rate", Message: "this plugin sent more " + what + " at once than it may"}
	}
	if wait := r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return &manifest.Error{Code: manifest.RateLimited, Reason: "rate", RetryAfterMS: wait.Milliseconds() + 1, Message: "this plugin sends more " + what + " than it may; retry later"}
	}
	return nil
}

// busErrorCode is the JSON-RPC code of errors of the relay; data has the code of ours.
const busErrorCode = jrpc2.Code(-32000)

// busError converts an error to the one that the plugin gets: nil stays nil.
func busError(err error) error {
	if err == nil {
		return nil
	}
	if rpc, ok := errors.AsType[*jrpc2.Error](err); ok {
		return rpc
	}
	if errors.Is(err, kernel.ErrNoResource) {
		err = manifest.E(manifest.BadRequest, "no resource has this URI")
	}
	e := manifest.AsError(err)
	data, _ := json.Marshal(struct {
		Code         manifest.Code    `json:"code"`
		Reason       string           `json:"reason,omitempty"`
		RetryAfterMS int64            `json:"retry_after_ms,omitempty"`
		Outcome      manifest.Outcome `json:"outcome,omitempty"`
	}{e.Code, e.Reason, e.RetryAfterMS, e.Outcome})
	return &jrpc2.Error{Code: busErrorCode, Message: e.Message, Data: bytes.TrimSpace(data)}
}
