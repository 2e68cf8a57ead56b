package process

import (
	"context"
	"errors"
	"io"
	"net"

	"go.uber.org/zap"
)

// Bundled is a plugin that is part of the relay's binary. It speaks the same protocol as a program,
// over a pipe inside the process, and is supervised and has its rights like one.
type Bundled struct {
	Manifest []byte // its plugin.json
	// Serve serves one connection until it or ctx ends.
	Serve func(ctx context.Context, conn io.ReadWriteCloser) error
}

// dial starts a bundled plugin in a goroutine, which the returned channel's Close ends and waits for.
func (b Bundled) dial(log *zap.Logger) func(context.Context) (*lineChannel, error) {
	return func(context.Context) (*lineChannel, error) {
		// net.Pipe has write deadlines, which lineChannel needs.
		ours, theirs := net.Pipe()
		// Not derived from the context of the dial, which ends with the handshake.
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { _ = theirs.Close() }()
			err := b.serve(ctx, theirs)
			if err != nil && ctx.Err() == nil {
				log.Warn("plugin ended", zap.Error(err))
			}
		}()
		abort := func() { _ = ours.Close() }
		return newLineChannel(ours, ours, abort, func() error {
			cancel()
			abort()
			<-done
			return nil
		}), nil
	}
}

// serve is Serve; a panic ends the connection, not the relay.
func (b Bundled) serve(ctx context.Context, conn io.ReadWriteCloser) (err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("it panicked")
		}
	}()
	return b.Serve(ctx, conn)
}
