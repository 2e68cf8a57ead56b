package inspect

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// tree writes files below a new directory and returns a Machine that reads there.
func tree(t testing.TB, files map[string]string) *Machine {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m := New(Options{Root: root, Version: "1.2.3", Now: func() (int64, bool) { return 1_795_132_800_000, true }, Synchronized: func() bool { return true }})
	m.hung.timeouts = [2]time.Duration{time.Minute, time.Minute} // a loaded machine is not a dead disk
	return m
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func stat(pid int, name string, ticks, start, pages int) string {
	return fmt.Sprintf("%d (%s) S 1 %d %d 0 -1 4194560 1 2 3 4 %d 0 7 8 20 0 3 0 %d 1000000 %d 18446744073709551615 1 1", pid, name, pid, pid, ticks, start, pages)
}

func TestInfo(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/sys/kernel/hostname": "attic\n", "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\x00",
		"etc/os-release": "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n",
		"proc/cpuinfo":   "processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\n",
		"proc/1/stat":    stat(1, "init", 0, 0, 0), "proc/22/stat": "", "proc/self/stat": "",
		"run/systemd/container": "lxc\n",
	})
	got := m.Info(within(t, 10*time.Second))
	if got.Hostname != "attic" || got.Model != "Raspberry Pi 4 Model B Rev 1.4" || got.OS != "Debian GNU/Linux 12 (bookworm)" ||
		got.CPUModel != "ARMv7 Processor rev 3 (v7l)" || got.Virtualization != "lxc" || got.Processes != 2 || got.AgentVersion != "1.2.3" ||
		got.TimeMS != 1_795_132_800_000 || !*got.ClockSynchronized || got.MemTotalBytes == 0 || got.Kernel == "" || len(got.Unfinished) > 0 {
		t.Errorf("got %+v", got)
	}
	empty := tree(t, nil).Info(within(t, 10*time.Second))
	if !slices.Equal(empty.Unfinished, []string{"cpu_model", "processes"}) || empty.Kernel == "" {
		t.Errorf("without files: %+v", empty)
	}
}

// Text of the machine is cut and clean, whatever is in the files.
func TestInfoCleansText(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/sys/kernel/hostname": strings.Repeat("ä", 1000), "proc/device-tree/model": "a\x1b[31m\nb\xff",
		"etc/os-release": "PRETTY_NAME=" + strings.Repeat("x", 70_000), "usr/lib/os-release": "PRETTY_NAME='fallback'\n",
	})
	got := m.Info(within(t, 10*time.Second))
	if got.Hostname != strings.Repeat("ä", 253) || got.Model != "a [31m b\uFFFD" || got.OS != "fallback" {
		t.Errorf("got %q, %q, %q", got.Hostname, got.Model, got.OS)
	}
}

// A file that hangs costs its part of the answer and a bounded number of goroutines.
func TestHungPartIsUnfinished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g guard
		hang := make(chan struct{})
		var started atomic.Int32
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			var out Info
			late := collect(ctx, &g, &out,
				part[Info]{"model", func(context.Context) func(*Info) { started.Add(1); <-hang; return nil }},
				part[Info]{"os", func(context.Context) func(*Info) { return func(i *Info) { i.OS = "x" } }},
				part[Info]{"kernel", func(context.Context) func(*Info) { return nil }})
			cancel()
			if !slices.Equal(late, []string{"model", "kernel"}) || out.OS != "x" {
				t.Fatalf("unfinished %v, got %+v", late, out)
			}
		}
		if n := started.Load(); n != maxHung {
			t.Errorf("%d goroutines hang, want %d", n, maxHung)
		}
		close(hang)
		synctest.Wait()
		if len(g.running) != 0 {
			t.Errorf("%v still counts", g.running)
		}
	})
}

