package mcp

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"agentctl/manifest"
)

// Bounds of what waits for the reader of one stream; beyond them it is cut.
const (
	maxQueued      = 1024
	maxQueuedBytes = 256 << 10
	drainWait      = time.Second // for what is queued when a stream ends by itself
)

var errStalled = errors.New("mcp: the stream's reader stalled")

// queued is the ResponseWriter of a long stream. Write never blocks: it queues, and a
// goroutine that lives only while there is something to write passes it on. A reader
// that lets the queue fill up, or one write last longer than writeWait, is cut.
//
// Without it the SDK writes notifications to all readers in turn, and one that stalled
// would stop them all.
type queued struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	cut  func() // ends the request
	lost func() // counts a cut

	mu      sync.Mutex // protects the fields below
	wg      sync.WaitGroup
	queue   [][]byte
	events  int // queued and being written
	size    int // their bytes
	pumping bool
	failed  bool
	closed  bool
	last    time.Time
}

func (q *queued) Header() http.Header { return q.w.Header() }

// WriteHeader comes before every Write and so before the first pump.
func (q *queued) WriteHeader(status int) { q.w.WriteHeader(status) }

// Flush does nothing: the pump flushes what it has written.
func (q *queued) Flush() {}

func (q *queued) Write(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.failed || q.closed {
		return 0, errStalled
	}
	if q.events >= maxQueued || q.size+len(b) > maxQueuedBytes {
		q.failLocked()
		return 0, errStalled
	}
	q.queue = append(q.queue, append([]byte(nil), b...))
	q.events++
	q.size += len(b)
	if !q.pumping {
		q.pumping = true
		q.wg.Go(q.pump)
	}
	return len(b), nil
}

func (q *queued) failLocked() {
	if q.failed {
		return
	}
	q.failed = true
	q.queue = nil
	q.lost()
	q.cut()
	_ = q.rc.SetWriteDeadline(time.Now()) // wakes the pump
}

func (q *queued) pump() {
	for {
		q.mu.Lock()
		batch := q.queue
		q.queue = nil
		if len(batch) == 0 {
			q.pumping = false
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		for _, b := range batch {
			err := q.write(b)
			q.mu.Lock()
			q.events--
			q.size -= len(b)
			q.last = time.Now()
			if err != nil {
				q.failLocked()
				q.pumping = false
				q.mu.Unlock()
				return
			}
			q.mu.Unlock()
		}
		if err := q.rc.Flush(); err != nil {
			q.mu.Lock()
			q.failLocked()
			q.mu.Unlock()
		}
	}
}

// write passes one event on, within its own time.
func (q *queued) write(b []byte) error {
	q.mu.Lock()
	if q.failed {
		q.mu.Unlock()
		return errStalled
	}
	wait := writeWait
	if q.closed {
		wait = drainWait
	}
	_ = q.rc.SetWriteDeadline(time.Now().Add(wait))
	q.mu.Unlock()
	_, err := q.w.Write(b)
	return err
}

// ping writes a comment when nothing was written for a while, so that proxies keep the
// stream and a dead reader is found.
func (q *queued) ping(now time.Time) {
	q.mu.Lock()
	due := now.Sub(q.last) >= pingEvery && !q.pumping && !q.closed
	if due {
		q.last = now
	}
	q.mu.Unlock()
	if due {
		_, _ = q.Write([]byte(": ping\n\n"))
	}
}

// close lets the pump finish for a moment and waits for it.
func (q *queued) close() {
	q.mu.Lock()
	q.closed = true
	if q.pumping {
		_ = q.rc.SetWriteDeadline(time.Now().Add(drainWait))
	}
	q.mu.Unlock()
	q.wg.Wait()
	_ = q.rc.SetWriteDeadline(time.Time{}) // the connection may serve another request
}

// stream runs serve with a writer that cannot block it, and registers the stream so that
// it ends when its token does.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, x *exchange, serve func(http.ResponseWriter)) {
	x.ctx, x.cancel = context.WithCancel(x.ctx)
	defer x.cancel()
	q := &queued{w: w, rc: http.NewResponseController(w), last: time.Now(), cut: x.cancel, lost: func() { h.count.cut.Add(1) }}
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
	defer q.close()
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
