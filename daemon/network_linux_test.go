package daemon

import (
	"context"
	"encoding/binary"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// routeMessage is one message of rtnetlink.
func routeMessage(typ uint16, body ...byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	binary.NativeEndian.PutUint32(b, uint32(unix.SizeofNlMsghdr+len(body)))
	binary.NativeEndian.PutUint16(b[4:], typ)
	b = append(b, body...)
	for len(b)%unix.NLMSG_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

// address is an ifaddrmsg, route an rtmsg.
func address(typ uint16, scope byte) []byte {
	return routeMessage(typ, unix.AF_INET, 24, 0, scope, 2, 0, 0, 0)
}

func route(typ uint16, table, kind byte, flags uint32) []byte {
	body := []byte{unix.AF_INET, 0, 0, 0, table, 0, 0, kind}
	return routeMessage(typ, binary.NativeEndian.AppendUint32(body, flags)...)
}

func TestRelevantChanges(t *testing.T) {
	loopback := address(unix.RTM_NEWADDR, unix.RT_SCOPE_HOST)
	wifi := address(unix.RTM_NEWADDR, unix.RT_SCOPE_UNIVERSE)
	for _, tt := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"nothing", nil, false},
		{"an address", wifi, true},
		{"an address that went away", address(unix.RTM_DELADDR, unix.RT_SCOPE_SITE), true},
		{"loopback", loopback, false},
		{"an address of one link", address(unix.RTM_NEWADDR, unix.RT_SCOPE_LINK), false},
		{"a route", route(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, 0), true},
		{"a route of a VPN's own table", route(unix.RTM_DELROUTE, 100, unix.RTN_UNICAST, 0), true},
		{"the local table", route(unix.RTM_NEWROUTE, unix.RT_TABLE_LOCAL, unix.RTN_LOCAL, 0), false},
		{"multicast", route(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTN_MULTICAST, 0), false},
		{"the cache", route(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, unix.RTM_F_CLONED), false},
		{"another message", routeMessage(unix.RTM_NEWLINK, make([]byte, 32)...), false},
		{"second in a datagram", append(append([]byte{}, loopback...), wifi...), true},
		{"a short body", routeMessage(unix.RTM_NEWADDR, 2), false},
		{"a length of zero", make([]byte, 32), false},
		{"a length beyond the datagram", wifi[:20], false},
	} {
		if got := isRelevant(tt.b); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// A burst of changes is one call, and the follower ends with its context.
func TestFollowRoutes(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel, socket := os.NewFile(uintptr(fds[0]), "kernel"), os.NewFile(uintptr(fds[1]), "rtnetlink")
	defer kernel.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer context.AfterFunc(ctx, func() { _ = socket.Close() })()
	changes, done := make(chan struct{}, 16), make(chan struct{})
	go func() { followRoutes(ctx, socket, func() { changes <- struct{}{} }); close(done) }()
	_, _ = kernel.Write(address(unix.RTM_NEWADDR, unix.RT_SCOPE_LINK))
	for range 5 {
		_, _ = kernel.Write(address(unix.RTM_NEWADDR, unix.RT_SCOPE_UNIVERSE))
	}
	select {
	case <-changes:
	case <-time.After(10 * time.Second):
		t.Fatal("no call after a change")
	}
	cancel()
	<-done
	if len(changes) > 0 {
		t.Error("several calls after one burst")
	}
}

func TestOpenRouteSocket(t *testing.T) {
	s, err := openRouteSocket()
	if err != nil {
		t.Skip(err) // a sandbox without netlink
	}
	defer s.Close()
	if err := s.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Errorf("the socket takes no deadline, which watchNetwork needs: %v", err)
	}
	if _, err := s.Read(make([]byte, 16)); !os.IsTimeout(err) {
		t.Errorf("read: %v", err)
	}
}
