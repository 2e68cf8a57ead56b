package gateway

import (
	"errors"
	"net/http"
	"time"

	"agentctl/manifest"
	"agentctl/transport/edge"
)

// httpError is the answer to a refused request: its status and the error of the envelope
// (docs/protocol.md, "Errors"). The functions below make those that the gateway uses.
type httpError struct {
	status int
	body   *manifest.Error
	cause  error // of a 401; the challenge depends on it
}

func (e *httpError) Error() string { return e.body.Message }

func refuse(status int, code manifest.Code, message string) error {
	return &httpError{status: status, body: manifest.E(code, message)}
}

// refuseFor is refuse for a request that may be sent again after retryAfter.
func refuseFor(retryAfter time.Duration, status int, code manifest.Code, message string) error {
	return &httpError{status: status, body: &manifest.Error{Code: code, Message: message, RetryAfterMS: retryAfter.Milliseconds()}}
}

func badRequest(message string) error {
	return refuse(http.StatusBadRequest, manifest.BadRequest, message)
}

func denied(message string) error {
	return refuse(http.StatusForbidden, manifest.SafetyDenied, message)
}

func rateLimited(message string, retryAfter time.Duration) error {
	return refuseFor(retryAfter, http.StatusTooManyRequests, manifest.RateLimited, message)
}

func unavailable(message string) error {
	return refuseFor(time.Second, http.StatusServiceUnavailable, manifest.Internal, message)
}

// unauthorized returns the answer to an error of identify: 403 for a valid token that may
// not do this, else 401.
func unauthorized(err error) error {
	if share := (*manifest.Error)(nil); errors.As(err, &share) && share.Code == manifest.RateLimited {
		return &httpError{status: http.StatusTooManyRequests, body: share}
	}
	if errors.Is(err, ErrForbidden) {
		return denied(err.Error())
	}
	return &httpError{status: http.StatusUnauthorized, body: manifest.E(manifest.SafetyDenied, err.Error()), cause: err}
}

// writeError answers with the envelope of err: that of a handler, or for a fault of the disk
// one with reason "storage", or an internal error.
func writeError(w http.ResponseWriter, r *http.Request, err error) {
	var e *httpError
	if !errors.As(err, &e) {
		e = &httpError{status: http.StatusInternalServerError, body: manifest.AsError(err)}
	}
	if e.status == http.StatusUnauthorized {
		edge.SetChallenge(w.Header(), "agentctl events", !errors.Is(e.cause, ErrNoToken), "")
	}
	trace, _ := edge.TraceID(r)
	edge.WriteError(w, e.status, e.body, trace)
}
