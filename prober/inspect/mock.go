package inspect

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"agentctl/prober"
)

// Mock answers for a mock board with SIMULATED data. It computes them from the board's history, so
// that both agree and thousands of boards need no memory for them. Its methods may be called from any
// goroutine.
type Mock struct {
	seed    uint64
	history *prober.MockHistory
	version string
	booted  time.Time // by the seed, 1 to 1000 hours before NewMock
}

// NewMock returns the mock board with that seed and history. version is its Info.AgentVersion.
func NewMock(seed uint64, history *prober.MockHistory, version string) *Mock {
	return &Mock{seed, history, version, time.Now().Add(-time.Duration(1+seed*7919%1000) * time.Hour)}
}

// value returns the present value of a sensor, by the names of prober.MockHistory.Value.
func (m *Mock) value(name string) float64 {
	v, _ := m.history.Value(name, time.Now())
	return v
}

// pick chooses an element by the board's seed: the same one at each call. The lowest bits of the
// product depend on few bits of the seed, so they are dropped.
func pick[T any](m *Mock, from []T) T {
	const spread = 2654435761 // Knuth's multiplier: neighboring seeds choose different elements
	return from[m.seed*spread>>7%uint64(len(from))]
}

var (
	mockModels = []string{"Raspberry Pi 4 Model B Rev 1.4 (mock)", "Raspberry Pi Zero 2 W Rev 1.0 (mock)", "Orange Pi 5 (mock)", "Raspberry Pi 3 Model B Plus Rev 1.3 (mock)"}
	mockOS     = []string{"Debian GNU/Linux 12 (bookworm)", "Debian GNU/Linux 13 (trixie)", "Ubuntu 24.04.3 LTS"}
	mockKernel = []string{"6.6.31+rpt-rpi-v8", "6.12.25+rpt-rpi-v8", "6.1.0-rpi7-rpi-v8"}
)

// mockCPUs is how many processors a mock board has.
const mockCPUs = 4

// Info implements handlers.Machine.
func (m *Mock) Info(context.Context) Info {
	swap, uptime, synchronized := uint64(100<<20), int64(time.Since(m.booted).Seconds()), true
	return Info{
		AgentVersion: Text(m.version, 64), Hostname: fmt.Sprintf("mock-%d", m.seed), Model: pick(m, mockModels), OS: pick(m, mockOS),
		Kernel: pick(m, mockKernel), Arch: "aarch64", CPUModel: "Cortex-A72", CPUs: mockCPUs, MemTotalBytes: uint64(m.value("mem_total_bytes")),
		SwapTotalBytes: &swap, UptimeS: &uptime, Processes: len(mockProcesses) + mockKernelThreads, TimeMS: time.Now().UnixMilli(),
		ClockSynchronized: &synchronized, Timezone: "Etc/UTC",
	}
}

// mockProcesses are the processes of a mock board. cpu and memory are shares of what the board
// uses.
var mockProcesses = []struct {
	name, user, args string
	cpu, memory      float64
}{
	{"python3", "app", "/usr/bin/python3 /srv/app/main.py --port 8080", 0.55, 0.40},
	{"node", "app", "/usr/bin/node /srv/web/server.js", 0.20, 0.22},
	{"mosquitto", "mosquitto", "/usr/sbin/mosquitto -c /etc/mosquitto/mosquitto.conf", 0.08, 0.03},
	{"dockerd", "root", "/usr/bin/dockerd -H fd://", 0.06, 0.12},
	{"agentctl", "agentctl-device", "/usr/bin/agentctl run", 0.01, 0.02},
	{"systemd-journald", "root", "/usr/lib/systemd/systemd-journald", 0.03, 0.05},
	{"sshd", "root", "sshd: /usr/sbin/sshd -D", 0.01, 0.02},
	{"systemd", "root", "/sbin/init", 0.02, 0.03},
	{"kworker/0:1-events", "root", "", 0.02, 0},
	{"cron", "root", "/usr/sbin/cron -f", 0.01, 0.01},
}

// mockKernelThreads are counted as processes of a mock board, and have no entry in mockProcesses.
const mockKernelThreads = 88

// Processes implements handlers.Machine.
func (m *Mock) Processes(_ context.Context, q ProcessQuery) Processes {
	out := Processes{WindowMS: q.Window.Milliseconds(), Total: len(mockProcesses) + mockKernelThreads, Processes: []Process{}}
	cpu, memory := m.value("cpu_pct")*mockCPUs, m.value("mem_bytes")
	for i, p := range mockProcesses {
		if !strings.Contains(strings.ToLower(p.name), strings.ToLower(q.Name)) {
			continue
		}
		pct := math.Round(cpu*p.cpu*10) / 10
		row := Process{PID: 412 + i*137, PPID: 1, Name: p.name, User: p.user, State: "sleeping", CPUPct: &pct,
			MemBytes: uint64(memory*p.memory) &^ 4095, Threads: 1 + i%5, StartedMS: m.booted.UnixMilli() + int64(i)*900}
		if i == 0 {
			row.State = "running"
		}
		if q.Args {
			row.Args = p.args
		}
		out.Processes = append(out.Processes, row)
	}
	out.Matching = len(out.Processes)
	if q.Name == "" {
		out.Matching = out.Total
	}
	slices.SortStableFunc(out.Processes, func(a, b Process) int {
		if q.SortBy == "memory" {
			return cmp.Compare(b.MemBytes, a.MemBytes)
		}
		return cmp.Compare(*b.CPUPct, *a.CPUPct)
	})
	out.Processes = pageOf(out.Processes, 0, q.Limit)
	return out
}

