package mcp

import (
	"cmp"
	"context"
	"errors"
	"net/http"
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
	// Kernel routes the calls, and decides which caller may use which tool.
	Kernel *kernel.Kernel
	// Authenticate returns the caller of a request, by its token alone. The caller's Active,
	// if it is set, is called each second while a stream is open; its error ends the stream.
	// Active runs with a lock held, so it must not block or call the Handler.
	Authenticate func(r *http.Request) (*kernel.Caller, error)
	// OnDenied answers a request that Authenticate refused: 401 or 403, the envelope and
	// WWW-Authenticate. Default: 401 with the envelope.
	OnDenied func(w http.ResponseWriter, r *http.Request, err error)
	// Label returns what a board is called in titles: the name that an operator gave it, or the
	// start of its id. It reads memory, since a list has hundreds of boards. nil: titles name no board.
	Label func(nodeID string) string
	// MayPack reports whether results of a tool may be packed for a caller, on a connection: the output
	// schema that the caller sees then admits that. nil: never.
	MayPack func(c *kernel.Caller, connID string, t *kernel.Tool) bool
	// OnSessionClosed, when set, is called with the id of each session that has ended.
	OnSessionClosed func(session string)
	Notice          string      // a sentence about the relay's state that precedes the instructions; default none
	Version         string      // of the relay, sent to clients; default "dev"
	Logger          *zap.Logger // default: none; arguments and results are not logged
	// Guard checks Host and Origin. Default: the Host is a loopback name, and no page of
	// another origin.
	Guard *edge.Guard

	// SessionKeys returns the keys of session ids: the first one signs, all of them verify. With the
	// same keys a later Handler makes the sessions of this one again (session_recreate.go). It is
	// called when a session is opened, and for each unknown id. Default: one key of this Handler.
	SessionKeys func() [][]byte

	// Bodies bounds the memory of request bodies; the server may have other handlers that share
	// it. Default: the handler has its own.
	Bodies *edge.Bodies

	MaxBody            int64         // bytes of a request; default 1 MiB
	MaxTenants         int           // served at once; default 1024
	MaxSessions        int           // legacy sessions, an edge.Pool; default 2048
	MaxStreams         int           // open GET and listen streams, an edge.Pool; default 2048
	MaxInFlight        int           // requests in progress of one tenant, streams apart; default 1024
	SessionIdleTimeout time.Duration // a session without requests and streams ends; default 30 min
}

// Fixed bounds.
const (
	maxBatch            = 32                     // messages of a JSON-RPC batch (protocol 2025-03-26)
	maxWatchedPerStream = 64                     // watched resources of a session or a listen stream
	maxWatchedPerTenant = kernel.MaxWatched / 4  // so that no tenant takes all of the kernel's
	tenantIdleTimeout   = 10 * time.Minute       // then an unused tenant's servers are dropped
	sweepInterval       = time.Second            // how often tokens of open streams are checked
	notifyInterval      = time.Second            // at most one round of change notifications a tenant
	notifyTimeout       = 5 * time.Second        // for one round
	writeTimeout        = 15 * time.Second       // for one write to a client
	pingInterval        = 25 * time.Second       // a comment on an idle stream
	pageSize            = 200                    // entries of a list
	listTTLMS           = 10_000                 // how long a client may cache a list
	modernVersion       = "2026-07-28"           // first version without sessions
	headerVersion       = "Mcp-Protocol-Version" // canonical forms
	headerSession       = "Mcp-Session-Id"
)

// Handler is the http.Handler of /mcp. Make one with New; it serves while Run runs, and
// answers 503 before and after.
//
// It keeps three tables. tenants are made by the first request of a tenant and dropped
// after tenantIdleTimeout; sessions are those of the legacy era; streams are the open GET
// and listen requests of both eras, which sweep checks each second.
type Handler struct {
	opts             Options
	log              *zap.Logger
	impl             *sdk.Implementation
	legacy           http.Handler      // the SDK's stateful handler: sessions
	modern           http.Handler      // the SDK's stateless handler: listen, and what is not plain
	sendNotification sdk.MethodHandler // the SDK's sending chain

	sessionPool, streamPool *edge.Pool // shares of both tables, by identity

	start     int64 // of this process, Unix nanoseconds: part of the session ids that it issues
	recreated recreations

	bodyTimeout time.Duration
	neverDirect bool   // tests compare direct calls with the SDK's answers
	serverMeta  []byte // _meta of modern results: {"io.modelcontextprotocol/serverInfo": ...}
	schemas     schemaCache
	started     chan struct{} // closed by Run
	stopping    chan struct{} // closed when Run ends: streams of tools end
	drained     chan struct{} // closed when the calls in progress have been answered

	// calls ends with kernel.ErrStopping when calls in progress are cut.
	calls    context.Context
	cutCalls context.CancelCauseFunc

	mu       sync.RWMutex    // protects the fields below
	ctx      context.Context // Run's; nil before
	stopped  bool
	tenants  map[string]*tenant
	sessions map[string]*session
	streams  map[*exchange]*sse.QueuedWriter
	wg       sync.WaitGroup // goroutines that Run waits for

	count counters
}

