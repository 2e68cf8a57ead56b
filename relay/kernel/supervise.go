package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"

	"agentctl/manifest"
)

// loaded is a plugin in the registry, with its counters and its breaker.
type loaded struct {
	plugin   Plugin
	manifest *Manifest
	counts   counters
	breaker  atomic.Pointer[breaker] // nil until the first fault
}

// visibleTo reports whether the caller's tenant may know of the plugin.
func (l *loaded) visibleTo(c *Caller) bool {
	return l.manifest.Tenant == "" || l.manifest.Tenant == c.Tenant
}

// DevicePrefix begins the names of the plugins that are devices; the node id follows.
const DevicePrefix = "device:"

// isDevice reports whether the plugin is a connected device. A device has the limits of its
// capabilities, and no breaker: RFC-0005 §7 and §8 define the answer to each call of a
// slow or failing device, the hub ends a link that does not answer, and a breaker would
// make all of a device unavailable for one bad capability.
func (l *loaded) isDevice() bool { return strings.HasPrefix(l.manifest.Name, DevicePrefix) }

// ControlPlugin is the name of the control plane. It has no breaker: the operator needs it
// when something is broken.
const ControlPlugin = "kernel"

// hasBreaker reports whether faults of the plugin open a breaker.
func (l *loaded) hasBreaker() bool { return !l.isDevice() && l.manifest.Name != ControlPlugin }

// Errors of calls that a plugin did not answer well. They quote nothing of the call.
var (
	errPanic     = &manifest.Error{Code: manifest.Internal, Message: "the plugin failed to answer this call", Reason: "panic"}
	errBadResult = &manifest.Error{Code: manifest.Internal, Message: "the plugin's result violates its own schema", Reason: "bad_result"}
	errBusy      = &manifest.Error{Code: manifest.RateLimited, Message: "too many calls of this plugin are in flight; wait for one to end", Reason: "concurrency"}

	// ErrReplaced makes dispatch look up the name again: its plugin was replaced or unloaded since,
	// and has not got the call. A plugin may return it after that only.
	ErrReplaced = &manifest.Error{Code: manifest.Internal, Message: "the plugin was unloaded; try again", Reason: "plugin_down", Outcome: manifest.NotSent}
)

// sharedFault is an error whose fault another call reports.
type sharedFault struct{ err *manifest.Error }

func (e sharedFault) Error() string { return e.err.Error() }
func (e sharedFault) Unwrap() error { return e.err }

// SharedFault returns an error of a call that is no fault beyond the one that another call reports:
// many calls end when a plugin's process ends once. The breaker ignores it.
func SharedFault(e *manifest.Error) error { return sharedFault{e} }

// callPlugin calls the plugin with a request that passed the checks, within the plugin's
// bounds, and counts the outcome.
func (k *Kernel) callPlugin(ctx context.Context, l *loaded, r *Request) (*Result, error) {
	limit := int64(l.manifest.MaxConcurrency)
	if limit == 0 {
		limit = DefaultConcurrency
	}
	if n := l.counts.inFlight.Add(1); n <= 0 {
		k.release(l)
		return nil, ErrReplaced
	} else if n > limit && !l.isDevice() {
		k.release(l)
		return nil, errBusy
	}
	var finish func(fault error)
	if b := l.breaker.Load(); b != nil {
		var err error
		if finish, err = b.allow(l); err != nil {
			k.release(l)
			return nil, err
		}
	}
	k.total.inFlight.Add(1)
	l.counts.calls.Add(1)
	r.plugin, r.dispatched = l, true
	var res *Result
	var err error
	if l.manifest.Inline {
		res, err = l.call(ctx, r)
		k.release(l)
	} else {
		res, err = k.callDetached(ctx, l, r)
	}
	k.total.inFlight.Add(-1)
	fault := k.count(ctx, l, err)
	if fault != nil && l.manifest.Forwards && !errors.Is(fault, errPanic) {
		fault = context.Canceled
	}
	switch {
	case finish != nil:
		finish(fault)
	case fault != nil && !errors.Is(fault, context.Canceled) && l.hasBreaker():
		l.recordFault(fault)
	}
	return res, err
}

// reasonStorage is the reason of an E_INTERNAL that the relay's disk caused. It is no fault of
// the plugin: its breaker would refuse reads as well, which need no disk.
const reasonStorage = "storage"

// count counts the outcome of a call and returns the fault of the plugin that it shows: nil for an
// answer or a refusal, and context.Canceled, which the breaker ignores, for what says nothing about
// the plugin.
func (k *Kernel) count(ctx context.Context, l *loaded, err error) (fault error) {
	hasEnded := ctx.Err() != nil
	isTimeout := hasEnded && errors.Is(context.Cause(ctx), errBudget)
	if err != nil || isTimeout {
		l.counts.errors.Add(1)
	}
	switch {
	case isTimeout:
		k.total.timeouts.Add(1)
		l.counts.timeouts.Add(1)
		if k.explainTimeout(l) != nil {
			return context.Canceled // the relay's fault
		}
		return errBudget
	case hasEnded: // the caller left
		return context.Canceled
	case err == nil: // here, so that a call that succeeds allocates nothing for what follows
		return nil
	case errors.As(err, new(sharedFault)):
		return context.Canceled
	case errors.Is(err, errPanic):
		k.total.panics.Add(1)
		l.counts.panics.Add(1)
		return err
	case isRefusal(err):
		return nil
	}
	return err
}

