package kernel

import (
	"context"
	"encoding/json"

	"agentctl/manifest"
)

// Scopes tells which scopes a caller holds.
type Scopes interface{ Has(scope string) bool }

// Caller is who asks. It is made by the door that checked the token and is read-only
// from then on; the tenant comes from the token only.
type Caller struct {
	Tenant    string
	Actor     string // token subject
	JTI       string
	Transport string // "http", "mcp", "stdio", "inproc"
	Scopes    Scopes
	// Active tells whether the identity is still good (not expired, not revoked); nil
	// means that it cannot end. Long streams ask once a second.
	Active func() error
}

// Has reports whether the caller holds the scope; a caller without scopes holds none.
func (c *Caller) Has(scope string) bool {
	return c != nil && c.Scopes != nil && c.Scopes.Has(scope)
}

// Request is one tool call on the bus.
type Request struct {
	Caller    *Caller
	Tool      string          // canonical or flat spelling
	Arguments json.RawMessage // a strict JSON object; nil means {}
	TraceID   string          // 32 hex digits; the kernel makes one when empty
	Traced    bool            // the caller sent the trace id (traceparent), so it goes on to the device
	Stream    bool            // the caller takes a stream
	Session   Session         // the client's side of the conversation; may be nil

	// InputResponses and RequestState answer an earlier Result that asked for input (MCP
	// multi round trip, SEP-2322): a JSON object by input name, and the state as it was
	// given. Both come from the client and are to be trusted as little as Arguments.
	InputResponses json.RawMessage
	RequestState   string

	tool   *Tool
	plugin *loaded
}

// Target is the tool that the request was resolved to; nil before that.
func (r *Request) Target() *Tool { return r.tool }

// Session is what a plugin may ask of the client during a call: progress, log messages
// and requests from server to client, as MCP knows them. Params and results are JSON.
type Session interface {
	Notify(ctx context.Context, method string, params json.RawMessage) error
	Ask(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error)
	ProgressToken() any // nil when the caller asked for no progress
	// Capabilities is what the client said that it can do, as MCP's ClientCapabilities
	// object; nil when it said nothing.
	Capabilities() json.RawMessage
}

// Result is the answer to a call: Structured for tools with an output schema, Content
// for MCP content blocks, Stream for a call that opened one.
type Result struct {
	Structured json.RawMessage
	Content    []json.RawMessage
	IsError    bool // the tool ran and reports a failure of its own
	Stream     Stream
	// Meta, when set, goes into the result's _meta.
	Meta json.RawMessage
	// InputRequests, when set, asks the client for input instead of answering: a JSON
	// object {name: {"method", "params"}}. The call is repeated with Request.InputResponses
	// and RequestState, which the plugin has to protect if it relies on it.
	InputRequests json.RawMessage
	RequestState  string
	// Fault, when set, is the answer of a plugin that speaks MCP itself.
	Fault *Fault
}

// Fault is a JSON-RPC error of the MCP protocol (not one of ours: those are
// *manifest.Error and never use the codes -32768..-32000). A Methods plugin may return
// it as its error, a tool puts it into Result.Fault.
type Fault struct {
	Code    int64
	Message string
	Data    json.RawMessage
}

func (f *Fault) Error() string { return f.Message }

// Frame is one element of a stream. Data is the JSON of the frame; Event is the same
// frame as a whole SSE event, encoded once for all readers. Both are shared: read only.
// (An alias of a plain struct, so that the hub, which may not import this room, makes
// the same type.)
type Frame = struct {
	Data  []byte
	Event []byte
}

// Stream is an open stream of frames, read by one goroutine.
type Stream interface {
	// Ready is signalled when Next has something new or the stream has ended.
	Ready() <-chan struct{}
	// Next takes the next frame; ok is false when there is none now.
	Next() (f *Frame, ok bool)
	// Err is nil while the stream lives; afterwards it tells why it ended.
	Err() error
	// Close gives the stream up. It may be called more than once.
	Close()
}

// Decision is the word that an audit line carries.
type Decision string

// Decisions.
const (
	Allowed Decision = "allow" // served
	Denied  Decision = "deny"  // refused before dispatch
	Failed  Decision = "fail"  // dispatched and failed
	Closed  Decision = "close" // a stream ended
)

// Record is one audit line (RFC-0005 §12): never arguments, never results.
type Record struct {
	Tenant   string
	Actor    string
	Tool     string // only names that passed the name syntax
	NodeID   string
	Decision Decision
	Code     manifest.Code
	Reason   string // short word: scope, schema, rate, late_ack, close code ...
	TraceID  string
}
