package mcp

import (
	"bytes"
	"context"
	"errors"
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
)

// session is a legacy session. The SDK keeps the protocol's side of it; this is ours:
// whose it is, when it was used, and what it watches.
type session struct {
	id     string
	owner  string // tenant and subject that opened it
	tenant *tenant
	ss     *sdk.ServerSession

	busy      atomic.Int64 // requests in progress, streams included
	listening atomic.Int64 // open GET streams
	used      atomic.Int64 // see moment

	mu      sync.Mutex // protects the fields below
	ended   bool
	open    map[*exchange]struct{}
	watches map[string]func() // release by URI
}

// owner is the identity that a session is bound to. A refreshed token of the same
// subject keeps its session.
func owner(c *kernel.Caller) string { return c.Tenant + "\x00" + c.Actor }

func (s *session) idle(now time.Time) time.Duration {
	if s.busy.Load() > 0 {
		return 0
	}
	return time.Duration(moment(now) - s.used.Load())
}

func (s *session) watching(uri string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.watches[uri]
	return ok
}

// begin counts a request in; false when the session has ended.
func (s *session) begin(x *exchange) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.open[x] = struct{}{}
	s.busy.Add(1)
	return true
}

func (s *session) done(x *exchange) {
	s.mu.Lock()
	delete(s.open, x)
	s.mu.Unlock()
	s.used.Store(moment(time.Now()))
	s.busy.Add(-1)
}

// exchangeKey carries an exchange in the context of an HTTP request to the SDK. A
// session's handlers see the context of the request that opened the session, so they
// take theirs from the message's token info, not from here.
type exchangeKey struct{}

const extraKey = "agentctl"

// bindSDK makes the SDK's handlers. Its bearer middleware is the one way to attach
// something to a message; the token that it sees is ours, the real one goes no further.
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
		DisableLocalhostProtection:   true, // guard does it, and knows the allowed hosts
		MaxRequestBodyBytes:          h.opt.MaxBody,
		PropagateRequestCancellation: true,
	}
	h.legacy = bind(sdk.NewStreamableHTTPHandler(server(func(x *exchange) *sdk.Server { return x.tenant.legacy }), &opt))
	opt.Stateless = true
	h.modern = bind(sdk.NewStreamableHTTPHandler(server(func(x *exchange) *sdk.Server { return x.tenant.listen }), &opt))
	sdk.NewServer(h.impl, nil).AddSendingMiddleware(func(next sdk.MethodHandler) sdk.MethodHandler {
		h.send = next
		return next
	})
}

func tokenInfo(x *exchange) *auth.TokenInfo {
	return &auth.TokenInfo{UserID: owner(x.caller), Extra: map[string]any{extraKey: x}}
}

// toSDK hands a request whose body was read to one of the SDK's handlers.
func toSDK(next http.Handler, w http.ResponseWriter, r *http.Request, x *exchange, body []byte) {
	r = r.WithContext(context.WithValue(x.ctx, exchangeKey{}, x))
	r.Header = maps.Clone(r.Header)
	r.Header["Authorization"] = []string{"Bearer checked"}
	if body != nil {
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	next.ServeHTTP(w, r)
}

// legacyPost serves messages of the protocol's versions up to 2025-11-25.
func (h *Handler) legacyPost(w http.ResponseWriter, r *http.Request, x *exchange, msgs []envelope, batch bool, body []byte) {
	h.count.legacy.Add(1)
	if s := h.find(r, x); s != nil {
		x.ctx, x.cancel = context.WithCancel(x.ctx)
		defer x.cancel()
		if s.begin(x) {
			x.session = s
			defer s.done(x)
			if m := &msgs[0]; !batch && !m.answer && !sessionMethods[m.method] {
				switch {
				case len(m.id) > 0:
					refuseRPC(w, http.StatusOK, m.id, jsonrpc.CodeMethodNotFound, methodNotFound(m.method).Error())
					return
				case strings.HasPrefix(m.method, "notifications/"): // of a version to come, perhaps
					w.WriteHeader(http.StatusAccepted)
					return
				}
			}
			pw := &patient{ResponseWriter: w, rc: http.NewResponseController(w)}
			toSDK(h.legacy, pw, r, x, body)
			if m := &msgs[0]; !batch && len(m.id) > 0 && !m.answer && x.ctx.Err() != nil && r.Context().Err() == nil {
				pw.over(m.id) // not the client: the session has ended, or the relay stops
			}
			if pw.done() == http.StatusNotFound { // the SDK has lost it
				h.end(s)
			}
			return
		}
	}
	switch {
	case r.Header.Get(headerSession) != "":
		refuseRPC(w, http.StatusNotFound, msgs[0].id, codeRefused, "no such session; initialize again")
	case batch || msgs[0].method != "initialize":
		refuseRPC(w, http.StatusBadRequest, msgs[0].id, codeRefused, "this request needs an Mcp-Session-Id; send initialize first")
	case !h.room(x.tenant):
		h.count.refused.Add(1)
		refuse(w, http.StatusTooManyRequests, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 60_000,
			Message: "too many sessions are open; end some with DELETE or use protocol version " + modernVersion, Reason: "sessions"})
	default:
		toSDK(h.legacy, w, r, x, body)
	}
}

