package client

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/transport/pin"
	"agentctl/transport/sse"
)

var (
	// ErrURL reports an address that is not of the form http://HOST[:PORT] or https://.
	ErrURL = errors.New("not of the form https://HOST[:PORT]")

	// ErrCleartext reports that a token would cross a network unencrypted.
	ErrCleartext = errors.New("refusing to send a token in the clear; use https://")

	// ErrStop ends a stream without an error when a callback returns it.
	ErrStop = errors.New("client: stop the stream")

	// ErrNotFound, ErrAmbiguous and ErrMalformed are the reasons of a RefError.
	ErrNotFound  = errors.New("not found")
	ErrAmbiguous = errors.New("ambiguous")
	ErrMalformed = errors.New("malformed")

	// ErrDeviceOffline, ErrReaderSlow and ErrTooManyStreams are the reasons of a
	// StreamClosedError that a caller can act on.
	ErrDeviceOffline  = errors.New("the device went offline")
	ErrReaderSlow     = errors.New("the reader was too slow")
	ErrTooManyStreams = errors.New("the tenant has too many streams open")

	// ErrNeverLinked reports a call to a node whose board has never connected, so its tools
	// are unknown.
	ErrNeverLinked = errors.New("has never been linked")
)

// Error is an error answer of the relay, of a tool or of the event gateway.
type Error struct {
	Status     int           // of HTTP
	Code       manifest.Code // "": the answer has no error envelope of agentctl
	Reason     string        // short word, finer than Code; often ""
	Message    string
	Outcome    manifest.Outcome // whether the call may have run; "" where that does not arise
	Retryable  bool             // the same request may be sent again
	TraceID    string
	RetryAfter time.Duration // how long the server asks to wait; 0: not given
	HadToken   bool          // the request carried a token
}

func (e *Error) Error() string {
	if e.Code == "" {
		return fmt.Sprintf("the server answered HTTP %d without an agentctl error", e.Status)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// ToolError is the answer of a tool that ran and reports a failure in its own words.
type ToolError struct {
	Status int // of HTTP
	// Result is the tool's structured content, or {"content":[...],"isError":true} with the content
	// blocks of MCP.
	Result json.RawMessage
}

func (e *ToolError) Error() string { return "the tool answered with an error" }

// isTemporary reports whether the same request may succeed later.
func (e *Error) isTemporary() bool {
	return e.Status == http.StatusTooManyRequests || e.Status >= 500
}

// envelope is the JSON form of an error answer: {"error": {"code", "message", ...}}.
type envelope struct {
	Error *struct {
		Code         manifest.Code    `json:"code"`
		Reason       string           `json:"reason"`
		Message      string           `json:"message"`
		Outcome      manifest.Outcome `json:"outcome"`
		Retryable    bool             `json:"retryable"`
		RetryAfterMS int64            `json:"retry_after_ms"`
		TraceID      string           `json:"trace_id"`
	} `json:"error"`
}

// into copies the envelope's fields into e. It reports whether the body was an envelope.
func (v *envelope) into(e *Error) bool {
	if v.Error == nil || v.Error.Code == "" {
		return false
	}
	e.Code, e.Reason, e.Message, e.TraceID = v.Error.Code, v.Error.Reason, v.Error.Message, v.Error.TraceID
	e.Outcome, e.Retryable = v.Error.Outcome, v.Error.Retryable
	e.RetryAfter = max(e.RetryAfter, time.Duration(v.Error.RetryAfterMS)*time.Millisecond)
	return true
}

const (
	maxErrorBody  = 1 << 20 // bytes read of an error answer
	maxRetryAfter = 3600    // seconds; bound of a Retry-After header
)

// answerError returns the error of a response whose status is not 2xx. A response without the
// error envelope comes from a proxy or from another server, and has no Code; a JSON object with
// status 422 is a tool's own answer. Go's HTTPS server answers plain HTTP with a sentence and
// status 400.
func answerError(resp *http.Response, hadToken bool) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // a partial body is used, too
	if resp.StatusCode == http.StatusBadRequest && bytes.Contains(body, []byte("HTTP request to an HTTPS server")) {
		return &TransportError{Kind: NeedsTLS, URL: origin(resp.Request.URL), Err: errors.New("the server speaks TLS")}
	}
	e := &Error{Status: resp.StatusCode, HadToken: hadToken}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(min(max(s, 0), maxRetryAfter)) * time.Second
	}
	var env envelope
	isEnvelope := json.Unmarshal(body, &env) == nil && env.into(e)
	if !isEnvelope && e.Status == http.StatusUnprocessableEntity && len(body) > 0 && body[0] == '{' && json.Valid(body) {
		return &ToolError{e.Status, body}
	}
	return e
}

