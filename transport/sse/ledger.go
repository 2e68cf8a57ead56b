package sse

import "time"

const (
	// lookAfter is when bytes that are outstanding are asked about at the latest.
	// Progress is taken to have happened half way between two answers, so idle is
	// right within half of this.
	lookAfter = 8 * time.Second
	// lookAgain is the least time between two questions that no rule asks for.
	lookAgain = 4 * time.Second
)

// ledger is the accounting of one stream (RFC-0009 §6, §7), apart from any
// socket: offsets of bytes written and acknowledged, and the time, go in;
// "this reader is behind" and "this reader is gone" come out.
type ledger struct {
	maxFrames  int           // this many waiting frames and the oldest older than grace: full
	hardFrames int           // this many: full at once
	grace      time.Duration // acknowledgements of a prompt reader lag 40 to 200 ms
	idleAfter  time.Duration // no progress for this long with bytes outstanding: idle

	frames   []mark // written frames that are not known to be acknowledged, oldest first
	written  int64
	acked    int64
	pingEnd  int64         // end of the last ping
	progress time.Duration // when acked last grew, or bytes last began to be outstanding
	looked   time.Duration // the last answer, or when bytes last began to be outstanding
}

// mark is one frame: the offset behind its last byte, and when it was written.
type mark struct {
	end int64
	at  time.Duration
}

// ack takes in the answer that the peer has acknowledged everything up to off.
func (l *ledger) ack(off int64, now time.Duration) {
	since := l.looked
	l.looked = now
	if off <= l.acked {
		return
	}
	l.acked, l.progress = off, since+(now-since)/2
	n := 0
	for n < len(l.frames) && l.frames[n].end <= off {
		n++
	}
	l.frames = l.frames[:copy(l.frames, l.frames[n:])]
}

// wrote takes in that everything up to end was written: a frame counts for full,
// other bytes only for idle.
func (l *ledger) wrote(end int64, now time.Duration, frame bool) {
	if !l.outstanding() {
		l.progress, l.looked = now, now
	}
	l.written = end
	if frame {
		l.frames = append(l.frames, mark{end, now})
	}
}

func (l *ledger) outstanding() bool { return l.acked < l.written }

func (l *ledger) pinging() bool { return l.acked < l.pingEnd }

// ask says that before the next frame the peer's progress must be known: what was
// known last would refuse the frame, or is old.
func (l *ledger) ask(now time.Duration) bool {
	return l.outstanding() && (l.full(now) || now-l.looked >= lookAgain)
}

// full says that no further frame may be written now.
func (l *ledger) full(now time.Duration) bool {
	n := len(l.frames)
	return n >= l.hardFrames || n >= l.maxFrames && now-l.frames[0].at >= l.grace
}

// stalled is how long bytes have been outstanding without progress.
func (l *ledger) stalled(now time.Duration) time.Duration {
	if !l.outstanding() {
		return 0
	}
	return now - l.progress
}

func (l *ledger) idle(now time.Duration) bool {
	return l.outstanding() && now-l.progress >= l.idleAfter
}

// due is when the ledger wants to be looked at; ok is false when nothing is outstanding.
func (l *ledger) due() (at time.Duration, ok bool) {
	return min(l.looked+lookAfter, l.progress+l.idleAfter), l.outstanding()
}
