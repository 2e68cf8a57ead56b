package mcp

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"agentctl/manifest"
	"agentctl/transport/edge"
)

// A failure takes one of three forms. Before a message was accepted it is an HTTP status
// with the relay's error envelope (refuse). A message that is not JSON-RPC, or that no
// tool could answer, gets a JSON-RPC error (refuseRPC, rpcError). A tool that fails
// answers with a result that has isError (tenant.renderError).

// Codes of JSON-RPC.
const (
	codeInvalidRequest = -32600
	codeInternal       = -32603
)

// sessionEndedMessage answers requests that were in progress when their session ended.
const sessionEndedMessage = "the session has ended; initialize again"

var (
	// errStopping refuses a request before it was handled; errStopped answers one that was cut, and may
	// have taken effect.
	errStopping = &manifest.Error{Code: manifest.NodeOffline, Message: "the relay is starting or stopping; retry shortly", RetryAfterMS: 1000, Reason: "stopping", Outcome: manifest.NotSent}
	errStopped  = &manifest.Error{Code: manifest.NodeOffline, Message: "the relay stopped during the call", RetryAfterMS: 1000, Reason: "stopping", Outcome: manifest.OutcomeUnknown}
	// errRequestEnded has the code of the SDK's "rejected by transport": the message is
	// lost, the connection is not.
	errRequestEnded = &jsonrpc.Error{Code: -32005, Message: "the request has ended"}
	// errTooManySessions is returned by registerSession when a bound is reached.
	errTooManySessions = errors.New("mcp: too many sessions")
	// errInputUnavailable: a tool wants input that the client has not announced.
	errInputUnavailable = errors.New("mcp: the client cannot provide this input")
	errSessions         = tooMany("too many sessions are open; end some with DELETE or use protocol version "+modernVersion, "sessions", 60_000)
	errTooManyWatches   = &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 10_000, Message: "too many resources are watched; retry later", Reason: "watches"}
	// errNoServerRequests answers Request in the modern era, where a server sends no
	// requests to a client.
	errNoServerRequests = errors.New("mcp: this protocol version takes no requests during a call; return Result.InputRequests instead")
	// errNoMessages answers Notify and Request during a direct call.
	errNoMessages = errors.New("mcp: a call of a board's tool sends nothing to the client but its result")
)

// refuse answers a request before any of its messages was handled, and counts it.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, status int, e *manifest.Error) {
	h.count.refused.Add(1)
	refuse(w, r, status, e)
}

// refuse answers with the error envelope, under the trace id of the request or a new one.
func refuse(w http.ResponseWriter, r *http.Request, status int, e *manifest.Error) {
	trace, _ := edge.TraceID(r)
	edge.WriteError(w, status, e, trace)
}

// tooMany makes an error for a bound that is reached. reason is the word for the audit log
// and metrics, retryAfterMS is sent as Retry-After.
func tooMany(message, reason string, retryAfterMS int64) *manifest.Error {
	return &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: retryAfterMS, Message: message, Reason: reason}
}

// refuseRPC answers a POST that carries no usable message with a JSON-RPC error.
func refuseRPC(w http.ResponseWriter, status int, id []byte, code int64, message string) {
	edge.WriteJSON(w, status, appendRPCError(nil, id, code, message, nil))
}

// appendRPCError appends a whole JSON-RPC error message; a nil id becomes null.
func appendRPCError(b, id []byte, code int64, message string, data json.RawMessage) []byte {
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	if len(id) == 0 {
		id = []byte("null")
	}
	b = append(b, id...)
	b = append(b, `,"error":{"code":`...)
	b = strconv.AppendInt(b, code, 10)
	b = append(b, `,"message":`...)
	b = appendString(b, message)
	if len(data) > 0 {
		b = append(b, `,"data":`...)
		b = append(b, data...)
	}
	return append(b, `}}`...)
}

// methodNotFound is the answer to a method that neither the kernel nor a plugin serves.
func methodNotFound(method string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeMethodNotFound, Message: "no plugin serves " + method}
}

// invalidParams is the answer to params that the protocol does not allow. The message goes to
// the client, so it quotes no argument.
func invalidParams(message string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: message}
}

// resourceNotFound has the code and the data that MCP gives for an unknown resource. A
// resource of another tenant is unknown too.
func resourceNotFound(uri string) error {
	data, _ := json.Marshal(map[string]string{"uri": uri})
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "Resource not found", Data: data}
}

// rpcCodes lie outside the range that JSON-RPC and MCP keep for themselves
// (-32768..-32000). The last three digits are the HTTP status of the same failure.
var rpcCodes = map[manifest.Code]int64{
	manifest.BadRequest:       -31400,
	manifest.SafetyDenied:     -31403,
	manifest.ManifestInvalid:  -31422,
	manifest.RateLimited:      -31429,
	manifest.NodeOffline:      -31503,
	manifest.DeadlineExceeded: -31504,
}

// RPCCode returns the JSON-RPC error code of a failure that cannot be a tool's result,
// such as that of reading a resource of a board that is offline.
func RPCCode(c manifest.Code) int64 {
	if code, ok := rpcCodes[c]; ok {
		return code
	}
	return -31500
}

// stoppedError is errStopped as a JSON-RPC error.
func stoppedError() (code int64, message string, data json.RawMessage) {
	return RPCCode(errStopped.Code), string(errStopped.Code) + ": " + errStopped.Message, edge.AppendError(nil, errStopped, manifest.NewTraceID())
}

// rpcError makes a JSON-RPC error whose data is the relay's error envelope.
func rpcError(e *manifest.Error, trace string) error {
	return &jsonrpc.Error{Code: RPCCode(e.Code), Message: string(e.Code) + ": " + e.Message, Data: edge.AppendError(nil, e, trace)}
}
