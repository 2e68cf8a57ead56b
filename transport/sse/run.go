package sse

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// Source is where Run takes frames from; a *fanout.Sub[T] is one. Ready can be
// received from while Next would give a value or Err is not nil.
type Source[T any] interface {
	Ready() <-chan struct{}
	Next() (T, bool)
	Err() error
}

// maxFramesPerWake bounds the frames written between two looks at everything else.
const maxFramesPerWake = 64

// Run writes src's values to w, frame giving the encoded event of each, until
// something ends the stream, and returns what: the context's cause, the source's
// error, ErrPeerClosed when the client closed its side (a half-closing client
// still gets what follows), or another error of w. It does not close w.
//
// It works in the caller's goroutine, with a second one that waits for the
// client's end and is gone when Run returns. An idle stream costs no CPU between
// pings.
func Run[T any](ctx context.Context, w *Writer, src Source[T], frame func(T) []byte) error {
	stop := w.watch(ctx)
	defer stop()
	for {
		select {
		case <-w.watcher.wake:
			if err := w.onWake(ctx); err != nil {
				return err
			}
		case <-src.Ready():
			for range maxFramesPerWake {
				v, ok := src.Next()
				if !ok {
					if err := src.Err(); err != nil {
						return err
					}
					break
				}
				if err := w.Frame(frame(v)); err != nil {
					return err
				}
			}
		}
	}
}

// waker is what can wake a stream besides its source: the context, the client
// and the clock, all through one channel, because a select over two channels is
// cheaper than one over four and every frame pays it.
type waker struct {
	wake  chan struct{}
	gone  atomic.Pointer[error] // why nothing more comes from the client
	timer *time.Timer
	at    time.Duration // what timer is set to, since the opening
}

func (v *waker) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// watch begins to watch; the function it returns ends that and waits for it.
func (w *Writer) watch(ctx context.Context) (stop func()) {
	v := &w.watcher
	v.wake = make(chan struct{}, 1)
	now := w.now()
	v.at = w.nextCheck(now)
	v.timer = time.AfterFunc(v.at-now, v.signal)
	unhook := context.AfterFunc(ctx, v.signal)

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := discard(w.conn)
		v.gone.Store(&err)
		v.signal()
	}()
	return func() {
		v.timer.Stop()
		v.timer = nil
		unhook()
		w.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // long ago: ends the read
		<-ended
		w.raw.Conn.SetReadDeadline(time.Time{})
	}
}

// discard reads until the client's side ends. Nothing is expected of it.
func discard(r io.Reader) error {
	var junk [64]byte
	for n := 0; n < maxInput; {
		m, err := r.Read(junk[:])
		if n += m; err != nil {
			return err
		}
	}
	return fmt.Errorf("more than %d bytes after the request", maxInput)
}

// onWake looks what it was.
func (w *Writer) onWake(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := w.watcher.gone.Load(); err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, *err)
	}
	return w.Check()
}

// timerSlack is how early the timer may go off. A stream with frames in a steady beat
// then sets it rarely and is never woken by it.
const timerSlack = 2 * time.Second

// resetTimer sets the timer for what is due next.
func (w *Writer) resetTimer(now time.Duration) {
	v := &w.watcher
	if v.timer == nil {
		return
	}
	at := w.nextCheck(now)
	if at < v.at || at-v.at > timerSlack || v.at <= now {
		v.at = at
		v.timer.Reset(at - now)
	}
}
