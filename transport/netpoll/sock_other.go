//go:build !linux

package netpoll

import (
	"net"
	"time"
)

// Sock is Linux only; see the package comment for what that means elsewhere.
type Sock struct{}

func NewSock(net.Conn) *Sock { return nil }

func (*Sock) Write([]byte) (int, error) { return 0, nil }
func (*Sock) Read([]byte) (int, error)  { return 0, ErrNothing }
func (*Sock) Unacked() (int, error)     { return 0, nil }
func (*Sock) GiveUp(time.Duration)      {}
func (*Sock) Expire(time.Duration)      {}