// counters are the sources of Stats.
type counters struct {
	refused, cut atomic.Uint64
}

// Stats are present sizes of a Handler and counters since New.
type Stats struct {
	Tenants, Sessions, Streams int
	SessionPool, StreamPool    edge.PoolStats
	Refused                    uint64 // requests refused before a message of theirs was handled
	StalledStreams             uint64 // streams cut because their reader stalled
}

// New makes a Handler. It starts no goroutine; Run does.
func New(opts Options) *Handler {
	setDefault(&opts.MaxBody, 1<<20)
	setDefault(&opts.MaxTenants, 1024)
	setDefault(&opts.MaxSessions, 2048)
	setDefault(&opts.MaxStreams, 2048)
	setDefault(&opts.MaxInFlight, 1024)
	setDefault(&opts.SessionIdleTimeout, 30*time.Minute)
	setDefault(&opts.Version, "dev")
	opts.Logger = cmp.Or(opts.Logger, zap.NewNop())
	if opts.Bodies == nil {
		opts.Bodies = edge.NewBodies()
	}
	if opts.SessionKeys == nil {
		opts.SessionKeys = randomSessionKeys()
	}
	if opts.Guard == nil {
		opts.Guard = edge.NewGuard(edge.GuardOptions{CheckHost: true})
	}
	if opts.OnDenied == nil {
		opts.OnDenied = func(w http.ResponseWriter, r *http.Request, err error) {
			refuse(w, r, http.StatusUnauthorized, manifest.AsError(err))
		}
	}
	h := &Handler{
		opts:        opts,
		log:         opts.Logger,
		impl:        &sdk.Implementation{Name: "agentctl", Title: "agentctl relay", Version: opts.Version},
		started:     make(chan struct{}),
		stopping:    make(chan struct{}),
		drained:     make(chan struct{}),
		tenants:     make(map[string]*tenant),
		sessions:    make(map[string]*session),
		streams:     make(map[*exchange]*sse.QueuedWriter),
		bodyTimeout: 10 * time.Second,
		start:       time.Now().UnixNano(),
		recreated:   recreations{pool: edge.NewPool(maxRecreated)},
		sessionPool: edge.NewPool(int64(opts.MaxSessions)),
		streamPool:  edge.NewPool(int64(opts.MaxStreams)),
	}
	h.calls, h.cutCalls = context.WithCancelCause(context.Background())
	h.serverMeta = serverMeta(h.impl)
	h.bindSDK()
	return h
}

// setDefault sets an option that is zero or negative, or an empty string.
func setDefault[T cmp.Ordered](v *T, def T) {
	var zero T
	if *v <= zero {
		*v = def
	}
}

// Started returns a channel that is closed once Run serves. Until then requests are refused with 503.
func (h *Handler) Started() <-chan struct{} { return h.started }

// Drained returns a channel that is closed once Run has ended every call in progress, except those
// that have no session and go to a board: these have their answer within kernel.CallBudget.
func (h *Handler) Drained() <-chan struct{} { return h.drained }

// Run serves until ctx ends. It then drains: it refuses new requests, ends every stream, and gives
// calls callGrace to end by themselves before it cuts them, which answers them with their outcome.
// Then it ends the sessions, and waits for its goroutines.
func (h *Handler) Run(ctx context.Context) error {
	// Tenants outlive ctx: they carry the calls that are drained.
	tenants, stopTenants := context.WithCancel(context.WithoutCancel(ctx))
	defer stopTenants()
	h.mu.Lock()
	if h.ctx != nil {
		h.mu.Unlock()
		return errors.New("mcp: Run was called twice")
	}
	h.ctx = tenants
	h.mu.Unlock()
	close(h.started)
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case now := <-tick.C:
			h.sweep(now)
		}
	}
	h.drain()
	stopTenants()
	h.mu.Lock()
	for _, s := range h.sessions {
		h.closeSessionLocked(s)
	}
	h.mu.Unlock()
	h.wg.Wait()
	return context.Cause(ctx)
}

// Times of a drain.
const (
	callGrace   = time.Second            // for calls to end by themselves: most take milliseconds
	answerGrace = 500 * time.Millisecond // for the answers of those that were cut
	drainPoll   = 5 * time.Millisecond
)

// drain ends streams and calls in progress, see Run.
func (h *Handler) drain() {
	defer close(h.drained)
	h.mu.Lock()
	h.stopped = true
	for x := range h.streams {
		x.cancel(nil)
	}
	h.mu.Unlock()
	close(h.stopping)
	if h.awaitIdle(callGrace) {
		h.cutCalls(kernel.ErrStopping)
		return
	}
	h.cutCalls(kernel.ErrStopping)
	h.mu.RLock()
	for _, s := range h.sessions {
		s.cutDirect()
	}
	h.mu.RUnlock()
	h.awaitIdle(answerGrace)
}

