package inspect

import "time"

// The types of answers. Their JSON is the output of the kinds system.info, system.processes,
// system.disks and system.network (package manifest has the schemas). A pointer or an optional field
// is empty where the machine does not have the figure, or where the part is in Unfinished.

// Info describes a machine.
type Info struct {
	AgentVersion string `json:"agent_version"`
	Hostname     string `json:"hostname,omitempty"`
	Model        string `json:"model,omitempty"`
	OS           string `json:"os,omitempty"`
	Kernel       string `json:"kernel,omitempty"`
	// Architecture of Go (arm64) until the part "kernel" replaces it by that of uname (aarch64).
	Arch           string `json:"arch"`
	Virtualization string `json:"virtualization,omitempty"` // "kvm", "docker"; "" on hardware
	CPUModel       string `json:"cpu_model,omitempty"`
	// Processors that this process may run on: fewer than the machine has if its affinity is limited.
	CPUs              int      `json:"cpus"`
	MemTotalBytes     uint64   `json:"mem_total_bytes,omitempty"`
	SwapTotalBytes    *uint64  `json:"swap_total_bytes,omitempty"`
	UptimeS           *int64   `json:"uptime_s,omitempty"`
	Processes         int      `json:"processes,omitempty"`
	TimeMS            int64    `json:"time_ms,omitempty"` // Options.Now; 0: unknown
	ClockSynchronized *bool    `json:"clock_synchronized,omitempty"`
	Timezone          string   `json:"timezone,omitempty"`
	Unfinished        []string `json:"unfinished,omitempty"`
}

// ProcessQuery selects processes.
type ProcessQuery struct {
	SortBy string        // "cpu" or "memory", largest first
	Limit  int           // of processes in the answer
	Window time.Duration // time over which CPU use is measured
	Name   string        // only processes whose name contains this, in either case; "": all
	Args   bool          // include command lines, which may contain secrets
}

// Processes is the answer to a ProcessQuery. Where the time was up during the first reading, Total
// also counts processes that were not read, and Matching and Processes have only those that were.
type Processes struct {
	WindowMS   int64     `json:"window_ms"` // as measured; 0: CPU use was not measured
	Total      int       `json:"total"`     // on the machine
	Matching   int       `json:"matching"`  // selected by ProcessQuery.Name
	Processes  []Process `json:"processes"` // the first Limit of them
	Unfinished []string  `json:"unfinished,omitempty"`
}

// Process is one process. Name is the kernel's, which the process may change: at most 15 bytes, more
// for some threads of the kernel. User is the name of its effective user.
type Process struct {
	PID   int    `json:"pid"`
	PPID  int    `json:"ppid"`
	Name  string `json:"name"`
	User  string `json:"user,omitempty"`
	State string `json:"state"`
	// 100 is one fully used processor; nil: there was no second reading in time.
	CPUPct   *float64 `json:"cpu_pct,omitempty"`
	MemBytes uint64   `json:"mem_bytes"` // resident memory
	Threads  int      `json:"threads"`
	// 0: Options.Now does not know the time.
	StartedMS int64  `json:"started_ms,omitempty"`
	Args      string `json:"args,omitempty"`
}

// Disks is a page of the file systems of a machine; the first page also has the drives.
type Disks struct {
	Total       int          `json:"total"` // of file systems on the machine
	Filesystems []Filesystem `json:"filesystems"`
	Disks       []Disk       `json:"disks,omitempty"`
	Unfinished  []string     `json:"unfinished,omitempty"`
}

