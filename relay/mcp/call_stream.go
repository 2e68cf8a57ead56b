package mcp

import (
	"context"
	"encoding/json"
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
	maxStreamFrames     = 20
	maxStreamTime       = 20 * time.Second
	maxPluginStreamTime = 30 * time.Second // of a plugin's tool, which knows by itself when it is done
	metaMaxFrames       = "agentctl/max_frames"
	metaMaxTime         = "agentctl/max_ms"
)

// keepAliveInterval is the longest silence of a stream. HTTP clients wait 15 s or less for the headers
// of a response, and some no longer for its next byte.
const keepAliveInterval = 5 * time.Second

// streamLimits bound one stream. MCP has no back-pressure for progress notifications and
// clients time out, many after 30 s, so a call is not left open for long; a client calls again.
type streamLimits struct {
	maxFrames int
	maxTime   time.Duration
}

// parseStreamLimits reads the bounds of a call of a tool. A value above ours means ours.
func parseStreamLimits(tool *kernel.Tool, meta sdk.Meta) (streamLimits, error) {
	frames, err := boundedInt(meta, metaMaxFrames, maxStreamFrames)
	if err != nil {
		return streamLimits{}, err
	}
	maxTime := maxPluginStreamTime
	if isBoardStream(tool) {
		maxTime = maxStreamTime
	}
	ms, err := boundedInt(meta, metaMaxTime, maxTime.Milliseconds())
	return streamLimits{int(frames), time.Duration(ms) * time.Millisecond}, err
}

// isBoardStream reports whether the stream of a tool has the frames of a board: it is the board's
// tool, or one that calls any tool of a board. Any other is a plugin's, which says all that it has
// to say in its last frame.
func isBoardStream(tool *kernel.Tool) bool {
	return tool != nil && (tool.NodeID != "" || tool.MayStream)
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

// streamProgress keeps a client from giving up on a call: it sends the frames as progress, and
// when there is none for keepAliveInterval a keep-alive message. A client without a progress token
// gets a comment of the event stream in place of either.
type streamProgress struct {
	cl      *client
	total   float64
	frames  int
	waiting int // keep-alive messages since the last frame
}

// frame sends a frame. Its progress is its number.
func (p *streamProgress) frame(data []byte) {
	p.frames++
	p.waiting = 0
	p.cl.sendProgress(float64(p.frames), p.total, data)
}

// keepAlive sends a message that is no frame. The protocol wants progress to increase, so its progress is a
// fraction above that of the last frame: 0 for the first, which is sent before the stream is open.
func (p *streamProgress) keepAlive() {
	if p.cl.ProgressToken() == nil {
		p.cl.x.sendComment()
		return
	}
	p.cl.sendProgress(float64(p.frames)+float64(p.waiting)/100, p.total, []byte("waiting for the next frame"))
	p.waiting++
}

// relayFrames turns a stream into progress notifications and a result: the last frame, and as
// text a summary and the frames. It ends after lim, when the client goes away, when the token
// ends, or with the stream. The audit log gets one record with the reason of the end.
func (t *tenant) relayFrames(ctx context.Context, x *exchange, progress *streamProgress, kr *kernel.Request, s kernel.Stream, lim streamLimits) (sdk.Result, error) {
	defer s.Close()
	began := time.Now()
	timeout := time.NewTimer(lim.maxTime)
	defer timeout.Stop()
	keepAlive := time.NewTicker(keepAliveInterval)
	defer keepAlive.Stop()
	check := time.NewTicker(sweepInterval) // of the token: sweep sees registered streams only
	defer check.Stop()
	ready := make(chan struct{}, 1) // one signal stands for any number of changes
	s.Notify(func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	})
	if tool := kr.Target(); tool == nil || !tool.Streams {
		progress.keepAlive() // callTool did not know that there would be a stream
	}
	var frames [][]byte // of a board; only the last one of a plugin, which says in it what it has to say
	isBoard := isBoardStream(kr.Target())
	// end audits the reason and renders the result: the error, or the last frame.
	end := func(reason string, e *manifest.Error) (sdk.Result, error) {
		t.auditStreamEnd(x, kr, reason, e)
		if e != nil {
			return t.renderError(x, e, kr.TraceID), nil
		}
		res := &kernel.Result{Structured: frames[len(frames)-1], Meta: kernel.UntrustedMeta}
		if isBoard {
			res.Content = []json.RawMessage{appendText(nil, describeFrames(frames, time.Since(began)))}
		}
		return t.renderResult(x, res)
	}
	for progress.frames < lim.maxFrames {
		if f, ok := s.Next(); ok {
			if !isBoard {
				frames = frames[:0]
			}
			frames = append(frames, f.Data)
			progress.frame(f.Data)
			keepAlive.Reset(keepAliveInterval)
			continue
		}
		if err := s.Err(); err != nil {
			if errors.Is(err, io.EOF) && len(frames) > 0 {
				break // the stream is complete
			}
			return end("stream_end", streamError(err))
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return end("cancelled", &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the caller canceled the call", Reason: "cancelled"})
		case <-t.h.stopping: // it would go on for longer than a drain may take
			return end("stopping", &manifest.Error{Code: manifest.NodeOffline, Message: "the relay stopped during the stream", Reason: "stopping", Outcome: manifest.OutcomeUnknown, ReadOnly: true, RetryAfterMS: 1000})
		case <-timeout.C:
			if len(frames) == 0 {
				return end("no_frame", errNoFrame)
			}
			return end("time", nil)
		case <-keepAlive.C:
			progress.keepAlive()
		case <-check.C:
			if x.caller.Active != nil && x.caller.Active() != nil {
				return end("token", &manifest.Error{Code: manifest.SafetyDenied, Message: "the token has ended", Reason: "token"})
			}
		}
	}
	return end("frames", nil)
}

// auditStreamEnd records why a stream ended.
func (t *tenant) auditStreamEnd(x *exchange, kr *kernel.Request, reason string, e *manifest.Error) {
	rec := kernel.Record{Tenant: x.caller.Tenant, Actor: x.caller.Actor, Decision: kernel.Closed, Reason: reason, TraceID: kr.TraceID}
	if tool := kr.Target(); tool != nil {
		rec.Tool, rec.NodeID = tool.Name, tool.NodeID
	}
	if e != nil {
		rec.Code = e.Code
	}
	t.h.opts.Kernel.Audit(rec)
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

// errNoFrame is the end of a stream that had no frame in time. Streams only read, so that the caller
// may repeat the call.
var errNoFrame = &manifest.Error{Code: manifest.DeadlineExceeded, Outcome: manifest.OutcomeUnknown, ReadOnly: true,
	Message: "no frame came within the time of this call; ask for a shorter interval_ms, or call metrics.snapshot for one reading"}
