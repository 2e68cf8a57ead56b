package inspect

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shirou/gopsutil/v4/disk"
)

// mountinfo has file systems in the order of the want of TestFilesystems, and others that are left out.
const mountinfo = `22 1 179:2 / / ro,noatime shared:1 - ext4 /dev/mmcblk0p2 rw
23 22 179:2 / /var/lib/private rw,noatime shared:1 - ext4 /dev/mmcblk0p2 rw
24 22 0:5 / /proc rw - proc proc rw
25 22 0:31 / /mnt/my\040disk rw - vfat /dev/sda1 ro,uid=0
26 22 0:32 / /mnt/nas rw - nfs4 nas:/export rw,vers=4
27 22 0:33 / /tmp rw - tmpfs tmpfs rw
28 22 0:34 / /run rw - tmpfs tmpfs rw
29 22 0:35 / /run/credentials/x rw - tmpfs tmpfs rw
30 22 7:1 / /snap/x ro - squashfs /dev/loop1 ro
31 22 0:36 / /sys/fs/cgroup rw - cgroup2 cgroup rw
32 22 0:37 / /var/lib/docker/overlay2/1/merged rw - overlay overlay rw,lowerdir=/x
broken line
`

// withMounts is a machine with mountinfo, on which the file system of /mnt/nas cannot be read.
func withMounts(t *testing.T) *Machine {
	m := tree(t, map[string]string{"proc/self/mountinfo": mountinfo, "sys/block/x": ""})
	m.usage.statfs = func(path string) (*disk.UsageStat, error) {
		if strings.HasSuffix(path, "/mnt/nas") {
			return nil, errors.New("stale file handle")
		}
		return &disk.UsageStat{Total: 100, Used: 30, Free: 70, UsedPercent: 30}, nil
	}
	return m
}

func TestFilesystems(t *testing.T) {
	got := withMounts(t).Disks(within(t, 10*time.Second), 0)
	want := []string{
		"/ ext4 rw 30%",
		"/mnt/my disk vfat ro 30%",
		"/mnt/nas nfs4 rw unreadable",
		"/tmp tmpfs rw 30%",
		"/run tmpfs rw 30%",
	}
	var list []string
	for _, f := range got.Filesystems {
		mode, usage := "rw", f.Error
		if f.ReadOnly {
			mode = "ro"
		}
		if f.UsedPct != nil {
			usage = fmt.Sprintf("%v%%", *f.UsedPct)
		}
		list = append(list, fmt.Sprint(f.Mount, " ", f.Type, " ", mode, " ", usage))
	}
	if !slices.Equal(list, want) || got.Total != len(want) || len(got.Unfinished) > 0 {
		t.Errorf("got %d of %d, unfinished %q:\n%s\nwant\n%s", len(list), got.Total, got.Unfinished, strings.Join(list, "\n"), strings.Join(want, "\n"))
	}
}

func TestFilesystemPages(t *testing.T) {
	m := withMounts(t)
	for skip, want := range map[int]int{0: 5, 3: 2, 5: 0, 99: 0} {
		got := m.Disks(within(t, 10*time.Second), skip)
		if len(got.Filesystems) != want || got.Total != 5 {
			t.Errorf("from %d on: %d of %d file systems, want %d of 5", skip, len(got.Filesystems), got.Total, want)
		}
	}
}

// 10,000 mounts are counted, and those of one page are measured.
func TestManyMounts(t *testing.T) {
	var b strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&b, "%d 1 8:%d / /mnt/%d rw - ext4 /dev/sd%d rw\n", i+2, i, i, i)
	}
	m := tree(t, map[string]string{"proc/self/mountinfo": b.String(), "sys/block/x": ""})
	measured := 0
	m.usage.statfs = func(string) (*disk.UsageStat, error) { measured++; return &disk.UsageStat{Total: 1}, nil }
	got := m.Disks(within(t, 10*time.Second), 9_700)
	if got.Total != 10_000 || len(got.Filesystems) != MaxFilesystems || measured != MaxFilesystems {
		t.Fatalf("measured %d, got %d of %d file systems, want %d of 10,000", measured, len(got.Filesystems), got.Total, MaxFilesystems)
	}
	if last := got.Filesystems[MaxFilesystems-1].Mount; last != "/mnt/9899" {
		t.Errorf("the last one is %s, want /mnt/9899", last)
	}
}

