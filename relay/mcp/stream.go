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
	maxFrames     = 20
	maxStreamTime = 60 * time.Second
	metaFrames    = "agentctl/max_frames"
	metaTime      = "agentctl/max_ms"
)

type limits struct {
	frames int
	wait   time.Duration
}

// limitsOf reads the bounds; a value above ours means ours.
func limitsOf(meta sdk.Meta) (limits, error) {
	l := limits{maxFrames, maxStreamTime}
	frames, err := positive(meta, metaFrames, maxFrames)
	if err != nil {
		return l, err
	}
	ms, err := positive(meta, metaTime, maxStreamTime.Milliseconds())
	l.frames, l.wait = int(frames), time.Duration(ms)*time.Millisecond
	return l, err
}

func positive(meta sdk.Meta, key string, most int64) (int64, error) {
	v, ok := meta[key]
	if !ok {
		return most, nil
	}
	f, ok := v.(float64)
	if !ok || f < 1 || f != math.Trunc(f) {
		return 0, invalidParams("_meta " + key + " must be a whole number from 1")
	}
	return int64(min(f, float64(most))), nil
}

// follow turns a stream into progress notifications and a result, the last frame. It
// ends after lim, when the client goes away, when the token ends, or with the stream.
func (t *tenant) follow(ctx context.Context, x *exchange, cl *client, kr *kernel.Request, s kernel.Stream, lim limits) (sdk.Result, error) {
	defer s.Close()
	over := time.NewTimer(lim.wait)
	defer over.Stop()
	check := time.NewTicker(sweepEvery)
	defer check.Stop()
	var last []byte
	end := func(reason string, e *manifest.Error) (sdk.Result, error) {
		rec := kernel.Record{Tenant: x.caller.Tenant, Actor: x.caller.Actor, Decision: kernel.Closed, Reason: reason, TraceID: kr.TraceID}
		if tool := kr.Target(); tool != nil {
			rec.Tool, rec.NodeID = tool.Name, tool.NodeID
		}
		if e != nil {
			rec.Code = e.Code
		}
		t.h.opt.Kernel.Audit(rec)
		if e != nil {
			return t.failed(x, e, kr.TraceID), nil
		}
		return t.answered(x, &kernel.Result{Structured: last})
	}
	for n := 0; n < lim.frames; {
		if f, ok := s.Next(); ok {
			n++
			last = f.Data
			cl.progress(float64(n), float64(lim.frames), last)
			continue
		}
		if err := s.Err(); err != nil {
			if errors.Is(err, io.EOF) && last != nil {
				break // it ended as it should
			}
			return end("stream_end", offline(err))
		}
		select {
		case <-s.Ready():
		case <-ctx.Done():
			return end("cancelled", manifest.E(manifest.DeadlineExceeded, "the caller gave the call up"))
		case <-over.C:
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

// offline is what the end of a device's stream means to its reader. A reason that is one
// of ours is kept; any other end is the board's going away.
func offline(err error) *manifest.Error {
	var e *manifest.Error
	if errors.As(err, &e) {
		return e
	}
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the board went away during the stream", Reason: "stream_end"}
}
