package mcp

import (
	"context"
	"encoding/base64"
	"errors"
	"strings"
	"sync"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const maxURI = 512 // bytes

// isURI bounds the strings that become keys of tables here: printable ASCII without spaces.
func isURI(uri string) bool {
	return uri != "" && len(uri) <= maxURI && strings.IndexFunc(uri, func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

// listResources renders one page of the resources that the caller may read.
func (t *tenant) listResources(x *exchange, cursor string) (sdk.Result, error) {
	list := func(c *kernel.Caller, after string, limit int) ([]*kernel.Resource, bool) {
		return t.h.opts.Kernel.ListResources(c, x.sessionID(), after, limit)
	}
	return listPage(t, x, "resources", cursor, 256, list,
		func(r *kernel.Resource) string { return r.URI },
		func(b *objectBuilder, r *kernel.Resource) {
			b.str("uri", r.URI)
			b.str("name", r.Name)
			t.h.appendTitle(b, r.Title, r.NodeID)
			b.optional("description", r.Description)
			b.optional("mimeType", r.MIME)
		})
}

// readResource reads a listed resource, or asks a plugin with resource templates.
func (t *tenant) readResource(ctx context.Context, x *exchange, req *sdk.ReadResourceRequest) (sdk.Result, error) {
	uri := req.Params.URI
	if !isURI(uri) {
		return nil, resourceNotFound(uri)
	}
	ctx, cancel := x.join(ctx)
	defer cancel()
	kr := &kernel.Request{Method: kernel.MethodRead, Caller: x.caller, URI: uri, ConnID: x.sessionID(), Meta: metaOf(req.Params.Meta), MarkUntrusted: true, TraceID: x.traceID}
	res, err := t.h.opts.Kernel.Call(ctx, kr)
	switch {
	case errors.Is(err, kernel.ErrNoResource):
		if !t.isServed(x, "resources/read") {
			return nil, resourceNotFound(uri)
		}
		return servePluginMethod(ctx, t, x, "resources/read", req, true)
	case err != nil:
		return nil, rpcError(manifest.AsError(err), kr.TraceID)
	}
	r, data := res.Resource, res.Data
	b := newObject(256 + 2*len(data))
	b.key("contents")
	e := objectBuilder{b: append(b.b, '[')}
	e.str("uri", r.URI)
	e.optional("mimeType", r.MIME)
	if isText(r.MIME) && utf8.Valid(data) {
		e.key("text")
		e.b = appendString(e.b, data)
	} else {
		e.str("blob", base64.StdEncoding.EncodeToString(data))
	}
	b.b = append(e.b, '}', ']')
	cacheMS := int64(listTTLMS)
	if r.Watchable {
		cacheMS = 0 // its updates are announced: what was read may be old at once
	}
	return t.finishResult(b, x, resultComplete, cacheMS, res.Meta), nil
}

// isText reports whether a resource of this type is sent as text, if it is UTF-8. Other
// types are sent in base64.
func isText(mime string) bool {
	mime, _, _ = strings.Cut(mime, ";")
	return mime == "" || strings.HasPrefix(mime, "text/") || mime == "application/json" ||
		strings.HasSuffix(mime, "+json") || mime == "application/xml" || strings.HasSuffix(mime, "+xml")
}

// watchResource starts a kernel watch for a caller, or returns why not in the protocol's
// words. watchCounts bounds the share of one tenant in the kernel's watches; several
// watches of one resource count once.
func (t *tenant) watchResource(x *exchange, uri string) (release func(), err error) {
	if !isURI(uri) || !t.h.opts.Kernel.MayRead(x.caller, x.sessionID(), uri) {
		return nil, resourceNotFound(uri)
	}
	t.mu.Lock()
	isFull := t.watchCounts[uri] == 0 && len(t.watchCounts) >= maxWatchedPerTenant
	if !isFull {
		t.watchCounts[uri]++
	}
	t.mu.Unlock()
	if isFull {
		return nil, rpcError(errTooManyWatches, manifest.NewTraceID())
	}
	uncount := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.watchCounts[uri]--; t.watchCounts[uri] == 0 {
			delete(t.watchCounts, uri)
		}
	}
	end, err := t.h.opts.Kernel.Watch(x.caller, uri)
	if err == nil {
		return sync.OnceFunc(func() { end(); uncount() }), nil
	}
	uncount()
	switch {
	case errors.Is(err, kernel.ErrNoResource):
		return nil, resourceNotFound(uri)
	case errors.Is(err, kernel.ErrNotWatchable):
		return nil, invalidParams("this resource does not report changes; read it instead")
	}
	return nil, rpcError(errTooManyWatches, manifest.NewTraceID())
}

// subscribe is resources/subscribe of a session. The session's table holds the watch, so
// its end releases it whatever the client does. The watch is made without the session's
// lock, so another request may have subscribed or ended the session meanwhile.
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
	// From here on, release is nil if the session holds the watch.
	s.mu.Lock()
	_, isDuplicate := s.subscriptions[uri]
	isFull := len(s.subscriptions) >= maxWatchedPerStream
	if !s.closed && !isDuplicate && !isFull {
		s.subscriptions[uri] = release
		release = nil
	}
	s.mu.Unlock()
	if release != nil {
		release()
	}
	if isFull {
		return nil, rpcError(manifest.E(manifest.RateLimited, "this session watches as many resources as it may; unsubscribe from one"), manifest.NewTraceID())
	}
	return emptyResult(), nil
}

// unsubscribe is resources/unsubscribe of a session. A resource that is not watched is no
// error.
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

// serveListen is subscriptions/listen, which replaces GET and resources/subscribe in the
// modern era:
//
//	POST subscriptions/listen {notifications: {toolsListChanged, ..., resourceSubscriptions}}
//	  <- notifications/subscriptions/acknowledged   what is granted
//	  <- notifications/.../list_changed, notifications/resources/updated, ...
//	  <- the result, when the relay or the token ends the stream
//
// What the caller may not have is missing from the acknowledgement, and is no error. Each
// notification names the request's id as its subscription. With nothing granted the
// stream ends at once.
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
	l := &listener{x: x, ss: ss, uris: make(map[string]bool), want: sdk.NotificationSubscriptions{
		ToolsListChanged: want.ToolsListChanged && mayListTools(x.caller), ResourcesListChanged: want.ResourcesListChanged,
		PromptsListChanged: want.PromptsListChanged && t.isServed(x, "prompts/list"),
	}}
	for _, uri := range want.ResourceSubscriptions {
		if l.uris[uri] {
			continue
		}
		release, err := t.watchResource(x, uri)
		if err != nil {
			continue
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
	err := send(ctx, t.h, ss, "notifications/subscriptions/acknowledged",
		&sdk.SubscriptionsAcknowledgedParams{Notifications: l.want, Meta: l.meta()})
	if err != nil {
		return nil, err
	}
	if l.want.ToolsListChanged || l.want.ResourcesListChanged || l.want.PromptsListChanged || len(l.uris) > 0 {
		select {
		case <-ctx.Done():
		case <-x.ctx.Done():
		}
	}
	return &sdk.SubscriptionsListenResult{Meta: l.meta()}, nil
}
