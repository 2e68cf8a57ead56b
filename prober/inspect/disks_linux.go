package inspect

import (
	"bytes"
	"cmp"
	"context"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shirou/gopsutil/v4/disk"
)

// File systems come from mountinfo(5), their usage from statfs(2), drives from /sys/block and
// /proc/diskstats. statfs may hang forever on a server or card that does not answer, and no signal
// interrupts it. usageReader therefore bounds how long an answer waits for it, and how many
// goroutines may hang in it.

// mount is a line of mountinfo(5). point is a path as this process sees it. device is what mount(8)
// was given: a block device, SERVER:/PATH, //SERVER/SHARE, or any word.
type mount struct {
	point, device, fsType string
	readOnly              bool
}

// parseMount parses a line of mountinfo(5):
//
//	36 35 98:0 /sub /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw,errors=continue
//
// readOnly comes from the options of the file system, the last field. The options of the mount, the
// sixth field, only say how the daemon's sandbox shows it to this process.
func parseMount(line []byte) (mount, bool) {
	head, tail, ok := bytes.Cut(line, []byte(" - "))
	h, t := bytes.Fields(head), bytes.Fields(tail)
	if !ok || len(h) < 6 || len(t) < 2 {
		return mount{}, false
	}
	m := mount{point: unescape(h[4]), fsType: unescape(t[0]), device: unescape(t[1])}
	if len(t) > 2 {
		options, _, _ := bytes.Cut(t[2], []byte(","))
		m.readOnly = string(options) == "ro"
	}
	return m, true
}

