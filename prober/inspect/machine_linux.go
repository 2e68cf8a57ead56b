package inspect

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shirou/gopsutil/v4/common"
)

// Machine reads this machine. Its methods may be called from any goroutine. Use New. All calls share
// guard and usage, so maxHung and maxHungMounts bound the goroutines that hang in all of them together.
type Machine struct {
	opt   Options
	guard guard
	usage usageReader
}

// New returns a Machine. It reads nothing yet.
func New(o Options) *Machine { return &Machine{opt: o} }

// path returns the path of a file below Options.Root.
func (m *Machine) path(parts ...string) string {
	return filepath.Join(append([]string{"/", m.opt.Root}, parts...)...)
}

// env returns ctx with the directories in which gopsutil looks for files.
func (m *Machine) env(ctx context.Context) context.Context {
	return context.WithValue(ctx, common.EnvKey, common.EnvMap{
		common.HostProcEnvKey: m.path("proc"), common.HostSysEnvKey: m.path("sys"),
		common.HostRunEnvKey: m.path("run"), common.HostDevEnvKey: m.path("dev"),
	})
}

// SeesProcesses reports whether the processes of other users are visible: /proc may be mounted so
// that they are not (hidepid, ProtectProc=). Process 1 belongs to root, so it stands for those of
// others.
func (m *Machine) SeesProcesses() bool {
	_, err := os.Stat(m.path("proc/1/stat"))
	return err == nil
}

// open opens a file for reading. O_NONBLOCK: if the file is a pipe, open does not wait for a writer.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// readFile returns the first maxBytes bytes of a file.
func readFile(path string, maxBytes int64) ([]byte, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxBytes))
}

// readText returns at most maxChars characters of a small file; "" if it cannot be read. Files of the
// device tree end in a NUL, those of /sys in a newline. Without the cut, Text would replace
// them by spaces.
func readText(path string, maxChars int) string {
	b, _ := readFile(path, 4096)
	return Text(string(bytes.TrimRight(b, "\x00\n")), maxChars)
}

// eachLine calls fn with each line of a file until fn returns false, ctx ends or the file ends. The
// line is valid during the call. A line of more than 64 KiB is an error. ctx is checked every 256
// lines: a table of routes may have a million.
func eachLine(ctx context.Context, path string, fn func(line []byte) bool) error {
	f, err := open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	for n := 0; lines.Scan(); n++ {
		if n%256 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if !fn(lines.Bytes()) {
			return nil
		}
	}
	return lines.Err()
}

// Info describes the machine. The names of its parts are those of Unfinished. Parts run at the same
// time, so a file that hangs costs only its part.
func (m *Machine) Info(ctx context.Context) Info {
	info := Info{AgentVersion: Text(m.opt.Version, 64), Arch: runtime.GOARCH, CPUs: runtime.NumCPU()}
	info.Unfinished = collect(ctx, &m.guard, &info,
		part[Info]{"hostname", m.hostname},
		part[Info]{"model", m.model},
		part[Info]{"os", m.osName},
		part[Info]{"kernel", m.kernel},
		part[Info]{"virtualization", m.virtualization},
		part[Info]{"cpu_model", m.cpuModel},
		part[Info]{"memory", m.memory},
		part[Info]{"processes", m.countProcesses},
		part[Info]{"clock", m.clock},
	)
	return info
}

// hostname reads the kernel's host name. 253 is the longest name of DNS. An empty name means that
// the file cannot be read; the part counts as read.
func (m *Machine) hostname(context.Context) func(*Info) {
	name := readText(m.path("proc/sys/kernel/hostname"), 253)
	return func(i *Info) { i.Hostname = name }
}

// model is the name that the firmware gives the board: in the device tree, or in DMI on PCs.
func (m *Machine) model(context.Context) func(*Info) {
	name := readText(m.path("proc/device-tree/model"), 128)
	if name == "" {
		dmi := m.path("sys/class/dmi/id") + "/"
		name = Text(readText(dmi+"sys_vendor", maxName)+" "+readText(dmi+"product_name", maxName), 128)
	}
	return func(i *Info) { i.Model = name }
}

// osName is PRETTY_NAME of os-release(5).
func (m *Machine) osName(ctx context.Context) func(*Info) {
	name := ""
	for _, path := range []string{"etc/os-release", "usr/lib/os-release"} {
		err := eachLine(ctx, m.path(path), func(line []byte) bool {
			if value, ok := bytes.CutPrefix(line, []byte("PRETTY_NAME=")); ok {
				name = Text(strings.Trim(string(value), `"'`), 128)
			}
			return name == ""
		})
		if err == nil {
			break
		}
	}
	return func(i *Info) { i.OS = name }
}

// kernel reads uname(2).
func (m *Machine) kernel(context.Context) func(*Info) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return nil
	}
	return func(i *Info) {
		i.Kernel = Text(unix.ByteSliceToString(u.Release[:]), 128)
		i.Arch = Text(unix.ByteSliceToString(u.Machine[:]), 32)
	}
}

