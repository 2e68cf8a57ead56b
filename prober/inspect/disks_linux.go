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

// File systems come from mountinfo(5), their figures from statfs(2), drives from /sys/block and
// /proc/diskstats. statfs is the call that can hang, for good, on a server or card that does not answer;
// no signal interrupts it. Each therefore runs in a separate goroutine with mountTimeout, and one that hangs
// is remembered, so that asking again does not leave another goroutine behind.

// mount is a line of mountinfo(5).
type mount struct {
	point, device, fsType string
	readOnly              bool
}

// parseMount parses a line of mountinfo(5):
//
//	36 35 98:0 /sub /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw,errors=continue
//
// Whether it is read-only is an option of the file system, the last field: those of the mount say
// how a sandbox shows it to this process.
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

// unescape replaces the octal escapes of mountinfo: \040 is a space.
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

// isStorage reports whether a file system holds somebody's files. The kernel's own ones, which show
// its state as files, and the layers of containers do not.
func (m *mount) isStorage() bool {
	switch {
	case strings.HasPrefix(m.device, "/"), strings.Contains(m.device, ":/"), m.fsType == "zfs", strings.HasPrefix(m.fsType, "fuse."):
		return m.fsType != "squashfs" && m.fsType != "fuse.snapfuse" && !strings.HasPrefix(m.device, "/dev/loop")
	case m.fsType == "tmpfs":
		return !strings.HasPrefix(m.point, "/run/credentials/") && !strings.HasPrefix(m.point, "/sys/") && !strings.HasPrefix(m.point, "/proc/")
	}
	return m.point == "/"
}

// isRemote reports whether another program or computer serves the file system, which may stop doing
// so.
func (m *mount) isRemote() bool {
	switch m.fsType {
	case "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs", "glusterfs", "lustre":
		return true
	}
	return strings.HasPrefix(m.fsType, "fuse") || strings.Contains(m.device, ":/") || strings.HasPrefix(m.device, "//")
}

// maxMounts bounds the file systems that are looked at.
const maxMounts = 20_000

// mounts returns the file systems that hold files, each device once: sandboxes and containers show
// one at several places.
func (m *Machine) mounts(ctx context.Context) ([]mount, error) {
	var list []mount
	seen := make(map[string]int) // index in list
	err := eachLine(ctx, m.path("proc/self/mountinfo"), func(line []byte) bool {
		mt, ok := parseMount(line)
		if !ok || !mt.isStorage() {
			return true
		}
		key := mt.device
		if mt.fsType == "tmpfs" { // all have one device
			key = "tmpfs " + mt.point
		}
		if at, again := seen[key]; again {
			if len(mt.point) < len(list[at].point) {
				list[at].point = mt.point // "/" says more than a place in a sandbox
			}
			return true
		}
		seen[key] = len(list)
		list = append(list, mt)
		return len(list) < maxMounts
	})
	return list, err
}

// Disks returns file systems from skip on, and with the first ones the drives.
func (m *Machine) Disks(ctx context.Context, skip int) Disks {
	out := Disks{Filesystems: []Filesystem{}}
	var mounts []mount
	parts := []part[Disks]{{"filesystems", func(ctx context.Context) func(*Disks) {
		list, err := m.mounts(ctx)
		if err != nil {
			return nil
		}
		return func(d *Disks) {
			d.Total = len(list)
			mounts = window(list, skip, MaxFilesystems)
		}
	}}}
	if skip == 0 {
		parts = append(parts, part[Disks]{"disks", m.drives})
	}
	out.Unfinished = collect(ctx, &m.guard, &out, parts...)
	for _, mt := range mounts {
		out.Filesystems = append(out.Filesystems, Filesystem{Mount: Text(mt.point, maxPath), Device: Text(mt.device, maxPath), Type: Text(mt.fsType, 32), ReadOnly: mt.readOnly})
	}
	// Local ones first: those of a dead server cost time.
	for _, remote := range []bool{false, true} {
		for i, mt := range mounts {
			if mt.isRemote() == remote && !m.hung.measure(ctx, mt, m.path(mt.point), &out.Filesystems[i]) {
				out.Unfinished = addUnfinished(out.Unfinished, "filesystems")
			}
		}
	}
	return out
}

