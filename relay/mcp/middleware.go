package mcp

import (
	"context"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
)

// middleware answers tools, resources, prompts and subscriptions from the kernel and its
// plugins. Handshake, ping, log level and notifications go on to the SDK. The SDK has decoded
// the params into its structs by then, and takes any sdk.Result, so results stay bytes.
//
// It finds its caller in the message (exchangeOf). A message whose exchange belongs to
// another tenant is refused: the server that received it belongs to one tenant.
func (t *tenant) middleware(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (res sdk.Result, err error) {
		x := exchangeOf(req)
		if x == nil || x.tenant != t {
			return nil, &jsonrpc.Error{Code: codeInternal, Message: "the request has no caller"}
		}
		// The SDK runs handlers in its goroutines, where a panic ends the process.
		defer t.recoverPanic(method, &err)
		if x.call != nil && x.call.hasParams { // the mux has kept _meta back
			if meta := x.call.extraMeta(); meta != nil {
				req.GetParams().SetMeta(meta)
			}
		}
		switch r := req.(type) {
		case *sdk.CallToolRequest:
			ctx, cancel := x.join(ctx)
			defer cancel()
			if x.call != nil && x.call.hasLargeArguments() {
				r.Params.Arguments = x.call.arguments
			}
			name, tool := t.resolveTool(x.caller, r.Params.Name)
			return t.callTool(ctx, x, &client{x: x, req: r, ctx: ctx}, r.Params, name, tool)
		case *sdk.ListToolsRequest:
			if r.Params == nil {
				return t.listTools(x, "")
			}
			return t.listTools(x, r.Params.Cursor)
		case *sdk.ListResourcesRequest:
			if r.Params == nil {
				return t.listResources(x, "")
			}
			return t.listResources(x, r.Params.Cursor)
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
				d.Instructions = x.spellInstructions(d.Instructions)
			}
			return res, err
		case "logging/setLevel":
			if !t.isServed(x, method) {
				return nil, methodNotFound(method)
			}
		}
		return next(ctx, method, req)
	}
}

// exchangeOf returns the exchange that bindSDK, or requestMux.serve, has attached to a
// message; nil for a message that came another way, which is refused.
func exchangeOf(req sdk.Request) *exchange {
	extra := req.GetExtra()
	if extra == nil || extra.TokenInfo == nil {
		return nil
	}
	x, _ := extra.TokenInfo.Extra[exchangeExtraKey].(*exchange)
	return x
}

// initialize registers the session before the client learns its id, so that the next
// request finds it. When the SDK refuses the handshake the registration is taken back.
func (t *tenant) initialize(ctx context.Context, x *exchange, req sdk.Request, next sdk.MethodHandler) (sdk.Result, error) {
	ss, ok := req.GetSession().(*sdk.ServerSession)
	if !ok {
		return nil, methodNotFound("initialize")
	}
	if x.session != nil { // registering it again would lose what the session holds
		return nil, &jsonrpc.Error{Code: codeInvalidRequest, Message: "this session is initialized; send initialize without an Mcp-Session-Id to open another"}
	}
	p, ok := req.GetParams().(*sdk.InitializeParams)
	if !ok || p == nil {
		return nil, invalidParams("initialize needs params")
	}
	s, err := t.h.registerSession(ss, x, p)
	if err != nil {
		return nil, rpcError(&manifest.Error{Code: manifest.RateLimited, Message: "too many sessions are open; retry later"}, manifest.NewTraceID())
	}
	res, err := next(ctx, "initialize", req)
	if err != nil {
		t.h.unregisterSession(s)
		return nil, err
	}
	x.opened = s
	if r, ok := res.(*sdk.InitializeResult); ok {
		t.removeUnserved(x, r.Capabilities)
		r.Instructions = x.spellInstructions(r.Instructions)
	}
	return res, nil
}

// isServed reports whether a loaded plugin serves a method that the kernel does not know.
func (t *tenant) isServed(x *exchange, method string) bool {
	_, ok := t.h.opts.Kernel.MethodHandler(x.caller, x.sessionID(), method)
	return ok
}

// removeUnserved removes the capabilities that no loaded plugin has. The SDK made the
// struct for this one answer.
func (t *tenant) removeUnserved(x *exchange, c *sdk.ServerCapabilities) {
	if !t.isServed(x, "prompts/list") {
		c.Prompts = nil
	}
	if !t.isServed(x, "completion/complete") {
		c.Completions = nil
	}
	if !t.isServed(x, "logging/setLevel") {
		//lint:ignore SA1019 logging belongs to the versions with sessions
		c.Logging = nil
	}
}
