package mcp

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"time"

	"agentctl/transport/edge"
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
	x.ctx, x.cancel = context.WithCancelCause(x.ctx)
	defer x.cancel(nil)
	q := sse.NewQueuedWriter(w, sse.QueueOptions{
		MaxWrites: maxQueuedEvents, MaxBytes: maxQueuedBytes,
		WriteTimeout: writeTimeout, DrainTimeout: drainTimeout, PingInterval: pingInterval,
		OnCut: func() { h.count.cut.Add(1); x.cancel(nil) },
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
//
// The SDK writes from the goroutine of a handler, which may send comments too, and may still do
// so when the request has ended: mu keeps them apart, and ended stops them.
type timeoutWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController

	mu          sync.Mutex // protects the fields below, and writes to w
	ended       bool
	status      int
	hasWritten  bool
	hasAnswered bool // the last event of a stream was a message with an id
}

var _ http.Flusher = (*timeoutWriter)(nil)

// newTimeoutWriter makes the writer of an exchange; end is called when its request has ended.
func newTimeoutWriter(w http.ResponseWriter, x *exchange) *timeoutWriter {
	x.writer = &timeoutWriter{w: w, rc: http.NewResponseController(w)}
	return x.writer
}

// Header implements http.ResponseWriter.
func (w *timeoutWriter) Header() http.Header { return w.w.Header() }

// WriteHeader implements http.ResponseWriter.
func (w *timeoutWriter) WriteHeader(status int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended || w.status != 0 || w.hasWritten { // a comment may have been first
		return
	}
	w.status = status
	w.w.WriteHeader(status)
}

// Write implements http.ResponseWriter. The SDK writes one event, or one whole answer, at
// a time.
func (w *timeoutWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return 0, errRequestEnded
	}
	w.hasAnswered = bytes.HasPrefix(b, []byte("event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":"))
	return w.writeLocked(b)
}

func (w *timeoutWriter) writeLocked(b []byte) (int, error) {
	w.hasWritten = true
	_ = w.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	return w.w.Write(b)
}

// writeComment sends a comment, if the response is an event stream: the SDK has set its type.
func (w *timeoutWriter) writeComment() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended && w.w.Header().Get("Content-Type") == "text/event-stream" {
		_, _ = w.writeLocked(eventComment)
		_ = w.rc.Flush()
	}
}

// Flush implements http.Flusher.
func (w *timeoutWriter) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		_ = w.rc.Flush()
	}
}

// answerClosedSession answers a request whose session ended before the SDK answered; the
// SDK would leave the client waiting. The status is not 404, which says that nothing was
// done and invites the client to call again.
func (w *timeoutWriter) answerClosedSession(answer []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.status == 0 && !w.hasWritten:
		edge.WriteJSON(w.w, http.StatusOK, answer)
	case !w.hasAnswered && w.w.Header().Get("Content-Type") == "text/event-stream":
		_, _ = w.writeLocked(appendEvent(nil, answer))
	}
}

// end frees the connection of the deadline: it may serve another request. What is written
// afterwards is dropped.
func (w *timeoutWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	if w.hasWritten {
		_ = w.rc.SetWriteDeadline(time.Time{})
	}
}

// eventComment is ignored by the readers of an event stream. It proves that the server is there.
var eventComment = []byte(": ok\n\n")

// appendEvent appends a message as the SSE event that the protocol wants.
func appendEvent(b, data []byte) []byte {
	b, _ = sse.AppendEvent(b, "message", data) // compact JSON has no line break
	return b
}
