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

// Machine reads this machine. Its methods may be called from any goroutine. Use New.
type Machine struct {
	opt   Options
	guard guard
	hung  hungMounts
}

// New returns a Machine. It reads nothing yet.
func New(o Options) *Machine { return &Machine{opt: o} }

// path is the path of a file of the machine.
func (m *Machine) path(parts ...string) string {
	return filepath.Join(append([]string{"/", m.opt.Root}, parts...)...)
}

// env is ctx for gopsutil, which finds the files of the machine with it.
func (m *Machine) env(ctx context.Context) context.Context {
	return context.WithValue(ctx, common.EnvKey, common.EnvMap{
		common.HostProcEnvKey: m.path("proc"), common.HostSysEnvKey: m.path("sys"),
		common.HostRunEnvKey: m.path("run"), common.HostDevEnvKey: m.path("dev"),
	})
}

// SeesProcesses reports whether the processes of other users are visible: /proc may be mounted so
// that they are not (hidepid, ProtectProc=).
func (m *Machine) SeesProcesses() bool {
	_, err := os.Stat(m.path("proc/1/stat"))
	return err == nil
}

// open opens a file for reading. It does not wait for a writer if the file is a pipe.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// readFile returns at most most bytes of a file.
func readFile(path string, most int64) ([]byte, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, most))
}

// readText returns the text of a small file, "" if it cannot be read.
func readText(path string, most int) string {
	b, _ := readFile(path, 4096)
	return Text(string(bytes.TrimRight(b, "\x00\n")), most)
}

// eachLine calls fn with each line of a file until fn returns false, ctx ends or the file does. The
// line is valid during the call. Lines of more than 64 KiB end the reading with an error.
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

// Info returns what the machine is.
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

func (m *Machine) hostname(context.Context) func(*Info) {
	name := readText(m.path("proc/sys/kernel/hostname"), 253)
	return func(i *Info) { i.Hostname = name }
}

// model is what the firmware calls the board: the device tree on boards, DMI on computers.
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

// hypervisors are the systems that computers run in, by a word of what DMI says.
var hypervisors = []struct{ word, name string }{
	{"QEMU", "kvm"}, {"KVM", "kvm"}, {"VMware", "vmware"}, {"VirtualBox", "virtualbox"}, {"innotek", "virtualbox"},
	{"Xen", "xen"}, {"Microsoft Corporation Virtual", "hyperv"}, {"Amazon EC2", "amazon"}, {"Google Compute", "google"},
}

// virtualization is the container that systemd or the engine names, else the hypervisor that the
// firmware names, else "vm" if the processor says that there is one.
func (m *Machine) virtualization(ctx context.Context) func(*Info) {
	name := readText(m.path("run/systemd/container"), maxName)
	for file, engine := range map[string]string{".dockerenv": "docker", "run/.containerenv": "podman"} {
		if _, err := os.Stat(m.path(file)); name == "" && err == nil {
			name = engine
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
			return name == "" && !bytes.HasPrefix(line, []byte("flags"))
		})
	}
	return func(i *Info) { i.Virtualization = name }
}

// cpuModel is the name of the first processor. ARM kernels name none; some name the hardware.
func (m *Machine) cpuModel(ctx context.Context) func(*Info) {
	name := ""
	err := eachLine(ctx, m.path("proc/cpuinfo"), func(line []byte) bool {
		key, value, _ := bytes.Cut(line, []byte(":"))
		switch string(bytes.TrimSpace(key)) {
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

// memory reads sysinfo(2), which also knows the uptime.
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

func (m *Machine) countProcesses(ctx context.Context) func(*Info) {
	n := 0
	if err := m.eachPID(ctx, func(string) bool { n++; return true }); err != nil {
		return nil
	}
	return func(i *Info) { i.Processes = n }
}

func (m *Machine) clock(context.Context) func(*Info) {
	ms, ok := m.opt.now()
	zone, _ := os.Readlink(m.path("etc/localtime"))
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

// eachPID calls fn with the name of each directory of /proc that is a process, until fn returns
// false or ctx ends.
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
