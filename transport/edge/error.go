package edge

import (
	"io"
	"net/http"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// Status returns the HTTP status of an error code. The codes do not distinguish 401, 404,
// 405 and 413: an endpoint sends these itself.
func Status(c manifest.Code) int {
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

// AppendError appends the error envelope (docs/protocol.md, "Errors"), which has the same
// form in HTTP bodies and in MCP results. outcome, reason and retry_after_ms are optional:
//
//	{"error":{"code":"…","message":"…","outcome":"not_sent","reason":"offline","retryable":true,"retry_after_ms":1000,"trace_id":"…"}}
func AppendError(b []byte, e *manifest.Error, traceID string) []byte {
	b = append(b, `{"error":{"code":"`...)
	b = append(b, e.Code...)
	b = append(b, `","message":`...)
	b, _ = jsontext.AppendQuote(b, e.Message) // invalid UTF-8 was replaced
	if e.Outcome != "" {
		b = append(b, `,"outcome":"`...)
		b = append(append(b, e.Outcome...), '"')
	}
	if reason := e.PublicReason(); reason != "" {
		b = append(b, `,"reason":`...)
		b, _ = jsontext.AppendQuote(b, reason)
	}
	b = append(b, `,"retryable":`...)
	b = strconv.AppendBool(b, e.Retryable())
	if e.RetryAfterMS > 0 {
		b = append(b, `,"retry_after_ms":`...)
		b = strconv.AppendInt(b, e.RetryAfterMS, 10)
	}
	b = append(b, `,"trace_id":"`...)
	b = append(b, traceID...)
	return append(b, `"}}`...)
}

// WriteError answers with the error envelope. If the error has RetryAfterMS, the response has
// a Retry-After header in whole seconds.
func WriteError(w http.ResponseWriter, status int, e *manifest.Error, traceID string) {
	if e.RetryAfterMS > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt((e.RetryAfterMS+999)/1000, 10))
	}
	WriteJSON(w, status, AppendError(nil, e, traceID))
}

// WriteJSON answers with a JSON value that no cache may keep.
func WriteJSON(w http.ResponseWriter, status int, value []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(value, '\n'))
}

// WriteText answers with plain text, which health probes read.
func WriteText(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// SetChallenge adds the WWW-Authenticate header of a 401 (RFC 6750 §3). invalid reports that
// the request carried a token; a request without one gets no error code. metadata is the URL
// of the resource's metadata (RFC 9728 §5.1), "" for none.
func SetChallenge(h http.Header, realm string, invalid bool, metadata string) {
	c := `Bearer realm="` + realm + `"`
	if invalid {
		c += `, error="invalid_token"`
	}
	if metadata != "" {
		c += `, resource_metadata="` + metadata + `"`
	}
	h.Set("WWW-Authenticate", c)
}
