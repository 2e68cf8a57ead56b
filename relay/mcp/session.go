package mcp

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// session is the relay's record of a legacy session: its owner, the time of its last use and its
// watches. The SDK has the state of the protocol: versions, capabilities, log level, open
// streams. Message by message:
//
//	POST initialize                 200, Mcp-Session-Id: the session is registered
//	POST notifications/initialized  202
//	POST tools/call, ...            200, JSON or an event stream that ends with the result
//	GET                             200, an event stream of notifications, until it breaks
//	DELETE                          204: the session is closed
//	any of them afterwards, or with
//	another owner's session id      404: initialize again
//
// It is also closed by its idle time-out, for another session of its tenant, when the
// SDK no longer knows it, and by the end of Run. The next process makes it again when it is used
// (session_recreate.go).
type session struct {
	id     string        // see newSessionID
	sdkID  string        // the SDK's, which no client sees
	owner  string        // ownerKey of who opened it
	holder edge.Identity // of its share of Handler.sessionPool
	tenant *tenant
	ss     *sdk.ServerSession

	usage // by its requests, streams included

	listsUnknown atomic.Bool // it was made again, and its client was not yet notified that lists may have changed

	mu            sync.Mutex // protects the fields below
	closed        bool
	exchanges     map[*exchange]struct{} // in progress; canceled at the end
	streams       map[*exchange]struct{} // open GET streams
	subscriptions map[string]func()      // release by URI
	requests      map[string]*exchange   // in progress, by canonical id
}

// ownerKey is the identity that a session is bound to. A refreshed token of the same
// subject keeps its session.
func ownerKey(c *kernel.Caller) string { return c.Tenant + "\x00" + c.Actor }

// identityOf returns the holder of a caller's shares.
func identityOf(c *kernel.Caller) edge.Identity {
	return edge.Identity{Tenant: c.Tenant, Subject: c.Actor}
}

// usage counts the requests in progress of a session or a tenant, and remembers when the
// last one ended. The zero value was last used when the process started: see markUsed.
type usage struct {
	inFlight atomic.Int64
	lastUsed atomic.Int64 // monotonicNanos
}

func (u *usage) markUsed() { u.lastUsed.Store(monotonicNanos(time.Now())) }

// release counts a request out. The idle time begins here; it is stored first, so that no
// sweep sees an old one without a request.
func (u *usage) release() {
	u.markUsed()
	u.inFlight.Add(-1)
}

// idleFor returns for how long there has been no request; 0 while there is one.
func (u *usage) idleFor(now time.Time) time.Duration {
	if u.inFlight.Load() > 0 {
		return 0
	}
	return time.Duration(monotonicNanos(now) - u.lastUsed.Load())
}

// isSubscribed reports whether the session watches a resource.
func (s *session) isSubscribed(uri string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.subscriptions[uri]
	return ok
}

// addStream and removeStream count an open GET stream.
func (s *session) addStream(x *exchange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams == nil {
		s.streams = make(map[*exchange]struct{})
	}
	s.streams[x] = struct{}{}
}

func (s *session) removeStream(x *exchange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, x)
}

// streamCallers are the callers of the open GET streams, which get the notifications. They are one
// identity, but their tokens may differ in scopes from the one that subscribed.
func (s *session) streamCallers() []*kernel.Caller {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*kernel.Caller, 0, len(s.streams))
	for x := range s.streams {
		list = append(list, x.caller)
	}
	return list
}

// attach counts a request in; false when the session has been closed.
func (s *session) attach(x *exchange) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	x.session = s
	s.exchanges[x] = struct{}{}
	s.inFlight.Add(1)
	return true
}

// detach counts a request out that attach counted in.
func (s *session) detach(x *exchange) {
	s.mu.Lock()
	delete(s.exchanges, x)
	s.mu.Unlock()
	s.release()
}

// exchangeKey carries an exchange in the context of an HTTP request to the SDK. A
// session's handlers run under the context of the request that opened the session, so
// they take their exchange from the message's token info, and not from here.
type exchangeKey struct{}

const exchangeExtraKey = "agentctl"

