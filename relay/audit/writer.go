package audit

import (
	"errors"
	"time"

	"go.uber.org/zap"
)

// chunkSize is how many bytes are written at once, about.
const chunkSize = 64 << 10

// writer writes what is queued. It is used by one goroutine at a time, the holder of Log.ioMu,
// which alone waits for the disk. What the disk does not take stays here and is tried again with
// each pass: the batch in hand and at most one chunk of formatted lines.
type writer struct {
	log                 *Log
	decisions, refusals *rotatingFile

	batch     []entry // taken from the queue
	next      int     // index of the first that is not formatted
	lastTaken time.Time
	lastPrune time.Time
	failing   bool // the last pass failed, which was logged
}

// runWriter makes passes until stop is closed, and one more then: writeInterval after a record
// was queued, and each syncInterval, so an idle log wakes the process once a second. A pass that left
// something, or failed, is followed by another one after writeInterval.
func (l *Log) runWriter(stop <-chan struct{}) {
	tick := time.NewTicker(syncInterval)
	defer tick.Stop()
	soon := time.NewTimer(writeInterval)
	defer soon.Stop()
	for running := true; running; {
		sync := false
		select {
		case <-stop:
			running = false
		case <-l.queued:
			soon.Reset(writeInterval)
			continue
		case <-tick.C:
			sync = true
		case <-soon.C:
		case <-l.wake:
		}
		l.ioMu.Lock()
		l.writer.pass(sync, !running)
		if l.writer.failing || l.queue.len() > 0 {
			soon.Reset(writeInterval)
		}
		l.ioMu.Unlock()
	}
}

// pass writes what is queued: records, then commits, and refusals once a minute. sync makes it
// sync what is written, final makes it write and sync everything that the disk takes. After an error it
// goes on with the other file, logs the first error, and leaves what was not written to the next pass.
func (w *writer) pass(sync, final bool) {
	now := time.Now()
	var commits []*commit
	if w.next == len(w.batch) {
		clear(w.batch) // frees the strings
		w.batch, commits = w.log.queue.take(w.batch[:0])
		w.next = 0
	} else {
		commits = w.log.queue.takeCommits()
	}
	err := w.writeRecords()
	w.writeCommits(commits, err)
	if final || now.Sub(w.lastTaken) >= time.Minute {
		w.lastTaken = now
		w.refusals.pending = append(w.refusals.pending, w.log.refusals.take(w.refusals.isIdle())...)
	}
	if e := w.flush(w.refusals); err == nil {
		err = e
	}
	if sync || final {
		for _, f := range []*rotatingFile{w.decisions, w.refusals} {
			if e := f.sync(); err == nil {
				err = e
			}
		}
	}
	// A rotation prunes as well, but a quiet log may not rotate for weeks.
	if now.Sub(w.lastPrune) >= time.Hour {
		w.lastPrune = now
		w.decisions.prune()
		w.refusals.prune()
	}
	if errors.Is(err, errTorn) {
		w.log.losses.add(lostStorage, classAgent, 1) // one at least; nothing says how many
	}
	w.logFailure(err)
}

// writeRecords writes the batch, a chunk at a time. After an error the rest stays.
func (w *writer) writeRecords() error {
	f := w.decisions
	for {
		if err := w.flush(f); err != nil {
			return err
		}
		if w.next == len(w.batch) {
			return nil
		}
		for ; w.next < len(w.batch) && len(f.pending) < f.chunk; w.next++ {
			f.pending = appendLine(f.pending, &w.batch[w.next])
		}
	}
}

// writeCommits writes the records whose callers wait, with one sync for all. err is that of writeRecords:
// after an error nothing more is written, and each caller gets it. A probe also fails while the file
// cannot be rotated, since the log would stop at its bound.
func (w *writer) writeCommits(commits []*commit, err error) {
	if len(commits) == 0 {
		return
	}
	f := w.decisions
	for _, c := range commits {
		if err == nil && !c.isProbe && !c.abandoned.Load() {
			f.pending = appendLine(f.pending, &c.entry)
		}
	}
	if err == nil {
		err = w.flush(f)
	}
	if err == nil {
		err = f.forceSync()
	}
	for _, c := range commits {
		if c.isProbe && err == nil {
			c.done <- f.rotateErr
			continue
		}
		c.done <- err
	}
}

// flush writes the pending lines of a file and counts them.
func (w *writer) flush(f *rotatingFile) error {
	n := f.pendingLines()
	err := f.flush()
	w.log.lines.Add(uint64(n - f.pendingLines()))
	return err
}

// giveUp counts what is lost with the end of the relay. Whose a formatted line is, is not known any more,
// so it counts as one of an agent.
func (w *writer) giveUp() {
	w.log.losses.add(lostStorage, classAgent, uint64(w.decisions.pendingLines()))
	w.log.losses.addQueued(w.batch[w.next:])
	w.batch, w.next = nil, 0
	w.decisions.pending, w.decisions.off = nil, 0
}

// logFailure logs the first failure and the end of failures, unless a monitor of the disk does.
func (w *writer) logFailure(err error) {
	switch {
	case w.log.opt.Watch != nil:
	case err != nil && !w.failing:
		w.log.opt.Logger.Error("the audit log cannot be written; lines wait, and are lost when the queue is full: see the disk of the state directory", zap.Error(err))
	case err == nil && w.failing:
		w.log.opt.Logger.Info("the audit log is written again", zap.Uint64("lost", w.log.Stats().Lost))
	}
	w.failing = err != nil
}
