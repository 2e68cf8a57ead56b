package relay

import (
	"encoding/json"
	"errors"
	"net/http"

	"agentctl/manifest"
	"agentctl/relay/auth"
)

// errorBody is the one error envelope of the relay (docs/protocol.md, "Errors").
type errorBody struct {
	Error errorFields `json:"error"`
}

type errorFields struct {
	Code         manifest.Code `json:"code"`
	Message      string        `json:"message"`
	Retryable    bool          `json:"retryable"`
	RetryAfterMS int64         `json:"retry_after_ms,omitempty"`
	TraceID      string        `json:"trace_id"`
}

// httpStatus is the one map from error codes to HTTP. 401, 405, 413 and 404 are chosen
// by the door that knows why.
func httpStatus(c manifest.Code) int {
	switch c {
	case manifest.BadRequest:
		return http.StatusBadRequest
	case manifest.ManifestInvalid:
		return http.StatusUnprocessableEntity
	case manifest.SafetyDenied:
		return http.StatusForbidden
	case manifest.NodeOffline:
		return http.StatusServiceUnavailable
	case manifest.DeadlineExceeded:
		return http.StatusGatewayTimeout
	case manifest.RateLimited:
		return http.StatusTooManyRequests
	}
	return http.StatusInternalServerError
}

// denial is what a caller without a good token is told, and with which status.
func denial(err error) (e *manifest.Error, status int) {
	e = manifest.AsError(err)
	status = http.StatusForbidden
	if errors.Is(err, auth.ErrMissing) || errors.Is(err, auth.ErrInvalid) {
		status = http.StatusUnauthorized
	}
	return e, status
}

func (r *Relay) writeError(w http.ResponseWriter, status int, e *manifest.Error, traceID string) {
	body, _ := json.Marshal(errorBody{errorFields{Code: e.Code, Message: e.Message, Retryable: e.Code.Retryable(),
		RetryAfterMS: e.RetryAfterMS, TraceID: traceID}}) // plain strings and numbers: cannot fail
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	if status == http.StatusUnauthorized {
		reason := ""
		if e.Reason != "no_token" { // RFC 6750 §3.1: no error code for who sent no token
			reason = `error="invalid_token", `
		}
		h.Set("WWW-Authenticate", `Bearer realm="agentctl", `+reason+`resource_metadata="`+r.base()+metadataPath+`/mcp"`)
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