// bindSDK makes the SDK's handlers. Its bearer middleware is how something is attached to
// a message (TokenInfo); the token that it sees is a placeholder, the real one goes no
// further. The sending chain of a server without sessions sends on any session.
func (h *Handler) bindSDK() {
	bind := auth.RequireBearerToken(func(ctx context.Context, _ string, _ *http.Request) (*auth.TokenInfo, error) {
		x, _ := ctx.Value(exchangeKey{}).(*exchange)
		if x == nil {
			return nil, auth.ErrInvalidToken
		}
		return tokenInfo(x), nil
	}, &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})
	server := func(pick func(*exchange) *sdk.Server) func(*http.Request) *sdk.Server {
		return func(r *http.Request) *sdk.Server { return pick(r.Context().Value(exchangeKey{}).(*exchange)) }
	}
	opt := sdk.StreamableHTTPOptions{
		DisableLocalhostProtection:   true, // edge.Guard does it, and knows the allowed hosts
		MaxRequestBodyBytes:          h.opts.MaxBody,
		PropagateRequestCancellation: true,
	}
	h.legacy = bind(sdk.NewStreamableHTTPHandler(server(func(x *exchange) *sdk.Server { return x.tenant.legacy }), &opt))
	opt.Stateless = true
	h.modern = bind(sdk.NewStreamableHTTPHandler(server(func(x *exchange) *sdk.Server { return x.tenant.listen }), &opt))
	sdk.NewServer(h.impl, nil).AddSendingMiddleware(func(next sdk.MethodHandler) sdk.MethodHandler {
		h.sendNotification = next
		return next
	})
}

// tokenInfo makes the value that the SDK attaches to each message of a request. The SDK compares
// UserID with that of the session's first request, so a second check of the owner is made.
func tokenInfo(x *exchange) *auth.TokenInfo {
	return &auth.TokenInfo{UserID: ownerKey(x.caller), Extra: map[string]any{exchangeExtraKey: x}}
}

