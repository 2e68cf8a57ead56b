package stdio

import (
	"context"
	"io"
	"time"
)

// writeGrace is how long a write goes on when everything else has ended.
const writeGrace = time.Second

// abortableWriter writes to a reader that may have stopped reading. Such a write cannot be
// interrupted, so it is not waited for once ctx has ended: like the read of stdin it ends
// with the process. One write at a time; what it is given is not used again.
type abortableWriter struct {
	lines   chan []byte
	results chan error
	expired chan struct{} // closed writeGrace after ctx ended
}

func newAbortableWriter(ctx context.Context, out io.Writer) *abortableWriter {
	o := &abortableWriter{lines: make(chan []byte), results: make(chan error, 1), expired: make(chan struct{})}
	context.AfterFunc(ctx, func() { time.AfterFunc(writeGrace, func() { close(o.expired) }) })
	go func() {
		for {
			select {
			case b := <-o.lines:
				_, err := out.Write(b)
				o.results <- err
			case <-o.expired:
				return
			}
		}
	}()
	return o
}

// Write returns context.Canceled for what is not known to be written.
func (o *abortableWriter) Write(b []byte) (int, error) {
	select {
	case o.lines <- b:
	case <-o.expired:
		return 0, context.Canceled
	}
	select {
	case err := <-o.results:
		return len(b), err
	case <-o.expired:
		return 0, context.Canceled
	}
}
