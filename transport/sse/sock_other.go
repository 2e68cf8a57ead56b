//go:build !linux

package sse

import (
	"net"
	"time"
)

// sock is Linux only; see the package comment for what that means elsewhere.
type sock struct{}

func newSock(net.Conn) *sock { return nil }

func (*sock) write([]byte) (int, error) { return 0, nil }
func (*sock) read([]byte) (int, error)  { return 0, nil }
func (*sock) unacked() (int, error)     { return 0, nil }
func (*sock) giveUp(time.Duration)      {}
func (*sock) expire(time.Duration)      {}