// isRefusal reports whether err is an answer of a plugin that works: the caller's fault, or one of the
// relay's disk.
func isRefusal(err error) bool {
	if errors.As(err, new(*RPCError)) || errors.Is(err, ErrNoResource) {
		return true
	}
	e := manifest.AsError(err)
	return e.Code != manifest.Internal || e.Reason == reasonStorage
}

// call calls the plugin. It converts a panic into an error and checks the result against
// the tool's schema. A panic in a goroutine that the plugin started cannot be caught here.
func (l *loaded) call(ctx context.Context, r *Request) (res *Result, err error) {
	defer func() {
		if recover() != nil { // the value may quote arguments
			res, err = nil, errPanic
		}
	}()
	if r.resource != nil {
		data, err := l.plugin.(Reader).Read(ctx, r.Caller, r.URI)
		if err != nil {
			return nil, err
		}
		return l.markUntrusted(r, &Result{Resource: r.resource, Data: data}), nil
	}
	if h, ok := l.plugin.(MethodHandler); ok && r.tool == nil {
		data, err := h.HandleMethod(ctx, r.Caller, r.Session, r.Method, r.Arguments)
		if err != nil {
			return nil, err
		}
		return l.markUntrusted(r, &Result{Data: data}), nil
	}
	if res, err = l.plugin.Call(ctx, r); err != nil {
		return nil, err
	}
	if res == nil {
		return nil, errBadResult
	}
	hasStructured := !res.IsError && res.Stream == nil && res.InputRequests == nil && res.RPCError == nil
	if check := r.tool.CheckResult; check != nil && hasStructured && check(res.Structured) != nil {
		return nil, errBadResult
	}
	return l.markUntrusted(r, res), nil
}

// detachedCall is a call in its own goroutine. Exactly one side finishes it: the
// plugin by its answer, or the caller by leaving when ctx ends.
type detachedCall struct {
	k        *Kernel
	l        *loaded
	ctx      context.Context
	req      Request     // a copy for the plugin: the caller goes on with the original
	finished atomic.Bool // set by the side that is first
	done     chan struct{}
	res      *Result // valid after done
	err      error
	session  detachedSession
}

// callDetached is call in its own goroutine, which is abandoned when ctx ends first:
// a plugin may ignore its context, and its caller must not wait for that. An abandoned
// call still counts as in flight, so that MaxConcurrency bounds their number. Its answer
// is dropped.
func (k *Kernel) callDetached(ctx context.Context, l *loaded, r *Request) (*Result, error) {
	c := &detachedCall{k: k, l: l, ctx: ctx, req: *r, done: make(chan struct{})}
	if r.Session != nil {
		c.session = detachedSession{r.Session, c}
		c.req.Session = &c.session
	}
	go c.run()
	select {
	case <-c.done:
	case <-ctx.Done():
		if c.finished.CompareAndSwap(false, true) {
			return nil, context.Cause(ctx)
		}
		<-c.done
	}
	return c.res, c.err
}

func (c *detachedCall) run() {
	res, err := c.l.call(c.ctx, &c.req)
	c.k.release(c.l)
	if c.finished.CompareAndSwap(false, true) {
		c.res, c.err = res, err
		close(c.done)
	} else if res != nil && res.Stream != nil {
		res.Stream.Close()
	}
}

// detachedSession refuses what a plugin sends to the client after its call has finished:
// nothing may follow a result.
type detachedSession struct {
	Session
	c *detachedCall
}

func (s *detachedSession) Notify(ctx context.Context, method string, params json.RawMessage) error {
	if s.c.finished.Load() {
		return context.Canceled
	}
	return s.Session.Notify(ctx, method, params)
}

func (s *detachedSession) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if s.c.finished.Load() {
		return nil, context.Canceled
	}
	return s.Session.Request(ctx, method, params)
}

// supervisedHandler is a MethodHandler plugin within its bounds.
type supervisedHandler struct {
	k *Kernel
	l *loaded
}

func (s supervisedHandler) Methods() []string { return s.l.plugin.(MethodHandler).Methods() }

// HandleMethod calls the plugin, for at most its CallTimeout or CallBudget. Invisible characters in
// untrusted text are shown, as for Request.MarkUntrusted. The error is a *RPCError, ErrNoResource or
// a *manifest.Error.
func (s supervisedHandler) HandleMethod(ctx context.Context, c *Caller, session Session, method string, params json.RawMessage) (json.RawMessage, error) {
	r := &Request{Caller: c, Method: method, Session: session, Arguments: params, MarkUntrusted: true, plugin: s.l}
	callCtx, cancel := context.WithTimeoutCause(ctx, r.budget(), errBudget)
	defer cancel()
	res, err := s.k.callPlugin(callCtx, s.l, r)
	for l := s.l; err == error(ErrReplaced); {
		if l = s.k.successor(l, c); l == nil {
			break
		}
		res, err = s.k.callPlugin(callCtx, l, r)
	}
	res, err = s.k.pipe.Filter(r, res, err) // methods do not pass the stages otherwise
	var rpc *RPCError
	switch {
	case err == nil:
		return res.Data, nil
	case errors.As(err, &rpc), errors.Is(err, ErrNoResource):
		return nil, err
	case errors.Is(context.Cause(callCtx), errBudget):
		err = errBudget
	}
	return nil, asError(ctx, r, err)
}
