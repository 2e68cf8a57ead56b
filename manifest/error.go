package manifest

import (
	"errors"
	"slices"
)

// Code is one of the seven error codes of the product (RFC-0001 §4 as used by
// RFC-0005 §8 and RFC-0009 §3). The set is closed.
type Code string

// The closed set of error codes.
const (
	BadRequest       Code = "E_BAD_REQUEST"       // malformed request, Accept, tool name or unknown tool on an own node
	ManifestInvalid  Code = "E_MANIFEST_INVALID"  // arguments fail the tool's schema, or a bad announce
	SafetyDenied     Code = "E_SAFETY_DENIED"     // token, scope, tenant or safety class
	NodeOffline      Code = "E_NODE_OFFLINE"      // an own node without a ready link
	DeadlineExceeded Code = "E_DEADLINE_EXCEEDED" // 5 s at the gateway or 2 s at the handler
	RateLimited      Code = "E_RATE_LIMITED"      // rate, concurrency, queue or quota
	Internal         Code = "E_INTERNAL"          // a bug here or a device that answered wrongly
)

// Codes lists the closed set.
var Codes = []Code{BadRequest, ManifestInvalid, SafetyDenied, NodeOffline, DeadlineExceeded, RateLimited, Internal}

// Valid reports whether c is one of the seven codes.
func (c Code) Valid() bool { return slices.Contains(Codes, c) }

// Retryable reports whether the same request may succeed later without a change, as far as
// the code alone says it. A deadline is not: the device may have done the work.
func (c Code) Retryable() bool { return c == NodeOffline || c == RateLimited || c == Internal }

// Error is the answer to a caller whose request failed. Message is printable ASCII written
// by this product: nothing that a device sent is ever part of it (RFC-0005 §8), since an
// agent would read it as instructions.
type Error struct {
	Code         Code
	Message      string
	RetryAfterMS int64   // if > 0, the earliest useful retry
	Reason       string  // short word for the audit log; PublicReason says whether the caller gets it
	ShowReason   bool    // the caller gets a Reason that its code does not show otherwise: enrollment, administration
	NoRetry      bool    // a repeat cannot help, whatever the code says: damaged or read-only storage
	Repeat       bool    // the caller may repeat the request, whatever the code says: enrollment only
	Outcome      Outcome // "" where the question does not arise
	ReadOnly     bool    // the tool changes nothing, so that a retry after OutcomeUnknown is safe
}

// Outcome says whether a board may have run a call that ended with an error. The set is closed.
type Outcome string

// The outcomes. Without one, the code alone says whether a retry makes sense.
const (
	NotSent        Outcome = "not_sent" // the board cannot have run it
	OutcomeUnknown Outcome = "unknown"  // it was written to the link and may have run
)

// Retryable reports whether the caller may send the same request again: yes if it cannot have
// run, only for a read-only tool if it may have run, and as the code says otherwise.
func (e *Error) Retryable() bool {
	if e.NoRetry {
		return false
	}
	switch e.Outcome {
	case NotSent:
		return e.Code.Retryable() || e.Code == DeadlineExceeded
	case OutcomeUnknown:
		return e.ReadOnly
	}
	return e.Code.Retryable() || e.Repeat
}

// publicReasons are the reasons that callers get, by code (docs/protocol.md, "Errors"). The
// list is short because every word in it is a promise. The codes for what a caller did wrong
// have none: their messages say it, and the reason of a denial would let somebody who tries
// tokens or node ids distinguish one refusal from another.
var publicReasons = map[Code][]string{
	NodeOffline:      {"offline", "suspect", "in_doubt", "stream_end", "stopping"},
	DeadlineExceeded: {"gateway_deadline", "device", "expired", "cancelled"},
	RateLimited:      {"rate", "concurrency", "queue", "streams", "device", "share", "storage"},
	Internal:         {"bad_result", "device", "breaker", "plugin_down", "plugin_died", "storage"},
}

// PublicReason is the reason that the caller gets, a short stable word; "" for none.
func (e *Error) PublicReason() string {
	if e.ShowReason || slices.Contains(publicReasons[e.Code], e.Reason) {
		return e.Reason
	}
	return ""
}

// Error is the code and the message, as the log shows them. Reason is left out: it is a field
// of the audit log.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// E makes an Error. There is no Errorf on purpose: a message is a constant, or is built from
// checked words.
func E(c Code, message string) *Error { return &Error{Code: c, Message: message} }

// AsError returns err as an *Error. Any other error becomes E_INTERNAL with a neutral
// message, so that nothing internal leaks.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: Internal, Message: "the relay failed to answer this call", Reason: "internal"}
}
