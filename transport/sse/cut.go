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
	opts       Options
	openedAt   time.Time
	nextPing   time.Duration
	acks       ackTracker
	hasPending bool // the last write left something in raw.pending
	waker      waker
}

func newCutState(o *Options, raw *Conn) *cutState {
	offset := raw.Written()
	return &cutState{
		opts: *o, openedAt: o.Now(), nextPing: o.PingInterval,
		acks: ackTracker{
			maxFrames: o.MaxUnacked, maxBurst: o.MaxBurst, grace: o.UnackedGrace, idleTimeout: o.IdleTimeout,
			frames:  make([]frameMark, 0, 4),
			written: offset, acked: offset - int64(raw.unacked()),
		},
	}
}

func (c *cutState) now() time.Duration { return c.opts.Now().Sub(c.openedAt) }

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

// writeEvent is write that also counts the bytes and resets the timer.
func (w *Writer) writeEvent(b []byte, now time.Duration, isFrame bool) error {
	if err := w.write(b, now, isFrame); err != nil {
		return err
	}
	w.streams.bytes.Add(uint64(len(b)))
	w.resetTimer(now)
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

// Ping writes the ping event unless an earlier one is unacknowledged, so that at most one is
// buffered on a stalled stream. Policy Cut.
func (w *Writer) Ping() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
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

// checkPingAndIdle is Check for policy Cut. A late call writes one ping, whatever number it
// missed.
func (w *Writer) checkPingAndIdle() error {
	now := w.now()
	w.flushPending()
	w.refresh(now)
	if w.acks.isIdle(now) {
		return ErrIdle
	}
	if w.opts.PingInterval > 0 && now >= w.nextPing {
		late := (now - w.nextPing) / w.opts.PingInterval // pings that were missed
		w.nextPing += (late + 1) * w.opts.PingInterval
		if err := w.Ping(); err != nil {
			return err
		}
	}
	w.resetTimer(now)
	return nil
}

// nextCheck returns when Check must be called next.
func (w *Writer) nextCheck(now time.Duration) time.Duration {
	at := now + time.Hour
	if w.opts.PingInterval > 0 {
		at = w.nextPing
	}
	if t, ok := w.acks.nextCheck(); ok {
		at = min(at, t)
	}
	if w.hasPending {
		at = min(at, now+time.Second)
	}
	return at
}
