package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"

	"agentctl/manifest"
)

// loaded is a plugin in the registry, with what watches over it.
type loaded struct {
	plugin   Plugin
	manifest *Manifest
	counts   counters
	breaker  atomic.Pointer[breaker] // nil until the first fault
}

// devicePrefix begins the names of the plugins that are devices.
const devicePrefix = "device:"

// device tells whether the plugin is a connected device. Devices have the limits of their
// capabilities, and no breaker: RFC-0005 §7 and §8 fix what a caller of a slow or failing
// device is told each time, the hub ends a link that does not answer, and a breaker would
// keep everybody from a device because of one bad capability of it.
func (l *loaded) device() bool { return strings.HasPrefix(l.manifest.Name, devicePrefix) }

// ControlPlugin is the name of the control plane. It has no breaker: it is the operator's
// way in when something is broken.
const ControlPlugin = "kernel"

// breaks tells whether the plugin has a breaker.
func (l *loaded) breaks() bool { return !l.device() && l.manifest.Name != ControlPlugin }

// Faults that the kernel finds in a plugin. Their texts quote nothing of the call.
var (
	errPanic  = &manifest.Error{Code: manifest.Internal, Message: "the plugin failed to answer this call", Reason: "panic"}
	errAnswer = &manifest.Error{Code: manifest.Internal, Message: "the plugin gave an answer that its own schema refuses", Reason: "bad_result"}
	errBusy   = &manifest.Error{Code: manifest.RateLimited, Message: "too many calls of this plugin are in flight; wait for one to end", Reason: "concurrency"}
)

// ask hands a request that passed the checks to its plugin, within the plugin's bounds,
// and judges the answer.
func (k *Kernel) ask(ctx context.Context, l *loaded, r *Request) (*Result, error) {
	limit := int64(l.manifest.MaxConcurrency)
	if limit == 0 {
		limit = DefaultConcurrency
	}
	if n := l.counts.inFlight.Add(1); n > limit && !l.device() {
		l.counts.inFlight.Add(-1)
		return nil, errBusy
	}
	var judged func(error)
	if b := l.breaker.Load(); b != nil {
		var err error
		if judged, err = b.allow(l); err != nil {
			l.counts.inFlight.Add(-1)
			return nil, err
		}
	}
	k.total.inFlight.Add(1)
	l.counts.calls.Add(1)
	r.plugin, r.dispatched = l, true
	var res *Result
	var err error
	if l.manifest.Inline {
		res, err = l.serve(ctx, r)
		l.counts.inFlight.Add(-1)
	} else {
		res, err = l.serveApart(ctx, r)
	}
	k.total.inFlight.Add(-1)
	fault := k.count(ctx, l, err)
	switch {
	case judged != nil:
		judged(fault)
	case fault != nil && !errors.Is(fault, context.Canceled) && l.breaks():
		l.faulty(fault)
	}
	return res, err
}

// count counts the outcome of a call and tells what fault of the plugin it shows: nil for
// an answer and for a refusal, context.Canceled when the caller left, which says nothing.
func (k *Kernel) count(ctx context.Context, l *loaded, err error) error {
	late := false
	if ctx.Err() != nil {
		if !errors.Is(context.Cause(ctx), errBudget) {
			if err != nil {
				l.counts.errors.Add(1)
			}
			return context.Canceled
		}
		late = true
	}
	switch {
	case late:
		k.total.timeouts.Add(1)
		l.counts.timeouts.Add(1)
	case err == nil:
		return nil
	case errors.Is(err, errPanic):
		k.total.panics.Add(1)
		l.counts.panics.Add(1)
	}
	l.counts.errors.Add(1)
	if late {
		return errBudget
	}
	var f *RPCError // an answer in MCP's words
	if errors.As(err, &f) || errors.Is(err, ErrNoResource) || manifest.AsError(err).Code != manifest.Internal {
		return nil
	}
	return err
}