// unescape replaces the octal escapes of mountinfo: \040 is a space. The kernel escapes space, tab,
// newline and backslash, and # in the name of a device; any octal number is accepted here.
func unescape(b []byte) string {
	if bytes.IndexByte(b, '\\') < 0 {
		return string(b)
	}
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] == '\\' && i+3 < len(b) {
			if n, err := strconv.ParseUint(string(b[i+1:i+4]), 8, 8); err == nil {
				out = append(out, byte(n))
				i += 3
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}

// isStorage reports whether a file system stores files of its users, in contrast to those that show
// the kernel's state (proc, cgroup2), and to the layers of containers (overlay, squashfs).
func (m *mount) isStorage() bool {
	switch {
	// A device node, a server's path (nfs, cifs, ceph), a data set of ZFS, which has no device node,
	// or what a program serves (FUSE).
	case strings.HasPrefix(m.device, "/"), strings.Contains(m.device, ":/"), m.fsType == "zfs", strings.HasPrefix(m.fsType, "fuse."):
		// Images that are mounted from a file are packages (snap), not storage: a squashfs is always
		// full.
		return m.fsType != "squashfs" && m.fsType != "fuse.snapfuse" && !strings.HasPrefix(m.device, "/dev/loop")
	// /tmp and /run may fill up. systemd mounts one for each service that has credentials, and
	// container engines hide directories of /sys and /proc below an empty one.
	case m.fsType == "tmpfs":
		return !strings.HasPrefix(m.point, "/run/credentials/") && !strings.HasPrefix(m.point, "/sys/") && !strings.HasPrefix(m.point, "/proc/")
	}
	// The root directory is shown whatever it is: in a container an overlay.
	return m.point == "/"
}

// isRemote reports whether another program or computer serves the file system and may stop
// answering. Only the order of reads and their bounds depend on it: a read of a local one that hangs,
// such as a broken card, is bounded as well.
func (m *mount) isRemote() bool {
	switch m.fsType {
	case "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs", "glusterfs", "lustre":
		return true
	}
	return strings.HasPrefix(m.fsType, "fuse") || strings.Contains(m.device, ":/") || strings.HasPrefix(m.device, "//")
}

// maxMounts bounds the list of file systems, from which pages are cut.
const maxMounts = 20_000

// mounts returns the file systems that hold files, each device once: sandboxes and containers mount
// the same device in several places. readOnly and fsType are those of the device's first line, and
// point is the shortest path. Subvolumes of one btrfs have one device, so they are listed once.
func (m *Machine) mounts(ctx context.Context) ([]mount, error) {
	var list []mount
	seen := make(map[string]int) // index in list
	err := eachLine(ctx, m.path("proc/self/mountinfo"), func(line []byte) bool {
		mt, ok := parseMount(line)
		if !ok || !mt.isStorage() {
			return true
		}
		key := mt.device
		if mt.fsType == "tmpfs" { // all tmpfs have the same device name
			key = "tmpfs " + mt.point
		}
		if at, again := seen[key]; again {
			if len(mt.point) < len(list[at].point) {
				list[at].point = mt.point // "/" is of more use than a path in a sandbox
			}
			return true
		}
		seen[key] = len(list)
		list = append(list, mt)
		return len(list) < maxMounts
	})
	return list, err
}

// Disks returns a page of at most MaxFilesystems file systems, from skip on. The first page also has
// the drives. A page is cut from the list of this call: a file system that is mounted between two
// calls may shift the pages, so that one appears twice or not at all.
func (m *Machine) Disks(ctx context.Context, skip int) Disks {
	out := Disks{Filesystems: []Filesystem{}}
	var mounts []mount
	// collect calls the functions that a part returns on this goroutine, so they need no lock for mounts.
	parts := []part[Disks]{{"filesystems", func(ctx context.Context) func(*Disks) {
		list, err := m.mounts(ctx)
		if err != nil {
			return nil
		}
		return func(d *Disks) {
			d.Total = len(list)
			mounts = pageOf(list, skip, MaxFilesystems)
		}
	}}}
	if skip == 0 {
		parts = append(parts, part[Disks]{"disks", m.drives})
	}
	out.Unfinished = collect(ctx, &m.guard, &out, parts...)
	// Names first, without statfs: a file system whose usage is not read in time is still listed.
	for _, mt := range mounts {
		out.Filesystems = append(out.Filesystems, Filesystem{Mount: Text(mt.point, maxPath), Device: Text(mt.device, maxPath), Type: Text(mt.fsType, 32), ReadOnly: mt.readOnly})
	}
	// Local ones first: those of a dead server use up the time of the answer.
	isComplete := true
	for _, remote := range []bool{false, true} {
		for i, mt := range mounts {
			if mt.isRemote() == remote {
				isComplete = m.usage.read(ctx, m.path(mt.point), remote, &out.Filesystems[i]) && isComplete
			}
		}
	}
	if !isComplete {
		out.Unfinished = append(out.Unfinished, "filesystems") // its list is read, so it is not there yet
	}
	return out
}

// usageReader reads the usage of file systems, each with a goroutine in statfs(2). While that hangs,
// further calls for the same mount start no other goroutine: they get NoAnswer at once. A path
// leaves pending when its statfs returns, and the next call reads it anew: a mount that answers
// again needs no restart of the daemon.
type usageReader struct {
	statfs   func(path string) (*disk.UsageStat, error) // nil: disk.Usage
	timeouts [2]time.Duration                           // for local and for remote ones; 0: mountTimeout

	mu      sync.Mutex      // protects the fields below
	pending map[string]bool // paths whose statfs has not returned: the value is isRemote
}

// maxHungMounts bounds the pending reads of local mounts, and again those of remote ones, so that
// dead servers do not keep local file systems from being read. Four servers that hang cost the first
// answer 1.2 s of the 1.8 s that handlers give it; later answers do not wait for them.
const maxHungMounts = 4

// mountTimeout is how long an answer waits for one mount. A local file system has its figures in
// memory, and a server that is far away answers within this time too.
const mountTimeout = 300 * time.Millisecond

// read adds the usage of the file system at path to f, or sets f.Error. It returns false if it did
// neither, because ctx ended or maxHungMounts other reads are pending.
func (u *usageReader) read(ctx context.Context, path string, isRemote bool, f *Filesystem) bool {
	if ctx.Err() != nil {
		return false
	}
	isNew, isPending := u.begin(path, isRemote)
	switch {
	case isPending:
		f.Error = NoAnswer
		return true
	case !isNew:
		return false
	}
	type result struct {
		*disk.UsageStat
		err error
	}
	done := make(chan result, 1) // nobody receives a result that is late
	// Ends when statfs returns, which may be never. It outlives this call then, and is counted in
	// pending.
	go func() {
		statfs := u.statfs
		if statfs == nil {
			statfs = disk.Usage
		}
		stat, err := statfs(path)
		// Before the send, so that a caller who has the result can ask for the same path at once.
		u.end(path)
		done <- result{stat, err}
	}()
	timeout := u.timeouts[0]
	if isRemote {
		timeout = u.timeouts[1]
	}
	timer := time.NewTimer(cmp.Or(timeout, mountTimeout))
	defer timer.Stop()
	select {
	case r := <-done:
		if r.err != nil {
			f.Error = Unreadable
			return true
		}
		f.setUsage(r.UsageStat)
		return true
	case <-timer.C:
		f.Error = NoAnswer
		return true
	case <-ctx.Done():
		return false
	}
}

// begin counts a read of a path as pending, unless one is pending already (isPending) or too many
// reads of such mounts are (neither result is true).
func (u *usageReader) begin(path string, isRemote bool) (isNew, isPending bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, isPending = u.pending[path]; isPending {
		return false, true
	}
	sameKind := 0
	for _, remote := range u.pending {
		if remote == isRemote {
			sameKind++
		}
	}
	if sameKind >= maxHungMounts {
		return false, false
	}
	if u.pending == nil {
		u.pending = make(map[string]bool)
	}
	u.pending[path] = isRemote
	return true, false
}

// end removes a read that returned.
func (u *usageReader) end(path string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.pending, path)
}