func TestProcesses(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/uptime": "1000.00 1.0\n", "proc/1/stat": stat(1, "systemd", 10, 5, 100), "proc/1/status": "Name:\tsystemd\nUid:\t0\t0\t0\t0\n",
		"proc/20/stat": stat(20, "evil) S 1 (x", 10, 300, 900), "proc/20/status": "Uid:\t4242424\t4242424\n", "proc/20/cmdline": "evil\x00--password=hunter2\x00",
		"proc/30/stat": stat(30, "busy", 10, 400, 50), "proc/40/stat": "garbage", "proc/50/stat": "", "proc/sys/x": "",
	})
	// It uses half of a CPU, whenever the window is. The file is replaced, so that a reader finds it whole.
	stop := make(chan struct{})
	var busyLoop sync.WaitGroup
	busyLoop.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ticks := 11; ; ticks++ {
			_ = os.WriteFile(m.path("proc/30/new"), []byte(stat(30, "busy", ticks, 400, 50)), 0o644)
			_ = os.Rename(m.path("proc/30/new"), m.path("proc/30/stat"))
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	})
	defer busyLoop.Wait()
	defer close(stop)
	got := m.Processes(within(t, 30*time.Second), ProcessQuery{SortBy: "cpu", Limit: 2, Window: 300 * time.Millisecond})
	if got.Total != 3 || got.Matching != 3 || len(got.Processes) != 2 || len(got.Unfinished) > 0 || got.WindowMS < 300 {
		t.Fatalf("got %+v", got)
	}
	busy, second := got.Processes[0], got.Processes[1]
	if busy.PID != 30 || busy.CPUPct == nil || *busy.CPUPct <= 0 || *busy.CPUPct > 100 || busy.StartedMS != 1_795_132_800_000-1_000_000+4_000 {
		t.Errorf("busiest is %+v", busy)
	}
	if second.PID != 20 || second.Name != "evil) S 1 (x" || second.User != "4242424" || second.MemBytes != 900*pageSize || second.Args != "" || second.State != "sleeping" || second.Threads != 3 {
		t.Errorf("second is %+v", second)
	}
	got = m.Processes(within(t, 30*time.Second), ProcessQuery{SortBy: "memory", Limit: 10, Window: time.Millisecond, Name: "EVIL", Args: true})
	if got.Total != 3 || got.Matching != 1 || len(got.Processes) != 1 || got.Processes[0].Args != "evil --password=hunter2" {
		t.Errorf("by name: %+v", got)
	}
}

