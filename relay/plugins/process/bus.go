package process

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A plugin on the bus is a client of the relay, by requests on its own connection
// (docs/kernel.md, "On the bus"; the methods are in bus_request.go):
//
//	Bus        the relay's side; one for a Host
//	busMember  a plugin by its name: its shares, which outlast restarts and versions
//	busConn    a connection: the calls that the plugin serves, and its subscriptions
//
// A request has one of two sets of rights:
//
//	with the token of a call   what the manifest asks for ∩ the scopes of the call's caller,
//	                           in the caller's tenant, until the call ends
//	without a token            what the manifest asks for, in the tenants of the consent
//
// A plugin that leaves out the token gains nothing beyond what an operator has consented to, and the
// audit log names the plugin as the actor. Nothing can keep it from confusing the callers that it
// serves at the same time: it may use the token of either.
//
// Bus.mu and busConn.mu are not held together, nor while the kernel or the event log is called or a
// message is sent. busConn.announcing is held while the consent is sent, and taken before the others.

// Bounds of a plugin on the bus.
const (
	// A request beyond maxBusRequests is refused and not queued: a plugin that sends many at once must
	// not fill the relay's memory.
	maxBusRequests   = 16 // in flight
	maxSubscriptions = 16 // of a connection

	busRate, busBurst             = 50, 100  // requests a second
	appendRate, appendBurst       = 5, 50    // events a second
	appendBytes                   = 1 << 20  // of events' payloads at once, and in each hour
	maxAppend                     = 16 << 10 // bytes of the payload of one event
	maxMembers                    = 256      // names; beyond it, those without a connection are dropped
	maxBusArguments         int64 = 1 << 20  // bytes of a request's parameters
)

// BusOptions are what a Bus uses of the relay. All fields but Events must be given.
type BusOptions struct {
	Kernel *kernel.Kernel
	Log    kernel.Log
	// Events follows the event log; nil: there is nothing to subscribe to but resources.
	Events Events
	// Consent returns the tenants in which an operator allows what the manifest of that digest asks
	// for; AllTenants among them stands for all. It reads memory. None: no consent.
	Consent func(plugin, digest string) []string
}

// Events is the event log as subscriptions need it.
type Events interface {
	// Follow calls fn with the events above seq after, in order, with their topics, until ctx ends or
	// fn returns an error. Without tenants it follows all of them.
	Follow(ctx context.Context, after uint64, tenants []string, fn func(topic string, e *kernel.Event) error) error
	// SeqAt returns a seq before every event that is younger than age.
	SeqAt(ctx context.Context, age time.Duration) (uint64, error)
}

// AllTenants as a tenant of a consent stands for every tenant.
const AllTenants = "*"

// Bus gives plugins what their manifests ask for and an operator has allowed. Its methods may be
// called from any goroutine.
type Bus struct {
	o BusOptions

	mu      sync.Mutex // protects the field below
	members map[string]*busMember
}

// busMember is a plugin by name. The limits hold for all of its connections together.
type busMember struct {
	slots    chan struct{} // capacity maxBusRequests
	requests *rate.Limiter
	appends  *rate.Limiter
	bytes    *rate.Limiter // of payloads

	conns map[*busConn]struct{} // protected by Bus.mu
}

// NewBus makes a Bus.
func NewBus(o BusOptions) *Bus { return &Bus{o: o, members: make(map[string]*busMember)} }

// busConn is the bus of one connection. Its context ends with the connection.
type busConn struct {
	bus    *Bus
	member *busMember
	conn   *conn
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // of the subscriptions, and of announce after a change of the consent

	announcing sync.Mutex // held by announce, so that the newest consent is the last one that is sent

	mu       sync.Mutex          // protects the fields below
	calls    map[string]*busCall // that the plugin serves, by their tokens
	subs     map[string]*subscription
	lastSub  int
	isServed bool // the handshake is over: the plugin is notified of the consent
	isClosed bool
	granted  context.Context // ends with the present consent
	withdraw context.CancelFunc
}

// busCall is a call that the plugin serves.
type busCall struct {
	ctx    context.Context // ends with the call, the budget of the outermost caller included
	caller *kernel.Caller
	trace  string
}

// attach makes the bus of a connection; nil if its plugin asks for nothing.
func (b *Bus) attach(c *conn) *busConn {
	if b == nil || c.plugin.declared == nil || c.plugin.declared.Bus.isEmpty() {
		return nil
	}
	bc := &busConn{bus: b, conn: c, calls: make(map[string]*busCall), subs: make(map[string]*subscription)}
	bc.ctx, bc.cancel = context.WithCancel(context.Background())
	bc.granted, bc.withdraw = context.WithCancel(bc.ctx)
	name := c.plugin.manifest.Name
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.members[name]
	if m == nil {
		if len(b.members) >= maxMembers {
			maps.DeleteFunc(b.members, func(_ string, m *busMember) bool { return len(m.conns) == 0 })
		}
		m = &busMember{
			slots: make(chan struct{}, maxBusRequests), requests: rate.NewLimiter(busRate, busBurst),
			appends: rate.NewLimiter(appendRate, appendBurst), bytes: rate.NewLimiter(appendBytes/3600.0, appendBytes),
			conns: make(map[*busConn]struct{}),
		}
		b.members[name] = m
	}
	bc.member = m
	m.conns[bc] = struct{}{}
	return bc
}

