package relay

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
	"agentctl/transport/fanout"
	"agentctl/transport/sse"
)

// encodeFrame returns the SSE event of a metric frame (RFC-0009 §5.1), nil if it cannot be
// one; CheckFrame has refused line breaks before.
func encodeFrame(sample []byte) []byte {
	b, err := sse.AppendEvent(make([]byte, 0, len(sample)+24), "metric", sample)
	if err != nil {
		return nil
	}
	return b
}

// serveStream runs an opened stream to its close event. From here on the client learns the
// reason of an end from the stream, not from an HTTP status (RFC-0009 §3): the status was
// sent with the first byte. One exception precedes that byte: a relay that drains.
//
// It runs in the request's goroutine, in which sse.Run writes the frames as they come.
func (r *Relay) serveStream(w http.ResponseWriter, req *http.Request, kr *kernel.Request, s kernel.Stream) {
	defer s.Close()
	id := identityOf(kr.Caller)
	if !r.streamPool.TryAcquire(id, 1) {
		e := edge.Exhausted("too many metric streams of this identity are open; close some", time.Second)
		r.kernel.Audit(kernel.Record{Tenant: kr.Caller.Tenant, Actor: kr.Caller.Actor, Tool: kr.Tool, NodeID: kr.Target().NodeID,
			Decision: kernel.Closed, Code: e.Code, Reason: e.Reason, TraceID: kr.TraceID})
		r.writeError(w, http.StatusTooManyRequests, e, kr.TraceID)
		return
	}
	defer r.streamPool.Release(id, 1)
	ctx, done, overQuota := r.openStreams.add(req.Context(), kr.Caller, int(r.endpoints.streamQuota.Load()))
	defer done()
	wr, err := r.streams.Open(w, req, sse.Options{})
	if err != nil {
		if errors.Is(err, sse.ErrDraining) {
			e := &manifest.Error{Code: manifest.NodeOffline, Message: "the relay is stopping; connect again", RetryAfterMS: 1000, Reason: "stopping", Outcome: manifest.NotSent}
			r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		}
		return
	}
	defer func() { _ = wr.Close(0) }() // only after a panic: the first Close counts
	code := sse.RateLimited
	if overQuota {
		r.metrics.overQuota.Add(1)
	}
	if !overQuota || !r.endpoints.enforceQuota.Load() {
		code = closeCode(sse.Run(ctx, wr, s, func(f *manifest.Frame) []byte { return f.Event }))
	}
	_ = wr.Close(code)
	r.kernel.Audit(kernel.Record{Tenant: kr.Caller.Tenant, Actor: kr.Caller.Actor, Address: kr.Caller.Address, Tool: kr.Tool, NodeID: kr.Target().NodeID,
		Decision: kernel.Closed, Reason: "close=" + strconv.Itoa(int(code)), TraceID: kr.TraceID})
}

// closeCode maps the end of a stream to a close code of RFC-0009 §7. An overflow comes from
// the fan-out before the client, which the client sees as its own back-pressure.
func closeCode(err error) sse.Code {
	switch {
	case errors.Is(err, hub.ErrOffline):
		return sse.DeviceOffline
	case errors.Is(err, fanout.ErrOverflow): // the client took nothing for a whole queue
		return sse.Backpressure
	}
	return sse.CodeOf(err)
}

// maxStreams bounds the metric streams of all clients, an edge.Pool.
const maxStreams = 16384

// openStreams counts the open streams of each tenant, and ends those whose token ended. The
// quota is per tenant rather than per token, since a tenant may have any number of tokens.
type openStreams struct {
	ctx context.Context // ends all streams; set before serving

	mu      sync.Mutex // protects the fields below
	streams map[*openStream]struct{}
	tenants map[string]int
}

// openStream is one stream of a caller; cancel ends it.
type openStream struct {
	caller *kernel.Caller
	cancel context.CancelFunc
}

// add registers a stream. Its context ends with the relay's streams, the request, and the
// caller's token. overQuota reports that the tenant has more than quota streams (0: no quota).
// The caller calls done at the end.
func (o *openStreams) add(ctx context.Context, c *kernel.Caller, quota int) (_ context.Context, done func(), overQuota bool) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(o.ctx, cancel)
	s := &openStream{caller: c, cancel: cancel}
	o.mu.Lock()
	if o.streams == nil {
		o.streams, o.tenants = make(map[*openStream]struct{}), make(map[string]int)
	}
	o.streams[s] = struct{}{}
	o.tenants[c.Tenant]++
	overQuota = quota > 0 && o.tenants[c.Tenant] > quota
	o.mu.Unlock()
	return ctx, func() {
		stop()
		cancel()
		o.mu.Lock()
		delete(o.streams, s)
		if o.tenants[c.Tenant]--; o.tenants[c.Tenant] == 0 {
			delete(o.tenants, c.Tenant)
		}
		o.mu.Unlock()
	}, overQuota
}

// closeRevoked ends the streams of expired and revoked tokens within a second, until ctx
// ends. It visits all of them: Active costs about 0.1 µs each.
func (o *openStreams) closeRevoked(ctx context.Context) {
	every(ctx, time.Second, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		for s := range o.streams {
			if s.caller.Active != nil && s.caller.Active() != nil {
				s.cancel()
			}
		}
	})
}
