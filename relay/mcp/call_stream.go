package mcp

import (
	"context"
	"errors"
	"io"
	"math"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Bounds of a stream over tools/call, and the keys of _meta that lower them.
const (
	maxStreamFrames = 20
	maxStreamTime   = 60 * time.Second
	metaMaxFrames   = "agentctl/max_frames"
	metaMaxTime     = "agentctl/max_ms"
)

// streamLimits bound one stream. MCP has no back-pressure for progress notifications and
// clients time out, so a call is not left open for long; a client calls again.
type streamLimits struct {
	maxFrames int
	maxTime   time.Duration
}

// parseStreamLimits reads the bounds of a request. A value above ours means ours.
func parseStreamLimits(meta sdk.Meta) (streamLimits, error) {
	frames, err := boundedInt(meta, metaMaxFrames, maxStreamFrames)
	if err != nil {
		return streamLimits{}, err
	}
	ms, err := boundedInt(meta, metaMaxTime, maxStreamTime.Milliseconds())
	return streamLimits{int(frames), time.Duration(ms) * time.Millisecond}, err
}

// boundedInt returns a whole number of _meta, at most max; max when it is missing.
func boundedInt(meta sdk.Meta, key string, max int64) (int64, error) {
	v, ok := meta[key]
	if !ok {
		return max, nil
	}
	f, ok := v.(float64)
	if !ok || f < 1 || f != math.Trunc(f) {
		return 0, invalidParams("_meta " + key + " must be a whole number from 1")
	}
	return int64(min(f, float64(max))), nil
}

// relayFrames turns a stream into progress notifications and a result, the last frame. It
// ends after lim, when the client goes away, when the token ends, or with the stream. The
// audit log gets one record with the reason of the end.
func (t *tenant) relayFrames(ctx context.Context, x *exchange, cl *client, kr *kernel.Request, s kernel.Stream, lim streamLimits) (sdk.Result, error) {
	defer s.Close()
	timeout := time.NewTimer(lim.maxTime)
	defer timeout.Stop()
	check := time.NewTicker(sweepInterval) // of the token: sweep sees registered streams only
	defer check.Stop()
	ready := make(chan struct{}, 1) // one signal stands for any number of changes
	s.Notify(func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	})
	var last []byte
	// end audits the reason and renders the result: the error, or the last frame.
	end := func(reason string, e *manifest.Error) (sdk.Result, error) {
		rec := kernel.Record{Tenant: x.caller.Tenant, Actor: x.caller.Actor, Decision: kernel.Closed, Reason: reason, TraceID: kr.TraceID}
		if tool := kr.Target(); tool != nil {
			rec.Tool, rec.NodeID = tool.Name, tool.NodeID
		}
		if e != nil {
			rec.Code = e.Code
		}
		t.h.opts.Kernel.Audit(rec)
		if e != nil {
			return t.renderError(x, e, kr.TraceID), nil
		}
		return t.renderResult(x, &kernel.Result{Structured: last, Meta: kernel.UntrustedMeta})
	}
	for n := 0; n < lim.maxFrames; {
		if f, ok := s.Next(); ok {
			n++
			last = f.Data
			cl.sendProgress(float64(n), float64(lim.maxFrames), last)
			continue
		}
		if err := s.Err(); err != nil {
			if errors.Is(err, io.EOF) && last != nil {
				break // the stream is complete
			}
			return end("stream_end", streamError(err))
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return end("cancelled", &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the caller canceled the call", Reason: "cancelled"})
		case <-timeout.C:
			if last == nil {
				return end("no_frame", manifest.E(manifest.DeadlineExceeded, "no frame came within the time of this call"))
			}
			return end("time", nil)
		case <-check.C:
			if x.caller.Active != nil && x.caller.Active() != nil {
				return end("token", &manifest.Error{Code: manifest.SafetyDenied, Message: "the token has ended", Reason: "token"})
			}
		}
	}
	return end("frames", nil)
}

// streamError translates the end of a device's stream for its reader. An error of the relay
// is kept; any other end means that the board went away. io.EOF comes here only when the stream
// ended before its first frame.
func streamError(err error) *manifest.Error {
	if e, ok := errors.AsType[*manifest.Error](err); ok {
		return e
	}
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the board went away during the stream", Reason: "stream_end"}
}