// close ends everything that the plugin has under way, and waits for its goroutines. The connection
// has ended.
func (bc *busConn) close() {
	if bc == nil {
		return
	}
	bc.mu.Lock()
	bc.isClosed = true
	bc.mu.Unlock()
	bc.cancel()
	bc.wg.Wait()
	bc.bus.mu.Lock()
	defer bc.bus.mu.Unlock()
	delete(bc.member.conns, bc)
}

// Refresh applies a change of the consent for a plugin to its connections: requests and
// subscriptions under the earlier consent end, and the plugin is notified of the tenants of the
// new one. Refresh does not wait for a plugin that reads nothing.
func (b *Bus) Refresh(plugin string) {
	b.mu.Lock()
	var conns []*busConn
	if m := b.members[plugin]; m != nil {
		conns = slices.Collect(maps.Keys(m.conns))
	}
	b.mu.Unlock()
	for _, bc := range conns {
		bc.mu.Lock()
		// Under one lock, so that a request gets either the old context, which has ended, or the new one
		// (consent).
		bc.withdraw()
		bc.granted, bc.withdraw = context.WithCancel(bc.ctx)
		if bc.isServed && !bc.isClosed {
			bc.wg.Go(bc.announce)
		}
		bc.mu.Unlock()
	}
}

// served notifies the plugin of the present consent, and from now on of each change.
func (bc *busConn) served() {
	if bc == nil {
		return
	}
	bc.mu.Lock()
	bc.isServed = true
	bc.mu.Unlock()
	bc.announce()
}

// announce notifies the plugin of the tenants in which its requests are allowed.
func (bc *busConn) announce() {
	bc.announcing.Lock()
	defer bc.announcing.Unlock()
	bc.notify("agentctl/consent", map[string]any{"tenants": append([]string{}, bc.tenants()...)})
}

// notify sends a notification. A connection that fails has ended, which its owner sees.
func (bc *busConn) notify(method string, params any) {
	_ = bc.conn.rpc.Notify(bc.ctx, method, params)
}

// name is the name of the plugin.
func (bc *busConn) name() string { return bc.conn.plugin.manifest.Name }

// actor is the plugin's identity.
func (bc *busConn) actor() string { return kernel.PluginActor + bc.name() }

// declared is what the manifest asks for.
func (bc *busConn) declared() *DeclaredBus { return &bc.conn.plugin.declared.Bus }

// tenants are those of the consent for this version of the plugin.
func (bc *busConn) tenants() []string {
	return bc.bus.o.Consent(bc.name(), bc.conn.plugin.digest)
}

// consent returns the tenants of the present consent, and a context that ends with it. The context is
// read first: if the consent changes in between, the context has ended.
func (bc *busConn) consent() (granted context.Context, tenants []string) {
	bc.mu.Lock()
	granted = bc.granted
	bc.mu.Unlock()
	return granted, bc.tenants()
}

// begin registers a call that the plugin is about to serve. The token that it returns is for the
// plugin; it is "" if the plugin has no use for one.
func (bc *busConn) begin(ctx context.Context, caller *kernel.Caller, trace string) (token string, end func()) {
	if bc == nil {
		return "", func() {}
	}
	// rand.Text has at least 128 random bits, so another plugin cannot guess the token of a call.
	token = rand.Text()
	bc.mu.Lock()
	defer bc.mu.Unlock()
	bc.calls[token] = &busCall{ctx: ctx, caller: caller, trace: trace}
	return token, func() {
		bc.mu.Lock()
		defer bc.mu.Unlock()
		delete(bc.calls, token)
	}
}

// busRights is with which rights a request is made.
type busRights struct {
	ctx    context.Context
	cancel context.CancelFunc
	caller *kernel.Caller
	trace  string
}

// Refusals of requests.
var (
	errNoConsent = &manifest.Error{Code: manifest.SafetyDenied, Reason: "consent", ShowReason: true,
		Message: "no operator has allowed this plugin to use the relay; agentctl plugin allow does"}
	errToken  = &manifest.Error{Code: manifest.BadRequest, Reason: "call", ShowReason: true, Message: "the call that _meta names is unknown or has ended"}
	errTenant = &manifest.Error{Code: manifest.SafetyDenied, Reason: "tenant", ShowReason: true, Message: "the consent for this plugin does not cover this tenant"}
	errDepth  = &manifest.Error{Code: manifest.SafetyDenied, Reason: "depth", ShowReason: true, Message: "plugins call each other too deeply; the chain ends here"}
	errBusy   = &manifest.Error{Code: manifest.RateLimited, Reason: "concurrency", RetryAfterMS: 100, Message: "16 requests of this plugin are in flight; wait for one to end"}
)

