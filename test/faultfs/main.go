//go:build linux

// Faultfs mounts a directory through FUSE and makes its files fail on command: operations that
// hang, fail or are slow, a disk that is full or read-only, writes that are torn. Tests and people
// put a state directory on it and watch what the product does.
//
//	faultfs BACKING MOUNT CONTROL.sock     # prints "ready"; ends with SIGTERM and unmounts
//	echo 'hang fsync events.db*' | nc -U CONTROL.sock
//
// Each connection to the control socket carries one command and gets "ok" or an error:
//
//	hang OP PATTERN           the operation waits until clear
//	fail OP PATTERN ERRNO     the operation fails: EIO, ENOSPC, EROFS, EDQUOT or EACCES
//	slow OP PATTERN MS        the operation takes so much longer
//	tear PATTERN              a write stores the first half of its bytes and reports success
//	full BYTES                files can grow by so many bytes together, then ENOSPC
//	readonly                  everything that changes something fails with EROFS
//	clear                     all is well again, and what hangs goes on
//
// OP is open, create, read, write, fsync, rename, unlink, stat or any. PATTERN is a glob of the base
// name (path.Match). Rules add up until clear.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: faultfs BACKING MOUNT CONTROL.sock")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "faultfs:", err)
		os.Exit(1)
	}
}

// run serves the mount until SIGTERM or SIGINT.
func run(backing, mount, control string) error {
	f := newFaults()
	root := &fs.LoopbackRoot{Path: backing}
	top := &node{LoopbackNode: fs.LoopbackNode{RootData: root}, faults: f}
	root.RootNode = top
	zero := time.Duration(0) // no cached attributes: what the disk says counts at once
	server, err := fs.Mount(mount, top, &fs.Options{
		AttrTimeout: &zero, EntryTimeout: &zero,
		MountOptions: fuse.MountOptions{Name: "faultfs", FsName: backing, DirectMount: true, AllowOther: os.Geteuid() == 0},
	})
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", control)
	if err != nil {
		return errors.Join(err, server.Unmount())
	}
	go serveControl(l, f) // ends with the listener
	fmt.Println("ready")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	<-ctx.Done()
	_ = l.Close()
	f.clear() // a hanging operation would keep the mount busy
	if err := server.Unmount(); err != nil {
		return syscall.Unmount(mount, syscall.MNT_DETACH)
	}
	return nil
}

// serveControl executes one command for each connection.
func serveControl(l net.Listener, f *faults) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		line, _ := bufio.NewReader(c).ReadString('\n')
		answer := "ok"
		if err := f.command(strings.Fields(line)); err != nil {
			answer = err.Error()
		}
		fmt.Fprintln(c, answer)
		_ = c.Close()
	}
}

// rule is one fault.
type rule struct {
	op, pattern string
	errno       syscall.Errno
	delay       time.Duration
	hang, tear  bool
}

// faults are the rules in force.
type faults struct {
	mu       sync.Mutex // protects the fields below
	rules    []rule
	cleared  chan struct{} // closed by clear: what hangs goes on
	readOnly bool
	limited  atomic.Bool
	free     atomic.Int64 // bytes that files may still grow by, if limited
}

func newFaults() *faults { return &faults{cleared: make(chan struct{})} }

var errnos = map[string]syscall.Errno{"EIO": syscall.EIO, "ENOSPC": syscall.ENOSPC, "EROFS": syscall.EROFS, "EDQUOT": syscall.EDQUOT, "EACCES": syscall.EACCES}

var errUsage = errors.New("usage: hang OP PATTERN | fail OP PATTERN ERRNO | slow OP PATTERN MS | tear PATTERN | full BYTES | readonly | clear")

// command executes the words of one command.
func (f *faults) command(words []string) error {
	if len(words) == 0 {
		return errUsage
	}
	args := words[1:]
	var r rule
	switch kind := words[0]; {
	case kind == "clear" && len(args) == 0:
		f.clear()
		return nil
	case kind == "readonly" && len(args) == 0:
		f.mu.Lock()
		f.readOnly = true
		f.mu.Unlock()
		return nil
	case kind == "full" && len(args) == 1:
		n, err := strconv.ParseInt(args[0], 10, 64)
		if err != nil {
			return err
		}
		f.free.Store(n)
		f.limited.Store(true)
		return nil
	case kind == "tear" && len(args) == 1:
		r = rule{op: "write", pattern: args[0], tear: true}
	case kind == "hang" && len(args) == 2:
		r = rule{op: args[0], pattern: args[1], hang: true}
	case kind == "fail" && len(args) == 3:
		errno, ok := errnos[args[2]]
		if !ok {
			return fmt.Errorf("not an errno that faultfs knows: %s", args[2])
		}
		r = rule{op: args[0], pattern: args[1], errno: errno}
	case kind == "slow" && len(args) == 3:
		ms, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		r = rule{op: args[0], pattern: args[1], delay: time.Duration(ms) * time.Millisecond}
	default:
		return errUsage
	}
	if _, err := path.Match(r.pattern, "x"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, r)
	return nil
}

// clear removes all rules.
func (f *faults) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules, f.readOnly = nil, false
	f.limited.Store(false)
	close(f.cleared)
	f.cleared = make(chan struct{})
}

// changing are the operations that a read-only disk refuses.
var changing = map[string]bool{"create": true, "write": true, "rename": true, "unlink": true}

