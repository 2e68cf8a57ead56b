package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// servePost reads, checks and routes one POST.
func (h *Handler) servePost(w http.ResponseWriter, r *http.Request, x *exchange) {
	if !edge.IsJSON(r.Header.Get("Content-Type")) {
		h.refuse(w, r, http.StatusBadRequest, manifest.BadRequest, "the Content-Type must be application/json")
		return
	}
	body, err := edge.ReadBody(w, r, h.opts.MaxBody)
	if err != nil {
		var big *http.MaxBytesError
		if errors.As(err, &big) {
			h.refuse(w, r, http.StatusRequestEntityTooLarge, manifest.BadRequest, "the request body is too large")
			return
		}
		h.refuse(w, r, http.StatusBadRequest, manifest.BadRequest, "the request body ended early")
		return
	}
	msgs, batch, err := scanBody(body)
	if err != nil {
		h.count.refused.Add(1)
		code, id := int64(jsonrpc.CodeParseError), []byte(nil)
		if errors.As(err, new(shapeError)) {
			code = codeInvalidRequest
			if !batch && len(msgs) == 1 {
				id = msgs[0].id
			}
		}
		refuseRPC(w, http.StatusBadRequest, id, code, err.Error())
		return
	}
	if !accepts(r.Header, "application/json") || !accepts(r.Header, "text/event-stream") {
		h.refuse(w, r, http.StatusBadRequest, manifest.BadRequest, "the Accept header must name application/json and text/event-stream")
		return
	}
	modern := r.Header.Get(headerVersion) >= modernVersion
	for i := range msgs {
		modern = modern || msgs[i].version >= modernVersion
		if msgs[i].method == "tools/list" && !mayListTools(x.caller) {
			h.opts.Kernel.Audit(kernel.Record{Tenant: x.caller.Tenant, Actor: x.caller.Actor, Decision: kernel.Denied,
				Code: manifest.SafetyDenied, Reason: "scope", TraceID: manifest.NewTraceID()})
			h.refuse(w, r, http.StatusForbidden, manifest.SafetyDenied, "the token lacks tools:list and every tools:call scope")
			return
		}
	}
	x.modern = modern
	plain := modern && !batch && isPlainRequest(r, &msgs[0])
	for i := range msgs {
		if !plain && !msgs[i].idRoundTrips() {
			h.count.refused.Add(1)
			refuseRPC(w, http.StatusBadRequest, nil, codeInvalidRequest, errID.Error())
			return
		}
	}
	if !batch {
		x.id = msgs[0].id
	}
	if !modern {
		h.serveSessionPost(w, r, x, msgs, batch, body)
		return
	}
	h.count.modern.Add(1)
	switch {
	case plain:
		x.tenant.mux.serve(w, x, &msgs[0])
	case !batch && msgs[0].method == "subscriptions/listen":
		h.stream(w, r, x, func(w http.ResponseWriter) { serveSDK(h.modern, w, r, x, body) })
	default:
		serveSDK(h.modern, w, r, x, body)
	}
}

// accepts tells whether Accept names a type, by itself or by a wildcard. Weights are not
// looked at, as the SDK does not.
func accepts(h http.Header, typ string) bool {
	group, _, _ := strings.Cut(typ, "/")
	for _, v := range h["Accept"] {
		for v != "" {
			var one string
			one, v, _ = strings.Cut(v, ",")
			one, _, _ = strings.Cut(one, ";")
			if one = strings.ToLower(strings.TrimSpace(one)); one == typ || one == "*/*" || one == group+"/*" {
				return true
			}
		}
	}
	return false
}

// mayListTools tells whether a token may ask for the list at all; the list then shows only
// what it may call.
func mayListTools(c *kernel.Caller) bool {
	return c.Has(manifest.ScopeToolsList) || c.Has(manifest.ScopeForClass(manifest.ReadOnly)) ||
		c.Has(manifest.ScopeForClass(manifest.Mutating)) || c.Has(manifest.ScopeForClass(manifest.Destructive))
}