// A process that ended is left out, and so is one whose number another one took.
func TestProcessesVanish(t *testing.T) {
	m := tree(t, map[string]string{"proc/1/stat": stat(1, "a", 1, 1, 1), "proc/2/stat": stat(2, "b", 1, 1, 1), "proc/3/stat": stat(3, "c", 1, 1, 1)})
	reader, err := m.newReader(time.Now(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.close()
	var list []procStat
	for _, pid := range []string{"1", "2", "3", "4"} {
		if s, _, ok := reader.read(pid); ok {
			list = append(list, s)
		}
	}
	if err := os.RemoveAll(m.path("proc/2")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.path("proc/3/stat"), []byte(stat(3, "d", 1, 99, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	alive, _, ok := m.measure(within(t, 10*time.Second), time.Now(), list, 0)
	if len(list) != 3 || !ok || len(alive) != 1 || alive[0].pid != 1 {
		t.Errorf("of %d processes %+v are alive (%v)", len(list), alive, ok)
	}
}

// Whatever there is no time for is named, and the answer comes in time.
func TestProcessesWithoutTime(t *testing.T) {
	files := make(map[string]string)
	for pid := range 2000 {
		files[fmt.Sprintf("proc/%d/stat", pid+1)] = stat(pid+1, "p", 1, 1, pid)
	}
	m := tree(t, files)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := m.Processes(ctx, ProcessQuery{SortBy: "cpu", Limit: 5}); !slices.Contains(got.Unfinished, "processes") || got.Processes == nil {
		t.Errorf("got %+v", got)
	}
	// The window takes all the time: the first reading has none, but the processes are counted.
	begin := time.Now()
	got := m.Processes(within(t, 400*time.Millisecond), ProcessQuery{SortBy: "memory", Limit: 5, Window: time.Minute})
	if len(got.Unfinished) == 0 || got.WindowMS != 0 || len(got.Processes) > 5 {
		t.Errorf("got %+v", got)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("it took %v", d)
	}
}

func TestParseStat(t *testing.T) {
	for line, want := range map[string]string{
		stat(7, "a b", 5, 9, 11):                                   "7 a b S 1 3 5 9 11 true",
		stat(7, "", 5, 9, 11):                                      "7  S 1 3 5 9 11 true",
		stat(7, ") R 0 (", 5, 9, 1):                                "7 ) R 0 ( S 1 3 5 9 1 true",
		strings.Replace(stat(7, "x", 5, 9, 11), " 11 ", " -1 ", 1): "7 x S 1 3 5 9 0 true",
		"7 (x) S 1":    "7 x S 1 0 0 0 0 false",
		"x (x) S 1 2":  "0   0 0 0 0 0 false",
		"7 (x)":        "0   0 0 0 0 0 false",
		")(":           "0   0 0 0 0 0 false",
		"-1 (x) S 1 2": "0   0 0 0 0 0 false",
	} {
		s, _, ok := parseStat([]byte(line), nil)
		state := string(rune(s.state))
		if s.state == 0 {
			state = ""
		}
		if got := fmt.Sprint(s.pid, " ", s.name, " ", state, " ", s.ppid, " ", s.threads, " ", s.ticks, " ", s.start, " ", s.rss, " ", ok); got != want {
			t.Errorf("%s: got %q, want %q", line, got, want)
		}
	}
}

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

func TestDisks(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/self/mountinfo": mountinfo, "tmp/x": "", "mnt/my disk/x": "", "run/x": "",
		"sys/block/mmcblk0/size": "62333952\n", "sys/block/mmcblk0/device/name": "SD64G\n", "sys/block/mmcblk0/removable": "0", "sys/block/mmcblk0/queue/rotational": "0",
		"sys/block/loop0/size": "8", "sys/block/sda/size": "0",
		"proc/diskstats": " 179 0 mmcblk0 100 0 2000 30 50 0 4000 60 0 70 90\n",
	})
	got := m.Disks(within(t, 10*time.Second), 0)
	var list []string
	for _, f := range got.Filesystems {
		list = append(list, fmt.Sprint(f.Mount, " ", f.Type, " ", f.ReadOnly, " ", f.Error, f.UsedPct != nil))
	}
	want := []string{"/ ext4 false true", "/mnt/my disk vfat true true", "/mnt/nas nfs4 false unreadablefalse", "/tmp tmpfs false true", "/run tmpfs false true"}
	if !slices.Equal(list, want) || got.Total != 5 || len(got.Unfinished) > 0 {
		t.Errorf("got %q of %d, unfinished %v", list, got.Total, got.Unfinished)
	}
	if len(got.Disks) != 1 || got.Disks[0].Model != "SD64G" || got.Disks[0].SizeBytes != 62333952*512 || *got.Disks[0].WrittenBytes != 4000*512 || *got.Disks[0].BusyMS != 70 {
		t.Errorf("drives are %+v", got.Disks)
	}
	if rest := m.Disks(within(t, 10*time.Second), 3); len(rest.Filesystems) != 2 || rest.Total != 5 || rest.Disks != nil {
		t.Errorf("the next page is %+v", rest)
	}
	if beyond := m.Disks(within(t, 10*time.Second), 99); len(beyond.Filesystems) != 0 || beyond.Total != 5 {
		t.Errorf("beyond the end: %+v", beyond)
	}
}

// 10,000 mounts are counted, and a page of them is measured.
func TestManyMounts(t *testing.T) {
	var b strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&b, "%d 1 8:%d / /mnt/%d rw - ext4 /dev/sd%d rw\n", i+2, i, i, i)
	}
	m := tree(t, map[string]string{"proc/self/mountinfo": b.String(), "sys/block/x": ""})
	got := m.Disks(within(t, 10*time.Second), 9_900)
	if got.Total != 10_000 || len(got.Filesystems) != 100 || got.Filesystems[99].Mount != "/mnt/9999" || got.Filesystems[0].Error != Unreadable {
		t.Errorf("got %d of %d: %+v", len(got.Filesystems), got.Total, got.Unfinished)
	}
}

// A mount whose statfs hangs is asked once, whoever else wants to know; too many of them leave local
// file systems their figures.
func TestHungMounts(t *testing.T) {
	hang := make(chan struct{})
	asked := make(chan string, 100)
	h := hungMounts{timeouts: [2]time.Duration{time.Minute, 20 * time.Millisecond}, statfs: func(path string) (usage, error) {
		asked <- path
		if strings.HasPrefix(path, "/nas") {
			<-hang
		}
		return usage{Total: 100, Used: 30, Free: 70, UsedPercent: 30}, nil
	}}
	measure := func(path, fsType string) (Filesystem, bool) {
		var f Filesystem
		ok := h.measure(within(t, 5*time.Second), mount{point: path, fsType: fsType}, path, &f)
		return f, ok
	}
	for range 3 {
		if f, ok := measure("/nas0", "nfs4"); !ok || f.Error != NoAnswer || f.UsedPct != nil {
			t.Errorf("a dead mount: %+v, %v", f, ok)
		}
	}
	if len(asked) != 1 {
		t.Errorf("a dead mount was asked %d times", len(asked))
	}
	for i := range maxHungMounts + 2 {
		_, ok := measure(fmt.Sprint("/nas", i), "nfs4")
		if want := i < maxHungMounts; ok != want {
			t.Errorf("dead mount %d: %v, want %v", i, ok, want)
		}
	}
	if f, ok := measure("/data", "ext4"); !ok || f.UsedPct == nil || *f.UsedPct != 30 {
		t.Errorf("a local disk beside dead mounts: %+v, %v", f, ok)
	}
	close(hang)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if f, ok := measure("/nas0", "nfs4"); ok && f.Error == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a mount that answers again has no figures")
		}
	}
}

const route4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n" +
	"eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n" +
	"eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n" +
	"*\t0000000A\t00000000\t0200\t0\t0\t0\t000000FF\t0\t0\t0\n"

