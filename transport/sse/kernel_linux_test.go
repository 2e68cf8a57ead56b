package sse

import (
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// quickack makes a kernel acknowledge at once (1) or as late as it may (0).
func quickack(raw syscall.RawConn, on int) {
	raw.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, on) })
}

// shrinkSendBuffer makes a server's kernel buffer small, to fill it quickly.
func shrinkSendBuffer(t *testing.T, c *Conn) {
	t.Helper()
	raw, err := c.Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10) })
	if err != nil {
		t.Fatal(err)
	}
}

// socketExists says that the server's socket to a client still exists. It reads all of the kernel's table,
// which takes a millisecond.
func socketExists(t *testing.T, client net.Conn) bool {
	t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	hex := func(a net.Addr) string { return fmt.Sprintf("0100007F:%04X", a.(*net.TCPAddr).Port) }
	local, remote := hex(client.RemoteAddr()), hex(client.LocalAddr())
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 3 && f[1] == local && f[2] == remote && f[3] != "06" { // 06: TIME_WAIT
			return true
		}
	}
	return false
}
