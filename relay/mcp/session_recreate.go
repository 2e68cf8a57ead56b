package mcp

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// A restart of the relay ends no session: a request with an id that an earlier process issued
// makes the session again, under the same id.
//
//	id in the table                       the session
//	issued by this process, or made       404: this process has ended it
//	again by it before
//	issued by an earlier process          the SDK opens a new session with the client's own
//	                                      capabilities and version; list_changed follows on
//	                                      its stream
//	anything else                         404
//
// The level for log messages and the subscriptions to resources are lost.

// Bounds of recreations.
const (
	maxRecreated    = 16384           // by one process, an edge.Pool: each is remembered until its id is too old
	recreateTimeout = 5 * time.Second // for the SDK to open a session, which needs no client
)

// recreations are the sessions of earlier processes that this one has made again. It
// distinguishes one that has ended here since from one that is still to be made.
type recreations struct {
	mu   sync.Mutex // taken before Handler.mu; serializes recreateSession; protects the fields below
	pool *edge.Pool
	made map[[idRandomLen]byte]recreation
}

type recreation struct {
	holder edge.Identity
	issued int64 // Unix seconds
}

// addLocked records a session; false if it was made before, or the caller's share is used up. An
// entry is not removed while its id is good.
func (r *recreations) addLocked(c *sessionClaims, holder edge.Identity) bool {
	if _, ok := r.made[c.random]; ok {
		return false
	}
	if !r.pool.TryAcquire(holder, 1) {
		r.expireLocked()
		if !r.pool.TryAcquire(holder, 1) {
			return false
		}
	}
	if r.made == nil {
		r.made = make(map[[idRandomLen]byte]recreation)
	}
	r.made[c.random] = recreation{holder, c.issued}
	return true
}

// removeLocked takes back addLocked.
func (r *recreations) removeLocked(random [idRandomLen]byte) {
	r.pool.Release(r.made[random].holder, 1)
	delete(r.made, random)
}

// expireLocked forgets sessions whose ids are too old.
func (r *recreations) expireLocked() {
	for random, m := range r.made {
		if time.Since(time.Unix(m.issued, 0)) > maxSessionAge {
			r.removeLocked(random)
		}
	}
}

// recreateSession makes the session of an earlier process again. It returns nil without an error
// if the caller has no such session.
func (h *Handler) recreateSession(x *exchange, id string) (*session, *manifest.Error) {
	c, ok := h.parseSessionID(id, ownerKey(x.caller))
	if !ok || c.start == h.start {
		return nil, nil
	}
	h.recreated.mu.Lock()
	defer h.recreated.mu.Unlock()
	if s := h.lookupSession(x.caller, id); s != nil { // another request was first
		return s, nil
	}
	if !h.recreated.addLocked(&c, identityOf(x.caller)) {
		return nil, nil
	}
	s, err := h.openAgain(x, id, &c)
	if err != nil {
		h.recreated.removeLocked(c.random) // a later request may succeed
	}
	return s, err
}

// openAgain opens a session with the messages that its client has sent: the SDK sees an ordinary
// handshake. recreations.mu is held.
func (h *Handler) openAgain(x *exchange, id string, c *sessionClaims) (*session, *manifest.Error) {
	if !h.hasSessionCapacity(x) {
		return nil, errSessions
	}
	h.mu.RLock()
	ctx := h.ctx
	h.mu.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, recreateTimeout)
	defer cancel()
	params, err := json.Marshal(map[string]any{"protocolVersion": c.version, "capabilities": json.RawMessage(c.capabilities),
		"clientInfo": map[string]string{"name": "", "version": ""}})
	if err != nil {
		return nil, manifest.E(manifest.Internal, "the relay failed to make this session again; initialize again")
	}
	opening := &exchange{caller: x.caller, tenant: x.tenant, ctx: ctx, recreates: id}
	h.postSelf(opening, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":`+string(params)+`}`)
	s := opening.opened
	if s == nil {
		return nil, errSessions
	}
	h.postSelf(&exchange{caller: x.caller, tenant: x.tenant, session: s, ctx: ctx}, `{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	return s, nil
}

// postSelf hands a message to the SDK as if a client had sent it, and drops the answer.
func (h *Handler) postSelf(x *exchange, body string) {
	r, err := http.NewRequestWithContext(x.ctx, http.MethodPost, "/mcp", nil)
	if err != nil {
		return // the arguments are constant
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json, text/event-stream")
	serveSDK(h.legacy, discard{}, r, x, []byte(body))
}

// discard is a ResponseWriter of nothing.
type discard struct{}

func (discard) Header() http.Header         { return make(http.Header) }
func (discard) Write(b []byte) (int, error) { return len(b), nil }
func (discard) WriteHeader(int)             {}

// sessionIDWriter puts our id in place of the SDK's into the answer to an initialize.
type sessionIDWriter struct {
	http.ResponseWriter
	x *exchange
}

func (w sessionIDWriter) setID() {
	if s := w.x.opened; s != nil {
		w.Header().Set(headerSession, s.id)
	} else {
		w.Header().Del(headerSession)
	}
}

// WriteHeader implements http.ResponseWriter.
func (w sessionIDWriter) WriteHeader(status int) {
	w.setID()
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w sessionIDWriter) Write(b []byte) (int, error) {
	w.setID()
	return w.ResponseWriter.Write(b)
}

// Unwrap lets the SDK flush.
func (w sessionIDWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// announcingWriter is a writer of a session's stream. The SDK writes a comment when it has opened the
// stream; a session that was made again then announces its lists.
type announcingWriter struct {
	http.ResponseWriter
	announce func() // once; nil afterwards
}

// announceWriter returns the writer for the stream of a session.
func announceWriter(w http.ResponseWriter, s *session) http.ResponseWriter {
	if !s.listsUnknown.Load() {
		return w
	}
	return &announcingWriter{w, s.tenant.announceLists}
}

// Write implements http.ResponseWriter.
func (w *announcingWriter) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	if w.announce != nil {
		w.announce()
		w.announce = nil
	}
	return n, err
}

// Unwrap lets the SDK flush.
func (w *announcingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// announceLists wakes run, which notifies the sessions that were made again and have a stream now
// that lists may have changed. It does not block.
func (t *tenant) announceLists() {
	select {
	case t.announce <- struct{}{}:
	default: // run has yet to take the signal before
	}
}

// sendLists sends the notifications that announceLists asked for. A session without a stream is notified when it opens one.
func (t *tenant) sendLists(ctx context.Context) {
	t.mu.Lock()
	var sessions []*session
	for s := range t.sessions {
		if s.listsUnknown.Load() {
			sessions = append(sessions, s)
		}
	}
	t.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	for _, s := range sessions {
		callers := s.streamCallers()
		if len(callers) == 0 || !s.listsUnknown.CompareAndSwap(true, false) {
			continue
		}
		t.notifySession(ctx, s, callers, kernel.Change{Tools: true, PluginTools: true, Resources: true, Prompts: t.isServed(&exchange{caller: callers[0]}, "prompts/list")}, nil)
	}
}