// Disks implements handlers.Machine.
func (m *Mock) Disks(_ context.Context, skip int) Disks {
	size := uint64(31_268_536_320) << (m.seed % 3)
	pct := round(m.value("disk_pct"))
	list := []Filesystem{mockFilesystem("/", "/dev/mmcblk0p2", "ext4", size, pct), mockFilesystem("/boot/firmware", "/dev/mmcblk0p1", "vfat", 536_870_912, 14.2)}
	out := Disks{Total: len(list), Filesystems: append([]Filesystem{}, pageOf(list, skip, MaxFilesystems)...)}
	if skip == 0 {
		since := uint64(time.Since(m.booted).Seconds())
		read, written, busy := since*9_000, since*21_000, since*4
		out.Disks = []Disk{{Name: "mmcblk0", Model: "SD64G", SizeBytes: size + 600_000_000, ReadBytes: &read, WrittenBytes: &written, BusyMS: &busy}}
	}
	return out
}

// mockFilesystem is a file system that is pct percent full. Its inodes are a third as full, as on a
// board whose files are mostly large.
func mockFilesystem(mount, device, fsType string, size uint64, pct float64) Filesystem {
	used := uint64(float64(size) * pct / 100)
	free := size - used
	inodes := round(pct / 3)
	return Filesystem{Mount: mount, Device: device, Type: fsType, TotalBytes: &size, UsedBytes: &used, FreeBytes: &free, UsedPct: &pct, InodesUsedPct: &inodes}
}

// Network implements handlers.Machine. The addresses are those for documentation (RFC 5737). MAC
// addresses begin with 02, which marks them as locally administered: no vendor has them.
func (m *Mock) Network(_ context.Context, q NetworkQuery) Network {
	host := m.seed%250 + 2
	since := uint64(time.Since(m.booted).Seconds())
	interfaces := []Interface{
		{Name: "lo", Up: true, Loopback: true, MTU: 65536, Addresses: []string{"127.0.0.1/8", "::1/128"}, Counters: &Counters{BytesIn: since * 40, BytesOut: since * 40, PacketsIn: since / 2, PacketsOut: since / 2}},
		{Name: "eth0", Up: true, MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", m.seed>>8&0xff, m.seed&0xff), MTU: 1500, SpeedMbps: 1000,
			Addresses: []string{fmt.Sprintf("192.0.2.%d/24", host)}, Counters: &Counters{BytesIn: since * 5200, BytesOut: since * 1900, PacketsIn: since * 11, PacketsOut: since * 7, DroppedIn: since / 9000}},
	}
	routes := []Route{{Destination: "default", Gateway: "192.0.2.1", Interface: "eth0", Metric: 100}, {Destination: "192.0.2.0/24", Interface: "eth0", Metric: 100}}
	if q.Interface != "" {
		interfaces = slices.DeleteFunc(interfaces, func(i Interface) bool { return i.Name != q.Interface })
		routes = slices.DeleteFunc(routes, func(r Route) bool { return r.Interface != q.Interface })
	}
	out := Network{TotalInterfaces: len(interfaces), TotalRoutes: len(routes)}
	out.Interfaces = append([]Interface{}, pageOf(interfaces, q.Skip, MaxInterfaces)...)
	out.Routes = append([]Route{}, pageOf(routes, q.Skip-len(interfaces), MaxRoutes)...)
	if q.Skip == 0 {
		out.Nameservers = []string{"192.0.2.1"}
	}
	return out
}

// ReadModules implements handlers.Modules: temperature, power, and the traffic of a second.
func (m *Mock) ReadModules(_ context.Context, set prober.ModuleSet) (r prober.ModuleReadings, unfinished prober.ModuleSet) {
	hottest, throttled, under := m.value("temperature.hottest_c"), m.value("power.throttled") > 0, false
	all := prober.ModuleReadings{
		Temperature: &prober.Temperature{HottestC: hottest, Zones: []prober.Zone{{Name: "cpu-thermal", C: hottest}}},
		Power:       &prober.Power{UnderVoltage: &under, Throttled: &throttled},
		Network: &prober.Network{WindowMS: 1000, BytesIn: 5200, BytesOut: 1900, PacketsIn: 11, PacketsOut: 7,
			BytesInPerS: 5200, BytesOutPerS: 1900, PacketsInPerS: 11, PacketsOutPerS: 7},
	}
	return all.Only(set), 0
}