// middleware answers every method from the kernel. What it passes on is the protocol's
// own business: handshake, ping, log level, notifications.
func (t *tenant) middleware(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (res sdk.Result, err error) {
		x := exchangeOf(req)
		if x == nil || x.tenant != t {
			return nil, &jsonrpc.Error{Code: codeInternal, Message: "the request has no caller"}
		}
		// The SDK runs handlers in goroutines of its own, where a panic ends the process.
		defer func() {
			if p := recover(); p != nil {
				t.h.count.panics.Add(1)
				t.h.log.Error("mcp handler panicked", zap.String("method", method), zap.String("type", fmt.Sprintf("%T", p)), zap.Stack("stack"))
				res, err = nil, &jsonrpc.Error{Code: codeInternal, Message: "the relay failed to answer this request"}
			}
		}()
		if x.call != nil && x.call.hasParams { // the mux has kept _meta back
			if meta := x.call.extraMeta(); meta != nil {
				req.GetParams().SetMeta(meta)
			}
		}
		switch r := req.(type) {
		case *sdk.CallToolRequest:
			return t.callTool(ctx, x, r)
		case *sdk.ListToolsRequest:
			return t.listTools(x, r)
		case *sdk.ListResourcesRequest:
			return t.listResources(x, r)
		case *sdk.ReadResourceRequest:
			return t.readResource(ctx, x, r)
		case *sdk.SubscribeRequest:
			return t.subscribe(x, r.Params.URI)
		case *sdk.UnsubscribeRequest:
			return t.unsubscribe(x, r.Params.URI)
		case *sdk.SubscriptionsListenRequest:
			return t.serveListen(ctx, x, r)
		case *sdk.ListPromptsRequest:
			return servePluginMethod(ctx, t, x, method, r, r.Params != nil)
		case *sdk.GetPromptRequest:
			return servePluginMethod(ctx, t, x, method, r, true)
		case *sdk.CompleteRequest:
			return servePluginMethod(ctx, t, x, method, r, true)
		case *sdk.ListResourceTemplatesRequest:
			return servePluginMethod(ctx, t, x, method, r, r.Params != nil)
		}
		switch method {
		case "initialize":
			return t.initialize(ctx, x, req, next)
		case "server/discover":
			res, err := next(ctx, method, req)
			if d, ok := res.(*sdk.DiscoverResult); ok {
				t.removeUnserved(x, d.Capabilities)
			}
			return res, err
		case "logging/setLevel":
			if _, ok := t.h.opts.Kernel.MethodHandler(x.caller, method); !ok {
				return nil, methodNotFound(method)
			}
		}
		return next(ctx, method, req)
	}
}

func exchangeOf(req sdk.Request) *exchange {
	extra := req.GetExtra()
	if extra == nil || extra.TokenInfo == nil {
		return nil
	}
	x, _ := extra.TokenInfo.Extra[exchangeExtraKey].(*exchange)
	return x
}

func (t *tenant) initialize(ctx context.Context, x *exchange, req sdk.Request, next sdk.MethodHandler) (sdk.Result, error) {
	ss, ok := req.GetSession().(*sdk.ServerSession)
	if !ok {
		return nil, methodNotFound("initialize")
	}
	if x.session != nil { // admitting it again would lose what the session holds
		return nil, &jsonrpc.Error{Code: codeInvalidRequest, Message: "this session is initialized; send initialize without an Mcp-Session-Id to open another"}
	}
	s, err := t.h.registerSession(ss, x)
	if err != nil {
		return nil, rpcError(&manifest.Error{Code: manifest.RateLimited, Message: "too many sessions are open; retry later"}, manifest.NewTraceID())
	}
	res, err := next(ctx, "initialize", req)
	if err != nil {
		t.h.unregisterSession(s)
		return nil, err
	}
	if r, ok := res.(*sdk.InitializeResult); ok {
		t.removeUnserved(x, r.Capabilities)
	}
	return res, nil
}