func TestDrives(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/self/mountinfo":                "",
		"proc/diskstats":                     " 179 0 mmcblk0 100 0 2000 30 50 0 4000 60 0 70 90\n",
		"sys/block/mmcblk0/size":             "62333952\n", // sectors of 512 bytes
		"sys/block/mmcblk0/device/name":      "SD64G\n",
		"sys/block/mmcblk0/removable":        "0",
		"sys/block/mmcblk0/queue/rotational": "0",
		"sys/block/loop0/size":               "8", // virtual
		"sys/block/sda/size":                 "0", // a card reader without a card
	})
	got := m.Disks(within(t, 10*time.Second), 0).Disks
	if len(got) != 1 {
		t.Fatalf("got %+v, want one drive", got)
	}
	d := got[0]
	if d.Name != "mmcblk0" || d.Model != "SD64G" || d.SizeBytes != 62333952*512 || d.Removable || d.Rotational {
		t.Errorf("got %+v", d)
	}
	if *d.ReadBytes != 2000*512 || *d.WrittenBytes != 4000*512 || *d.BusyMS != 70 {
		t.Errorf("counters are %d, %d, %d", *d.ReadBytes, *d.WrittenBytes, *d.BusyMS)
	}
	if next := m.Disks(within(t, 10*time.Second), 1); next.Disks != nil {
		t.Errorf("the second page has drives: %+v", next.Disks)
	}
}

// withDeadServers is a usageReader for which statfs below /nas hangs until answer is closed. calls
// counts the calls of statfs.
func withDeadServers() (u *usageReader, calls *atomic.Int32, answer chan struct{}) {
	calls, answer = new(atomic.Int32), make(chan struct{})
	u = &usageReader{statfs: func(path string) (*disk.UsageStat, error) {
		calls.Add(1)
		if strings.HasPrefix(path, "/nas") {
			<-answer
		}
		return &disk.UsageStat{Total: 100, Used: 30, Free: 70, UsedPercent: 30}, nil
	}}
	return u, calls, answer
}

// The usage of a real file system.
func TestUsage(t *testing.T) {
	var f Filesystem
	if ok := new(usageReader).read(within(t, 10*time.Second), t.TempDir(), false, &f); !ok || f.Error != "" || *f.TotalBytes == 0 {
		t.Errorf("got %+v, %v, want its size", f, ok)
	}
}

// A mount whose statfs hangs has no answer, and later calls do not ask it again.
func TestHungMountIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, calls, answer := withDeadServers()
		for range 3 {
			var f Filesystem
			if ok := u.read(t.Context(), "/nas", true, &f); !ok || f.Error != NoAnswer || f.UsedPct != nil {
				t.Errorf("got %+v, %v, want %s", f, ok, NoAnswer)
			}
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("statfs was called %d times, want once", n)
		}
		close(answer)
		synctest.Wait()
		var f Filesystem
		if ok := u.read(t.Context(), "/nas", true, &f); !ok || f.Error != "" || f.UsedPct == nil {
			t.Errorf("got %+v, %v after the server answered, want its usage", f, ok)
		}
	})
}

// At most maxHungMounts remote mounts hang at a time; local file systems are read beside them.
func TestHungMountsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, _, answer := withDeadServers()
		defer close(answer)
		for i := range maxHungMounts + 2 {
			var f Filesystem
			ok := u.read(t.Context(), fmt.Sprint("/nas", i), true, &f)
			if want := i < maxHungMounts; ok != want {
				t.Errorf("dead mount %d: read is %v, want %v", i, ok, want)
			}
		}
		var f Filesystem
		if ok := u.read(t.Context(), "/data", false, &f); !ok || f.UsedPct == nil || *f.UsedPct != 30 {
			t.Errorf("a local file system: got %+v, %v, want its usage", f, ok)
		}
	})
}
