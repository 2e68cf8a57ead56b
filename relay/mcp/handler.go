package mcp

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// Options configure a Handler. Kernel and Authenticate are required.
type Options struct {
	Kernel *kernel.Kernel
	// Authenticate proves who sends a request, from its token alone.
	Authenticate func(r *http.Request) (*kernel.Caller, error)
	// OnDenied answers a request that Authenticate refused: 401 or 403, the envelope and
	// WWW-Authenticate. Default: 401 with the envelope.
	OnDenied func(w http.ResponseWriter, r *http.Request, err error)
	// OnSessionClosed, when set, is called with the id of each session that has ended.
	OnSessionClosed func(session string)
	Version         string      // of the relay, told to clients; default "dev"
	Logger          *zap.Logger // default: none
	// Guard checks Host and Origin. Default: the Host is a loopback name, and no page of
	// another origin.
	Guard *edge.Guard

	MaxBody              int64         // bytes of a request; default 1 MiB
	MaxTenants           int           // served at once; default 1024
	MaxSessions          int           // legacy sessions; default 4096
	MaxSessionsPerTenant int           // and as many streams; default 1024
	MaxStreams           int           // open GET and listen streams; default 8192
	MaxInFlight          int           // requests in progress of one tenant; default 1024
	SessionIdleTimeout   time.Duration // a session without requests and streams ends; default 30 min
}

// Fixed bounds.
const (
	maxBatch            = 32                     // messages of a JSON-RPC batch (protocol 2025-03-26)
	maxWatchedPerStream = 64                     // watched resources of a session or a listen stream
	maxWatchedPerTenant = kernel.MaxWatched / 4  // of a tenant, so that none takes all of the kernel's
	tenantIdleTimeout   = 10 * time.Minute       // then an unused tenant's servers are dropped
	sweepInterval       = time.Second            // tokens of open streams are asked this often
	notifyInterval      = time.Second            // at most one round of change notifications a tenant
	notifyTimeout       = 5 * time.Second        // for one round
	writeWait           = 15 * time.Second       // for one write to a client
	pingEvery           = 25 * time.Second       // a comment on an idle stream
	pageSize            = 200                    // entries of a list
	listTTL             = 10 * time.Second       // how long a client may cache a list
	modernVersion       = "2026-07-28"           // first version without sessions
	headerVersion       = "Mcp-Protocol-Version" // canonical forms
	headerSession       = "Mcp-Session-Id"
)

// Handler is the http.Handler of /mcp. Make one with New; it serves while Run runs.
type Handler struct {
	opts             Options
	log              *zap.Logger
	impl             *sdk.Implementation
	legacy           http.Handler // sessions
	modern           http.Handler // no sessions: listen, and everything that the mux does not take
	sendNotification sdk.MethodHandler

	bodyTimeout time.Duration
	serverMeta  []byte // _meta of modern results: {"io.modelcontextprotocol/serverInfo": ...}
	schemas     schemaCache

	mu       sync.RWMutex // protects the fields below
	ctx      context.Context
	stopped  bool
	tenants  map[string]*tenant
	sessions map[string]*session
	streams  map[*exchange]*sse.QueuedWriter
	wg       sync.WaitGroup

	count counters
}

type counters struct {
	modern, legacy, refused, cut, notified, panics atomic.Uint64
}

// Stats is a snapshot of what the handler does.
type Stats struct {
	Tenants, Sessions, Streams int
	Modern, Legacy             uint64 // requests of the two eras
	Refused                    uint64 // requests refused before a message of theirs was handled
	StalledStreams             uint64 // streams cut because their reader stalled
	NotifyRounds               uint64 // rounds of change notifications
	Panics                     uint64 // handlers that panicked and were answered with E_INTERNAL
}

