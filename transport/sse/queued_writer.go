package sse

import (
	"net/http"
	"sync"
	"time"
)

// QueueOptions of a QueuedWriter. All but OnCut are required.
type QueueOptions struct {
	MaxWrites    int           // queued writes
	MaxBytes     int           // queued bytes
	WriteTimeout time.Duration // of one write to the connection
	DrainTimeout time.Duration // to write the queue when the stream ends
	PingInterval time.Duration // time without a write after which Ping writes a comment
	OnCut        func()        // called once when the subscriber is too slow; must not call the writer
}

// QueuedWriter is policy Queue: the http.ResponseWriter of a stream that other code
// writes. Write never waits for the subscriber: it queues a copy. A goroutine writes the
// queue and ends when the queue is empty. When the queue exceeds its bounds, or one write
// exceeds its timeout, the stream is cut: every later Write fails, and OnCut ends the
// request.
//
// Without it, code that notifies all subscribers one after the other, as the MCP SDK does,
// would block on a stalled one. Its methods may be called from any goroutine.
type QueuedWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController
	o  QueueOptions

	mu        sync.Mutex // protects the fields below
	queue     queue
	isWriting bool // a goroutine is in drain
	isCut     bool
	closed    bool
	lastWrite time.Time
	writing   sync.WaitGroup
}

// NewQueuedWriter makes the writer of a stream that answers with w. The caller must call
// Close before its handler returns.
func NewQueuedWriter(w http.ResponseWriter, o QueueOptions) *QueuedWriter {
	if o.OnCut == nil {
		o.OnCut = func() {}
	}
	return &QueuedWriter{
		w: w, rc: http.NewResponseController(w), o: o, lastWrite: time.Now(),
		queue: queue{maxBytes: o.MaxBytes, maxBatches: o.MaxWrites},
	}
}

// Header implements http.ResponseWriter.
func (q *QueuedWriter) Header() http.Header { return q.w.Header() }

// WriteHeader implements http.ResponseWriter. It must come before every Write.
func (q *QueuedWriter) WriteHeader(status int) { q.w.WriteHeader(status) }

// Flush implements http.Flusher and does nothing: drain flushes what it has written.
func (q *QueuedWriter) Flush() {}

// Write queues a copy of b, and cuts the stream when the queue is full.
func (q *QueuedWriter) Write(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return 0, ErrClosed
	case q.isCut:
		return 0, ErrBackpressure
	case !q.queue.push(batch{b: append([]byte(nil), b...)}):
		q.cutLocked()
		return 0, ErrBackpressure
	}
	if !q.isWriting {
		q.isWriting = true
		q.writing.Go(q.drain)
	}
	return len(b), nil
}

func (q *QueuedWriter) cutLocked() {
	if q.isCut {
		return
	}
	q.isCut = true
	q.queue.clear()
	q.o.OnCut()
	_ = q.rc.SetWriteDeadline(time.Now()) // wakes drain
}

// drain writes until the queue is empty, with one flush for all batches that were queued
// when a round began.
func (q *QueuedWriter) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer func() { q.isWriting = false }()
	for len(q.queue.batches) > 0 {
		for n := len(q.queue.batches); n > 0 && !q.isCut; n-- {
			q.writeLocked(q.queue.pop())
		}
		if q.isCut {
			return
		}
		q.mu.Unlock()
		err := q.rc.Flush()
		q.mu.Lock()
		if err != nil {
			q.cutLocked()
		}
	}
}

// writeLocked writes one batch within its timeout, without the lock.
func (q *QueuedWriter) writeLocked(b batch) {
	timeout := q.o.WriteTimeout
	if q.closed {
		timeout = q.o.DrainTimeout
	}
	_ = q.rc.SetWriteDeadline(time.Now().Add(timeout))
	q.mu.Unlock()
	_, err := q.w.Write(b.b)
	q.mu.Lock()
	q.lastWrite = time.Now()
	if err != nil {
		q.cutLocked()
	}
	if !q.isCut { // a cut has released everything
		q.queue.done(len(b.b))
	}
}

// Ping writes a comment when nothing was written for PingInterval, so that proxies keep the
// stream open and a lost subscriber is noticed.
func (q *QueuedWriter) Ping(now time.Time) {
	q.mu.Lock()
	isDue := now.Sub(q.lastWrite) >= q.o.PingInterval && !q.isWriting && !q.closed
	if isDue {
		q.lastWrite = now
	}
	q.mu.Unlock()
	if isDue {
		_, _ = q.Write(AppendComment(nil, "ping"))
	}
}

// Close waits until the queue is written, for at most DrainTimeout.
func (q *QueuedWriter) Close() {
	q.mu.Lock()
	q.closed = true
	if q.isWriting {
		_ = q.rc.SetWriteDeadline(time.Now().Add(q.o.DrainTimeout))
	}
	q.mu.Unlock()
	q.writing.Wait()
	_ = q.rc.SetWriteDeadline(time.Time{}) // the connection may serve another request
}