// serve calls the plugin, turns its panic into an error of its call and holds its answer
// against the schema. A panic in a goroutine that the plugin started cannot be caught here.
func (l *loaded) serve(ctx context.Context, r *Request) (res *Result, err error) {
	defer func() {
		if recover() != nil { // its value may quote arguments
			res, err = nil, errPanic
		}
	}()
	if m, ok := l.plugin.(MethodHandler); ok && r.tool == nil && r.resource == nil {
		data, err := m.HandleMethod(ctx, r.Caller, r.Session, r.Method, r.Arguments)
		if err != nil {
			return nil, err
		}
		return &Result{Data: data}, nil
	}
	if r.resource != nil {
		data, err := l.plugin.(Reader).Read(ctx, r.Caller, r.URI)
		if err != nil {
			return nil, err
		}
		return &Result{Resource: r.resource, Data: data}, nil
	}
	if res, err = l.plugin.Call(ctx, r); err != nil {
		return nil, err
	}
	if res == nil {
		return nil, errAnswer
	}
	if check := r.tool.CheckResult; check != nil && !res.IsError && res.Stream == nil && res.InputRequests == nil && res.RPCError == nil {
		if check(res.Structured) != nil {
			return nil, errAnswer
		}
	}
	return res, nil
}

// serveApart is serve in a goroutine of its own, left behind when ctx ends first: the
// plugin may ignore its context, its caller may not have to wait for that. What is left
// behind still counts as in flight, so its number is bounded, and its answer is dropped.
func (l *loaded) serveApart(ctx context.Context, r *Request) (*Result, error) {
	a := &apart{l: l, ctx: ctx, req: *r, done: make(chan struct{})}
	if r.Session != nil {
		a.session = apartSession{r.Session, a}
		a.req.Session = &a.session
	}
	go a.serve()
	select {
	case <-a.done:
	case <-ctx.Done():
		if a.decided.CompareAndSwap(false, true) {
			return nil, context.Cause(ctx)
		}
		<-a.done
	}
	return a.res, a.err
}

// apart is a call that runs beside its caller.
type apart struct {
	l       *loaded
	ctx     context.Context
	req     Request     // the plugin's own: the caller goes on with the original
	decided atomic.Bool // by the plugin's answer or by the caller's leaving, whichever is first
	done    chan struct{}
	res     *Result
	err     error
	session apartSession
}

// apartSession ends what a plugin may say to the client with the call: nothing follows
// its result.
type apartSession struct {
	Session
	a *apart
}

func (s *apartSession) Notify(ctx context.Context, method string, params json.RawMessage) error {
	if s.a.decided.Load() {
		return context.Canceled
	}
	return s.Session.Notify(ctx, method, params)
}

func (s *apartSession) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if s.a.decided.Load() {
		return nil, context.Canceled
	}
	return s.Session.Request(ctx, method, params)
}

// supervised is a Methods plugin within its bounds.
type supervised struct {
	k *Kernel
	l *loaded
}

func (s supervised) Methods() []string { return s.l.plugin.(MethodHandler).Methods() }

// HandleMethod asks the plugin, and ends with its CallTimeout or CallBudget. The error is a
// *RPCError, ErrNoResource or a *manifest.Error.
func (s supervised) HandleMethod(ctx context.Context, c *Caller, session Session, method string, params json.RawMessage) (json.RawMessage, error) {
	r := &Request{Caller: c, Method: method, Session: session, Arguments: params, plugin: s.l}
	callCtx, cancel := context.WithTimeoutCause(ctx, r.budget(), errBudget)
	defer cancel()
	res, err := s.k.ask(callCtx, s.l, r)
	var f *RPCError
	switch {
	case err == nil:
		return res.Data, nil
	case errors.As(err, &f), errors.Is(err, ErrNoResource):
		return nil, err
	case errors.Is(context.Cause(callCtx), errBudget):
		err = errBudget
	}
	return nil, asError(ctx, r, err)
}

func (a *apart) serve() {
	res, err := a.l.serve(a.ctx, &a.req)
	a.l.counts.inFlight.Add(-1)
	if a.decided.CompareAndSwap(false, true) {
		a.res, a.err = res, err
		close(a.done)
	} else if res != nil && res.Stream != nil {
		res.Stream.Close()
	}
}
