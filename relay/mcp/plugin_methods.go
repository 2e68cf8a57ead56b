package mcp

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// servePluginMethod answers a method that the kernel does not know from the plugin that
// serves it. Params and result pass as JSON. The kernel bounds the time. hasParams is false for
// a request without params, which the plugin sees as an empty object.
func servePluginMethod[P sdk.Params](ctx context.Context, t *tenant, x *exchange, method string, req *sdk.ServerRequest[P], hasParams bool) (sdk.Result, error) {
	plugin, ok := t.h.opts.Kernel.MethodHandler(x.caller, x.sessionID(), method)
	if !ok {
		if method == "resources/templates/list" { // resources are always offered, if only an empty list
			b := &objectBuilder{}
			b.raw("resourceTemplates", []byte("[]"))
			return t.finishResult(b, x, resultComplete, listTTLMS, nil), nil
		}
		return nil, methodNotFound(method)
	}
	ctx, cancel := x.join(ctx)
	defer cancel()
	params := json.RawMessage("{}")
	if hasParams {
		var err error
		if params, err = json.Marshal(req.Params); err != nil {
			return nil, invalidParams("params are malformed")
		}
	}
	data, err := plugin.HandleMethod(ctx, x.caller, &client{x: x, req: req, ctx: ctx}, method, params)
	if err != nil {
		return nil, methodError(req, err)
	}
	return t.wrapResult(x, method, data)
}

// methodError translates a plugin's error. A plugin may return a JSON-RPC error.
func methodError(req sdk.Request, err error) error {
	if f, ok := errors.AsType[*kernel.RPCError](err); ok {
		return &jsonrpc.Error{Code: f.Code, Message: f.Message, Data: f.Data}
	}
	if r, ok := req.GetParams().(*sdk.ReadResourceParams); ok && errors.Is(err, kernel.ErrNoResource) {
		return resourceNotFound(r.URI)
	}
	return rpcError(manifest.AsError(err), manifest.NewTraceID())
}

// wrapResult adds the members that the era requires and the plugin left out: the
// result type, the cache fields and _meta. Members that the relay decides (how long a
// client may cache) are dropped from the plugin's answer; all others pass as bytes. An
// answer that is not complete, because the plugin wants input, is not cached.
func (t *tenant) wrapResult(x *exchange, method string, data []byte) (sdk.Result, error) {
	if data = strictjson.SkipSpace(data); !json.Valid(data) || data[0] != '{' {
		return nil, rpcError(manifest.E(manifest.Internal, "a plugin answered with no JSON object"), manifest.NewTraceID())
	}
	resultType, cacheMS := resultComplete, int64(-1)
	switch method {
	case "prompts/list", "resources/templates/list", "resources/read":
		cacheMS = listTTLMS
	}
	b := newObject(len(data) + 256)
	var meta []byte
	for name, v := range strictjson.Object(data).Members {
		switch key := string(name); {
		case key == "_meta":
			meta = v
		case x.modern && key == "resultType":
			resultType = stringValue(v)
		case x.modern && (key == "ttlMs" || key == "cacheScope"): // ours to say
		default:
			k, _ := json.Marshal(key)
			b.raw(string(k[1:len(k)-1]), v)
		}
	}
	if resultType != resultComplete {
		cacheMS = -1
	}
	return t.finishResult(b, x, resultType, cacheMS, meta), nil
}
