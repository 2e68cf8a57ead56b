package statedir

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"agentctl/atomicfile"
	"agentctl/prober/history"
)

const (
	// probeFile is the file that a probe writes, in the directory. It stays: to make and remove it
	// each time would write more.
	probeFile = ".disk-probe"
	// probeRead is how much of a file a probe reads: a page.
	probeRead = 4096
	// minFree is the space below which a directory counts as full, bytes. A commit of the history
	// needs about as much.
	minFree = 256 << 10
	// maxDamaged bounds the names in Status.Damaged.
	maxDamaged = 16
)

// notDisks are filesystems whose writes do not wear a card of this machine, by the magic numbers of
// statfs(2). A probe may write there each time, which finds faults that reading does not.
var notDisks = []int64{
	unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.FUSE_SUPER_MAGIC, unix.NFS_SUPER_MAGIC, unix.V9FS_MAGIC,
	unix.CIFS_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC,
}

// prober makes probes, one at a time.
type prober struct {
	dir   string
	stuck string // the block device's figures at the last probe, with requests in flight; "": none
}

// run probes the directory. It may not return: the caller runs it in a goroutine.
func (p *prober) run(write bool) (r result) {
	r.state = OK
	var fs unix.Statfs_t
	err := unix.Statfs(p.dir, &fs)
	if err != nil {
		r.state, r.detail = stateOf(err), p.dir+": "+err.Error()
		return r
	}
	isDisk := !slices.Contains(notDisks, int64(fs.Type))
	blocks := fs.Bavail
	if os.Geteuid() == 0 {
		blocks = fs.Bfree // root may use the reserved ones
	}
	r.free = blocks * uint64(fs.Bsize)
	r.damaged = damaged(p.dir)
	switch {
	case p.isStuck():
		r.state, r.detail = Hung, "the block device finishes no request"
	case fs.Flags&unix.ST_RDONLY != 0:
		r.state, r.detail = ReadOnly, "the filesystem is mounted read-only"
	case r.free < min(minFree, fs.Blocks*uint64(fs.Bsize)/64):
		r.state, r.detail = Full, fmt.Sprintf("%d KiB free", r.free>>10)
	case fs.Files > 0 && fs.Ffree == 0:
		r.state, r.detail = Full, "no free inode"
	default:
		if err = unix.Access(p.dir, unix.W_OK|unix.X_OK); err == nil {
			err = p.read()
		}
		if err == nil && (write || !isDisk) {
			err = p.write()
			r.written = err == nil
		}
		if err != nil {
			r.state, r.detail = stateOf(err), err.Error()
		}
	}
	return r
}

// stateOf is the state that an error of a system call means.
func stateOf(err error) State {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return Full
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return ReadOnly
	}
	return Failing
}

// read reads a page of a file that is there, from the disk: what the page cache has would hide a
// card that cannot be read any more.
func (p *prober) read() error {
	path := filepath.Join(p.dir, probeFile)
	if st, err := os.Lstat(path); errors.Is(err, syscall.ENOENT) || err == nil && !st.Mode().IsRegular() {
		return p.write() // once
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.EACCES) {
		return p.write() // a daemon of another user made it
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_ = unix.Fadvise(int(f.Fd()), 0, probeRead, unix.FADV_DONTNEED)
	var b [1]byte
	_, err = f.ReadAt(b[:], 0)
	if errors.Is(err, io.EOF) {
		return p.write() // the power was cut when it was made
	}
	return err
}

// write replaces the file, as everything that the daemon saves is replaced, and waits until it is
// on the disk. What else has its name, such as a directory, is set aside: it is no fault of the disk.
func (p *prober) write() error {
	path := filepath.Join(p.dir, probeFile)
	if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() {
		if _, err := atomicfile.SetAside(path); err != nil {
			return err
		}
	}
	return atomicfile.Replace(path, []byte("written now and then by agentctl, to see whether the disk works\n"))
}

// isStuck reports whether the block device under the directory had requests in flight at the last
// probe and has finished none since (Documentation/block/stat.rst). It is false where there is no
// block device, or the kernel does not show it.
func (p *prober) isStuck() bool {
	var st unix.Stat_t
	if unix.Stat(p.dir, &st) != nil || unix.Major(uint64(st.Dev)) == 0 {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev))))
	f := strings.Fields(string(b))
	if err != nil || len(f) < 9 || f[8] == "0" {
		p.stuck = ""
		return false
	}
	// Finished reads and writes; the requests in flight count as well, since new ones come.
	now := f[0] + " " + f[4]
	was := p.stuck
	p.stuck = now
	return now == was
}

// damaged returns the names of files that were set aside: those of package atomicfile and those of
// the history, without their WAL.
func damaged(dir string) (names []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if name := e.Name(); (strings.Contains(name, atomicfile.AsideMark) || strings.Contains(name, history.AsideMark)) && !strings.HasSuffix(name, "-wal") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names[max(0, len(names)-maxDamaged):]
}