// hungMounts measures file systems. It remembers those whose measuring hangs, so that each costs one
// goroutine and not one for each call.
type hungMounts struct {
	statfs   func(path string) (usage, error) // nil: gopsutil's
	timeouts [2]time.Duration                 // of local and remote ones; 0: mountTimeout

	mu    sync.Mutex      // protects the fields below
	hung  map[string]bool // mount points
	count [2]int          // how many are local and remote
}

// maxHungMounts bounds the mounts that hang, local ones and again remote ones.
const maxHungMounts = 4

// mountTimeout is how long an answer waits for one mount. A local file system has its figures in
// memory, and a server that is far away answers within this time too.
const mountTimeout = 300 * time.Millisecond

// measure adds the figures of a file system, or why there are none. It returns false if there was no
// time for it, or too many others hang.
func (h *hungMounts) measure(ctx context.Context, mt mount, path string, f *Filesystem) bool {
	kind := 0
	if mt.isRemote() {
		kind = 1
	}
	h.mu.Lock()
	_, isHung := h.hung[path]
	isFull := h.count[kind] >= maxHungMounts
	if !isHung && !isFull {
		if h.hung == nil {
			h.hung = make(map[string]bool)
		}
		h.hung[path] = true // until it answers
		h.count[kind]++
	}
	h.mu.Unlock()
	switch {
	case isHung:
		f.Error = NoAnswer
		return true
	case isFull, ctx.Err() != nil:
		if !isFull {
			h.answered(path, kind)
		}
		return false
	}
	type result struct {
		usage
		err error
	}
	done := make(chan result, 1)
	go func() {
		u, err := h.usage(path)
		h.answered(path, kind)
		done <- result{u, err}
	}()
	timer := time.NewTimer(cmp.Or(h.timeouts[kind], mountTimeout))
	defer timer.Stop()
	select {
	case u := <-done:
		if u.err != nil {
			f.Error = Unreadable
			return true
		}
		f.setUsage(&u.usage)
		return true
	case <-timer.C:
		f.Error = NoAnswer
		return true
	case <-ctx.Done():
		return false
	}
}

// usage is the use of a file system.
type usage = disk.UsageStat

// usage asks the file system. Nothing ends the call if that does not answer.
func (h *hungMounts) usage(path string) (usage, error) {
	if h.statfs != nil {
		return h.statfs(path)
	}
	u, err := disk.Usage(path)
	if err != nil {
		return usage{}, err
	}
	return *u, nil
}

// answered forgets a mount that answers.
func (h *hungMounts) answered(path string, kind int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.hung, path)
	h.count[kind]--
}

// setUsage enters the figures. A file system without blocks has none, as those of some servers.
func (f *Filesystem) setUsage(u *usage) {
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

// round makes a percentage with one decimal.
func round(pct float64) float64 {
	if !(pct >= 0) {
		return 0
	}
	return math.Round(min(pct, 100)*10) / 10
}

// drives reads what /sys has of drives, and their counters.
func (m *Machine) drives(ctx context.Context) func(*Disks) {
	entries, err := os.ReadDir(m.path("sys/block"))
	if err != nil {
		return nil
	}
	var list []Disk
	var names []string
	for _, e := range entries {
		name := e.Name()
		if len(list) == MaxDisks || ctx.Err() != nil {
			break
		}
		if slices.ContainsFunc([]string{"loop", "ram", "zram", "dm-", "md", "nbd", "sr", "fd"}, func(p string) bool { return strings.HasPrefix(name, p) }) {
			continue
		}
		dir := m.path("sys/block", name) + "/"
		sectors, ok := parseUint([]byte(readText(dir+"size", maxName)))
		if !ok || sectors == 0 {
			continue // a slot without a card
		}
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