// awaitIdle waits until no request but streams is in progress, and reports whether that was so within the
// timeout. It polls: nothing else needs the number of requests of all tenants.
func (h *Handler) awaitIdle(timeout time.Duration) bool {
	for end := time.Now().Add(timeout); ; time.Sleep(drainPoll) {
		h.mu.RLock()
		n := int64(0)
		for _, t := range h.tenants {
			n += t.inFlight.Load() - t.openStreams.Load()
		}
		h.mu.RUnlock()
		if n == 0 {
			return true
		}
		if !time.Now().Before(end) {
			return false
		}
	}
}

// sweep ends streams whose token has ended, idle sessions and idle tenants. Tokens are
// checked under the read lock, so that requests go on; a canceled stream removes itself
// from the table.
func (h *Handler) sweep(now time.Time) {
	h.mu.RLock()
	var expired []*exchange
	for x, q := range h.streams {
		if x.caller.Active != nil && x.caller.Active() != nil {
			expired = append(expired, x)
			continue
		}
		q.Ping(now)
	}
	h.mu.RUnlock()
	for _, x := range expired {
		x.cancel(nil)
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

var processStart = time.Now()

// monotonicNanos returns t on the monotonic clock: a step of the wall clock, as of a relay
// that gets its time after the start, neither ends an idle session nor keeps one.
func monotonicNanos(t time.Time) int64 { return int64(t.Sub(processStart)) }

// Stats returns the counters.
func (h *Handler) Stats() Stats {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return Stats{
		Tenants: len(h.tenants), Sessions: len(h.sessions), Streams: len(h.streams),
		SessionPool: h.sessionPool.Stats(), StreamPool: h.streamPool.Stats(),
		Refused: h.count.refused.Load(), StalledStreams: h.count.cut.Load(),
	}
}

// ServeHTTP answers one request. The order of the checks decides the status: method,
// Origin and Host, size, token, limits of the tenant, content type and strict body, then
// the protocol's own.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	edge.SetBodyDeadline(w, r, h.bodyTimeout)
	if r.Method != http.MethodGet && r.Method != http.MethodPost && r.Method != http.MethodDelete {
		w.Header().Set("Allow", "GET, POST, DELETE")
		h.refuse(w, r, http.StatusMethodNotAllowed, manifest.E(manifest.BadRequest, "this method is not allowed here; use POST"))
		return
	}
	if err := h.opts.Guard.Check(r); err != nil {
		h.refuse(w, r, http.StatusForbidden, manifest.E(manifest.SafetyDenied, err.Error()))
		return
	}
	if r.ContentLength > h.opts.MaxBody {
		h.refuse(w, r, http.StatusRequestEntityTooLarge, errBodyTooLarge)
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
		h.refuse(w, r, status, e)
		return
	}
	defer t.release()
	x := &exchange{caller: caller, tenant: t, ctx: r.Context(), traceID: edge.CallerTraceID(r)}
	if e := h.readQuery(x, r.URL.RawQuery, r.Header.Get(headerSession) != ""); e != nil {
		h.refuse(w, r, http.StatusBadRequest, e)
		return
	}
	switch {
	case r.Method == http.MethodPost:
		h.servePost(w, r, x)
		h.opts.Bodies.Release(identityOf(caller), x.bodyHeld)
	case r.Header.Get(headerVersion) >= modernVersion:
		w.Header().Set("Allow", "POST")
		h.refuse(w, r, http.StatusMethodNotAllowed, manifest.E(manifest.BadRequest, "this protocol version knows POST only"))
	default:
		h.serveSessionMethod(w, r, x)
	}
}

// acquireTenant finds or makes the tenant and counts the request in; release counts it
// out. A tenant with requests in progress is not dropped.
func (h *Handler) acquireTenant(name string) (*tenant, *manifest.Error) {
	h.mu.RLock()
	t, running := h.tenants[name], h.ctx != nil && !h.stopped
	if t != nil && running {
		t.inFlight.Add(1)
	}
	h.mu.RUnlock()
	if !running {
		return nil, errStopping
	}
	if t == nil {
		var err *manifest.Error
		if t, err = h.addTenant(name); err != nil {
			return nil, err
		}
	}
	if t.inFlight.Load()-t.openStreams.Load() > int64(h.opts.MaxInFlight) {
		t.release()
		return nil, tooMany("too many requests of this tenant are in progress; retry later", "tenant_in_flight", 1000)
	}
	return t, nil
}

// addTenant makes a tenant and starts its goroutine, unless another request just has. The
// bound protects memory: each tenant has three SDK servers and a goroutine.
func (h *Handler) addTenant(name string) (*tenant, *manifest.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.tenants[name]
	if t == nil {
		if h.stopped {
			return nil, errStopping
		}
		if len(h.tenants) >= h.opts.MaxTenants {
			return nil, tooMany("the relay serves as many tenants as it may; retry later", "tenants", tenantIdleTimeout.Milliseconds())
		}
		var err error
		if t, err = newTenant(h, name); err != nil {
			h.log.Error("mcp tenant", zap.Error(err))
			return nil, manifest.E(manifest.Internal, "the relay failed to serve this tenant")
		}
		h.tenants[name] = t
		h.wg.Go(func() { t.run(h.ctx) })
	}
	t.inFlight.Add(1)
	return t, nil
}