// apply waits and fails as the rules say. torn reports that a write is to be cut.
func (f *faults) apply(ctx context.Context, op, name string) (torn bool, errno syscall.Errno) {
	f.mu.Lock()
	rules, cleared, readOnly := f.rules, f.cleared, f.readOnly
	f.mu.Unlock()
	for _, r := range rules {
		if ok, _ := path.Match(r.pattern, path.Base(name)); !ok || r.op != op && r.op != "any" {
			continue
		}
		switch {
		case r.hang:
			// Not even a signal ends it: a disk that hangs puts its callers into
			// uninterruptible sleep, and FUSE interrupts only what listens.
			<-cleared
		case r.delay > 0:
			time.Sleep(r.delay)
		case r.tear:
			torn = true
		default:
			return false, r.errno
		}
	}
	if readOnly && changing[op] {
		return false, syscall.EROFS
	}
	return torn, 0
}

// grow takes bytes from the free space.
func (f *faults) grow(n int64) bool {
	if n <= 0 || !f.limited.Load() {
		return true
	}
	if f.free.Add(-n) < 0 {
		f.free.Add(n)
		return false
	}
	return true
}

// node is a file or directory.
type node struct {
	fs.LoopbackNode
	faults *faults
}

var (
	_ fs.NodeWrapChilder = (*node)(nil)
	_ fs.NodeOpener      = (*node)(nil)
	_ fs.NodeCreater     = (*node)(nil)
	_ fs.NodeRenamer     = (*node)(nil)
	_ fs.NodeUnlinker    = (*node)(nil)
	_ fs.NodeMkdirer     = (*node)(nil)
	_ fs.NodeGetattrer   = (*node)(nil)
	_ fs.NodeStatfser    = (*node)(nil)
)

// WrapChild makes every node one of ours.
func (n *node) WrapChild(context.Context, fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{LoopbackNode: fs.LoopbackNode{RootData: n.RootData}, faults: n.faults}
}

// Open opens a file; O_TRUNC counts as a write.
func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	name := n.Path(nil)
	if _, errno := n.faults.apply(ctx, "open", name); errno != 0 {
		return nil, 0, errno
	}
	if flags&syscall.O_TRUNC != 0 {
		if _, errno := n.faults.apply(ctx, "write", name); errno != 0 {
			return nil, 0, errno
		}
	}
	// Without O_APPEND: the kernel gives the offset of each write.
	h, _, errno := n.LoopbackNode.Open(ctx, flags&^syscall.O_APPEND)
	if errno != 0 {
		return nil, 0, errno
	}
	return &file{LoopbackFile: h.(*fs.LoopbackFile), name: name, faults: n.faults}, 0, 0
}

// Create creates a file and opens it.
func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if _, errno := n.faults.apply(ctx, "create", name); errno != 0 {
		return nil, nil, 0, errno
	}
	if !n.faults.grow(4096) {
		return nil, nil, 0, syscall.ENOSPC
	}
	in, h, _, errno := n.LoopbackNode.Create(ctx, name, flags&^syscall.O_APPEND, mode, out)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return in, &file{LoopbackFile: h.(*fs.LoopbackFile), name: path.Join(n.Path(nil), name), faults: n.faults}, 0, 0
}

// Rename matches the rules with the new name.
func (n *node) Rename(ctx context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if _, errno := n.faults.apply(ctx, "rename", newName); errno != 0 {
		return errno
	}
	return n.LoopbackNode.Rename(ctx, name, to, newName, flags)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	if _, errno := n.faults.apply(ctx, "unlink", name); errno != 0 {
		return errno
	}
	return n.LoopbackNode.Unlink(ctx, name)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if _, errno := n.faults.apply(ctx, "create", name); errno != 0 {
		return nil, errno
	}
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *node) Getattr(ctx context.Context, h fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if _, errno := n.faults.apply(ctx, "stat", n.Path(nil)); errno != 0 {
		return errno
	}
	if f, ok := h.(*file); ok {
		h = f.LoopbackFile
	}
	return n.LoopbackNode.Getattr(ctx, h, out)
}

// Setattr changes the size, the mode or the times.
func (n *node) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if _, errno := n.faults.apply(ctx, "write", n.Path(nil)); errno != 0 {
		return errno
	}
	if f, ok := h.(*file); ok {
		h = f.LoopbackFile
	}
	return n.LoopbackNode.Setattr(ctx, h, in, out)
}

// Statfs shows the free space that full leaves, and a read-only disk as what it is.
func (n *node) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	errno := n.LoopbackNode.Statfs(ctx, out)
	if errno == 0 && n.faults.limited.Load() {
		out.Bfree = uint64(n.faults.free.Load()) / uint64(out.Bsize)
		out.Bavail = out.Bfree
	}
	return errno
}

// file is an open file.
type file struct {
	*fs.LoopbackFile
	name   string
	faults *faults
}

// PassthroughFd keeps the kernel from going around us.
func (f *file) PassthroughFd() (int, bool) { return 0, false }

func (f *file) Read(ctx context.Context, buf []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if _, errno := f.faults.apply(ctx, "read", f.name); errno != 0 {
		return nil, errno
	}
	return f.LoopbackFile.Read(ctx, buf, off)
}

func (f *file) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	torn, errno := f.faults.apply(ctx, "write", f.name)
	if errno != 0 {
		return 0, errno
	}
	var attr fuse.AttrOut
	if errno := f.LoopbackFile.Getattr(ctx, &attr); errno != 0 {
		return 0, errno
	}
	if !f.faults.grow(off + int64(len(data)) - int64(attr.Size)) {
		return 0, syscall.ENOSPC
	}
	if !torn {
		return f.LoopbackFile.Write(ctx, data, off)
	}
	if _, errno := f.LoopbackFile.Write(ctx, data[:len(data)/2], off); errno != 0 {
		return 0, errno
	}
	return uint32(len(data)), 0
}

func (f *file) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	if _, errno := f.faults.apply(ctx, "fsync", f.name); errno != 0 {
		return errno
	}
	return f.LoopbackFile.Fsync(ctx, flags)
}
