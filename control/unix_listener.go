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
)

// maxPath is what fits into a unix socket's address on every system.
const maxPath = 103

// ErrInUse means that another daemon serves the socket.
var ErrInUse = errors.New("another agentctl serves it; ask it with: agentctl status")

// PathError means that the socket cannot be created at a path; another path may do.
type PathError struct {
	Path string
	Err  error
}

// Error names the path and what to do about what is in the way.
func (e *PathError) Error() string { return fmt.Sprintf("control socket %q: %v", e.Path, e.Err) }

// Unwrap returns the cause.
func (e *PathError) Unwrap() error { return e.Err }

// socketFile is a socket that this process created.
type socketFile struct {
	// path is that of the socket, and alias the well-known name, empty when another daemon
	// has it.
	path, alias string
	// info identifies the socket, so that remove does not delete that of another daemon.
	info fs.FileInfo
}

// listenUnix creates the socket: directory 0750, socket 0660, both of group agentctl when
// the daemon is root and that group exists. A socket that somebody listens on is not taken
// over, and a link is not followed; a socket whose daemon is gone is replaced. The error is
// a *PathError.
func listenUnix(path string) (*net.UnixListener, *socketFile, error) {
	ln, f, err := createSocket(path)
	if err != nil {
		return nil, nil, &PathError{path, err}
	}
	return ln, f, nil
}

// createSocket holds the lock of the directory from the check of the path until the socket
// is there.
func createSocket(path string) (*net.UnixListener, *socketFile, error) {
	if path == "" || len(path) > maxPath {
		return nil, nil, fmt.Errorf("the path must be 1 to %d bytes long", maxPath)
	}
	dir := filepath.Dir(path)
	gid := socketGroup()
	if err := makeDir(dir, gid); err != nil {
		return nil, nil, fmt.Errorf("make its directory: %w", err)
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
		return nil, nil, err
	}
	f, err := setOwner(path, gid)
	if err != nil {
		ln.Close()
		os.Remove(path)
		return nil, nil, err
	}
	return ln, f, nil
}

// bind listens on the path. The socket never has a wider mode than 0660.
func bind(path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// Linux creates the file with the mode of the unbound socket, so that there is no
		// moment at which everybody may connect.
		return c.Control(func(fd uintptr) { setMode(fd, 0o660) })
	}}
	ln, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	u := ln.(*net.UnixListener)
	u.SetUnlinkOnClose(false) // the path may belong to another daemon by then: see remove
	return u, nil
}

// setOwner sets the mode that the umask reduced and the group, and creates the well-known
// name.
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
	} // else another daemon of this directory has the name
	return f, nil
}

// remove deletes the socket, if the path still names it.
func (f *socketFile) remove() {
	if info, err := os.Lstat(f.path); err != nil || !os.SameFile(info, f.info) {
		return
	}
	os.Remove(f.path)
	if target, err := os.Readlink(f.alias); err == nil && target == filepath.Base(f.path) {
		os.Remove(f.alias)
	}
}

// makeDir creates the directory. One that exists keeps its mode and group.
func makeDir(dir string, gid int) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	if gid >= 0 {
		if err := os.Chown(dir, -1, gid); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o750) // whatever the umask is
}

// lockDir keeps two daemons that start together from replacing each other's socket, for
// which it waits 2 s. A directory that cannot be locked is used without.
func lockDir(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}, nil
	}
	for range 40 {
		if !tryLock(d.Fd()) {
			return func() { d.Close() }, nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	d.Close()
	return nil, fmt.Errorf("directory %s is locked by another process; try again, or see who with: fuser %s", dir, dir)
}

// clearPath removes a socket nobody listens on, as a killed daemon leaves it. Anything else in
// the way is an error. The caller holds the lock of the directory, so no other daemon can
// listen between the check and the removal.
func clearPath(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return errors.New("it is a symbolic link, which is not followed; remove it")
	case info.Mode()&fs.ModeSocket == 0:
		return errors.New("a file that is not a socket is in the way; remove it")
	}
	nc, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		nc.Close()
		return ErrInUse
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("cannot determine whether it is in use: %w", err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("it is left over from a daemon that is gone: %w; remove it", err)
	}
	return nil
}

// socketGroup is the group to which a root daemon gives its socket, -1 for none.
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
