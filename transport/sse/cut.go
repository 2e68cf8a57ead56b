package sse

import "time"

var pingEvent = []byte("event: ping\ndata: {}\n\n")

// cutState is the state of policy Cut. All times are since the stream opened.
//
// The rules of RFC-0009, in the order in which they take effect:
//
//	§6  Send: 3 frames unacknowledged and the oldest older than 1 s, or 64 frames: 4413
//	    Send: more than maxPending bytes wait because the kernel's buffer is full: 4413
//	§7  Check: bytes unacknowledged and no progress for 90 s: 4408
//	§5  Check: a ping every 25 s, unless one is unacknowledged
//
// The acknowledged offset is read from the kernel only when one of these rules, or one of
// ackTracker's intervals, needs it: a system call per frame would double the frame's cost.
type cutState struct {
	linger     time.Duration
	acks       ackTracker
	hasPending bool // the last write left something in raw.pending
}

func newCutState(o *Options, raw *Conn) *cutState {
	offset := raw.Written()
	return &cutState{
		linger: o.Linger,
		acks: ackTracker{
			maxFrames: o.MaxUnacked, maxBurst: o.MaxBurst, grace: o.UnackedGrace, idleTimeout: o.IdleTimeout,
			frames:  make([]frameMark, 0, 4),
			written: offset, acked: offset - int64(raw.unacked()),
		},
	}
}

// refresh reads the offset up to which the peer has acknowledged.
func (w *Writer) refresh(now time.Duration) {
	if w.acks.hasUnacked() {
		unacked := w.raw.unacked() // before Written: TLS may write in between
		w.acks.acknowledged(w.raw.Written()-int64(unacked), now)
	}
}

// flushPending writes, without waiting, what an earlier write left in raw.pending, and
// returns how many bytes are still left.
func (w *Writer) flushPending() int {
	if !w.hasPending {
		return 0
	}
	n, _ := w.raw.flush(0) // the next write reports a failure
	w.hasPending = n > 0
	return n
}

// write sends b. Frames count for ErrBackpressure; the head and pings do not.
func (w *Writer) write(b []byte, now time.Duration, isFrame bool) error {
	if err := w.put(b); err != nil {
		return err
	}
	w.acks.wrote(w.raw.Written(), now, isFrame)
	w.hasPending = w.raw.hasPending()
	return nil
}

// writeEvent is write that also counts the bytes and sets the time of the next Check.
func (w *Writer) writeEvent(b []byte, now time.Duration, isFrame bool) error {
	if err := w.write(b, now, isFrame); err != nil {
		return err
	}
	w.streams.bytes.Add(uint64(len(b)))
	w.setCheckAt(now)
	return nil
}

// sendOrCut writes one event, unless the subscriber is too far behind.
func (w *Writer) sendOrCut(b []byte, events int) error {
	now := w.now()
	if w.acks.needsRefresh(now) {
		w.refresh(now)
	}
	if w.acks.isFull(now) {
		return ErrBackpressure
	}
	if n := w.flushPending(); n > 0 && n+len(b) > maxPending {
		return ErrBackpressure
	}
	if err := w.writeEvent(b, now, true); err != nil {
		return err
	}
	w.streams.frames.Add(uint64(events))
	return nil
}

// pingOrSkip writes a ping unless an earlier one is unacknowledged, so that at most one is
// buffered on a stalled stream.
func (w *Writer) pingOrSkip(now time.Duration) error {
	pending := w.flushPending()
	w.refresh(now)
	if w.acks.pingPending() || pending > 0 {
		return nil
	}
	if err := w.writeEvent(pingEvent, now, false); err != nil {
		return err
	}
	w.acks.pingEnd = w.acks.written
	w.streams.pings.Add(1)
	return nil
}
