package control

import (
	"context"
	"encoding/json"
	"errors"

	"agentctl/manifest"
)

// The methods of this file are additions to the frozen protocol: what the daemon and the
// device report about themselves. The answers come from Options.

// status answers with Options.Status.
func (ss *session) status(ctx context.Context, p *params) (any, error) {
	return provided(ctx, p, ss.srv.o.Status, "status")
}

// getConfig answers with Options.GetConfig.
func (ss *session) getConfig(ctx context.Context, p *params) (any, error) {
	return provided(ctx, p, ss.srv.o.GetConfig, "configuration")
}

// capabilities answers with Options.Capabilities.
func (ss *session) capabilities(ctx context.Context, p *params) (any, error) {
	get := ss.srv.o.Capabilities
	if get == nil {
		return provided(ctx, p, nil, "tools")
	}
	return provided(ctx, p, func(context.Context) any { return get() }, "capabilities")
}

// provided answers a method without params with the value of get, nil when the daemon does
// not provide it.
func provided(ctx context.Context, p *params, get func(context.Context) any, what string) (any, error) {
	if err := p.finish(); err != nil {
		return nil, err
	}
	if get == nil {
		return nil, newError(CodeNotSupported, "this daemon has no "+what)
	}
	b, err := json.Marshal(get(ctx))
	if err != nil {
		return nil, newError(CodeInternal, "the "+what+" cannot be encoded")
	}
	return json.RawMessage(b), nil
}

// callTool calls a tool of the device, as a relay does: with the same checks and limits,
// which Options.Call enforces. Streams are not offered here; events take their place.
func (ss *session) callTool(ctx context.Context, p *params) (any, error) {
	tool := p.text("tool", 64)
	if tool == "" {
		p.fail(errParams("tool", "is empty"))
	}
	args := json.RawMessage("{}")
	if p.take("arguments", &args) && args[0] != '{' {
		p.fail(errParams("arguments", "must be an object"))
	}
	if err := p.finish(); err != nil {
		return nil, err
	}
	if ss.srv.o.Call == nil {
		return nil, newError(CodeNotSupported, "this daemon has no tools")
	}
	result, err := ss.srv.o.Call(ctx, tool, args)
	if err != nil {
		return nil, toolError(ctx, err)
	}
	if !json.Valid(result) {
		return nil, newError(CodeInternal, "the tool's answer is not valid JSON")
	}
	return result, nil
}

// toolCodes are the codes of the socket for errors of tools; others are internal.
var toolCodes = map[manifest.Code]int{
	manifest.BadRequest:      CodeInvalidParams,
	manifest.ManifestInvalid: CodeInvalidParams,
	manifest.RateLimited:     CodeRateLimited,
	manifest.SafetyDenied:    CodeUnauthorized,
}

// toolError maps a tool's error to one of the socket, with the tool's code in data. An error
// without a code, when the time is up, is the handler's context error: a deadline.
func toolError(ctx context.Context, err error) error {
	var m *manifest.Error
	switch {
	case !errors.As(err, &m) && ctx.Err() != nil:
		m = manifest.E(manifest.DeadlineExceeded, "the tool did not answer in time")
	case m == nil:
		return err
	}
	code, ok := toolCodes[m.Code]
	if !ok {
		code = CodeInternal
	}
	e := newError(code, m.Message)
	e.ToolCode = string(m.Code)
	return e
}
