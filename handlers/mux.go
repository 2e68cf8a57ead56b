// Package handlers answers the calls that a relay sends to a board. A Handler answers the tools of
// one capability; a Mux has all handlers of a board and announces exactly what they answer:
//
//	mux, err := handlers.New(handlers.Options{},
//		handlers.NewEcho(clock.NowMS),
//		handlers.NewMetrics(sampler, clock.NowMS))
//	mux.Capabilities()                                // for the announce
//	result, stream, err := mux.Call(ctx, tool, args)
//
// The relay checks a call before it sends it. The Mux checks the tool, the arguments, the
// rate and the concurrency again, since a device does not have to trust its relay
// (RFC-0005 §6.6). Handlers get only calls that passed.
//
//	echo.go         system.echo
//	metrics.go      system.metrics: snapshots and streams of package prober
//	history.go      system.history: pages of what package prober/history recorded
//	inspection.go   system.info, .modules, .processes, .disks, .network, .doctor
//	services.go     system.services, from systemd
//	journal.go      system.journal, from the helper of package journal
//
// Results that are lists come in pages: a message on the link has 64 KiB, and a handler two
// seconds. What does not fit is on the next page; what was not read in time is named in the
// result's member unfinished.
package handlers

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"agentctl/manifest"
)

// Stream produces the frames of an open stream: it calls send for each and returns when
// ctx ends, send fails or there will be no more. A frame is not changed after send.
type Stream = func(ctx context.Context, send func(frame []byte) error) error

// Handler answers the calls of one capability. Calls may run concurrently, as many as
// the capability's constraints admit.
type Handler interface {
	Capability() manifest.Capability
	// Call answers one call; args are valid for the verb's input schema and in normal form.
	// It should return soon after ctx ends. For a stream it returns the result of opening
	// it and a Stream. An error that is not a *manifest.Error becomes E_INTERNAL.
	Call(ctx context.Context, tool manifest.ToolName, args []byte) (result []byte, stream Stream, err error)
}

// Options of a Mux. The zero value is valid.
type Options struct {
	// OnPanic is called with the stack of a handler that panicked; the call ended with
	// E_INTERNAL. The panic's value is left out, since it may quote arguments.
	OnPanic func(capID string, stack []byte)
}

// Mux routes calls to handlers. Its methods may be called from any goroutine: after New only
// entry.limit and entry.enabled change.
type Mux struct {
	opt     Options
	caps    []manifest.Capability // of all handlers, in the order of New
	entries map[string]*entry     // by cap_id
}

// entry is one handler of a Mux.
type entry struct {
	capability manifest.Capability
	kind       *manifest.Kind
	handler    Handler
	limit      *manifest.Limit // rate and concurrency, from the capability's constraints
	enabled    atomic.Bool     // a disabled capability is neither announced nor answered
}

// New returns a Mux. It refuses a handler whose capability is not one of this release,
// two handlers of one cap_id, and more than manifest.MaxCapabilities.
func New(o Options, hs ...Handler) (*Mux, error) {
	if len(hs) > manifest.MaxCapabilities {
		return nil, fmt.Errorf("handlers: %d capabilities, at most %d", len(hs), manifest.MaxCapabilities)
	}
	m := &Mux{opt: o, entries: make(map[string]*entry, len(hs))}
	for _, h := range hs {
		c := h.Capability()
		if err := c.Check(); err != nil {
			return nil, fmt.Errorf("handlers: capability %q: %w", c.CapID, err)
		}
		if m.entries[c.CapID] != nil {
			return nil, fmt.Errorf("handlers: capability %q is given twice", c.CapID)
		}
		kind, _ := manifest.LookupKind(c.Kind)
		e := &entry{capability: c, kind: kind, handler: h, limit: manifest.NewLimit(c.Constraints, manifest.DeviceWindow)}
		e.enabled.Store(true)
		m.entries[c.CapID] = e
		m.caps = append(m.caps, c)
	}
	return m, nil
}

