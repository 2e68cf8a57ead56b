package relay

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// Joining over HTTP: a board or an agent gets its identity with an invite code, and its next
// token with its key. The endpoints need no token.
//
//	GET  /v1/enroll   nonce        a nonce for either POST
//	POST /v1/enroll   enroll       code and public key -> identity and first token
//	POST /v1/token    renewToken   proof of the key -> next token

// Bounds of joining.
const (
	maxJoinBody    = 16 << 10         // bytes; a token of 4 KiB is the largest member
	joinTimeout    = 15 * time.Second // for one request, a ping of the node's link included
	maxJoinSources = 4096             // addresses whose failures are counted

	maxEnrollFailures  = 10 // of an address in a minute; then 429
	maxRefreshFailures = 60 // the same; higher, as a refresh guesses nothing
)

// linkedSessions is what joining needs of the hub.
type linkedSessions interface {
	// LiveSession returns the session of the node's link. alive reports that the board
	// answered a ping just now; age is that of the link.
	LiveSession(ctx context.Context, nodeID string) (sessionID string, age time.Duration, alive bool)
	// ExtendGrant moves the end of a session's grant; a session that is gone is ignored.
	ExtendGrant(nodeID, sessionID string, expiresAt time.Time)
	// SuspectClone raises clone_suspected on a node.
	SuspectClone(nodeID string)
}

// joinEndpoints is the state of the endpoints: failures by address, and counters by result.
type joinEndpoints struct {
	enrollFailures, refreshFailures *edge.Limiter
	enrolls, refreshes              map[string]*atomic.Uint64
}

// joinResults are the values of the label result of both counters. Keys of the maps are
// fixed, so that they need no lock.
var joinResults = []string{"new", "repeat", "rate_limited", "request", "failed",
	enrollment.ReasonCodeUnknown, enrollment.ReasonExpired, enrollment.ReasonGenerationUsed, enrollment.ReasonKeyInUse, enrollment.ReasonNonce,
	enrollment.ReasonProof, enrollment.ReasonRevoked, enrollment.ReasonSession, enrollment.ReasonTokenInvalid, enrollment.ReasonUsed}

func newJoinEndpoints() *joinEndpoints {
	newMap := func() map[string]*atomic.Uint64 {
		m := make(map[string]*atomic.Uint64, len(joinResults))
		for _, r := range joinResults {
			m[r] = new(atomic.Uint64)
		}
		return m
	}
	// An address that is dropped because others fail, too, starts over with a full burst.
	limiter := func() *edge.Limiter { return edge.NewLimiter(maxJoinSources, true) }
	return &joinEndpoints{limiter(), limiter(), newMap(), newMap()}
}

// joinRoutes registers the routes of joining and of invites.
func (r *Relay) joinRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET "+enrollment.EnrollPath, r.enrollNonce)
	mux.HandleFunc("POST "+enrollment.EnrollPath, r.enroll)
	mux.HandleFunc("POST "+enrollment.TokenPath, r.renewToken)
	mux.Handle("POST "+invitesPath, r.changeRoute("invites.create", manifest.ScopeInvitesWrite, r.createInvite))
	mux.Handle("GET "+invitesPath, r.adminRoute("invites.list", manifest.ScopeInvitesWrite, r.listInvites))
	mux.Handle("DELETE "+invitesPath+"/{prefix}", r.changeRoute("invites.revoke", manifest.ScopeInvitesWrite, r.revokeInvite))
}

// joinStatus gives a refusal its status: 401 where the caller must prove more, 410 where
// the code is gone for good, 409 where the request conflicts with what is known by now.
var joinStatus = map[string]int{
	enrollment.ReasonUsed:           http.StatusGone,
	enrollment.ReasonExpired:        http.StatusGone,
	enrollment.ReasonRevoked:        http.StatusForbidden,
	enrollment.ReasonCodeUnknown:    http.StatusForbidden,
	enrollment.ReasonTokenInvalid:   http.StatusForbidden,
	enrollment.ReasonKeyInUse:       http.StatusConflict,
	enrollment.ReasonNonce:          http.StatusConflict,
	enrollment.ReasonSession:        http.StatusConflict,
	enrollment.ReasonProof:          http.StatusUnauthorized,
	enrollment.ReasonGenerationUsed: http.StatusUnauthorized,
}

// enrollNonce serves GET /v1/enroll.
func (r *Relay) enrollNonce(w http.ResponseWriter, req *http.Request) {
	if r.refusePage(w, req) {
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, enrollment.Nonce{Nonce: r.store.Nonce()})
}

// enrollEndpoint is what the audit log calls POST /v1/enroll.
const enrollEndpoint = "enroll"

