package mcp

import (
	"bytes"
	"context"
	"net/http"
	"time"

	"agentctl/transport/sse"
)

// Bounds of the events that wait for the client of one stream; beyond them the stream is cut.
const (
	maxQueuedEvents = 1024
	maxQueuedBytes  = 256 << 10
	drainTimeout    = time.Second // for what is queued when a stream ends
)

// stream runs serve with a writer that does not block it, and registers the stream so
// that it ends when its token does. It is used for GET of a session and for
// subscriptions/listen: both live for hours, and the SDK writes to them from a loop over
// all streams. A stream that is cut ends its request; the client opens it again and, in
// the legacy era, keeps its session.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, x *exchange, serve func(http.ResponseWriter)) {
	x.ctx, x.cancel = context.WithCancel(x.ctx)
	defer x.cancel()
	q := sse.NewQueuedWriter(w, sse.QueueOptions{
		MaxWrites: maxQueuedEvents, MaxBytes: maxQueuedBytes,
		WriteTimeout: writeTimeout, DrainTimeout: drainTimeout, PingInterval: pingInterval,
		OnCut: func() { h.count.cut.Add(1); x.cancel() },
	})
	h.mu.Lock()
	ok := !h.stopped && h.streamPool.TryAcquire(identityOf(x.caller), 1)
	if ok {
		h.streams[x] = q
		x.tenant.openStreams.Add(1)
	}
	h.mu.Unlock()
	if !ok {
		h.refuse(w, r, http.StatusTooManyRequests, tooMany("too many streams are open; retry later", "streams", 10_000))
		return
	}
	defer func() {
		h.mu.Lock()
		delete(h.streams, x)
		h.mu.Unlock()
		h.streamPool.Release(identityOf(x.caller), 1)
		x.tenant.openStreams.Add(-1)
	}()
	defer q.Close() // after serve: it writes what is queued
	serve(q)
}

// timeoutWriter is the ResponseWriter of a short request: each write has writeTimeout.
// It records what the SDK wrote, to answer a request whose session ends under it. There is
// no queue: the answer to one request may wait for its reader, and delays no other request.
type timeoutWriter struct {
	http.ResponseWriter
	rc          *http.ResponseController
	status      int
	hasWritten  bool
	hasAnswered bool // the last event of a stream was a message with an id
}

// WriteHeader implements http.ResponseWriter.
func (w *timeoutWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter. The SDK writes one event, or one whole answer, at
// a time.
func (w *timeoutWriter) Write(b []byte) (int, error) {
	w.hasWritten = true
	w.hasAnswered = bytes.HasPrefix(b, []byte("event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":"))
	_ = w.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	return w.ResponseWriter.Write(b)
}

// Unwrap lets the SDK flush.
func (w *timeoutWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// answerClosedSession answers a request whose session ended before the SDK answered; the
// SDK would leave the client waiting. The status is not 404, which says that nothing was
// done and invites the client to call again.
func (w *timeoutWriter) answerClosedSession(id []byte) {
	switch {
	case w.status == 0 && !w.hasWritten:
		refuseRPC(w, http.StatusOK, id, codeInvalidRequest, errSessionEnded)
	case !w.hasAnswered && w.Header().Get("Content-Type") == "text/event-stream":
		_, _ = w.Write(appendEvent(nil, appendRPCError(nil, id, codeInvalidRequest, errSessionEnded, nil)))
	}
}

// clearDeadline frees the connection of the deadline: it may serve another request.
func (w *timeoutWriter) clearDeadline() {
	if w.hasWritten {
		_ = w.rc.SetWriteDeadline(time.Time{})
	}
}

// appendEvent appends a message as the SSE event that the protocol wants.
func appendEvent(b, data []byte) []byte {
	b, _ = sse.AppendEvent(b, "message", data) // compact JSON has no line break
	return b
}
