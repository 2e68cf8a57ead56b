package daemon

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// Changes of routes and addresses wake a board that waits for its next dial: a cable was plugged
// in, a modem or Wi-Fi is back. The kernel reports them over rtnetlink (rtnetlink(7)).

// networkSettle is how long watchNetwork collects further changes after the first one. A new
// address comes with its routes within milliseconds, and on a router with many of them the board
// wakes up at most once in this time.
const networkSettle = 500 * time.Millisecond

// watchNetwork wakes the link when the network changes, until ctx ends. It is optional: a system
// that allows no netlink socket has the back-off alone.
func (d *Daemon) watchNetwork(ctx context.Context) error {
	socket, err := openRouteSocket()
	if err != nil {
		d.log.Info("the kernel reports no network changes; the link waits for its back-off after each", zap.Error(err))
		<-ctx.Done()
		return ctx.Err()
	}
	defer func() { _ = socket.Close() }()
	// An expired deadline ends a Read that waits.
	defer context.AfterFunc(ctx, func() { _ = socket.SetReadDeadline(time.Unix(1, 0)) })()
	followRoutes(ctx, socket, d.device.wakeLink)
	<-ctx.Done()
	return ctx.Err()
}

// followRoutes calls changed after changes, at most once in networkSettle, until ctx ends or the
// socket fails.
func followRoutes(ctx context.Context, socket *os.File, changed func()) {
	buf := make([]byte, 16<<10) // the kernel sends no larger datagram without being asked (nlmsg_total_size)
	for {
		relevant, err := readRoutes(socket, buf)
		if ctx.Err() != nil || err != nil {
			return
		}
		if !relevant {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(networkSettle):
		}
		drain(socket, buf)
		changed()
	}
}

// drain drops what the kernel reported during networkSettle: the caller acts on all of it at once.
func drain(socket *os.File, buf []byte) {
	conn, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Read(func(fd uintptr) (done bool) {
		for range maxDrained {
			if _, err := unix.Read(int(fd), buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
				break // EAGAIN: nothing is left
			}
		}
		return true
	})
}

// maxDrained bounds the datagrams of one drain, for a router that never stops reporting.
const maxDrained = 1024

// readRoutes reads what the kernel has reported, and waits for something if there is nothing.
// relevant: an address or a route beyond this machine is among it. A socket that could not keep
// up (ENOBUFS) has lost some reports, which count as relevant.
func readRoutes(socket *os.File, buf []byte) (relevant bool, err error) {
	n, err := socket.Read(buf)
	switch {
	case errors.Is(err, syscall.ENOBUFS):
		return true, nil
	case err != nil:
		return false, err
	}
	return isRelevant(buf[:n]), nil
}

// isRelevant reports whether a datagram of rtnetlink has a change that may let a dial succeed.
// Addresses and routes of the machine itself and of one link (loopback, fe80::/10 of a container's
// interface) do not, nor do entries of the route cache.
func isRelevant(b []byte) bool {
	for len(b) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(b))
		typ := binary.NativeEndian.Uint16(b[4:])
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return false
		}
		body := b[unix.SizeofNlMsghdr:size]
		switch typ {
		case unix.RTM_NEWADDR, unix.RTM_DELADDR: // struct ifaddrmsg
			if len(body) >= unix.SizeofIfAddrmsg && body[3] < unix.RT_SCOPE_LINK {
				return true
			}
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE: // struct rtmsg
			if len(body) < unix.SizeofRtMsg {
				break
			}
			table, kind, flags := body[4], body[7], binary.NativeEndian.Uint32(body[8:])
			if table != unix.RT_TABLE_LOCAL && kind == unix.RTN_UNICAST && flags&unix.RTM_F_CLONED == 0 {
				return true
			}
		}
		next := (size + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		b = b[min(next, len(b)):]
	}
	return false
}

// openRouteSocket opens a socket on which the kernel reports changes. It needs no privilege.
func openRouteSocket() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	const groups = unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	return os.NewFile(uintptr(fd), "rtnetlink"), nil
}
