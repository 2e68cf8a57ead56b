// Package unixrpctest starts helpers for tests.
package unixrpctest

import (
	"net"
	"path/filepath"
	"testing"
)

// Listen passes the connections to a new socket to serve, one after the other, until the test ends.
// systemd does the same with a process for each (Accept=yes).
//
// The end of the test waits for serve. A serve that blocks on purpose is released by a t.Cleanup that is
// registered after Listen: cleanups run in reverse order.
func Listen(t testing.TB, serve func(net.Conn)) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serve(conn)
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return socket
}
