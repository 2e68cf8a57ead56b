package sse

import "time"

const (
	// maxCheckInterval is when bytes that are outstanding are asked about at the latest.
	// Progress is taken to have happened half way between two answers, so idle is
	// right within half of this.
	maxCheckInterval = 8 * time.Second
	// minCheckInterval is the least time between two questions that no rule asks for.
	minCheckInterval = 4 * time.Second
)

// ackTracker is the accounting of one stream (RFC-0009 §6, §7), apart from any
// socket: offsets of bytes written and acknowledged, and the time, go in;
// "this reader is behind" and "this reader is gone" come out.
type ackTracker struct {
	maxFrames   int           // this many waiting frames and the oldest older than grace: full
	maxBurst    int           // this many: full at once
	grace       time.Duration // acknowledgements of a prompt reader lag 40 to 200 ms
	idleTimeout time.Duration // no progress for this long with bytes outstanding: idle

	frames     []frameMark // written frames that are not known to be acknowledged, oldest first
	written    int64
	acked      int64
	pingEnd    int64         // end of the last ping
	progressAt time.Duration // when acked last grew, or bytes last began to be outstanding
	checkedAt  time.Duration // the last answer, or when bytes last began to be outstanding
}

// frameMark is one frame: the offset behind its last byte, and when it was written.
type frameMark struct {
	end int64
	at  time.Duration
}

// acknowledged takes in the answer that the peer has acknowledged everything up to off.
func (l *ackTracker) acknowledged(off int64, now time.Duration) {
	since := l.checkedAt
	l.checkedAt = now
	if off <= l.acked {
		return
	}
	l.acked, l.progressAt = off, since+(now-since)/2
	n := 0
	for n < len(l.frames) && l.frames[n].end <= off {
		n++
	}
	l.frames = l.frames[:copy(l.frames, l.frames[n:])]
}

// wrote takes in that everything up to end was written: a frame counts for full,
// other bytes only for idle.
func (l *ackTracker) wrote(end int64, now time.Duration, frame bool) {
	if !l.hasUnacked() {
		l.progressAt, l.checkedAt = now, now
	}
	l.written = end
	if frame {
		l.frames = append(l.frames, frameMark{end, now})
	}
}

func (l *ackTracker) hasUnacked() bool { return l.acked < l.written }

func (l *ackTracker) pingPending() bool { return l.acked < l.pingEnd }

// needsRefresh says that before the next frame the peer's progress must be known: what was
// known last would refuse the frame, or is old.
func (l *ackTracker) needsRefresh(now time.Duration) bool {
	return l.hasUnacked() && (l.isFull(now) || now-l.checkedAt >= minCheckInterval)
}

// isFull says that no further frame may be written now.
func (l *ackTracker) isFull(now time.Duration) bool {
	n := len(l.frames)
	return n >= l.maxBurst || n >= l.maxFrames && now-l.frames[0].at >= l.grace
}

// stalledFor is how long bytes have been outstanding without progress.
func (l *ackTracker) stalledFor(now time.Duration) time.Duration {
	if !l.hasUnacked() {
		return 0
	}
	return now - l.progressAt
}

func (l *ackTracker) isIdle(now time.Duration) bool {
	return l.hasUnacked() && now-l.progressAt >= l.idleTimeout
}

// nextCheck is when the ledger wants to be looked at; ok is false when nothing is outstanding.
func (l *ackTracker) nextCheck() (at time.Duration, ok bool) {
	return min(l.checkedAt+maxCheckInterval, l.progressAt+l.idleTimeout), l.hasUnacked()
}
