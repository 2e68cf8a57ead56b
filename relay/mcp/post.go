package mcp

import (
	"errors"
	"net/http"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

var errBodyTooLarge = manifest.E(manifest.BadRequest, "the request body is too large")

// servePost reads and checks the body of a POST, and routes its messages by their era:
//
//	legacy                       serveSessionPost
//	modern, plain                requestMux.serve
//	modern, subscriptions/listen the SDK, with a writer that does not block
//	modern, everything else      the SDK
//
// A batch is one era: the first modern message makes all of it modern, and the SDK then
// refuses it, since modern versions have no batches. tools/list without a scope for it is
// refused here with 403 and audited, whatever else the body holds.
func (h *Handler) servePost(w http.ResponseWriter, r *http.Request, x *exchange) {
	msgs, isBatch, body, ok := h.readMessages(w, r, x)
	if !ok {
		return
	}
	if !accepts(r.Header, "application/json") || !accepts(r.Header, "text/event-stream") {
		h.refuse(w, r, http.StatusBadRequest, manifest.E(manifest.BadRequest, "the Accept header must name application/json and text/event-stream"))
		return
	}
	x.modern = r.Header.Get(headerVersion) >= modernVersion
	for i := range msgs {
		x.modern = x.modern || msgs[i].version >= modernVersion
		if msgs[i].method == "tools/list" && !mayListTools(x.caller) {
			h.opts.Kernel.Audit(kernel.Record{Tenant: x.caller.Tenant, Actor: x.caller.Actor, Address: x.caller.Address, Transport: x.caller.Transport, Decision: kernel.Denied,
				Code: manifest.SafetyDenied, Reason: "scope", TraceID: manifest.NewTraceID()})
			h.refuse(w, r, http.StatusForbidden, manifest.E(manifest.SafetyDenied, "the token lacks tools:list and every tools:call scope"))
			return
		}
	}
	isPlain := x.modern && !isBatch && isPlainRequest(r, &msgs[0])
	for i := range msgs {
		if !isPlain && !msgs[i].idRoundTrips() {
			h.count.refused.Add(1)
			refuseRPC(w, http.StatusBadRequest, nil, codeInvalidRequest, errID.Error())
			return
		}
	}
	if !isBatch {
		x.id = msgs[0].id
	}
	if !x.modern {
		h.serveSessionPost(w, r, x, msgs, isBatch, body)
		return
	}
	switch {
	case isPlain && x.tenant.serveDirect(w, r, x, &msgs[0]):
	case isPlain:
		x.tenant.mux.serve(w, r, x, &msgs[0])
	case !isBatch && msgs[0].method == "subscriptions/listen":
		h.stream(w, r, x, func(w http.ResponseWriter) { serveSDK(h.modern, w, r, x, body) })
	default:
		tw := newTimeoutWriter(w, x)
		defer tw.end()
		serveSDK(h.modern, tw, r, x, body)
	}
}

// readMessages reads the body and scans its messages. It answers a body that is not
// acceptable itself, and then returns ok false. JSON that is not a message is answered
// under the id that it has, if there is one message.
func (h *Handler) readMessages(w http.ResponseWriter, r *http.Request, x *exchange) (msgs []envelope, isBatch bool, body []byte, ok bool) {
	if !edge.IsJSON(r.Header.Get("Content-Type")) {
		h.refuse(w, r, http.StatusBadRequest, manifest.E(manifest.BadRequest, "the Content-Type must be application/json"))
		return nil, false, nil, false
	}
	body, held, err := h.opts.Bodies.Read(w, r, identityOf(x.caller), h.opts.MaxBody)
	x.bodyHeld = held
	if err != nil {
		if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
			h.refuse(w, r, http.StatusRequestEntityTooLarge, errBodyTooLarge)
		} else if share, ok := errors.AsType[*manifest.Error](err); ok {
			h.refuse(w, r, edge.Status(share.Code), share)
		} else {
			h.refuse(w, r, http.StatusBadRequest, manifest.E(manifest.BadRequest, "the request body ended early"))
		}
		return nil, false, nil, false
	}
	if msgs, isBatch, err = scanBody(body); err != nil {
		h.count.refused.Add(1)
		code, id := int64(jsonrpc.CodeParseError), []byte(nil)
		if errors.As(err, new(shapeError)) {
			code = codeInvalidRequest
			if !isBatch && len(msgs) == 1 {
				id = msgs[0].id
			}
		}
		refuseRPC(w, http.StatusBadRequest, id, code, err.Error())
		return nil, false, nil, false
	}
	return msgs, isBatch, body, true
}

// accepts reports whether Accept names a type, by itself or by a wildcard. It ignores
// weights, as the SDK does.
func accepts(h http.Header, typ string) bool {
	group, _, _ := strings.Cut(typ, "/")
	for _, v := range h["Accept"] {
		for one := range strings.SplitSeq(v, ",") {
			one, _, _ = strings.Cut(one, ";")
			if one = strings.ToLower(strings.TrimSpace(one)); one == typ || one == "*/*" || one == group+"/*" {
				return true
			}
		}
	}
	return false
}

// mayListTools reports whether a token may ask for the list at all. The list then shows
// only what it may call.
func mayListTools(c *kernel.Caller) bool {
	return c.Has(manifest.ScopeToolsList) || c.Has(manifest.ScopeForClass(manifest.ReadOnly)) ||
		c.Has(manifest.ScopeForClass(manifest.Mutating)) || c.Has(manifest.ScopeForClass(manifest.Destructive))
}