// sessionMethods are what the SDK takes from a session's client. It answers others with
// HTTP 400 and a line of text, which is no answer to a request.
var sessionMethods = map[string]bool{
	"initialize": true, "ping": true, "tools/list": true, "tools/call": true, "prompts/list": true, "prompts/get": true,
	"resources/list": true, "resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true,
	"completion/complete": true, "logging/setLevel": true,
	"notifications/initialized": true, "notifications/cancelled": true, "notifications/progress": true, "notifications/roots/list_changed": true,
}

// codeRefused is JSON-RPC's "invalid request".
const codeRefused = -32600

// find returns the session that the request names if it is the caller's own; another's
// is not told apart from none.
func (h *Handler) find(r *http.Request, x *exchange) *session {
	id := r.Header.Get(headerSession)
	if id == "" {
		return nil
	}
	h.mu.RLock()
	s := h.sessions[id]
	h.mu.RUnlock()
	if s == nil || s.owner != owner(x.caller) {
		return nil
	}
	return s
}

// sessionRequest serves GET (the session's stream) and DELETE (its end).
func (h *Handler) sessionRequest(w http.ResponseWriter, r *http.Request, x *exchange) {
	if r.Header.Get(headerSession) == "" {
		h.refuse(w, http.StatusBadRequest, manifest.BadRequest, "this request needs an Mcp-Session-Id; POST initialize first")
		return
	}
	s := h.find(r, x)
	if s == nil {
		h.refuse(w, http.StatusNotFound, manifest.BadRequest, "no such session; initialize again")
		return
	}
	if r.Method == http.MethodDelete {
		h.end(s)
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if !accepts(r.Header, "text/event-stream") {
		h.refuse(w, http.StatusBadRequest, manifest.BadRequest, "the Accept header must name text/event-stream")
		return
	}
	x.session = s
	h.stream(w, x, func(w http.ResponseWriter) {
		if !s.begin(x) {
			http.Error(w, "session ended", http.StatusNotFound)
			return
		}
		defer s.done(x)
		s.listening.Add(1)
		defer s.listening.Add(-1)
		toSDK(h.legacy, w, r, x, nil)
	})
}

var errSessions = errors.New("mcp: too many sessions")

// Session is an open session of the eras that have some.
type Session struct{ ID, Tenant, Actor string }

// Sessions lists the first open sessions, ascending by id.
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

// room tells whether a tenant may open another session; it makes room by ending the one
// that has been idle longest, if that is at least a minute.
func (h *Handler) room(t *tenant) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	own := t.count()
	if len(h.sessions) < h.opt.MaxSessions && own < h.opt.MaxSessionsPerTenant {
		return true
	}
	now := time.Now()
	var oldest *session
	longest := time.Minute
	for _, s := range h.sessions {
		if s.tenant == t && s.idle(now) > longest {
			oldest, longest = s, s.idle(now)
		}
	}
	if oldest == nil {
		return false
	}
	h.endLocked(oldest)
	return true
}

func (t *tenant) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.sessions)
}

// admit registers the session that an initialize is about to open.
func (h *Handler) admit(ss *sdk.ServerSession, x *exchange) (*session, error) {
	s := &session{
		id: ss.ID(), owner: owner(x.caller), tenant: x.tenant, ss: ss,
		open: make(map[*exchange]struct{}), watches: make(map[string]func()),
	}
	s.used.Store(moment(time.Now()))
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || s.id == "" || len(h.sessions) >= h.opt.MaxSessions || x.tenant.count() >= h.opt.MaxSessionsPerTenant {
		return nil, errSessions
	}
	h.sessions[s.id] = s
	x.tenant.mu.Lock()
	x.tenant.sessions[s] = struct{}{}
	x.tenant.mu.Unlock()
	return s, nil
}

func (h *Handler) end(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endLocked(s)
}

// forget drops a session whose initialize failed; the SDK closes it.
func (h *Handler) forget(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sessions[s.id] != s {
		return
	}
	delete(h.sessions, s.id)
	s.tenant.mu.Lock()
	delete(s.tenant.sessions, s)
	s.tenant.mu.Unlock()
}

// endLocked ends a session: its requests are cancelled, its watches released, and the
// SDK's part is closed by a goroutine of Run's, because closing waits for handlers.
func (h *Handler) endLocked(s *session) {
	if h.sessions[s.id] != s {
		return
	}
	delete(h.sessions, s.id)
	t := s.tenant
	t.mu.Lock()
	delete(t.sessions, s)
	t.mu.Unlock()
	s.mu.Lock()
	s.ended = true
	watches := s.watches
	s.watches = nil
	for x := range s.open {
		x.cancel()
	}
	s.mu.Unlock()
	for _, release := range watches {
		release()
	}
	h.wg.Go(func() {
		_ = s.ss.Close()
		if h.opt.OnSessionClosed != nil {
			h.opt.OnSessionClosed(s.id)
		}
	})
}
