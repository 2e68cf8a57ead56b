package relay

import (
	"errors"
	"net/http"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// How HTTP endpoints refuse:
//
//	fail          the request itself is wrong, or nothing is served there; not audited
//	writeDenied   the token is missing or bad; audited
//	denial        error and status of writeDenied, for endpoints that write the audit record themselves
//	writeError    any error, with the challenge that a 401 must have

// writeError answers with the error envelope. A 401 also names the token that is needed and
// where its metadata is (RFC 6750 §3, RFC 9728 §5.1); an error code is only for a caller who
// sent a token.
func (r *Relay) writeError(w http.ResponseWriter, status int, e *manifest.Error, traceID string) {
	if status == http.StatusUnauthorized {
		edge.SetChallenge(w.Header(), "agentctl", e.Reason != "no_token", r.URL()+metadataPath+"/mcp")
	}
	edge.WriteError(w, status, e, traceID)
}

// fail is writeError for an error of the request itself.
func (r *Relay) fail(w http.ResponseWriter, req *http.Request, status int, code manifest.Code, message string) {
	trace, _ := edge.TraceID(req)
	r.writeError(w, status, manifest.E(code, message), trace)
}

// writeDenied answers a request without a good token, and audits it.
func (r *Relay) writeDenied(w http.ResponseWriter, req *http.Request, err error) {
	e, status := denial(err)
	trace, _ := edge.TraceID(req)
	r.recordDecision(kernel.Record{Address: r.clientAddr(req), Transport: transportOf(req.URL.Path), Decision: kernel.Denied, Code: e.Code, Reason: e.Reason, TraceID: trace})
	r.writeError(w, status, e, trace)
}

// denial returns the error and the status for a caller without a good token: 401 when
// another token may help, 403 when this one is good but not for this.
func denial(err error) (e *manifest.Error, status int) {
	if errors.Is(err, auth.ErrMissing) || errors.Is(err, auth.ErrInvalid) {
		return manifest.AsError(err), http.StatusUnauthorized
	}
	if e = manifest.AsError(err); e.Code == manifest.RateLimited { // it has too many connections
		return e, http.StatusTooManyRequests
	}
	return e, http.StatusForbidden
}
