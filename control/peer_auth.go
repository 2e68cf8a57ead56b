package control

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"slices"
	"strconv"
)

// errPeer is sent to a refused peer and says what to do.
var errPeer = errors.New("this user may not use the control socket; join group " + Group +
	" (sudo usermod -aG " + Group + " $USER, then log in again) or use sudo")

// AllowGroup allows root, the daemon's user, and members of group agentctl. It is the
// default of Options.Allow. The mode of the socket allows the same users; the check holds
// also where somebody has widened the mode, and for a socket made by systemd.
//
// The kernel reports one group of the peer, so its other groups are looked up by name service.
func AllowGroup(uid, gid uint32) error {
	if uid == 0 || int64(uid) == int64(os.Geteuid()) {
		return nil
	}
	group, err := user.LookupGroup(Group)
	if err != nil {
		return errPeer
	}
	if group.Gid == strconv.FormatUint(uint64(gid), 10) {
		return nil
	}
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return errPeer
	}
	groups, err := u.GroupIds()
	if err != nil {
		return fmt.Errorf("groups of user %s: %w", u.Username, err)
	}
	if !slices.Contains(groups, group.Gid) {
		return errPeer
	}
	return nil
}

// unixPeer returns who connected, according to the kernel.
func unixPeer(nc net.Conn) (uid, gid uint32, err error) {
	u, ok := nc.(*net.UnixConn)
	if !ok {
		return 0, 0, errors.New("not a unix socket")
	}
	return peerCred(u)
}
