package sse

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// QueueOverhead is the number of bytes that a queued Send counts in addition to its own, with
// policy Drop.
const QueueOverhead = 64

// maxJoined bounds the queued events that Flush joins into one write.
const maxJoined = 16 << 10

// dropState is the state of policy Drop. A stream has two states:
//
//	open      each Send is written at once; nothing waits
//	blocked   the connection accepted only a part of a write (unsent > 0), or events are
//	          queued; Send queues or drops, Flush writes until the connection is full
//	          again or the queue is empty, which makes the stream open
//
// Once an event was dropped, all later ones are dropped until the queue is empty, so that the
// subscriber has one gap instead of many.
type dropState struct {
	queue       queue
	maxQueued   int
	unsent      int       // bytes reserved for a write that was accepted in part, 0: none
	dropped     uint64    // events since the stream became blocked
	progressAt  time.Time // when a write was last begun while blocked
	idleTimeout time.Duration
	pingEvent   func(time.Time) []byte
}

func newDropState(o *Options) dropState {
	return dropState{
		pingEvent:   o.PingEvent,
		queue:       queue{maxBytes: o.MaxQueued, overhead: QueueOverhead, budget: o.Budget},
		maxQueued:   o.MaxQueued,
		idleTimeout: o.IdleTimeout,
	}
}

func (d *dropState) release() {
	d.queue.budget.release(d.unsent)
	d.unsent = 0
	d.queue.clear()
}

func (w *Writer) sendOrDrop(b batch) (taken bool, err error) {
	if !w.Blocked() {
		w.streams.frames.Add(uint64(b.events)) // first: whoever has read the event finds it counted
		return true, w.offer(b.b)
	}
	if b.events == 0 {
		return false, nil
	}
	if w.dropped > 0 || !w.queue.push(b) {
		w.dropped += uint64(b.events)
		w.streams.dropped.Add(uint64(b.events))
		return false, nil
	}
	w.streams.frames.Add(uint64(b.events))
	return true, nil
}

// offer writes b without waiting; bytes that the connection does not accept stay in raw.
func (w *Writer) offer(b []byte) error {
	w.streams.bytes.Add(uint64(len(b)))
	if err := w.put(b); err != nil {
		return err
	}
	if !w.raw.hasPending() {
		return nil
	}
	if !w.queue.budget.reserve(len(b)) {
		return ErrBackpressure
	}
	w.unsent, w.progressAt = len(b), time.Now()
	return nil
}

// SendWait is Send for the first events of a stream, before anything is queued: it waits
// until the connection has accepted b, and returns ErrIdle after timeout. Policy Drop.
func (w *Writer) SendWait(ctx context.Context, b []byte, events int, timeout time.Duration) error {
	if _, err := w.Send(b, events); err != nil {
		return err
	}
	for end := time.Now().Add(timeout); w.unsent > 0; {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case time.Now().After(end):
			return ErrIdle
		}
		if err := w.flushUnsent(time.Second); err != nil {
			return err
		}
	}
	return nil
}

// Preload queues an event that the first Flush writes. It counts against the Budget but not
// against MaxQueued, and returns false when the Budget is exhausted. Policy Drop.
func (w *Writer) Preload(b []byte, events int) bool {
	if !w.queue.push(batch{b, events}) {
		return false
	}
	w.queue.maxBytes = w.queue.bytes + w.maxQueued
	w.streams.frames.Add(uint64(events))
	return true
}

// Flush writes as much of what waits as the connection accepts without waiting. With policy
// Drop, once the queue is empty, it returns the number of dropped events, which the caller
// reports to the subscriber.
func (w *Writer) Flush() (dropped uint64, err error) {
	if w.policy == Cut {
		w.flushPending()
		return 0, nil
	}
	if err := w.flushUnsent(0); err != nil {
		return 0, err
	}
	for w.unsent == 0 && len(w.queue.batches) > 0 {
		if err := w.writeQueued(); err != nil {
			return 0, err
		}
	}
	if w.unsent > 0 {
		return 0, nil
	}
	w.queue.maxBytes = w.maxQueued
	dropped, w.dropped = w.dropped, 0
	return dropped, nil
}

func (w *Writer) flushUnsent(wait time.Duration) error {
	if w.unsent == 0 {
		return nil
	}
	n, err := w.raw.flush(wait)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	if n == 0 {
		w.queue.budget.release(w.unsent)
		w.unsent = 0
	}
	return nil
}

var joinBuffers = sync.Pool{New: func() any { b := make([]byte, 0, maxJoined); return &b }}

// writeQueued writes the oldest batches, as many as fit into one write.
func (w *Writer) writeQueued() error {
	first := w.queue.pop()
	w.queue.done(len(first.b))
	if len(w.queue.batches) == 0 || len(first.b)+len(w.queue.batches[0].b) > maxJoined {
		return w.offer(first.b)
	}
	buf := joinBuffers.Get().(*[]byte)
	defer joinBuffers.Put(buf)
	b := append((*buf)[:0], first.b...)
	for len(w.queue.batches) > 0 && len(b)+len(w.queue.batches[0].b) <= maxJoined {
		next := w.queue.pop()
		w.queue.done(len(next.b))
		b = append(b, next.b...)
	}
	return w.offer(b)
}
