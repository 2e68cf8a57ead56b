//go:build !linux

package netpoll

import (
	"context"
	"errors"
)

// Epoll is Linux only; see the package comment for what that means elsewhere.
type Epoll struct{}

func New() (*Epoll, error) { return nil, errors.ErrUnsupported }

func (*Epoll) Add(*Socket, uint64, Events) error { return errors.ErrUnsupported }

func (*Epoll) Run(ctx context.Context, _ func(uint64, Events)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}
