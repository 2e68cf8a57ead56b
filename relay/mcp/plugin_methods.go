package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// servePluginMethod answers a method that the kernel does not know from the plugin that
// serves it. Params and result pass as JSON. The kernel bounds the time. hasParams is false for
// a request without params, which the plugin sees as an empty object.
func servePluginMethod[P sdk.Params](ctx context.Context, t *tenant, x *exchange, method string, req *sdk.ServerRequest[P], hasParams bool) (sdk.Result, error) {
	plugins := t.h.opts.Kernel.MethodHandlers(x.caller, x.sessionID(), method)
	if len(plugins) == 0 {
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
	session := &client{x: x, req: req, ctx: ctx}
	if list, isList := pluginLists[method]; isList && len(plugins) > 1 {
		return t.mergeLists(ctx, x, plugins, session, method, list, params)
	}
	// A plugin whose prompt or resource it is not answers ErrNoResource.
	var data json.RawMessage
	err := kernel.ErrNoResource
	for i := 0; i < len(plugins) && errors.Is(err, kernel.ErrNoResource); i++ {
		data, err = plugins[i].HandleMethod(ctx, x.caller, session, method, params)
	}
	if err != nil {
		return nil, methodError(req, err)
	}
	return t.wrapResult(x, method, data)
}

// pluginList describes the result of a method that lists what plugins have.
type pluginList struct{ member, key string }

var pluginLists = map[string]pluginList{
	"prompts/list":             {"prompts", "name"},
	"resources/templates/list": {"resourceTemplates", "uriTemplate"},
}

// mergeLists answers a list method from several plugins: one list in the order of the keys, in pages.
// A plugin that fails is left out, so that it takes the list of the others from nobody.
func (t *tenant) mergeLists(ctx context.Context, x *exchange, plugins []kernel.MethodHandler, s kernel.Session, method string, list pluginList, params json.RawMessage) (sdk.Result, error) {
	var query struct {
		Cursor string `json:"cursor"`
	}
	err := json.Unmarshal(params, &query)
	after, ok := parseCursor(query.Cursor)
	if err != nil || !ok {
		return nil, invalidParams("the cursor is not one of this server's; list from the start")
	}
	type entry struct {
		key string
		raw json.RawMessage
	}
	var all []entry
	for _, p := range plugins {
		data, err := p.HandleMethod(ctx, x.caller, s, method, json.RawMessage("{}"))
		if err != nil {
			t.h.log.Debug("a plugin did not answer a list method", zap.String("method", method), zap.Error(err))
			continue
		}
		var page map[string]json.RawMessage
		var items []json.RawMessage
		if json.Unmarshal(data, &page) != nil || json.Unmarshal(page[list.member], &items) != nil {
			continue
		}
		for _, raw := range items {
			var item map[string]json.RawMessage
			var key string
			if json.Unmarshal(raw, &item) == nil && json.Unmarshal(item[list.key], &key) == nil && key > after {
				all = append(all, entry{key, raw})
			}
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.key, b.key) })
	page := all[:min(len(all), pageSize)]
	b := newObject(512 + 256*len(page))
	b.key(list.member)
	b.b = append(b.b, '[')
	for i, e := range page {
		if i > 0 {
			b.b = append(b.b, ',')
		}
		b.b = append(b.b, e.raw...)
	}
	b.b = append(b.b, ']')
	if len(page) < len(all) {
		b.str("nextCursor", makeCursor(page[len(page)-1].key))
	}
	return t.finishResult(b, x, resultComplete, listTTLMS, nil), nil
}

// methodError translates a plugin's error. A plugin may return a JSON-RPC error.
func methodError(req sdk.Request, err error) error {
	if f, ok := errors.AsType[*kernel.RPCError](err); ok {
		return &jsonrpc.Error{Code: f.Code, Message: f.Message, Data: f.Data}
	}
	if r, ok := req.GetParams().(*sdk.ReadResourceParams); ok && errors.Is(err, kernel.ErrNoResource) {
		return resourceNotFound(r.URI)
	}
	if errors.Is(err, kernel.ErrNoResource) {
		return invalidParams("no plugin has what this request names; list first")
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