// errRequestEnded is the cause of a request that ended because its plugin's call or connection did. It
// is no deadline, so that the kernel does not count a fault of the plugin that was called.
var errRequestEnded = errors.New("the plugin that asked no longer waits")

// rights returns the rights of a request that names the token of a call, or of one that names a
// tenant. The caller must call cancel of a result without an error.
func (bc *busConn) rights(token, tenant string) (r *busRights, err error) {
	granted, tenants := bc.consent()
	if len(tenants) == 0 {
		return nil, errNoConsent
	}
	bc.mu.Lock()
	call, depth := bc.calls[token], 0
	for _, c := range bc.calls {
		depth = max(depth, c.caller.Depth)
	}
	bc.mu.Unlock()
	if token == "" {
		r, err = bc.ownRights(granted, tenants, tenant, depth)
	} else if call == nil {
		return nil, errToken
	} else {
		r, err = bc.callRights(granted, call, tenants, tenant)
	}
	switch {
	case err != nil:
		return nil, err
	case r.caller.Depth > kernel.MaxDepth:
		r.cancel()
		return nil, errDepth
	}
	return r, nil
}

// ownRights are those of the plugin itself. While it serves calls, the request counts as one level
// deeper than the deepest of them: a plugin that leaves out the token does not get around MaxDepth.
func (bc *busConn) ownRights(granted context.Context, tenants []string, tenant string, depth int) (*busRights, error) {
	if tenant == "" && len(tenants) == 1 && tenants[0] != AllTenants {
		tenant = tenants[0]
	}
	if tenant == "" {
		return nil, &manifest.Error{Code: manifest.BadRequest, Reason: "tenant", ShowReason: true, Message: "the consent has more than one tenant: name one as tenant, or a call in _meta"}
	}
	if !covers(tenants, tenant) || !manifest.ValidTenant(tenant) {
		return nil, errTenant
	}
	ctx, cancel := context.WithCancel(granted)
	return &busRights{ctx: ctx, cancel: cancel, trace: manifest.NewTraceID(), caller: &kernel.Caller{
		Tenant: tenant, Actor: bc.actor(), Transport: "plugin", Scopes: busScopes{}, Depth: depth + 1,
	}}, nil
}

// callRights are those of the plugin while it serves a call.
func (bc *busConn) callRights(granted context.Context, call *busCall, tenants []string, tenant string) (*busRights, error) {
	c := call.caller
	if tenant != "" && tenant != c.Tenant || !covers(tenants, c.Tenant) {
		return nil, errTenant
	}
	// Not derived from the call's context: if its deadline ended this request, that would count as a
	// fault of the plugin that is called now. The cause of the end is errRequestEnded instead.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(call.ctx))
	end := func() { cancel(errRequestEnded) }
	stopCall, stopGrant := context.AfterFunc(call.ctx, end), context.AfterFunc(granted, end)
	r := &busRights{ctx: ctx, trace: call.trace, cancel: func() { stopCall(); stopGrant(); end() }}
	if d, ok := call.ctx.Deadline(); ok {
		r.ctx = boundedContext{ctx, d}
	}
	r.caller = &kernel.Caller{
		Tenant: c.Tenant, Actor: c.Actor, JTI: c.JTI, Address: c.Address, Transport: "plugin", Via: bc.actor(),
		Scopes: busScopes{c.Scopes, true}, Depth: c.Depth + 1, Active: c.Active,
	}
	return r, nil
}

// boundedContext has the deadline of the outermost call. It is canceled by another cause.
type boundedContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c boundedContext) Deadline() (time.Time, bool) { return c.deadline, true }

// busScopes are the scopes of a plugin: every one that a tool may need, because the manifest and the
// consent name the tools themselves, and no more than those of the caller while it serves a call.
type busScopes struct {
	caller  kernel.Scopes
	forCall bool
}

// neverOnBus are scopes that no plugin has: with them it could allow itself more.
var neverOnBus = []string{
	manifest.ScopeKernelAdmin, manifest.ScopeTokensWrite, manifest.ScopeInvitesWrite, manifest.ScopeNodesWrite,
	manifest.ScopeDeviceConnect, manifest.ScopeDeviceEnroll,
}

// Has implements kernel.Scopes.
func (s busScopes) Has(scope string) bool {
	return !slices.Contains(neverOnBus, scope) && (!s.forCall || s.caller != nil && s.caller.Has(scope))
}

// HasTopic limits a plugin to the topics of its caller while it serves a call.
func (s busScopes) HasTopic(topic string) bool {
	return !s.forCall || (&kernel.Caller{Scopes: s.caller}).HasTopic(topic)
}

// covers reports whether a name is one of a list, or begins with one that ends in *. A name that
// itself ends in * is covered by one that is at least as wide.
func covers(list []string, name string) bool {
	return slices.ContainsFunc(list, func(pattern string) bool {
		prefix, isPrefix := strings.CutSuffix(pattern, "*")
		return pattern == name || isPrefix && strings.HasPrefix(name, prefix)
	})
}
