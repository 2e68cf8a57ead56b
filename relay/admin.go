package relay

import (
	"errors"
	"net/http"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// The administration of a tenant over HTTP: attributes, revocation and removal of its nodes,
// and its tokens. The tenant comes from the caller's token only. Each request is answered by
// one function, and gets exactly one audit record.

// Paths below which a node or a token is named.
const (
	nodesPath  = "/v1/nodes/"
	tokensPath = "/v1/tokens/"
)

// Bounds of the administration. Each change costs a write to disk, so a caller's rate is
// bounded; the burst lets a script rename a fleet of a few hundred boards at once.
const (
	maxAdminBody    = 64 << 10 // bytes
	adminRate       = 20.0     // requests per second of one caller
	adminBurst      = 400
	maxAdminCallers = 4096
)

// adminCall is one request of an administrator.
type adminCall struct {
	req    *http.Request
	caller *kernel.Caller
	body   []byte
	dryRun bool           // ?dry_run=true: check and answer, change nothing
	record *kernel.Record // of the audit log; a handler adds the node and the target
	begun  bool           // a change whose first record is on the disk, see changeRoute
}

// adminChange is a change that was checked, to be made. What it returns is the answer.
type adminChange func() (any, error)

// adminRoutes registers the routes of the administration. Their handlers read the path
// themselves: checkRequests bypasses the mux's wildcards.
func (r *Relay) adminRoutes(mux *http.ServeMux) {
	mux.Handle("PATCH "+nodesPath+"{node}", r.changeRoute("nodes.update", manifest.ScopeNodesWrite, r.patchNode))
	mux.Handle("DELETE "+nodesPath+"{node}", r.changeRoute("nodes.remove", manifest.ScopeNodesWrite, r.removeNode))
	mux.Handle("POST "+nodesPath+"{node}/revoke", r.changeRoute("nodes.revoke", manifest.ScopeNodesWrite, r.revokeNode))
	mux.Handle("POST /v1/tokens", r.changeRoute("tokens.create", manifest.ScopeTokensWrite, r.createToken))
	mux.Handle("GET /v1/tokens", r.adminRoute("tokens.list", manifest.ScopeTokensWrite, r.listTokens))
	mux.Handle("DELETE "+tokensPath+"{jti}", r.changeRoute("tokens.revoke", manifest.ScopeTokensWrite, r.revokeToken))
}

// creator is the identity of the caller, for what it gives away. It is never nil, which would be
// the operator.
func (a *adminCall) creator() *auth.Identity {
	if id, ok := a.caller.Scopes.(*auth.Identity); ok && id != nil {
		return id
	}
	return &auth.Identity{Tenant: a.caller.Tenant, Subject: a.caller.Actor, JTI: a.caller.JTI}
}

// badRequest is an error of the request, with a short stable reason.
func badRequest(reason, message string) *manifest.Error {
	return &manifest.Error{Code: manifest.BadRequest, Message: message, Reason: reason, ShowReason: true}
}

// checkNoBody refuses a body where none is read: a key in it would be ignored.
func (a *adminCall) checkNoBody() error {
	if len(a.body) > 0 && strictjson.Unmarshal(a.body, &struct{}{}) != nil {
		return badRequest("body", "send no body")
	}
	return nil
}

// changeRoute is adminRoute for a change. prepare checks the request, finds out what it is about
// and changes nothing. The change that it returns is made after the audit log has it on the disk:
// while that cannot be written, nobody changes anything.
func (r *Relay) changeRoute(name, scope string, prepare func(*adminCall) (adminChange, error)) http.Handler {
	return r.adminRoute(name, scope, func(a *adminCall) (any, error) {
		change, err := prepare(a)
		if err != nil {
			return nil, err
		}
		if !a.dryRun {
			if err := r.beginChange(a.req.Context(), *a.record); err != nil {
				return nil, err
			}
			a.begun = true
		}
		return change()
	})
}

// adminRoute makes a route: it authenticates, checks the scope and the caller's rate, reads
// the body, and writes the answer and the audit record of what handle decided. name is the
// name of the operation in the audit log.
func (r *Relay) adminRoute(name, scope string, handle func(*adminCall) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		a := &adminCall{req: req, record: &kernel.Record{Tool: name, Decision: kernel.Allowed, Address: r.clientAddr(req)}}
		a.record.TraceID, _ = edge.TraceID(req)
		answer, status, err := r.adminAnswer(w, a, scope, handle)
		if err != nil {
			e := manifest.AsError(err)
			if status == 0 {
				status = edge.Status(e.Code)
			}
			a.record.Decision, a.record.Code, a.record.Reason = kernel.Denied, e.Code, e.Reason
			if e.Code == manifest.Internal {
				a.record.Decision = kernel.Failed
			}
			r.endAdmin(a)
			r.metrics.countDecision(a.record)
			r.publishRefusal(a.record)
			r.writeError(w, status, e, a.record.TraceID)
			return
		}
		if a.dryRun {
			a.record.Reason = "dry_run"
		}
		r.endAdmin(a) // not a call of a tool, so the counters of calls do not count it
		w.Header().Set("Cache-Control", "no-store")
		writeJSON(w, answer)
	})
}

// endAdmin writes the audit record of what was decided: the outcome of a change that was begun, or
// the only record of everything else.
func (r *Relay) endAdmin(a *adminCall) {
	if a.begun {
		r.endChange(a.req.Context(), a.record)
	} else {
		r.audit.Write(a.record)
	}
}

// adminAnswer makes the checks of adminRoute and calls handle. status is 0 where it follows
// from the code of the error.
func (r *Relay) adminAnswer(w http.ResponseWriter, a *adminCall, scope string, handle func(*adminCall) (any, error)) (answer any, status int, err error) {
	tooLarge := badRequest("size", "the body is larger than 64 KiB")
	// What costs least is checked first: size, token, scope, rate. The body is read after them.
	if a.req.ContentLength > maxAdminBody {
		return nil, http.StatusRequestEntityTooLarge, tooLarge
	}
	if a.caller, err = r.httpCaller(a.req); err != nil {
		e, status := denial(err)
		return nil, status, e
	}
	a.record.Tenant, a.record.Actor = a.caller.Tenant, a.caller.Actor
	if !a.caller.Has(scope) {
		return nil, 0, &manifest.Error{Code: manifest.SafetyDenied, Message: "the token lacks the scope " + scope, Reason: "scope"}
	}
	if wait := r.adminLimits.Take(a.caller.Tenant+"/"+a.caller.Actor, adminRate, adminBurst, time.Now()); wait > 0 {
		return nil, 0, &manifest.Error{Code: manifest.RateLimited, Message: "too many administrative requests", RetryAfterMS: wait.Milliseconds() + 1, Reason: "rate"}
	}
	switch a.req.URL.Query().Get("dry_run") {
	case "", "false":
	case "true":
		a.dryRun = true
	default:
		return nil, 0, badRequest("dry_run", "dry_run is true or false")
	}
	var held int64
	a.body, held, err = r.bodies.Read(w, a.req, identityOf(a.caller), maxAdminBody)
	defer r.bodies.Release(identityOf(a.caller), held)
	share := (*manifest.Error)(nil)
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, http.StatusRequestEntityTooLarge, tooLarge
	case errors.As(err, &share):
		return nil, 0, share
	case err != nil:
		return nil, 0, badRequest("body", "the body did not arrive whole and in time")
	case len(a.body) > 0 && !edge.IsJSON(a.req.Header.Get("Content-Type")):
		return nil, 0, badRequest("body", "send Content-Type: application/json")
	}
	answer, err = handle(a)
	return answer, 0, err
}