// enroll serves POST /v1/enroll.
func (r *Relay) enroll(w http.ResponseWriter, req *http.Request) {
	var body enrollment.EnrollRequest
	x := r.newExchange(w, req, enrollEndpoint, r.join.enrollFailures, maxEnrollFailures, r.join.enrolls)
	if !x.read(&body) {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), joinTimeout)
	defer cancel()
	out, err := r.store.Enroll(ctx, &body)
	if err != nil {
		x.refuse(err)
		return
	}
	x.served(out)
	a := enrollment.EnrollAnswer{TenantID: out.Tenant, Name: out.Name, Gen: out.Gen, ExpiresAtMS: out.Expires.UnixMilli(), CA: r.authorityPEM()}
	if out.Class == auth.ClassDevice {
		a.NodeID, a.DeviceToken = out.Subject, out.Token
	} else {
		a.AgentID, a.Token = out.Subject, out.Token
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, a)
}

// renewToken serves POST /v1/token. While a link of the node answers a ping, only a request
// that names its session is served: a copy of the board's files cannot know that. The link
// then lives on with the new token.
func (r *Relay) renewToken(w http.ResponseWriter, req *http.Request) {
	var body enrollment.TokenRequest
	x := r.newExchange(w, req, "token", r.join.refreshFailures, maxRefreshFailures, r.join.refreshes)
	if !x.read(&body) {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), joinTimeout)
	defer cancel()
	// overtaken: the present link is younger than a nonce may be, so the board that holds it may have
	// made this request before it opened the link.
	liveSession, overtaken := "", false
	out, err := r.store.RenewToken(ctx, &body, func(ctx context.Context, nodeID string) bool {
		session, age, alive := r.sessions.LiveSession(ctx, nodeID)
		if alive {
			liveSession = session
		}
		overtaken = body.SessionID != "" && age < auth.NonceLifetime
		return !alive || session == body.SessionID
	})
	if !errors.Is(err, auth.ErrRequest) { // else the ids may be anything, of any length
		x.rec.Actor, x.rec.NodeID = body.NodeID+body.AgentID, body.NodeID
	}
	if err != nil {
		// Whoever asked holds the node's key. But a request that names a session may have been
		// made before the present link was opened, by the board that has it; it asks again.
		var e *auth.Error
		if errors.As(err, &e) && body.NodeID != "" && (e.Reason == enrollment.ReasonGenerationUsed || e.Reason == enrollment.ReasonSession && !overtaken) {
			r.sessions.SuspectClone(body.NodeID)
			x.rec.Tenant, _ = r.store.NodeTenant(body.NodeID) // an identity that is known, since its key is
		}
		x.refuse(err)
		return
	}
	if out.CloneSuspected {
		r.sessions.SuspectClone(body.NodeID)
	}
	if liveSession != "" {
		r.sessions.ExtendGrant(body.NodeID, liveSession, out.ValidUntil())
	}
	x.served(out)
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, enrollment.TokenAnswer{Token: out.Token, Gen: out.Gen, ExpiresAtMS: out.Expires.UnixMilli(), CA: r.authorityPEM()})
}

// refusePage refuses a request that a web page made. No page has a use for these endpoints,
// and the visitors of one must not guess codes for it.
func (r *Relay) refusePage(w http.ResponseWriter, req *http.Request) bool {
	if req.Header.Get("Origin") == "" {
		return false
	}
	r.fail(w, req, http.StatusForbidden, manifest.SafetyDenied, "this endpoint is not for web pages")
	return true
}

// exchange is one POST of joining: it reads the body and, once, answers, counts and audits.
type exchange struct {
	r           *Relay
	w           http.ResponseWriter
	req         *http.Request
	source      string                    // the client's address, by which failures are counted
	failures    *edge.Limiter             // of the endpoint, by source
	maxFailures int                       // of one source in a minute
	counts      map[string]*atomic.Uint64 // of the endpoint, by result
	rec         kernel.Record
}

func (r *Relay) newExchange(w http.ResponseWriter, req *http.Request, name string, failures *edge.Limiter, maxFailures int, counts map[string]*atomic.Uint64) *exchange {
	x := &exchange{r: r, w: w, req: req, failures: failures, maxFailures: maxFailures, source: edge.AddressKey(r.opt.TrustedProxies.ClientAddr(req)).String(), counts: counts}
	x.rec.Tool, x.rec.Address = name, r.clientAddr(req)
	x.rec.TraceID, _ = edge.TraceID(req)
	return x
}

