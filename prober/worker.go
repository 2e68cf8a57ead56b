package prober

import "time"

// worker runs a call that may hang, such as statfs on a dead network mount, in a separate
// goroutine. Nothing can end such a call: the sampler waits for it for a bounded time and
// receives the result later, if there is one.
//
//	request ──> call ──> result in the buffer ──> receive      isPending from request to receive
//	              └─ hangs: receive returns false each time, request must not be called again
//
// At most one call is in progress. The goroutine does not block on results, whose buffer
// holds one, because no request is sent while one is pending. The methods, except serve, are
// for one goroutine: the sampler.
type worker[T any] struct {
	requests chan struct{} // closed by stop
	results  chan T
	done     chan struct{} // the goroutine closes it at its end
	// isPending is set while a request was sent and its result not received.
	isPending bool
	// timer is reused, since most samples wait. It is nil before the first wait.
	timer *time.Timer
}

// newWorker starts nothing: the owner runs serve in a goroutine.
func newWorker[T any]() worker[T] {
	return worker[T]{requests: make(chan struct{}, 1), results: make(chan T, 1), done: make(chan struct{})}
}

// serve answers requests until stop, in the worker's goroutine.
func (w *worker[T]) serve(call func() T) {
	for range w.requests {
		w.results <- call()
	}
}

// request asks for one call. None may be pending.
func (w *worker[T]) request() {
	w.isPending = true
	w.requests <- struct{}{}
}

// receive returns the result of the pending request, for which it waits at most d.
func (w *worker[T]) receive(d time.Duration) (result T, ok bool) {
	select {
	case result = <-w.results:
		w.isPending = false
		return result, true
	default:
	}
	if d <= 0 {
		return result, false
	}
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	defer w.timer.Stop()
	select {
	case result = <-w.results:
		w.isPending = false
		return result, true
	case <-w.timer.C:
		return result, false
	}
}

// stop makes serve return after the call in progress.
func (w *worker[T]) stop() { close(w.requests) }

// hasEnded reports whether the goroutine has ended, for which it waits at most d.
func (w *worker[T]) hasEnded(d time.Duration) bool {
	select {
	case <-w.done:
		return true
	case <-time.After(d):
		return false
	}
}