// Capabilities returns the enabled capabilities, in the order of New, so that an announce that says the
// same has the same bytes.
func (m *Mux) Capabilities() []manifest.Capability {
	return slices.DeleteFunc(slices.Clone(m.caps), func(c manifest.Capability) bool { return !m.entries[c.CapID].enabled.Load() })
}

// SetEnabled enables the capabilities for whose cap_id enabled returns true and disables the
// others; New enables all. It reports whether that changed anything, in which case the device
// has to announce again. Calls that run already are not ended.
func (m *Mux) SetEnabled(enabled func(capID string) bool) (changed bool) {
	for id, e := range m.entries {
		if on := enabled(id); e.enabled.Swap(on) != on {
			changed = true
		}
	}
	return changed
}

// Call checks a call and hands it to its handler. The error is always a *manifest.Error:
// E_MANIFEST_INVALID for a tool that was not announced or arguments that do not fit,
// E_RATE_LIMITED, E_DEADLINE_EXCEEDED when ctx ended, or the handler's. The caller runs the
// stream; only its opening counts against the limits.
func (m *Mux) Call(ctx context.Context, tool manifest.ToolName, args []byte) (result []byte, stream Stream, err error) {
	// The arguments are checked before the limit, so that malformed calls do not use up the rate.
	e, verb := m.lookup(tool)
	if verb == nil {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest")
	}
	if args, err = manifest.CheckArgs(verb.Input, args); err != nil {
		return nil, nil, err
	}
	if err := e.limit.Acquire(time.Now()); err != nil {
		return nil, nil, err
	}
	defer e.limit.Release()
	result, stream, err = m.callHandler(ctx, e, tool, args)
	switch {
	case err != nil:
		return nil, nil, asError(ctx, err)
	case len(result) == 0 || (stream != nil) != verb.Stream():
		return nil, nil, manifest.E(manifest.Internal, "the handler returned no result, or not the stream that the verb requires")
	}
	return result, m.wrapStream(e, stream), nil
}

// lookup returns the enabled handler of a tool, and its verb; nil if no such tool was announced. The
// relay may not have received the announce that took it away yet.
func (m *Mux) lookup(tool manifest.ToolName) (*entry, *manifest.Verb) {
	e := m.entries[tool.CapID]
	if e == nil || tool.Short != e.kind.Short || !e.enabled.Load() {
		return nil, nil
	}
	if !slices.Contains(e.capability.Verbs, tool.Verb) {
		return nil, nil
	}
	v, _ := e.kind.Verb(tool.Verb)
	return e, v
}

// callHandler turns a panic into E_INTERNAL, so that a faulty handler does not end the
// daemon.
func (m *Mux) callHandler(ctx context.Context, e *entry, tool manifest.ToolName, args []byte) (result []byte, stream Stream, err error) {
	defer m.recoverPanic(e, &err)
	return e.handler.Call(ctx, tool, args)
}

// wrapStream does the same as callHandler for the stream, which runs after Call has returned.
func (m *Mux) wrapStream(e *entry, stream Stream) Stream {
	if stream == nil {
		return nil
	}
	return func(ctx context.Context, send func([]byte) error) (err error) {
		defer m.recoverPanic(e, &err)
		return stream(ctx, send)
	}
}

// recoverPanic, deferred, ends a panic and sets err to E_INTERNAL.
func (m *Mux) recoverPanic(e *entry, err *error) {
	if recover() == nil {
		return
	}
	*err = manifest.E(manifest.Internal, "the handler failed")
	if m.opt.OnPanic != nil {
		m.opt.OnPanic(e.capability.CapID, debug.Stack())
	}
}

// asError returns a handler's error for the caller. An error that is not a *manifest.Error may quote
// files or arguments, so its text is not passed on.
func asError(ctx context.Context, err error) *manifest.Error {
	var e *manifest.Error
	switch {
	case errors.As(err, &e):
		return e
	case ctx.Err() != nil, errors.Is(err, context.DeadlineExceeded):
		return manifest.E(manifest.DeadlineExceeded, "the handler did not answer in time")
	}
	return manifest.E(manifest.Internal, "the handler could not answer")
}
