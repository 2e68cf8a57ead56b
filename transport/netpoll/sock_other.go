//go:build !linux

package netpoll

import (
	"net"
	"time"
)

// Socket is Linux only; see the package comment for what that means elsewhere.
type Socket struct{}

func NewSocket(net.Conn) *Socket { return nil }

func (*Socket) Write([]byte) (int, error)     { return 0, nil }
func (*Socket) Read([]byte) (int, error)      { return 0, ErrWouldBlock }
func (*Socket) Unacked() (int, error)         { return 0, nil }
func (*Socket) SetUserTimeout(time.Duration)  {}
func (*Socket) SetCloseTimeout(time.Duration) {}
