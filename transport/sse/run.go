package sse

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// Source is a queue of frames, such as a *fanout.Subscriber[T]. A receive from Ready
// succeeds while Next would return a value or Err is not nil.
type Source[T any] interface {
	Ready() <-chan struct{}
	Next() (T, bool)
	Err() error
}

// maxFramesPerWake bounds the frames that are written before Run checks for other events.
const maxFramesPerWake = 64

// Run writes the values of src to w, which has policy Cut, until the stream ends; encode
// returns the encoded event of a value. Run returns why the stream ended: the context's
// cause, the source's error, ErrPeerClosed when the client closed its side, or another error
// of w. It does not close w, so that a client that only half-closed still gets the close
// event.
//
// It runs in the caller's goroutine. A second goroutine waits for the client to close; it
// has ended when Run returns. An idle stream costs no CPU between pings.
func Run[T any](ctx context.Context, w *Writer, src Source[T], encode func(T) []byte) error {
	stop := w.startWaker(ctx)
	defer stop()
	for {
		select {
		case <-w.waker.wake:
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
				if _, err := w.Send(encode(v), 1); err != nil {
					return err
				}
			}
		}
	}
}

// waker joins all events other than frames (the context, the client and the timer) in one
// channel: each frame costs a select, and a select over two channels is cheaper than one over
// four.
type waker struct {
	wake       chan struct{}
	readErr    atomic.Pointer[error] // why reading from the client ended
	timer      *time.Timer
	timerSetTo time.Duration // since the stream opened
}

func (v *waker) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// startWaker starts the goroutine and the timer that signal wake; stop ends both and waits
// for the goroutine.
func (w *Writer) startWaker(ctx context.Context) (stop func()) {
	v := &w.waker
	v.wake = make(chan struct{}, 1)
	now := w.now()
	v.timerSetTo = w.nextCheck(now)
	v.timer = time.AfterFunc(v.timerSetTo-now, v.signal)
	stopContext := context.AfterFunc(ctx, v.signal)

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := discard(w.conn)
		v.readErr.Store(&err)
		v.signal()
	}()
	return func() {
		v.timer.Stop()
		v.timer = nil
		stopContext()
		w.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // in the past: ends the read
		<-ended
		w.raw.Conn.SetReadDeadline(time.Time{})
	}
}

// discard reads until the client closes its side. Nothing is expected from it.
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

// onWake handles whatever woke the stream: cancellation, the client, or the timer.
func (w *Writer) onWake(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := w.waker.readErr.Load(); err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, *err)
	}
	return w.Check()
}

// timerSlack is how early the timer may fire. A stream with frames at a steady interval
// then resets it rarely and is never woken by it.
const timerSlack = 2 * time.Second

// resetTimer sets the timer to the next check.
func (w *Writer) resetTimer(now time.Duration) {
	v := &w.waker
	if v.timer == nil {
		return
	}
	at := w.nextCheck(now)
	if at < v.timerSetTo || at-v.timerSetTo > timerSlack || v.timerSetTo <= now {
		v.timerSetTo = at
		v.timer.Reset(at - now)
	}
}
