package mcp

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const maxURI = 512

// validURI bounds what becomes a key of a table here.
func validURI(uri string) bool {
	if uri == "" || len(uri) > maxURI {
		return false
	}
	for i := 0; i < len(uri); i++ {
		if uri[i] <= ' ' || uri[i] > '~' {
			return false
		}
	}
	return true
}

func (t *tenant) listResources(x *exchange, req *sdk.ListResourcesRequest) (sdk.Result, error) {
	var cursor string
	if req.Params != nil {
		cursor = req.Params.Cursor
	}
	after, ok := parseCursor(cursor)
	if !ok {
		return nil, invalidParams("the cursor is not one of this server's; list from the start")
	}
	page, more := t.h.opts.Kernel.ListResources(x.caller, after, pageSize)
	b := &objectBuilder{b: make([]byte, 0, 512+256*len(page))}
	b.key("resources")
	b.b = append(b.b, '[')
	for i, r := range page {
		if i > 0 {
			b.b = append(b.b, ',')
		}
		e := objectBuilder{b: b.b}
		e.str("uri", r.URI)
		e.str("name", r.Name)
		for _, f := range [...]struct{ key, value string }{
			{"title", r.Title}, {"description", r.Description}, {"mimeType", r.MIME},
		} {
			if f.value != "" {
				e.str(f.key, f.value)
			}
		}
		b.b = append(e.b, '}')
	}
	b.b = append(b.b, ']')
	if more {
		b.str("nextCursor", makeCursor(page[len(page)-1].URI))
	}
	return t.finishResult(b, x, "complete", listTTL.Milliseconds(), nil), nil
}

// readResource reads a listed resource, or asks a plugin with resource templates.
func (t *tenant) readResource(ctx context.Context, x *exchange, req *sdk.ReadResourceRequest) (sdk.Result, error) {
	uri := req.Params.URI
	if !validURI(uri) {
		return nil, resourceNotFound(uri)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(x.ctx, cancel)()
	kr := &kernel.Request{Method: kernel.MethodRead, Caller: x.caller, URI: uri, ConnID: x.sessionID(), Meta: metaOf(req.Params.Meta), TraceID: x.traceID}
	res, err := t.h.opts.Kernel.Call(ctx, kr)
	switch {
	case errors.Is(err, kernel.ErrNoResource):
		if _, ok := t.h.opts.Kernel.MethodHandler(x.caller, "resources/read"); !ok {
			return nil, resourceNotFound(uri)
		}
		return servePluginMethod(ctx, t, x, "resources/read", req, true)
	case err != nil:
		return nil, rpcError(manifest.AsError(err), kr.TraceID)
	}
	r, data := res.Resource, res.Data
	b := &objectBuilder{b: make([]byte, 0, 256+2*len(data))}
	b.key("contents")
	b.b = append(b.b, '[')
	e := objectBuilder{b: b.b}
	e.str("uri", r.URI)
	if r.MIME != "" {
		e.str("mimeType", r.MIME)
	}
	if isText(r.MIME) && utf8.Valid(data) {
		e.key("text")
		e.b = appendString(e.b, data)
	} else {
		e.key("blob")
		e.b = append(e.b, '"')
		e.b = base64.StdEncoding.AppendEncode(e.b, data)
		e.b = append(e.b, '"')
	}
	b.b = append(e.b, '}', ']')
	ttl := listTTL.Milliseconds()
	if r.Watchable {
		ttl = 0 // its updates are announced; what was read is old at once
	}
	return t.finishResult(b, x, "complete", ttl, res.Meta), nil
}

func isText(mime string) bool {
	mime, _, _ = strings.Cut(mime, ";")
	return mime == "" || strings.HasPrefix(mime, "text/") || mime == "application/json" ||
		strings.HasSuffix(mime, "+json") || mime == "application/xml" || strings.HasSuffix(mime, "+xml")
}

func resourceNotFound(uri string) error {
	data, _ := json.Marshal(map[string]string{"uri": uri})
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "Resource not found", Data: data}
}

var errTooManyWatches = &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 10_000, Message: "too many resources are watched; retry later", Reason: "watches"}