const route6 = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n" +
	"fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n" +
	"00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000002 00000000 80200001       lo\n" +
	"ff000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000003 00000000 00000001     eth0\n"

func TestNetwork(t *testing.T) {
	m := tree(t, map[string]string{
		"proc/net/route": route4, "proc/net/ipv6_route": route6, "etc/resolv.conf": "# x\nnameserver 192.0.2.53\nsearch example\nnameserver\n",
		"proc/net/dev": "Inter-| x\n face | y\n    lo:    1000      10    1    2    0     0          0         0     2000      20    3    4    0     0       0          0\n",
	})
	got := m.Network(within(t, 10*time.Second), NetworkQuery{})
	want := []Route{{"default", "192.168.1.1", "eth0", 100}, {"192.168.1.0/24", "", "eth0", 100}, {"default", "fe80::1", "eth0", 1024}, {"fd00::/64", "", "eth0", 256}}
	if !slices.Equal(got.Routes, want) || got.TotalRoutes != 4 || !slices.Equal(got.Nameservers, []string{"192.0.2.53"}) {
		t.Errorf("got %+v", got)
	}
	if len(got.Unfinished) > 0 || got.TotalInterfaces == 0 || len(got.Interfaces) != got.TotalInterfaces {
		t.Errorf("got %d of %d interfaces, unfinished %v", len(got.Interfaces), got.TotalInterfaces, got.Unfinished)
	}
	lo := slices.IndexFunc(got.Interfaces, func(i Interface) bool { return i.Name == "lo" })
	if lo < 0 {
		t.Skip("this machine has no loopback interface")
	}
	if i := got.Interfaces[lo]; !i.Loopback || i.Counters == nil || *i.Counters != (Counters{1000, 2000, 10, 20, 1, 3, 2, 4}) {
		t.Errorf("loopback is %+v with %+v", i, i.Counters)
	}
	one := m.Network(within(t, 10*time.Second), NetworkQuery{Interface: "lo"})
	if one.TotalInterfaces != 1 || one.Interfaces[0].Name != "lo" || one.TotalRoutes != 0 {
		t.Errorf("only lo: %+v", one)
	}
	if rest := m.Network(within(t, 10*time.Second), NetworkQuery{Skip: got.TotalInterfaces + 3}); len(rest.Interfaces) != 0 || !slices.Equal(rest.Routes, want[3:]) {
		t.Errorf("the last page: %+v", rest)
	}
	if none := m.Network(within(t, 10*time.Second), NetworkQuery{Interface: "../../etc"}); none.TotalInterfaces != 0 || len(none.Interfaces) != 0 {
		t.Errorf("an odd name: %+v", none)
	}
}

// A pipe in place of a file does not hang the reading.
func TestPipeIsNoFile(t *testing.T) {
	m := tree(t, map[string]string{"etc/x": ""})
	if err := unix.Mkfifo(m.path("etc/os-release"), 0o644); err != nil {
		t.Skip("no pipes here: ", err)
	}
	if got := m.Info(within(t, 10*time.Second)); got.OS != "" || slices.Contains(got.Unfinished, "os") {
		t.Errorf("got %q, unfinished %v", got.OS, got.Unfinished)
	}
}

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"": "", " a\x00b\tc ": "a b c", "äöü€🙂x": "äöü€🙂", "abcdefgh": "abcde", "\xff\xfe": "\uFFFD", "a    b": "a", "\u0085x": "x",
	} {
		if got := Text(in, 5); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzParsers(f *testing.F) {
	f.Add(stat(7, "x", 1, 2, 3), "a b c")
	f.Add(mountinfo, route4)
	f.Add(route6, `\040\9`)
	f.Fuzz(func(t *testing.T, a, b string) {
		s, _, ok := parseStat([]byte(a), func(name []byte) bool { return len(name)%2 == 0 })
		if ok && (s.pid < 0 || s.ppid < 0 || s.threads < 0) {
			t.Errorf("%q: %+v", a, s)
		}
		for _, line := range strings.Split(a, "\n") {
			if mt, ok := parseMount([]byte(line)); ok && (mt.point == "" || mt.fsType == "") {
				t.Errorf("%q: %+v", line, mt)
			}
			for _, parse := range []func([]byte) (Route, bool){parseRoute4, parseRoute6} {
				if r, ok := parse([]byte(line)); ok && (r.Destination == "" || r.Destination == "invalid Prefix" || r.Metric < 0) {
					t.Errorf("%q: %+v", line, r)
				}
			}
		}
		if got := Text(b, 8); len([]rune(got)) > 8 || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' }) || strings.ToValidUTF8(got, "") != got {
			t.Errorf("Text(%q) = %q", b, got)
		}
	})
}
