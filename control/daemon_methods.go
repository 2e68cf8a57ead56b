package control

import (
	"context"
	"encoding/json"
	"errors"

	"agentctl/manifest"
)

// The methods of this file are additions to the frozen document: what the daemon and
// the device it serves say of themselves. What they answer is made in other rooms.

func (ss *session) status(ctx context.Context, f *paramFields) (any, error) {
	if err := f.finish(); err != nil {
		return nil, err
	}
	if ss.srv.o.Status == nil {
		return nil, errNotSupported("", "this daemon gives no status")
	}
	return encoded(ss.srv.o.Status(ctx), "the status")
}

func (ss *session) getConfig(ctx context.Context, f *paramFields) (any, error) {
	if err := f.finish(); err != nil {
		return nil, err
	}
	if ss.srv.o.GetConfig == nil {
		return nil, errNotSupported("", "this daemon gives no configuration")
	}
	return encoded(ss.srv.o.GetConfig(ctx), "the configuration")
}

func (ss *session) capabilities(_ context.Context, f *paramFields) (any, error) {
	if err := f.finish(); err != nil {
		return nil, err
	}
	if ss.srv.o.Capabilities == nil {
		return nil, errNotSupported("", "this daemon has no tools")
	}
	return encoded(ss.srv.o.Capabilities(), "the capabilities")
}

// encoded is v as an answer.
func encoded(v any, what string) (any, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, errInternal(what + " cannot be encoded")
	}
	return json.RawMessage(b), nil
}

// callTool calls a tool of the device, as a relay does.
func (ss *session) callTool(ctx context.Context, f *paramFields) (any, error) {
	tool := f.text("tool", 64)
	if tool == "" {
		f.fail(errParams("tool", "is empty"))
	}
	args := json.RawMessage("{}")
	if f.take("arguments", &args) && args[0] != '{' {
		f.fail(errParams("arguments", "must be an object"))
	}
	if err := f.finish(); err != nil {
		return nil, err
	}
	if ss.srv.o.Call == nil {
		return nil, errNotSupported("", "this daemon has no tools")
	}
	result, err := ss.srv.o.Call(ctx, tool, args)
	if err != nil {
		return nil, toolError(ctx, err)
	}
	if !json.Valid(result) {
		return nil, errInternal("the tool gave no answer")
	}
	return result, nil
}

// toolError maps a tool's error to one of the socket, with the tool's code in data.
func toolError(ctx context.Context, err error) error {
	var m *manifest.Error
	switch {
	case !errors.As(err, &m) && ctx.Err() != nil:
		m = manifest.E(manifest.DeadlineExceeded, "the tool did not answer in time")
	case m == nil:
		return err
	}
	e := errInternal(m.Message)
	switch m.Code {
	case manifest.BadRequest, manifest.ManifestInvalid:
		e = errParams("", "%s", m.Message)
	case manifest.RateLimited:
		e = errRate(m.Message)
	case manifest.SafetyDenied:
		e = errUnauthorized(m.Message)
	}
	e.ToolCode = string(m.Code)
	return e
}
