package kernel

import (
	"context"
	"encoding/json"
	"net/netip"
	"strings"

	"agentctl/manifest"
)

// Scopes are the permissions of a token.
type Scopes interface{ Has(scope string) bool }

// topicLimit is what Scopes implement that may be limited to topics of events.
type topicLimit interface{ HasTopic(topic string) bool }

// Caller is the authenticated identity that makes a request. The endpoint that checked the
// token makes it, with the tenant of the token, and nobody changes it afterwards.
type Caller struct {
	Tenant    string
	Actor     string     // token subject
	JTI       string     // token id
	Address   netip.Addr // of its client, for the audit log; invalid: unknown
	Transport string     // "http", "mcp", "stdio", "inproc"
	Scopes    Scopes
	// Via is the plugin that makes the request on behalf of Actor while it serves a call of Actor's,
	// as an identity: "plugin:NAME". Empty: Actor makes it.
	Via string
	// Depth counts the plugins between the outermost caller and this request, at most MaxDepth.
	Depth int
	// Active returns why the identity is no longer valid (expired, revoked), or nil. A nil
	// function means that it cannot end. Long streams call it once a second.
	Active func() error
}

// MaxDepth bounds a chain of plugins that call each other, so that a loop ends.
const MaxDepth = 4

// PluginActor is the prefix of the identity of a plugin, "plugin:NAME".
const PluginActor = "plugin:"

// IsPlugin reports whether a plugin makes the request, for itself or for the caller that it serves.
func (c *Caller) IsPlugin() bool { return c.Via != "" || strings.HasPrefix(c.Actor, PluginActor) }

// Has reports whether the caller holds the scope; a caller without scopes holds none.
func (c *Caller) Has(scope string) bool {
	return c != nil && c.Scopes != nil && c.Scopes.Has(scope)
}

// HasTopic reports whether the caller's scopes for events extend to a topic; whether it has such
// scopes is for Has. Scopes that know no limit extend to all topics.
func (c *Caller) HasTopic(topic string) bool {
	limit, ok := c.Scopes.(topicLimit)
	return !ok || limit.HasTopic(topic)
}

// Methods of a Request.
const (
	MethodCall = "tools/call"
	MethodRead = "resources/read"
)

// Request is a tool call, or the reading of a resource.
type Request struct {
	Caller  *Caller
	Method  string // MethodCall when empty, or MethodRead
	Tool    string // of a call: canonical or flat spelling
	URI     string // of a read
	ConnID  string // the connection or session that it came by, as the endpoint names it
	TraceID string // 32 hex digits; the kernel makes one when empty
	// Arguments are a strict JSON object; nil means {}.
	Arguments json.RawMessage
	// Traced says that the caller sent the trace id (traceparent), so that it goes on to
	// the device.
	Traced  bool
	Stream  bool    // the caller accepts a stream
	Session Session // the client's side of the conversation; may be nil
	// MarkUntrusted makes invisible characters visible in answers of plugins with
	// Manifest.Untrusted, and adds MetaUntrusted to their Meta: a model will read them.
	MarkUntrusted bool
	// Inner says that a plugin makes the request for its own caller: the answer goes to the plugin and
	// not to a client, so that no stage packs or signs it. All checks apply.
	Inner bool

	// InputResponses and RequestState answer an earlier Result that asked for input (MCP
	// multi round trip, SEP-2322): a JSON object by input name, and the state as it was
	// given. Both come from the client and are as untrusted as Arguments.
	InputResponses json.RawMessage
	RequestState   string

	// Meta is the request's _meta as the client sent it, a JSON object; nil when there is
	// none. It is as untrusted as Arguments.
	Meta json.RawMessage

	// What the request was resolved to. plugin and scope are set before the stages run,
	// tool and resource by dispatch, when the caller may know of them.
	tool       *Tool
	resource   *Resource
	plugin     *loaded // nil: nothing that the caller can see
	scope      string
	dispatched bool // the plugin was called
}

// Target is the tool that the request was resolved to; nil before that.
func (r *Request) Target() *Tool { return r.tool }

// Plugin is the name of the plugin that the request goes to, known before the stages
// run; "" when it goes to none that the caller may see.
func (r *Request) Plugin() string {
	if r.plugin == nil {
		return ""
	}
	return r.plugin.manifest.Name
}

// RequiredScope is the scope that the request's tool or resource needs, known before the
// stages run; "" when it goes to nothing that the caller may see.
func (r *Request) RequiredScope() string { return r.scope }

// Session sends to the client during a call: progress, log messages and requests from
// server to client, as MCP defines them. Params and results are JSON.
type Session interface {
	Notify(ctx context.Context, method string, params json.RawMessage) error
	Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error)
	// ProgressToken returns the token of the call; nil when the caller wants no progress.
	ProgressToken() any
	// Capabilities returns the client's ClientCapabilities object of MCP; nil when it sent
	// none.
	Capabilities() json.RawMessage
}

// Result is the answer to a call: Structured for tools with an output schema, Content
// for MCP content blocks, Stream for a call that opened one. A plugin may return one
// Result to several callers, so nobody changes it in place.
type Result struct {
	Structured json.RawMessage
	Content    []json.RawMessage
	IsError    bool // the tool ran and reports that it failed
	Stream     Stream
	// Resource and Data answer MethodRead.
	Resource *Resource
	Data     []byte
	// Meta, when set, goes into the result's _meta.
	Meta json.RawMessage
	// InputRequests, when set, asks the client for input instead of answering: a JSON
	// object {name: {"method", "params"}}. The call is repeated with Request.InputResponses
	// and RequestState, which the plugin has to protect if it relies on it.
	InputRequests json.RawMessage
	RequestState  string
	// RPCError, when set, is the answer of a plugin that speaks MCP.
	RPCError *RPCError
}

// RPCError is a JSON-RPC error of the MCP protocol (not one of ours: those are
// *manifest.Error and never use the codes -32768..-32000). A MethodHandler plugin may return
// it as its error, a tool puts it into Result.RPCError.
type RPCError struct {
	Code    int64
	Message string
	Data    json.RawMessage
}

func (f *RPCError) Error() string { return f.Message }

// Stream is an open stream of frames, read by one goroutine.
type Stream interface {
	// Notify makes the stream call fn now, and whenever Next may have something new or the
	// stream has ended. fn must be quick and must not call the stream.
	Notify(fn func())
	// Next takes the next frame; ok is false when there is none now.
	Next() (f *manifest.Frame, ok bool)
	// Err is nil while the stream lives; afterwards it says why it ended.
	Err() error
	// Close closes the stream. It may be called more than once.
	Close()
}

// Decision is the outcome of a request as an audit record names it.
type Decision string

// Decisions.
const (
	Allowed Decision = "allow" // served
	Denied  Decision = "deny"  // refused before dispatch
	Failed  Decision = "fail"  // dispatched and failed
	Closed  Decision = "close" // a stream ended
	Begun   Decision = "begin" // an administrative change is about to be made; its outcome follows
)

// Record is one line of the audit log (RFC-0005 §12): never arguments, never results.
type Record struct {
	Tenant  string
	Actor   string
	Address netip.Addr // of the caller's client; invalid: unknown
	// Transport is the caller's, for metrics; the audit log does not have it.
	Transport string
	Tool      string // only names that passed the name syntax
	NodeID    string
	Via       string // the plugin that made the request on behalf of Actor, see Caller.Via
	Target    string // what an administrative change is about: a jti, an invite's prefix, a plugin, a stage
	Decision  Decision
	Code      manifest.Code
	// Reason is a short word: scope, schema, rate, late_ack, a close code.
	Reason  string
	TraceID string
}
