package stdio

import (
	"context"
	"io"
	"time"
)

// outTime is how long a write goes on when everything else has ended.
const outTime = time.Second

// output writes to a reader that may have stopped reading. Such a write cannot be
// interrupted, so it is not waited for once ctx has ended: like the read of stdin it ends
// with the process. One write at a time; what it is given is not used again.
type output struct {
	lines chan []byte
	wrote chan error
	late  chan struct{} // closed outTime after ctx ended
}

func newOutput(ctx context.Context, out io.Writer) *output {
	o := &output{lines: make(chan []byte), wrote: make(chan error, 1), late: make(chan struct{})}
	context.AfterFunc(ctx, func() { time.AfterFunc(outTime, func() { close(o.late) }) })
	go func() {
		for {
			select {
			case b := <-o.lines:
				_, err := out.Write(b)
				o.wrote <- err
			case <-o.late:
				return
			}
		}
	}()
	return o
}

// Write returns context.Canceled for what is not known to be written.
func (o *output) Write(b []byte) (int, error) {
	select {
	case o.lines <- b:
	case <-o.late:
		return 0, context.Canceled
	}
	select {
	case err := <-o.wrote:
		return len(b), err
	case <-o.late:
		return 0, context.Canceled
	}
}
