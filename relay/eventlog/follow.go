package eventlog

import (
	"context"
	"errors"

	"agentctl/relay/kernel"
	"agentctl/transport/fanout"
)

// followBuffer is how many events a follower may be behind before it reads from the disk
// again.
const followBuffer = 1024

// Subscribe subscribes to events as they become durable, in the order of seq; the newest 512
// can be resumed from (SubscribeOptions.Resume). It ends with ErrClosed. A reader who must not
// miss any, and may be slow, uses Follow.
func (s *Store) Subscribe(o fanout.SubscribeOptions[kernel.Event]) *fanout.Subscriber[kernel.Event] {
	return s.topic.Subscribe(o)
}

// Follow calls fn with the events of q behind q.After, those on disk first, then each as
// it becomes durable, in the order of seq without a gap or a repeat, until q.To is
// reached, ctx ends, fn fails or the log is closed; it returns why, nil for q.To. A slow
// fn falls back to the disk. ErrRemoved: it was so slow that retention passed it.
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

// follower has handled all up to pos.
type follower struct {
	s            *Store
	q            Query
	pos          uint64
	fn           func(kernel.Event) error
	hasDelivered bool // it was on the disk once: from here on, a gap is ErrRemoved
}

func (f *follower) reachedEnd() bool { return f.q.To > 0 && f.pos >= f.q.To }

// replay hands out what lies on the disk.
func (f *follower) replay(ctx context.Context) error {
	to := f.s.Last()
	if f.q.To > 0 {
		to = min(to, f.q.To)
	}
	if to <= f.pos {
		return ctx.Err()
	}
	if f.hasDelivered && !f.s.CanResume(f.pos) {
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

// live hands out what is committed, until it falls behind.
func (f *follower) live(ctx context.Context) error {
	after := min(f.pos, f.s.Last()) // pos may be a number that is still to come
	sub := f.s.topic.Subscribe(fanout.SubscribeOptions[kernel.Event]{Buffer: followBuffer, Resume: true, After: after})
	defer sub.Close()
	if sub.Missed() {
		return nil // more was committed since than the ring holds
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
