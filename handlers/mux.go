// Package handlers answers the calls of a device's capabilities: a Mux, which announces
// exactly what it answers, and the handlers Echo and Metrics.
//
//	mux, err := handlers.New(handlers.Options{},
//		handlers.NewEcho(clock.NowMS),
//		handlers.NewMetrics(sampler, clock.NowMS))
//	mux.Capabilities()                                // for the announce
//	result, stream, err := mux.Call(ctx, tool, args)
//
// The relay checks a call before it sends it. The Mux checks the tool, the arguments, the
// rate and the concurrency again, since a device does not have to trust its relay
// (RFC-0005 §6.6), and hands a handler only calls that pass.
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

// Mux routes calls to handlers. Its methods may be called from any goroutine.
type Mux struct {
	opt     Options
	caps    []manifest.Capability // of all handlers
	entries map[string]*entry     // by cap_id
}

type entry struct {
	capability manifest.Capability
	kind       *manifest.Kind
	handler    Handler
	limit      *manifest.Limit
	enabled    atomic.Bool
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

// Capabilities returns the enabled capabilities, in the order of New.
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
	s, verb := m.lookup(tool)
	if verb == nil {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest")
	}
	if args, err = manifest.CheckArgs(verb.Input, args); err != nil {
		return nil, nil, err
	}
	if err := s.limit.Acquire(time.Now()); err != nil {
		return nil, nil, err
	}
	defer s.limit.Release()
	result, stream, err = m.callHandler(ctx, s, tool, args)
	switch {
	case err != nil:
		return nil, nil, asError(ctx, err)
	case len(result) == 0 || (stream != nil) != verb.Stream():
		return nil, nil, manifest.E(manifest.Internal, "the handler gave no answer of its kind")
	}
	return result, m.wrapStream(s, stream), nil
}

func (m *Mux) lookup(tool manifest.ToolName) (*entry, *manifest.Verb) {
	s := m.entries[tool.CapID]
	if s == nil || tool.Short != s.kind.Short || !s.enabled.Load() {
		return nil, nil
	}
	if !slices.Contains(s.capability.Verbs, tool.Verb) {
		return nil, nil
	}
	v, _ := s.kind.Verb(tool.Verb)
	return s, v
}

// callHandler turns a panic into E_INTERNAL, so that a faulty handler does not end the
// daemon.
func (m *Mux) callHandler(ctx context.Context, s *entry, tool manifest.ToolName, args []byte) (result []byte, stream Stream, err error) {
	defer m.recoverPanic(s, &err)
	return s.handler.Call(ctx, tool, args)
}

func (m *Mux) wrapStream(s *entry, stream Stream) Stream {
	if stream == nil {
		return nil
	}
	return func(ctx context.Context, send func([]byte) error) (err error) {
		defer m.recoverPanic(s, &err)
		return stream(ctx, send)
	}
}

// recoverPanic, deferred, ends a panic and sets err to E_INTERNAL.
func (m *Mux) recoverPanic(s *entry, err *error) {
	if recover() == nil {
		return
	}
	*err = manifest.E(manifest.Internal, "the handler failed")
	if m.opt.OnPanic != nil {
		m.opt.OnPanic(s.capability.CapID, debug.Stack())
	}
}

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
