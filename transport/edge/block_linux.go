package edge

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// dropAttempts makes the kernel drop the connection attempts of the given addresses (AddressKey) to
// a listener, and of no others. It replaces what an earlier call has set. It fails for a listener of
// Multipath TCP.
//
// The filter is a classic BPF program on the listening socket, for which a process needs no
// privilege. A connection inherits the filter that its listener has at the time; it therefore drops
// nothing but the packet that opens a connection.
func dropAttempts(ln *net.TCPListener, addresses []netip.Prefix) error {
	raw, err := ln.SyscallConn()
	if err != nil {
		return err
	}
	var optErr error
	err = raw.Control(func(fd uintptr) {
		if len(addresses) == 0 {
			optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
			return
		}
		program := attemptFilter(addresses)
		optErr = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	})
	if err != nil {
		return err
	}
	return optErr
}

// attemptFilter returns the program. It sees the TCP header first; the IP header is at a negative
// offset (SKF_NET_OFF).
func attemptFilter(addresses []netip.Prefix) []unix.SockFilter {
	const (
		loadByte = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
		loadWord = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		and      = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		ifEqual  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		jump     = unix.BPF_JMP | unix.BPF_JA
		ret      = unix.BPF_RET | unix.BPF_K

		tcpFlags = 13
		synAck   = 0x12
		syn      = 0x02
		ip       = 0xfff00000 // SKF_NET_OFF
		drop     = 0
		pass     = 0xffffffff
	)
	var v4, v6 []unix.SockFilter
	for _, p := range addresses {
		if p.Addr().Is4() {
			a := p.Addr().As4()
			v4 = append(v4,
				unix.SockFilter{Code: ifEqual, K: binary.BigEndian.Uint32(a[:]), Jf: 1},
				unix.SockFilter{Code: ret, K: drop})
			continue
		}
		a := p.Addr().As16() // the /64
		v6 = append(v6,
			unix.SockFilter{Code: loadWord, K: ip + 8},
			unix.SockFilter{Code: ifEqual, K: binary.BigEndian.Uint32(a[:4]), Jf: 3},
			unix.SockFilter{Code: loadWord, K: ip + 12},
			unix.SockFilter{Code: ifEqual, K: binary.BigEndian.Uint32(a[4:8]), Jf: 1},
			unix.SockFilter{Code: ret, K: drop})
	}
	v4 = append(v4, unix.SockFilter{Code: ret, K: pass})
	program := []unix.SockFilter{
		{Code: loadByte, K: tcpFlags},
		{Code: and, K: synAck},
		{Code: ifEqual, K: syn, Jt: 1},
		{Code: ret, K: pass},
		{Code: loadByte, K: ip},
		{Code: and, K: 0xf0},
		{Code: ifEqual, K: 0x40, Jt: 1},
		{Code: jump, K: uint32(len(v4) + 1)},
		{Code: loadWord, K: ip + 12}, // the source
	}
	program = append(append(program, v4...), v6...)
	return append(program, unix.SockFilter{Code: ret, K: pass})
}