// read decodes the body, or answers and returns false. An address with too many failures is
// refused before anything of the request is read.
func (x *exchange) read(body any) bool {
	if x.r.refusePage(x.w, x.req) {
		return false
	}
	if wait := x.wait(); wait > 0 {
		x.counts["rate_limited"].Add(1)
		x.answer(http.StatusTooManyRequests, &manifest.Error{Code: manifest.RateLimited, Reason: "rate", RetryAfterMS: wait.Milliseconds(),
			Message: "too many failed attempts from this address; wait"})
		return false
	}
	if !edge.IsJSON(x.req.Header.Get("Content-Type")) {
		x.refuse(&manifest.Error{Code: manifest.BadRequest, Reason: "request", Message: "send Content-Type: application/json"})
		return false
	}
	b, held, err := x.r.bodies.Read(x.w, x.req, edge.Identity{Subject: x.source}, maxJoinBody)
	defer x.r.bodies.Release(edge.Identity{Subject: x.source}, held) // decoded by then
	share := (*manifest.Error)(nil)
	switch {
	case errors.As(err, &share) && share.Code == manifest.RateLimited:
		x.counts["rate_limited"].Add(1)
		x.answer(http.StatusTooManyRequests, share)
		return false
	case errors.As(err, new(*http.MaxBytesError)):
		x.refuse(&manifest.Error{Code: manifest.BadRequest, Reason: "size", Message: "the body is larger than 16 KiB"})
		return false
	case err != nil || strictjson.Unmarshal(b, body) != nil:
		x.refuse(&manifest.Error{Code: manifest.BadRequest, Reason: "request", Message: "the body must be one strict JSON object with the documented keys and no others"})
		return false
	}
	return true
}

// wait is how long the address has to wait after too many failures, 0 when it need not. It
// takes nothing: only failures do (refuse). Requests that run at the same time may exceed
// the limit by their number.
func (x *exchange) wait() time.Duration {
	return x.failures.Wait(x.source, float64(x.maxFailures)/60, x.maxFailures, time.Now())
}

// refuse answers with an error, counts it against the address and audits it. A nonce that
// has become too old is nobody's fault and does not count. It is not audited either: a stranger
// could send any number of them, and the audit log keeps its newest lines only.
func (x *exchange) refuse(err error) {
	e := manifest.AsError(err)
	result, status := e.Reason, edge.Status(e.Code)
	switch {
	case errors.Is(err, auth.ErrJoin):
		status = joinStatus[e.Reason]
	case errors.Is(err, auth.ErrFull):
		e = &manifest.Error{Code: manifest.Internal, Reason: "storage", Message: "the relay cannot store another identity; its operator can say more"}
		result, status = "failed", http.StatusInsufficientStorage
	case e.Code == manifest.Internal:
		if e.Reason != storage.Reason { // faults of the disk are logged by their monitor
			x.r.log.Error("joining", zap.String("endpoint", x.rec.Tool), zap.Error(err))
		}
		result = "failed"
	case e.Reason == "size":
		result, status = "request", http.StatusRequestEntityTooLarge
	}
	if x.counts[result] == nil {
		result = "failed"
	}
	x.counts[result].Add(1)
	if e.Reason == enrollment.ReasonNonce {
		x.answer(status, e)
		return
	}
	if e.Code != manifest.Internal {
		x.failures.Charge(x.source, 1, time.Now())
	}
	x.rec.Decision, x.rec.Code, x.rec.Reason = kernel.Denied, e.Code, e.Reason
	if e.Code == manifest.Internal {
		x.rec.Decision = kernel.Failed
	}
	x.r.audit.Write(&x.rec)
	x.answer(status, e)
}

// answer sends an error. Unlike writeError it adds no challenge to a 401: no bearer token
// helps here.
func (x *exchange) answer(status int, e *manifest.Error) {
	edge.WriteError(x.w, status, e, x.rec.TraceID)
}

// Types of the events about identities that were made with an invite. The aggregate is the node or the
// agent.
const (
	eventJoinBoard = "join.board"
	eventJoinAgent = "join.agent"
)

// offerJoin offers the event of a new identity to the event log. Its payload has ids only: the name
// may be a board's.
func (r *Relay) offerJoin(out *auth.Enrolled) {
	e := kernel.Event{Tenant: out.Tenant, Type: eventJoinAgent, Aggregate: out.Subject}
	key := "agent_id"
	if out.Class == auth.ClassDevice {
		e.Type, key = eventJoinBoard, "node_id"
	}
	e.Payload, _ = json.Marshal(map[string]string{key: out.Subject}) // cannot fail
	r.queue.Offer(e)
}

// served counts and audits a success. The client has proved who it is.
func (x *exchange) served(out *auth.Enrolled) {
	edge.ConnOf(x.req).MarkKnown()
	result := "new"
	if out.Repeat {
		result = "repeat"
	}
	x.counts[result].Add(1)
	x.rec.Tenant, x.rec.Actor, x.rec.Decision, x.rec.Reason = out.Tenant, out.Subject, kernel.Allowed, result
	if out.CloneSuspected {
		x.rec.Reason = "clone_suspected"
	}
	if out.Class == auth.ClassDevice {
		x.rec.NodeID = out.Subject
	}
	x.r.audit.Write(&x.rec)
	if x.rec.Tool == enrollEndpoint && !out.Repeat {
		x.r.offerJoin(out)
	}
}