// setUsage enters the figures. File systems without blocks, as some servers have, get none. The
// percentages are gopsutil's, computed as df(1) does. Inodes are left out where statfs reports a total
// of 0, as btrfs and vfat do, which have no fixed number of them.
func (f *Filesystem) setUsage(u *disk.UsageStat) {
	if u.Total == 0 {
		return
	}
	total, used, free := min(u.Total, maxCount), min(u.Used, maxCount), min(u.Free, maxCount)
	pct := round(u.UsedPercent)
	f.TotalBytes, f.UsedBytes, f.FreeBytes, f.UsedPct = &total, &used, &free, &pct
	if u.InodesTotal > 0 {
		inodes := round(u.InodesUsedPercent)
		f.InodesUsedPct = &inodes
	}
}

// round brings a percentage into 0..100 and rounds it to one decimal.
func round(pct float64) float64 {
	if !(pct >= 0) { // also NaN, of file systems that report 0 of 0
		return 0
	}
	return math.Round(min(pct, 100)*10) / 10
}

// virtualDrives are the first letters of block devices that are no hardware, or have no fixed medium.
// What LVM and RAID (dm-, md) read and write is counted by the drives below them already.
var virtualDrives = []string{"loop", "ram", "zram", "dm-", "md", "nbd", "sr", "fd"}

// drives reads the drives from /sys/block, and their counters. Drives whose counters cannot be read
// are listed without them.
func (m *Machine) drives(ctx context.Context) func(*Disks) {
	entries, err := os.ReadDir(m.path("sys/block"))
	if err != nil {
		return nil
	}
	var list []Disk
	var names []string
	for _, e := range entries {
		name := e.Name()
		// os.ReadDir sorts, so that the same MaxDisks drives are in each answer.
		if len(list) == MaxDisks || ctx.Err() != nil {
			break
		}
		if slices.ContainsFunc(virtualDrives, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			continue
		}
		dir := m.path("sys/block", name) + "/"
		// The unit of size is 512 bytes, also for drives with sectors of 4 KiB.
		sectors, ok := parseUint([]byte(readText(dir+"size", maxName)))
		if !ok || sectors == 0 {
			continue // a card reader without a card
		}
		// SATA, USB and NVMe drives have a file model, SD cards and eMMCs a file name, virtio disks
		// neither.
		model := readText(dir+"device/model", maxName)
		if model == "" {
			model = readText(dir+"device/name", maxName)
		}
		list = append(list, Disk{
			Name: Text(name, maxName), Model: model, SizeBytes: min(sectors, maxCount/512) * 512,
			Removable: readText(dir+"removable", 8) == "1", Rotational: readText(dir+"queue/rotational", 8) == "1",
		})
		names = append(names, name)
	}
	if len(names) > 0 {
		counters, _ := disk.IOCountersWithContext(m.env(ctx), names...)
		for i := range list {
			if c, ok := counters[list[i].Name]; ok {
				read, written, busy := min(c.ReadBytes, maxCount), min(c.WriteBytes, maxCount), min(c.IoTime, maxCount)
				list[i].ReadBytes, list[i].WrittenBytes, list[i].BusyMS = &read, &written, &busy
			}
		}
	}
	return func(d *Disks) { d.Disks = list }
}
