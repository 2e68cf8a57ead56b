package mcp

import (
	"bytes"
	"context"
	"net/http"
	"time"

	"agentctl/manifest"
	"agentctl/transport/sse"
)

// Bounds of what waits for the subscriber of one stream; beyond them the stream is cut.
const (
	maxQueuedEvents = 1024
	maxQueuedBytes  = 256 << 10
	drainTimeout    = time.Second // for what is queued when a stream ends
)

// stream runs serve with a writer that cannot block it, and registers the stream so that
// it ends when its token does.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, x *exchange, serve func(http.ResponseWriter)) {
	x.ctx, x.cancel = context.WithCancel(x.ctx)
	defer x.cancel()
	q := sse.NewQueuedWriter(w, sse.QueueOptions{
		MaxWrites: maxQueuedEvents, MaxBytes: maxQueuedBytes,
		WriteTimeout: writeWait, DrainTimeout: drainTimeout, PingInterval: pingEvery,
		OnCut: func() { h.count.cut.Add(1); x.cancel() },
	})
	h.mu.Lock()
	ok := !h.stopped && len(h.streams) < h.opts.MaxStreams && x.tenant.openStreams.Load() < int64(h.opts.MaxSessionsPerTenant)
	if ok {
		h.streams[x] = q
		x.tenant.openStreams.Add(1)
	}
	h.mu.Unlock()
	if !ok {
		h.count.refused.Add(1)
		refuse(w, r, http.StatusTooManyRequests, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 10_000,
			Message: "too many streams are open; retry later", Reason: "streams"})
		return
	}
	defer func() {
		h.mu.Lock()
		delete(h.streams, x)
		h.mu.Unlock()
		x.tenant.openStreams.Add(-1)
	}()
	defer q.Close()
	serve(q)
}

// patient is the ResponseWriter of a short request: a write may wait for its reader, but
// not for ever.
type patient struct {
	http.ResponseWriter
	rc       *http.ResponseController
	status   int
	timed    bool
	answered bool // the last event of a stream was one with an id
}

func (p *patient) WriteHeader(status int) {
	if p.status == 0 {
		p.status = status
	}
	p.ResponseWriter.WriteHeader(status)
}

func (p *patient) Write(b []byte) (int, error) {
	p.timed = true
	p.answered = bytes.HasPrefix(b, []byte("event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":"))
	_ = p.rc.SetWriteDeadline(time.Now().Add(writeWait))
	return p.ResponseWriter.Write(b)
}

// over answers the request of a session that has ended under it, for which the SDK
// leaves the client waiting. Not by 404, which says that nothing was done: who reads that
// may call again.
func (p *patient) over(id []byte) {
	const gone = "the session has ended; initialize again"
	switch {
	case p.status == 0 && !p.timed:
		refuseRPC(p, http.StatusOK, id, codeInvalidRequest, gone)
	case !p.answered && p.Header().Get("Content-Type") == "text/event-stream":
		_, _ = p.Write(append(appendFault([]byte("event: message\ndata: "), id, codeInvalidRequest, gone, nil), "\n\n"...))
	}
}

// Unwrap lets the SDK flush.
func (p *patient) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// done frees the connection of the deadline and returns the status, if one was written.
func (p *patient) done() int {
	if p.timed {
		_ = p.rc.SetWriteDeadline(time.Time{})
	}
	return p.status
}
