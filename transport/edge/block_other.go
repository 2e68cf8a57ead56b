//go:build !linux

package edge

import (
	"errors"
	"net"
	"net/netip"
)

// dropAttempts needs the socket filters of Linux.
func dropAttempts(*net.TCPListener, []netip.Prefix) error { return errors.ErrUnsupported }