// Kind is the way in which a request failed without a response.
type Kind int

// The kinds of transport failures.
const (
	Broken               Kind = iota // any other failure
	Unreachable                      // no connection could be opened
	TimedOut                         // the server did not answer in time
	UntrustedCertificate             // signed by an authority that is not trusted
	WrongCertificateName             // the certificate is for another host
	WrongAuthority                   // not the relay whose authority was pinned; a *pin.MismatchError
	NotTLS                           // https:// to a server that speaks plain HTTP
	NeedsTLS                         // http:// to a server that speaks TLS
)

// TransportError reports a request without a response.
type TransportError struct {
	Kind Kind
	URL  string // of the server, without a path
	Err  error
}

func (e *TransportError) Error() string { return fmt.Sprintf("call %s: %v", e.URL, e.Err) }

// Unwrap returns the cause.
func (e *TransportError) Unwrap() error { return e.Err }

// transportError classifies an error of http.Client.Do. It returns ctx's error if ctx ended
// the request, so that a caller sees its own cancellation. The dialer's errors come first,
// because a dial that timed out means an unreachable server, not a slow one.
func transportError(ctx context.Context, to *url.URL, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	e := &TransportError{URL: origin(to), Err: err}
	var request *url.Error
	if errors.As(err, &request) {
		e.Err = request.Err // without the request's URL, which may be long
	}
	var op *net.OpError
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	var mismatch *pin.MismatchError
	switch {
	case errors.As(err, &mismatch):
		e.Kind, e.Err = WrongAuthority, mismatch
	case errors.As(err, &op) && op.Op == "dial":
		e.Kind, e.Err = Unreachable, op.Err
	case request != nil && request.Timeout():
		e.Kind = TimedOut
	case errors.As(err, &authority):
		e.Kind = UntrustedCertificate
	case errors.As(err, &name):
		e.Kind = WrongCertificateName
	case errors.Is(err, http.ErrSchemeMismatch):
		e.Kind = NotTLS
	}
	return e
}

// isTemporaryRefresh reports whether err is a failure of Options.NewToken that may pass. Such
// errors say so by a method, as this package does not know how tokens are made.
func isTemporaryRefresh(err error) bool {
	var t interface{ Temporary() bool }
	return errors.As(err, &t) && t.Temporary()
}

// origin returns a URL without path, query and user.
func origin(u *url.URL) string { return u.Scheme + "://" + u.Host }

// StreamClosedError is the close event with which the relay ended a metric stream early. Its
// codes are those of RFC-0009 §7.
type StreamClosedError struct {
	Code   sse.Code `json:"code"`
	Reason string   `json:"reason"`
}

func (e *StreamClosedError) Error() string {
	return fmt.Sprintf("the relay closed the stream (%d %s)", e.Code, e.Reason)
}

// Unwrap returns what the close code means: ErrDeviceOffline, ErrReaderSlow or
// ErrTooManyStreams; nil for other codes. The relay gives up on a slow reader when its queue
// is full (Backpressure) or when a write stalls (IdleTimeout).
func (e *StreamClosedError) Unwrap() error {
	switch e.Code {
	case sse.DeviceOffline:
		return ErrDeviceOffline
	case sse.IdleTimeout, sse.Backpressure:
		return ErrReaderSlow
	case sse.RateLimited:
		return ErrTooManyStreams
	}
	return nil
}

// ProtocolError reports a response that violates the protocol.
type ProtocolError struct {
	What string
	Err  error // the cause; may be nil
}

func (e *ProtocolError) Error() string {
	if e.Err == nil {
		return e.What
	}
	return e.What + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *ProtocolError) Unwrap() error { return e.Err }

// RefError reports a reference that does not identify exactly one node or ticket.
type RefError struct {
	Reason error // ErrNotFound, ErrAmbiguous or ErrMalformed
	Thing  string
	text   string
}

func (e *RefError) Error() string { return e.text }

// Unwrap returns the reason.
func (e *RefError) Unwrap() error { return e.Reason }

func refError(reason error, thing, format string, args ...any) error {
	return &RefError{reason, thing, fmt.Sprintf(format, args...)}
}
