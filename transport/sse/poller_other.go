//go:build !linux

package sse

import "context"

// epoll is Linux only; see Poller for what that means elsewhere.
type epoll struct{}

func newEpoll() (*epoll, error) { return nil, nil }

func (*epoll) add(*sock, uint64) error { return ErrClosed }

func (*epoll) close() {}

func (*epoll) run(ctx context.Context, _ func(uint64, bool, bool)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}
