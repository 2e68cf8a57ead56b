package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is what fits into a unix socket's address on every system.
const maxPath = 103

// socketFile is a socket this process has made.
type socketFile struct {
	path, alias string
	info        fs.FileInfo
}

// listenUnix makes the socket: directory 0750, socket 0660, both of group agentctl
// where a root daemon finds such a group. A live socket is not taken over, and a link
// is not followed; one whose daemon is gone is replaced.
func listenUnix(path string) (*net.UnixListener, *socketFile, error) {
	if path == "" || len(path) > maxPath {
		return nil, nil, fmt.Errorf("control socket path %q: must be 1 to %d bytes long; give another with --socket", path, maxPath)
	}
	dir := filepath.Dir(path)
	gid := socketGroup()
	if err := makeDir(dir, gid); err != nil {
		return nil, nil, err
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	if err := clearPath(path); err != nil {
		return nil, nil, err
	}
	ln, err := bind(path)
	if err != nil {
		return nil, nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	f, err := setOwner(path, gid)
	if err != nil {
		ln.Close()
		os.Remove(path)
		return nil, nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	return ln, f, nil
}

func bind(path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// Linux makes the file with the mode the unbound socket has, so that
		// there is no moment at which everybody may connect.
		return c.Control(func(fd uintptr) { unix.Fchmod(int(fd), 0o660) })
	}}
	ln, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	u := ln.(*net.UnixListener)
	u.SetUnlinkOnClose(false) // by then the path may be somebody else's: see remove
	return u, nil
}

// setOwner sets what the umask took away and the group, and makes the well-known name.
func setOwner(path string, gid int) (*socketFile, error) {
	if gid >= 0 {
		if err := os.Lchown(path, -1, gid); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	f := &socketFile{path: path, info: info}
	alias := filepath.Join(filepath.Dir(path), WellKnownName)
	target, err := os.Readlink(alias)
	switch {
	case alias == filepath.Clean(path):
	case err == nil && target == filepath.Base(path):
		f.alias = alias
	case errors.Is(err, fs.ErrNotExist) && os.Symlink(filepath.Base(path), alias) == nil:
		f.alias = alias
	} // else the name is in use: another daemon of this directory has it
	return f, nil
}

// remove takes the socket away, if it still is the one that was made.
func (f *socketFile) remove() {
	if info, err := os.Lstat(f.path); err != nil || !os.SameFile(info, f.info) {
		return
	}
	os.Remove(f.path)
	if target, err := os.Readlink(f.alias); err == nil && target == filepath.Base(f.path) {
		os.Remove(f.alias)
	}
}

func makeDir(dir string, gid int) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("control socket directory: %w; make it, or give another place with --socket", err)
	}
	if gid >= 0 {
		if err := os.Chown(dir, -1, gid); err != nil {
			return fmt.Errorf("control socket directory: %w", err)
		}
	}
	if err := os.Chmod(dir, 0o750); err != nil { // whatever the umask is
		return fmt.Errorf("control socket directory: %w", err)
	}
	return nil
}

// lockDir keeps two daemons that start together from replacing each other's socket.
// A directory that cannot be locked is used without.
func lockDir(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}, nil
	}
	for try := 0; ; try++ {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return func() { d.Close() }, nil
		}
		if try == 40 {
			d.Close()
			return nil, fmt.Errorf("control socket directory %s is locked by another process; try again, or see who with: fuser %s", dir, dir)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// clearPath removes a socket nobody listens on. Anything else in the way is an error.
func clearPath(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("control socket: %w; give another path with --socket", err)
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("control socket %s is a symbolic link, which is not followed; remove it, or give another path with --socket", path)
	case info.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("control socket %s: a file that is no socket is in the way; remove it, or give another path with --socket", path)
	}
	nc, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		nc.Close()
		return fmt.Errorf("control socket %s: %w; ask it with: agentctl status, or give another path with --socket", path, ErrInUse)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("control socket %s: cannot tell whether it is in use: %w; give another path with --socket", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("control socket %s is left over from a daemon that is gone: %w; remove it, or give another path with --socket", path, err)
	}
	return nil
}

// socketGroup is the group a root daemon gives its socket to, -1: none.
func socketGroup() int {
	if os.Geteuid() != 0 {
		return -1
	}
	g, err := user.LookupGroup(Group)
	if err != nil {
		return -1
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return -1
	}
	return gid
}
