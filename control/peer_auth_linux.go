package control

import (
	"net"

	"golang.org/x/sys/unix"
)

// peerCred reads the credentials that the kernel recorded at connect(2).
func peerCred(nc *net.UnixConn) (uid, gid uint32, err error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, 0, err
	}
	if cerr != nil {
		return 0, 0, cerr
	}
	return cred.Uid, cred.Gid, nil
}