// removeUnserved takes the capabilities away that no loaded plugin has. The SDK made the struct
// for this one answer.
func (t *tenant) removeUnserved(x *exchange, c *sdk.ServerCapabilities) {
	has := func(method string) bool { _, ok := t.h.opts.Kernel.MethodHandler(x.caller, method); return ok }
	if !has("prompts/list") {
		c.Prompts = nil
	}
	if !has("completion/complete") {
		c.Completions = nil
	}
	if !has("logging/setLevel") {
		//lint:ignore SA1019 logging belongs to the versions with sessions
		c.Logging = nil
	}
}

func methodNotFound(method string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeMethodNotFound, Message: "no plugin serves " + method}
}

func invalidParams(message string) error {
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: message}
}

// RPCCode is the JSON-RPC error code of a failure that cannot be told as a tool's
// result, such as a resource of a board that is offline. None of them lies in the range
// that JSON-RPC and MCP keep for themselves (-32768..-32000).
func RPCCode(c manifest.Code) int64 {
	switch c {
	case manifest.BadRequest:
		return -31400
	case manifest.SafetyDenied:
		return -31403
	case manifest.ManifestInvalid:
		return -31422
	case manifest.RateLimited:
		return -31429
	case manifest.NodeOffline:
		return -31503
	case manifest.DeadlineExceeded:
		return -31504
	}
	return -31500
}

// rpcError carries the envelope of the failure as its data.
func rpcError(e *manifest.Error, trace string) error {
	return &jsonrpc.Error{Code: RPCCode(e.Code), Message: string(e.Code) + ": " + e.Message, Data: edge.AppendError(nil, e, trace)}
}

// rawJSON is JSON that is encoded as it stands.
type rawJSON []byte

func (r rawJSON) MarshalJSON() ([]byte, error) { return r, nil }

// result is an SDK result made of bytes: schemas and device answers pass without being
// decoded. It embeds the SDK's ResultBase for the marker method only.
type result struct {
	sdk.ResultBase
	body []byte
}

func (r *result) MarshalJSON() ([]byte, error) { return r.body, nil }

// serverInfoSet makes the SDK believe that the server's name is in _meta already, because
// the builder below has written it.
var serverInfoSet = map[string]any{sdk.MetaKeyServerInfo: true}

func (r *result) GetMeta() map[string]any { return serverInfoSet }

// objectBuilder appends a result object. The modern era wants a result type and the server's
// name in every one.
type objectBuilder struct {
	b       []byte
	members int // members
}

func (b *objectBuilder) key(k string) {
	c := byte(',')
	if b.members == 0 {
		c = '{'
	}
	b.members++
	b.b = append(b.b, c, '"')
	b.b = append(b.b, k...)
	b.b = append(b.b, '"', ':')
}

func (b *objectBuilder) raw(k string, v []byte) { b.key(k); b.b = append(b.b, v...) }

func (b *objectBuilder) str(k, v string) { b.key(k); b.b = appendString(b.b, v) }

// finishResult ends the object. kind is the modern result type; ttl < 0 means no cache fields.
// meta, if any, is a JSON object with the plugin's own _meta.
func (t *tenant) finishResult(b *objectBuilder, x *exchange, kind string, ttl int64, meta []byte) *result {
	if x.modern {
		b.key("resultType")
		b.b = append(append(append(b.b, '"'), kind...), '"')
		if ttl >= 0 {
			b.key("ttlMs")
			b.b = strconv.AppendInt(b.b, ttl, 10)
			b.raw("cacheScope", []byte(`"private"`))
		}
		if len(meta) == 0 {
			meta = t.h.serverMeta
		}
	}
	if len(meta) > 0 {
		b.raw("_meta", meta)
	}
	if b.members == 0 {
		b.b = append(b.b, '{')
	}
	b.b = append(b.b, '}')
	return &result{body: b.b}
}

func serverMeta(i *sdk.Implementation) []byte {
	data, _ := json.Marshal(map[string]any{sdk.MetaKeyServerInfo: i}) // strings only
	return data
}
