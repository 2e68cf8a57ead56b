//go:build !linux

package netpoll

import (
	"context"
	"errors"
	"net"
	"time"
)

// Epoll exists on Linux only; New always fails here.
type Epoll struct{}

// New fails with errors.ErrUnsupported.
func New() (*Epoll, error) { return nil, errors.ErrUnsupported }

// Add fails with errors.ErrUnsupported.
func (*Epoll) Add(*Socket, uint64, Events) error { return errors.ErrUnsupported }

// Run waits until ctx ends.
func (*Epoll) Run(ctx context.Context, _ func(uint64, Events)) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

// Socket exists on Linux only; NewSocket always returns nil here.
type Socket struct{}

// NewSocket returns nil.
func NewSocket(net.Conn) *Socket { return nil }

// Write, Read, Unacked and the timeouts are never called, since NewSocket returns nil.
func (*Socket) Write([]byte) (int, error) { return 0, nil }
func (*Socket) Read([]byte) (int, error)  { return 0, ErrWouldBlock }
func (*Socket) Unacked() (int, error)     { return 0, nil }

func (*Socket) SetUserTimeout(time.Duration)  {}
func (*Socket) SetCloseTimeout(time.Duration) {}