// serveSDK passes a request to one of the SDK's handlers, with the exchange in its context
// and the placeholder token. The body was read before, so the SDK reads it from memory. The
// context is the exchange's: it ends when the session or the token ends, and not only when
// the client goes away.
func serveSDK(next http.Handler, w http.ResponseWriter, r *http.Request, x *exchange, body []byte) {
	r = r.WithContext(context.WithValue(x.ctx, exchangeKey{}, x))
	r.Header = maps.Clone(r.Header)
	r.Header["Authorization"] = []string{"Bearer checked"}
	if x.session != nil {
		r.Header[headerSession] = []string{x.session.sdkID}
	}
	if body != nil {
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	next.ServeHTTP(w, r)
}

// serveSessionPost serves messages of the legacy era: within their session, or an
// initialize that opens one.
func (h *Handler) serveSessionPost(w http.ResponseWriter, r *http.Request, x *exchange, msgs []envelope, isBatch bool, body []byte) {
	s, refusal := h.findSession(r, x)
	if s != nil {
		x.ctx, x.cancel = context.WithCancelCause(x.ctx)
		defer x.cancel(nil)
		if s.attach(x) {
			defer s.detach(x)
			h.serveInSession(w, r, x, msgs, isBatch, body)
			return
		}
	}
	switch {
	case refusal != nil:
		h.refuse(w, r, http.StatusTooManyRequests, refusal)
	case r.Header.Get(headerSession) != "":
		refuseRPC(w, http.StatusNotFound, msgs[0].id, codeInvalidRequest, "no such session; initialize again")
	case isBatch || msgs[0].method != "initialize":
		refuseRPC(w, http.StatusBadRequest, msgs[0].id, codeInvalidRequest, "this request needs an Mcp-Session-Id; send initialize first")
	case !h.hasSessionCapacity(x):
		h.refuse(w, r, http.StatusTooManyRequests, errSessions)
	default:
		serveSDK(h.legacy, sessionIDWriter{w, x}, r, x, body)
	}
}

// serveInSession passes the messages of a session to the SDK. It answers two kinds of requests
// itself, since the SDK would leave them without an answer: those of unknown methods, and those
// whose session ends while they are in progress.
func (h *Handler) serveInSession(w http.ResponseWriter, r *http.Request, x *exchange, msgs []envelope, isBatch bool, body []byte) {
	m := &msgs[0]
	isRequest := !isBatch && !m.isResponse && len(m.id) > 0
	isAccepted := isSessionPost(r, isBatch)
	var name string
	var tool *kernel.Tool
	if isRequest && isAccepted && m.version == "" && x.session.ss.InitializeParams() != nil {
		name, tool, x.isDirect = x.tenant.isDirect(x, m)
	}
	duplicate := x.session.claimIDs(x, msgs)
	defer x.session.releaseIDs(x)
	if duplicate != nil {
		refuseDuplicate(w, duplicate)
		return
	}
	if x.isDirect {
		x.tenant.serveDirectInSession(w, r, x, m, name, tool)
		return
	}
	if !isBatch && !m.isResponse && !sessionMethods[m.method] {
		if isRequest {
			refuseRPC(w, http.StatusOK, m.id, jsonrpc.CodeMethodNotFound, methodNotFound(m.method).Error())
			return
		}
		if strings.HasPrefix(m.method, "notifications/") { // of a later version, perhaps
			w.WriteHeader(http.StatusAccepted)
			return
		}
	}
	if isAccepted {
		for i := range msgs {
			x.session.cancelRequest(&msgs[i])
		}
	}
	tw := newTimeoutWriter(w, x)
	defer tw.end()
	serveSDK(h.legacy, tw, r, x, body)
	if isRequest && x.ctx.Err() != nil && r.Context().Err() == nil {
		tw.answerClosedSession(h.endOfSession(m.id)) // the client is there: the session has ended, or the relay stops
	}
	if tw.status == http.StatusNotFound { // the SDK does not know the session
		h.closeSession(x.session)
	}
}

// endOfSession makes the answer to a request whose session ended before it was answered. A call may
// have taken effect.
func (h *Handler) endOfSession(id []byte) []byte {
	if h.calls.Err() != nil {
		code, message, data := stoppedError()
		return appendRPCError(nil, id, code, message, data)
	}
	return appendRPCError(nil, id, codeInvalidRequest, sessionEndedMessage, nil)
}

// sessionMethods are the methods that the SDK accepts from a session's client. It answers
// others with HTTP 400 and a line of text, which is not an answer to a JSON-RPC request.
var sessionMethods = map[string]bool{
	"initialize": true, "ping": true, "tools/list": true, "tools/call": true, "prompts/list": true, "prompts/get": true,
	"resources/list": true, "resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true,
	"completion/complete": true, "logging/setLevel": true,
	"notifications/initialized": true, "notifications/cancelled": true, "notifications/progress": true, "notifications/roots/list_changed": true,
}

// findSession returns the session that the request names, if it is the caller's own; one that an
// earlier process issued is made again. For another's the answer is the same as for none. The error
// says that the caller has too many.
func (h *Handler) findSession(r *http.Request, x *exchange) (*session, *manifest.Error) {
	id := r.Header.Get(headerSession)
	if id == "" {
		return nil, nil
	}
	if s := h.lookupSession(x.caller, id); s != nil {
		return s, nil
	}
	return h.recreateSession(x, id)
}

// lookupSession returns an open session of a caller, or nil.
func (h *Handler) lookupSession(c *kernel.Caller, id string) *session {
	h.mu.RLock()
	s := h.sessions[id]
	h.mu.RUnlock()
	if s == nil || s.owner != ownerKey(c) {
		return nil
	}
	return s
}

// serveSessionMethod serves GET (the session's stream) and DELETE (its end).
func (h *Handler) serveSessionMethod(w http.ResponseWriter, r *http.Request, x *exchange) {
	if r.Header.Get(headerSession) == "" {
		h.refuse(w, r, http.StatusBadRequest, manifest.E(manifest.BadRequest, "this request needs an Mcp-Session-Id; POST initialize first"))
		return
	}
	s, refusal := h.findSession(r, x)
	if refusal != nil {
		h.refuse(w, r, http.StatusTooManyRequests, refusal)
		return
	}
	if s == nil {
		h.refuse(w, r, http.StatusNotFound, manifest.E(manifest.BadRequest, "no such session; initialize again"))
		return
	}
	if r.Method == http.MethodDelete {
		h.closeSession(s)
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if !accepts(r.Header, "text/event-stream") {
		h.refuse(w, r, http.StatusBadRequest, manifest.E(manifest.BadRequest, "the Accept header must name text/event-stream"))
		return
	}
	h.stream(w, r, x, func(w http.ResponseWriter) {
		if !s.attach(x) {
			http.Error(w, "session ended", http.StatusNotFound)
			return
		}
		defer s.detach(x)
		s.addStream(x)
		defer s.removeStream(x)
		serveSDK(h.legacy, announceWriter(w, s), r, x, nil)
	})
}

// Session describes an open session.
type Session struct{ ID, Tenant, Actor string }

// Sessions lists the first open sessions, ascending by id, for the relay's own status.
func (h *Handler) Sessions(limit int) []Session {
	h.mu.RLock()
	ids := slices.Sorted(maps.Keys(h.sessions))
	list := make([]Session, 0, min(limit, len(ids)))
	for _, id := range ids[:min(limit, len(ids))] {
		tenant, actor, _ := strings.Cut(h.sessions[id].owner, "\x00")
		list = append(list, Session{id, tenant, actor})
	}
	h.mu.RUnlock()
	return list
}

// hasSessionCapacity reports whether a caller may open another session. If not, it closes the
// session of the caller that has been idle longest, when that is at least a minute, else the
// one of the tenant.
func (h *Handler) hasSessionCapacity(x *exchange) bool {
	holder := identityOf(x.caller)
	if h.sessionPool.TryAcquire(holder, 1) { // nothing is reserved: registerSession asks again
		h.sessionPool.Release(holder, 1)
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	var own, other *session // idle longest
	ownIdle, otherIdle := time.Minute, time.Minute
	for _, s := range h.sessions {
		idle := s.idleFor(now)
		switch {
		case s.tenant != x.tenant:
		case s.holder == holder && idle > ownIdle:
			own, ownIdle = s, idle
		case s.holder != holder && idle > otherIdle:
			other, otherIdle = s, idle
		}
	}
	if own == nil {
		own = other
	}
	if own == nil {
		return false
	}
	h.closeSessionLocked(own)
	return true
}

// registerSession registers the session that an initialize is about to open. It checks the
// bounds again: hasSessionCapacity reserved nothing, and others may have come first.
func (h *Handler) registerSession(ss *sdk.ServerSession, x *exchange, p *sdk.InitializeParams) (*session, error) {
	id := x.recreates
	if id == "" {
		id = h.newSessionID(ownerKey(x.caller), p)
	}
	s := &session{
		id: id, sdkID: ss.ID(), owner: ownerKey(x.caller), holder: identityOf(x.caller), tenant: x.tenant, ss: ss,
		exchanges: make(map[*exchange]struct{}), subscriptions: make(map[string]func()),
	}
	s.markUsed()
	s.listsUnknown.Store(x.recreates != "")
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || s.sdkID == "" || !h.sessionPool.TryAcquire(s.holder, 1) {
		return nil, errTooManySessions
	}
	h.sessions[s.id] = s
	x.tenant.mu.Lock()
	x.tenant.sessions[s] = struct{}{}
	x.tenant.mu.Unlock()
	return s, nil
}

// unregisterSession drops a session whose initialize failed; the SDK closes it.
func (h *Handler) unregisterSession(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.removeSessionLocked(s)
}

// removeSessionLocked removes a session from the tables; false when it is not there.
func (h *Handler) removeSessionLocked(s *session) bool {
	if h.sessions[s.id] != s {
		return false
	}
	delete(h.sessions, s.id)
	h.sessionPool.Release(s.holder, 1)
	s.tenant.mu.Lock()
	delete(s.tenant.sessions, s)
	s.tenant.mu.Unlock()
	return true
}

// closeSession ends a session, once; later calls do nothing.
func (h *Handler) closeSession(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closeSessionLocked(s)
}

// closeSessionLocked ends a session: it cancels its requests and releases its watches. A
// goroutine of Run's closes the SDK's part, because that waits for handlers.
func (h *Handler) closeSessionLocked(s *session) {
	if !h.removeSessionLocked(s) {
		return
	}
	s.mu.Lock()
	s.closed = true
	subscriptions := s.subscriptions
	s.subscriptions = nil
	for x := range s.exchanges {
		x.cancel(nil)
	}
	s.mu.Unlock()
	for _, release := range subscriptions {
		release()
	}
	h.wg.Go(func() {
		_ = s.ss.Close()
		if h.opts.OnSessionClosed != nil {
			h.opts.OnSessionClosed(s.id)
		}
	})
}
