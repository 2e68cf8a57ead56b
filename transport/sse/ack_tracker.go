package sse

import "time"

const (
	// maxCheckInterval bounds the time between two reads of the acknowledged offset while
	// bytes are unacknowledged. Progress is assumed to have happened half way between two
	// reads, so isIdle is accurate to half of this.
	maxCheckInterval = 8 * time.Second
	// minCheckInterval is the minimum time between two reads that no rule requires.
	minCheckInterval = 4 * time.Second
)

// ackTracker decides when a subscriber of policy Cut is too slow (RFC-0009 §6, §7). It does
// not access the socket: its caller passes the offsets of bytes written and acknowledged and
// the time since the stream opened. It reports "too far behind" (isFull) and "gone" (isIdle).
type ackTracker struct {
	maxFrames   int           // unacknowledged frames, once the oldest is older than grace
	maxBurst    int           // unacknowledged frames, whatever their age
	grace       time.Duration // acknowledgements of a prompt reader lag 40 to 200 ms
	idleTimeout time.Duration // without progress while bytes are unacknowledged

	frames     []frameMark // written and not known to be acknowledged, oldest first
	written    int64
	acked      int64
	pingEnd    int64         // offset of the end of the last ping
	progressAt time.Duration // when acked last grew, or bytes last became unacknowledged
	checkedAt  time.Duration // when acked was last read, or bytes last became unacknowledged
}

// frameMark is one frame: the offset of its end, and when it was written.
type frameMark struct {
	end int64
	at  time.Duration
}

// acknowledged records that the peer has acknowledged everything up to offset.
func (t *ackTracker) acknowledged(offset int64, now time.Duration) {
	since := t.checkedAt
	t.checkedAt = now
	if offset <= t.acked {
		return
	}
	t.acked, t.progressAt = offset, since+(now-since)/2
	n := 0
	for n < len(t.frames) && t.frames[n].end <= offset {
		n++
	}
	t.frames = t.frames[:copy(t.frames, t.frames[n:])]
}

// wrote records that everything up to end was written. Frames count for isFull and isIdle,
// other bytes for isIdle alone.
func (t *ackTracker) wrote(end int64, now time.Duration, isFrame bool) {
	if !t.hasUnacked() {
		t.progressAt, t.checkedAt = now, now
	}
	t.written = end
	if isFrame {
		t.frames = append(t.frames, frameMark{end, now})
	}
}

func (t *ackTracker) hasUnacked() bool { return t.acked < t.written }

func (t *ackTracker) pingPending() bool { return t.acked < t.pingEnd }

// needsRefresh reports whether the acknowledged offset must be read before the next frame,
// because the last known offset is old or would refuse the frame.
func (t *ackTracker) needsRefresh(now time.Duration) bool {
	return t.hasUnacked() && (t.isFull(now) || now-t.checkedAt >= minCheckInterval)
}

// isFull reports whether the subscriber is too far behind for another frame.
func (t *ackTracker) isFull(now time.Duration) bool {
	n := len(t.frames)
	return n >= t.maxBurst || n >= t.maxFrames && now-t.frames[0].at >= t.grace
}

// stalledFor returns how long bytes have been unacknowledged without progress.
func (t *ackTracker) stalledFor(now time.Duration) time.Duration {
	if !t.hasUnacked() {
		return 0
	}
	return now - t.progressAt
}

func (t *ackTracker) isIdle(now time.Duration) bool {
	return t.hasUnacked() && now-t.progressAt >= t.idleTimeout
}

// nextCheck returns when the acknowledged offset must be read next; ok is false while
// nothing is unacknowledged.
func (t *ackTracker) nextCheck() (at time.Duration, ok bool) {
	return min(t.checkedAt+maxCheckInterval, t.progressAt+t.idleTimeout), t.hasUnacked()
}
