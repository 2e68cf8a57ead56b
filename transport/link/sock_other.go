//go:build !linux

package link

import "net"

// setUserTimeout needs Linux; elsewhere DeadAfter alone finds a dead peer.
func setUserTimeout(net.Conn) {}