// New makes a Handler; it starts nothing.
func New(opt Options) *Handler {
	def := func(n *int, d int) {
		if *n <= 0 {
			*n = d
		}
	}
	def(&opt.MaxTenants, 1024)
	def(&opt.MaxSessions, 4096)
	def(&opt.MaxSessionsPerTenant, 1024)
	def(&opt.MaxStreams, 8192)
	def(&opt.MaxInFlight, 1024)
	if opt.MaxBody <= 0 {
		opt.MaxBody = 1 << 20
	}
	if opt.SessionIdleTimeout <= 0 {
		opt.SessionIdleTimeout = 30 * time.Minute
	}
	if opt.Version == "" {
		opt.Version = "dev"
	}
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	h := &Handler{
		opts:        opt,
		log:         opt.Logger,
		impl:        &sdk.Implementation{Name: "agentctl", Title: "agentctl relay", Version: opt.Version},
		tenants:     make(map[string]*tenant),
		sessions:    make(map[string]*session),
		streams:     make(map[*exchange]*sse.QueuedWriter),
		bodyTimeout: 10 * time.Second,
	}
	if h.opts.Guard == nil {
		h.opts.Guard = edge.NewGuard(edge.GuardOptions{CheckHost: true})
	}
	if h.opts.OnDenied == nil {
		h.opts.OnDenied = func(w http.ResponseWriter, r *http.Request, err error) {
			refuse(w, r, http.StatusUnauthorized, manifest.AsError(err))
		}
	}
	h.serverMeta = serverMeta(h.impl)
	h.bindSDK()
	return h
}

// Run serves until ctx ends; then it ends every stream and session and waits for its
// goroutines.
func (h *Handler) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h.mu.Lock()
	if h.ctx != nil {
		h.mu.Unlock()
		return errors.New("mcp: Run was called twice")
	}
	h.ctx = ctx
	h.mu.Unlock()
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case now := <-tick.C:
			h.sweep(now)
		}
	}
	h.mu.Lock()
	h.stopped = true
	for x := range h.streams {
		x.cancel()
	}
	for _, s := range h.sessions {
		h.closeSessionLocked(s)
	}
	h.mu.Unlock()
	h.wg.Wait()
	return context.Cause(ctx)
}

// sweep ends what is over: streams whose token ended, idle sessions and idle tenants.
func (h *Handler) sweep(now time.Time) {
	h.mu.RLock()
	var over []*exchange
	for x, q := range h.streams {
		if x.caller.Active != nil && x.caller.Active() != nil {
			over = append(over, x)
			continue
		}
		q.Ping(now)
	}
	h.mu.RUnlock()
	for _, x := range over {
		x.cancel()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		if s.idleFor(now) > h.opts.SessionIdleTimeout {
			h.closeSessionLocked(s)
		}
	}
	for name, t := range h.tenants {
		if t.idleFor(now) > tenantIdleTimeout {
			t.stop()
			delete(h.tenants, name)
		}
	}
}

// processStart is the zero of moments.
var processStart = time.Now()

// monotonicNanos is t on the monotonic clock, in nanoseconds: a step of the wall clock, as of a
// relay that gets its time after the start, neither ends a session nor keeps one.
func monotonicNanos(t time.Time) int64 { return int64(t.Sub(processStart)) }

// Stats tells what is going on.
func (h *Handler) Stats() Stats {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return Stats{
		Tenants: len(h.tenants), Sessions: len(h.sessions), Streams: len(h.streams),
		Modern: h.count.modern.Load(), Legacy: h.count.legacy.Load(), Refused: h.count.refused.Load(),
		StalledStreams: h.count.cut.Load(), NotifyRounds: h.count.notified.Load(), Panics: h.count.panics.Load(),
	}
}

// exchange is one HTTP request on /mcp. The SDK carries it to the middleware, so that a
// message's caller is that of its own request, whoever opened the session.
type exchange struct {
	caller    *kernel.Caller
	tenant    *tenant
	session   *session // legacy, once it is known
	modern    bool
	flatNames bool // ?names=flat
	traceID   string
	id        []byte // of a single message, as it was sent

	// ctx ends when the client goes away; cancel ends it from here (nil on short
	// requests). It is in a struct because the SDK runs the handler under another one.
	ctx    context.Context
	cancel context.CancelFunc

	call *muxCall // of a request that the mux carries
}