// hypervisors maps words in DMI's vendor and product to names, as systemd-detect-virt(1) has them.
// The first word that matches decides.
var hypervisors = []struct{ word, name string }{
	{"QEMU", "kvm"}, {"KVM", "kvm"}, {"VMware", "vmware"}, {"VirtualBox", "virtualbox"}, {"innotek", "virtualbox"},
	{"Xen", "xen"}, {"Microsoft Corporation Virtual", "hyperv"}, {"Amazon EC2", "amazon"}, {"Google Compute", "google"},
}

// engineMarks are files that engines leave in the root directory of a container. The first that is there
// decides, in the order of systemd-detect-virt(1).
var engineMarks = []struct{ file, engine string }{{"run/.containerenv", "podman"}, {".dockerenv", "docker"}}

// virtualization is the container that systemd or the engine reports, else the hypervisor that the
// firmware names, else "vm" if the processor has the flag hypervisor.
func (m *Machine) virtualization(ctx context.Context) func(*Info) {
	name := readText(m.path("run/systemd/container"), maxName)
	for _, mark := range engineMarks {
		if _, err := os.Stat(m.path(mark.file)); name == "" && err == nil {
			name = mark.engine
		}
	}
	dmi := m.path("sys/class/dmi/id") + "/"
	firmware := readText(dmi+"sys_vendor", maxName) + " " + readText(dmi+"product_name", maxName)
	for _, h := range hypervisors {
		if name == "" && strings.Contains(firmware, h.word) {
			name = h.name
		}
	}
	if name == "" {
		_ = eachLine(ctx, m.path("proc/cpuinfo"), func(line []byte) bool {
			if bytes.HasPrefix(line, []byte("flags")) && bytes.Contains(line, []byte(" hypervisor")) {
				name = "vm"
			}
			// One line of flags is enough: the hypervisor sets the flag for all processors.
			return name == "" && !bytes.HasPrefix(line, []byte("flags"))
		})
	}
	return func(i *Info) { i.Virtualization = name }
}

// cpuModel is the name of the first processor. Kernels of 64-bit ARM show one to 32-bit programs only;
// some name the board's chip under Hardware instead.
func (m *Machine) cpuModel(ctx context.Context) func(*Info) {
	name := ""
	err := eachLine(ctx, m.path("proc/cpuinfo"), func(line []byte) bool {
		key, value, _ := bytes.Cut(line, []byte(":"))
		switch string(bytes.TrimSpace(key)) {
		// x86 and 32-bit ARM, MIPS, RISC-V, the chip on older ARM kernels. 32-bit ARM has Hardware too,
		// but behind the processors, so its model name comes first.
		case "model name", "cpu model", "uarch", "Hardware":
			name = Text(string(value), 128)
		}
		return name == ""
	})
	if err != nil {
		return nil
	}
	return func(i *Info) { i.CPUModel = name }
}

// memory reads sysinfo(2), which also has the uptime. The total is what the kernel manages, less
// than the chips have. In a container it is the machine's.
func (m *Machine) memory(context.Context) func(*Info) {
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) != nil {
		return nil
	}
	swap, uptime := uint64(s.Totalswap)*uint64(s.Unit), int64(s.Uptime)
	return func(i *Info) {
		i.MemTotalBytes = uint64(s.Totalram) * uint64(s.Unit)
		i.SwapTotalBytes, i.UptimeS = &swap, &uptime
	}
}

// countProcesses counts the processes in /proc.
func (m *Machine) countProcesses(ctx context.Context) func(*Info) {
	n := 0
	if err := m.eachPID(ctx, func(string) bool { n++; return true }); err != nil {
		return nil
	}
	return func(i *Info) { i.Processes = n }
}

// clock reads the time, whether NTP synchronizes it, and the time zone.
func (m *Machine) clock(context.Context) func(*Info) {
	ms, ok := m.opt.now()
	zone, _ := os.Readlink(m.path("etc/localtime"))
	// The link leads to /usr/share/zoneinfo/AREA/CITY. Where /etc/localtime is a copy, the zone
	// stays unknown.
	_, zone, _ = strings.Cut(zone, "zoneinfo/")
	var synchronized *bool
	if m.opt.Synchronized != nil {
		s := m.opt.Synchronized()
		synchronized = &s
	}
	return func(i *Info) {
		if ok {
			i.TimeMS = ms
		}
		i.ClockSynchronized, i.Timezone = synchronized, Text(zone, maxName)
	}
}

// eachPID calls fn with the number of each process in /proc, until fn returns false or ctx ends. It
// reads 1024 names at a time, and checks ctx between them: os.ReadDir would sort and hold all of them.
// A process that starts meanwhile may be missing, and one that is listed may have ended.
func (m *Machine) eachPID(ctx context.Context, fn func(pid string) bool) error {
	f, err := os.Open(m.path("proc"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if name[0] < '1' || name[0] > '9' {
				continue
			}
			if _, bad := strconv.Atoi(name); bad == nil && !fn(name) {
				return nil
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}
