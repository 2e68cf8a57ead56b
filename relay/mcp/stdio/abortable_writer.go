package stdio

import (
	"context"
	"io"
	"time"
)

// writeGrace is how long a write may go on after ctx has ended: enough for a client that
// reads, and short enough for one that was killed while its pipe is full.
const writeGrace = time.Second

// abortableWriter writes to a reader that may have stopped reading. Such a write cannot be
// interrupted, so it runs in a separate goroutine and is abandoned writeGrace after ctx
// ended. One Write at a time; the bytes must not be changed after an abandoned write.
type abortableWriter struct {
	writes  chan []byte
	results chan error
	expired chan struct{} // closed writeGrace after ctx ended
}

// newAbortableWriter starts the goroutine that writes. It ends when ctx has ended for
// writeGrace, or with the process if a write is blocked.
func newAbortableWriter(ctx context.Context, out io.Writer) *abortableWriter {
	w := &abortableWriter{writes: make(chan []byte), results: make(chan error, 1), expired: make(chan struct{})}
	context.AfterFunc(ctx, func() { time.AfterFunc(writeGrace, func() { close(w.expired) }) })
	go func() {
		for {
			select {
			case b := <-w.writes:
				_, err := out.Write(b)
				w.results <- err
			case <-w.expired:
				return
			}
		}
	}()
	return w
}

// Write implements io.Writer. It returns context.Canceled for an abandoned write, which may
// or may not be completed.
func (w *abortableWriter) Write(b []byte) (int, error) {
	select {
	case w.writes <- b:
	case <-w.expired:
		return 0, context.Canceled
	}
	select {
	case err := <-w.results:
		return len(b), err
	case <-w.expired:
		return 0, context.Canceled
	}
}