// Filesystem is one mounted file system. If it has no figures, Error says why, or "filesystems" is
// in Disks.Unfinished. UsedPct is that of df(1): used space by used and free. FreeBytes is what
// ordinary users may write, so UsedBytes and FreeBytes are less than TotalBytes where blocks are
// reserved for root.
type Filesystem struct {
	Mount         string   `json:"mount"`
	Device        string   `json:"device,omitempty"`
	Type          string   `json:"type"`
	ReadOnly      bool     `json:"read_only"`
	TotalBytes    *uint64  `json:"total_bytes,omitempty"`
	UsedBytes     *uint64  `json:"used_bytes,omitempty"`
	FreeBytes     *uint64  `json:"free_bytes,omitempty"`
	UsedPct       *float64 `json:"used_pct,omitempty"`
	InodesUsedPct *float64 `json:"inodes_used_pct,omitempty"`
	Error         string   `json:"error,omitempty"` // NoAnswer or Unreadable
}

// Reasons why a file system has no figures.
const (
	NoAnswer   = "no_answer" // statfs hangs: a dead network mount or disk
	Unreadable = "unreadable"
)

// Disk is a drive or a memory card. Its counters are since the machine started.
type Disk struct {
	Name         string  `json:"name"`
	Model        string  `json:"model,omitempty"`
	SizeBytes    uint64  `json:"size_bytes"`
	Removable    bool    `json:"removable"`
	Rotational   bool    `json:"rotational"`
	ReadBytes    *uint64 `json:"read_bytes,omitempty"`
	WrittenBytes *uint64 `json:"written_bytes,omitempty"`
	// Time with at least one operation in progress.
	BusyMS *uint64 `json:"busy_ms,omitempty"`
}

// NetworkQuery selects interfaces and routes. Pages go through one list: all interfaces, then all
// routes.
type NetworkQuery struct {
	Interface string // only this interface and its routes; "": all
	Skip      int    // how many elements of the list were on earlier pages
}

// Network is a page of the interfaces and routes of a machine. A total is 0 also if its part is in
// Unfinished, so an empty page is not always the last one.
type Network struct {
	TotalInterfaces int         `json:"total_interfaces"`
	TotalRoutes     int         `json:"total_routes"`
	Interfaces      []Interface `json:"interfaces"`
	Routes          []Route     `json:"routes"`
	Nameservers     []string    `json:"nameservers,omitempty"` // on the first page only
	Unfinished      []string    `json:"unfinished,omitempty"`
}

// Interface is a network interface. Its counters are since the interface was created; nil if
// /proc/net/dev has no such interface or could not be read.
type Interface struct {
	Name      string   `json:"name"`
	Up        bool     `json:"up"` // enabled, and with a carrier
	Loopback  bool     `json:"loopback,omitempty"`
	MAC       string   `json:"mac,omitempty"`
	MTU       int      `json:"mtu,omitempty"`
	SpeedMbps int      `json:"speed_mbps,omitempty"`
	Addresses []string `json:"addresses,omitempty"` // with the prefix length: 192.0.2.7/24
	*Counters
}

// Counters are the counters of an interface.
type Counters struct {
	BytesIn    uint64 `json:"bytes_in"`
	BytesOut   uint64 `json:"bytes_out"`
	PacketsIn  uint64 `json:"packets_in"`
	PacketsOut uint64 `json:"packets_out"`
	ErrorsIn   uint64 `json:"errors_in"`
	ErrorsOut  uint64 `json:"errors_out"`
	DroppedIn  uint64 `json:"dropped_in"`
	DroppedOut uint64 `json:"dropped_out"`
}

// Route is one route.
type Route struct {
	Destination string `json:"destination"` // "default" or a network: 192.0.2.0/24
	Gateway     string `json:"gateway,omitempty"`
	Interface   string `json:"interface"`
	Metric      int64  `json:"metric"`
}

// Bounds of answers, as in the schemas. maxName to maxArgs are characters of texts.
const (
	MaxFilesystems = 200
	MaxDisks       = 64
	MaxInterfaces  = 100
	MaxRoutes      = 500

	maxName      = 64
	maxPath      = 256
	maxArgs      = 512
	maxCount     = 1<<53 - 1 // the largest count of the schemas
	maxAddresses = 32
)