// watchResource starts a kernel watch for a caller, or says why not in the protocol's words.
func (t *tenant) watchResource(x *exchange, uri string) (release func(), err error) {
	if !validURI(uri) {
		return nil, resourceNotFound(uri)
	}
	t.mu.Lock()
	if t.watchCounts[uri] == 0 && len(t.watchCounts) >= maxWatchedPerTenant {
		t.mu.Unlock()
		return nil, rpcError(errTooManyWatches, manifest.NewTraceID())
	}
	t.watchCounts[uri]++
	t.mu.Unlock()
	forget := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.watchCounts[uri]--; t.watchCounts[uri] == 0 {
			delete(t.watchCounts, uri)
		}
	}
	end, err := t.h.opts.Kernel.Watch(x.caller, uri)
	if err == nil {
		return sync.OnceFunc(func() { end(); forget() }), nil
	}
	forget()
	switch {
	case errors.Is(err, kernel.ErrNoResource):
		return nil, resourceNotFound(uri)
	case errors.Is(err, kernel.ErrNotWatchable):
		return nil, invalidParams("this resource does not report changes; read it instead")
	}
	return nil, rpcError(errTooManyWatches, manifest.NewTraceID())
}

// subscribe is resources/subscribe of a session. The session's table holds the watch, so
// its end releases it whatever the client does.
func (t *tenant) subscribe(x *exchange, uri string) (sdk.Result, error) {
	s := x.session
	if s == nil {
		return nil, methodNotFound("resources/subscribe")
	}
	if s.isSubscribed(uri) {
		return emptyResult(), nil
	}
	release, err := t.watchResource(x, uri)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	_, twice := s.subscriptions[uri]
	full := len(s.subscriptions) >= maxWatchedPerStream
	if !s.closed && !twice && !full {
		s.subscriptions[uri] = release
		release = nil
	}
	s.mu.Unlock()
	if release != nil {
		release()
	}
	if full {
		return nil, rpcError(manifest.E(manifest.RateLimited, "this session watches as many resources as it may; unsubscribe from one"), manifest.NewTraceID())
	}
	return emptyResult(), nil
}

func (t *tenant) unsubscribe(x *exchange, uri string) (sdk.Result, error) {
	s := x.session
	if s == nil {
		return nil, methodNotFound("resources/unsubscribe")
	}
	s.mu.Lock()
	release := s.subscriptions[uri]
	delete(s.subscriptions, uri)
	s.mu.Unlock()
	if release != nil {
		release()
	}
	return emptyResult(), nil
}

func emptyResult() *result { return &result{body: []byte("{}")} }

// serveListen is subscriptions/listen: it acknowledges what it will report and then holds
// the stream open until the client, its token or the relay ends it.
func (t *tenant) serveListen(ctx context.Context, x *exchange, req *sdk.SubscriptionsListenRequest) (sdk.Result, error) {
	want := req.Params.Notifications
	if want == nil {
		return nil, invalidParams("notifications is missing")
	}
	if len(want.ResourceSubscriptions) > maxWatchedPerStream {
		return nil, invalidParams("at most 64 resources can be watched by one stream")
	}
	ss, ok := req.GetSession().(*sdk.ServerSession)
	if !ok || x.cancel == nil {
		return nil, methodNotFound("subscriptions/listen")
	}
	_, prompts := t.h.opts.Kernel.MethodHandler(x.caller, "prompts/list")
	l := &listener{x: x, ss: ss, uris: make(map[string]bool), want: sdk.NotificationSubscriptions{
		ToolsListChanged: want.ToolsListChanged && mayListTools(x.caller), ResourcesListChanged: want.ResourcesListChanged,
		PromptsListChanged: want.PromptsListChanged && prompts,
	}}
	for _, uri := range want.ResourceSubscriptions {
		if l.uris[uri] {
			continue
		}
		release, err := t.watchResource(x, uri)
		if err != nil {
			continue // not acknowledged, so the client sees that it is not watched
		}
		defer release()
		l.uris[uri] = true
		l.want.ResourceSubscriptions = append(l.want.ResourceSubscriptions, uri)
	}
	t.mu.Lock()
	t.listeners[l] = struct{}{}
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		delete(t.listeners, l)
		t.mu.Unlock()
	}()
	meta := sdk.Meta{sdk.MetaKeySubscriptionID: rawJSON(x.id)}
	if _, err := t.h.sendNotification(ctx, "notifications/subscriptions/acknowledged", &sdk.ServerRequest[*sdk.SubscriptionsAcknowledgedParams]{
		Session: ss, Params: &sdk.SubscriptionsAcknowledgedParams{Notifications: l.want, Meta: meta},
	}); err != nil {
		return nil, err
	}
	if l.want.ToolsListChanged || l.want.ResourcesListChanged || l.want.PromptsListChanged || len(l.uris) > 0 {
		select {
		case <-ctx.Done():
		case <-x.ctx.Done():
		}
	}
	return &sdk.SubscriptionsListenResult{Meta: sdk.Meta{sdk.MetaKeySubscriptionID: rawJSON(x.id)}}, nil
}