// sessionID names the session for stages that are meant for one; modern requests have none.
func (x *exchange) sessionID() string {
	if x.session == nil {
		return ""
	}
	return x.session.id
}

// ServeHTTP answers one request. The order of the checks decides the status: method,
// origin and host, size, token, content type and strict body, then the protocol's own.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	edge.SetBodyDeadline(w, r, h.bodyTimeout)
	switch r.Method {
	case http.MethodGet, http.MethodPost, http.MethodDelete:
	default:
		w.Header().Set("Allow", "GET, POST, DELETE")
		h.refuse(w, r, http.StatusMethodNotAllowed, manifest.BadRequest, "this method is not allowed here; use POST")
		return
	}
	if err := h.opts.Guard.Check(r); err != nil {
		h.refuse(w, r, http.StatusForbidden, manifest.SafetyDenied, err.Error())
		return
	}
	if r.ContentLength > h.opts.MaxBody {
		h.refuse(w, r, http.StatusRequestEntityTooLarge, manifest.BadRequest, "the request body is too large")
		return
	}
	caller, err := h.opts.Authenticate(r)
	if err != nil {
		h.count.refused.Add(1)
		h.opts.OnDenied(w, r, err)
		return
	}
	t, e := h.acquireTenant(caller.Tenant)
	if e != nil {
		status := http.StatusServiceUnavailable
		if e.Code == manifest.RateLimited {
			status = http.StatusTooManyRequests
		}
		h.count.refused.Add(1)
		refuse(w, r, status, e)
		return
	}
	defer t.release()
	x := &exchange{caller: caller, tenant: t, ctx: r.Context(), traceID: edge.CallerTraceID(r)}
	x.flatNames = strings.Contains(r.URL.RawQuery, "names=flat") && r.URL.Query().Get("names") == "flat"
	if r.Method == http.MethodPost {
		h.servePost(w, r, x)
		return
	}
	if r.Header.Get(headerVersion) >= modernVersion {
		w.Header().Set("Allow", "POST")
		h.refuse(w, r, http.StatusMethodNotAllowed, manifest.BadRequest, "this protocol version knows POST only")
		return
	}
	h.count.legacy.Add(1)
	h.serveSessionMethod(w, r, x)
}

// acquireTenant finds or makes the tenant and counts the request in.
func (h *Handler) acquireTenant(name string) (*tenant, *manifest.Error) {
	h.mu.RLock()
	t, running := h.tenants[name], h.ctx != nil && !h.stopped
	if t != nil && running {
		t.inFlight.Add(1)
	}
	h.mu.RUnlock()
	if !running {
		return nil, manifest.E(manifest.Internal, "the relay is starting or stopping; retry shortly")
	}
	if t == nil {
		var err *manifest.Error
		if t, err = h.addTenant(name); err != nil {
			return nil, err
		}
	}
	if t.inFlight.Load()-t.openStreams.Load() > int64(h.opts.MaxInFlight) {
		t.release()
		return nil, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 1000,
			Message: "too many requests of this tenant are in progress; retry later", Reason: "tenant_in_flight"}
	}
	return t, nil
}

func (h *Handler) addTenant(name string) (*tenant, *manifest.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.tenants[name]; t != nil {
		t.inFlight.Add(1)
		return t, nil
	}
	if h.stopped {
		return nil, manifest.E(manifest.Internal, "the relay is stopping; retry shortly")
	}
	if len(h.tenants) >= h.opts.MaxTenants {
		return nil, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: tenantIdleTimeout.Milliseconds(),
			Message: "the relay serves as many tenants as it may; retry later", Reason: "tenants"}
	}
	t, err := newTenant(h, name)
	if err != nil {
		h.log.Error("mcp tenant", zap.Error(err))
		return nil, manifest.E(manifest.Internal, "the relay failed to serve this tenant")
	}
	t.inFlight.Add(1)
	h.tenants[name] = t
	h.wg.Go(func() { t.run(h.ctx) })
	return t, nil
}

func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, status int, code manifest.Code, message string) {
	h.count.refused.Add(1)
	refuse(w, r, status, manifest.E(code, message))
}
