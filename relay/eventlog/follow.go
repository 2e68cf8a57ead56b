package eventlog

import (
	"context"
	"errors"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// followBuffer is how many events a live follower may be behind before it returns to the
// disk.
const followBuffer = 1024

// Follow calls fn with the events of q behind q.After, those on disk first, then each as
// it becomes durable, in the order of seq without a gap or a repeat. It returns nil when
// q.To is reached, else why it ended: ctx, the error of fn, ErrClosed, or ErrRemoved when
// fn was so slow that retention overtook it.
//
// It alternates between two modes. replay reads the disk up to the last seq; live
// subscribes to the ring behind that seq and receives new commits. A follower that
// falls more than followBuffer events behind loses its subscription and goes back to
// replay, so it needs bounded memory however slow fn is. fn runs in the caller's goroutine without a lock
// of the log, and may append. While Follow waits for a commit, it holds no database connection.
func (s *Store) Follow(ctx context.Context, q Query, fn func(kernel.Event) error) error {
	if err := q.check(); err != nil {
		return err
	}
	f := follower{s: s, q: q, pos: q.After, fn: fn}
	for {
		if err := f.replay(ctx); err != nil || f.reachedEnd() {
			return err
		}
		if err := f.live(ctx); err != nil || f.reachedEnd() {
			return err
		}
	}
}

// follower is one Follow. pos also moves past events that the query does not select, so that a follower
// of a rare type does not read them again when it returns to the disk.
type follower struct {
	s            *Store
	q            Query
	pos          uint64 // every event up to here has been handled
	fn           func(kernel.Event) error
	hasDelivered bool // it has delivered an event: from here on a gap is ErrRemoved
}

// reachedEnd reports whether the query has an end and all of it was handled.
func (f *follower) reachedEnd() bool { return f.q.To > 0 && f.pos >= f.q.To }

// replay delivers the events on disk. Before the first delivery, a gap after pos is not an
// error: Follow does not promise events that were removed before it began. It reads up to Last. Later
// events are in the ring, since publish moves Last after it; if the ring has lost them, live returns and
// replay reads on.
func (f *follower) replay(ctx context.Context) error {
	to := f.s.Last()
	if f.q.To > 0 {
		to = min(to, f.q.To)
	}
	if to <= f.pos {
		return ctx.Err()
	}
	if f.hasDelivered && !f.s.CanResume(f.pos, f.q) {
		return ErrRemoved
	}
	q := f.q
	q.After, q.To = f.pos, to
	if err := f.s.Select(ctx, q, f.fn); err != nil {
		return err
	}
	f.pos, f.hasDelivered = to, true
	return nil
}

// live delivers events as they are committed. It returns nil when it falls behind, and
// when the ring no longer reaches back to pos; Follow then replays the gap from disk. The
// subscription starts before the ring is checked, so no commit in between is lost.
func (f *follower) live(ctx context.Context) error {
	after := min(f.pos, f.s.Last()) // pos may be a seq that has not been given yet
	sub := f.s.topic.Subscribe(fanout.SubscribeOptions[kernel.Event]{Buffer: followBuffer, Resume: true, After: after})
	defer sub.Close()
	if sub.Missed() {
		return nil // the ring does not reach back to pos
	}
	for {
		for e, ok := sub.Next(); ok; e, ok = sub.Next() {
			if e.Seq <= f.pos {
				continue
			}
			if f.q.To > 0 && e.Seq > f.q.To {
				f.pos = f.q.To
				return nil
			}
			if f.q.matches(e) {
				if err := f.fn(e); err != nil {
					return err
				}
			}
			f.pos, f.hasDelivered = e.Seq, true
			if f.reachedEnd() || ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if err := sub.Err(); errors.Is(err, fanout.ErrOverflow) {
			return nil
		} else if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-sub.Ready():
		}
	}
}
