package inspect

import "time"

// Info is what a machine is. Fields that are empty could not be read, or the machine does not have
// them.
type Info struct {
	AgentVersion      string   `json:"agent_version"`
	Hostname          string   `json:"hostname,omitempty"`
	Model             string   `json:"model,omitempty"`
	OS                string   `json:"os,omitempty"`
	Kernel            string   `json:"kernel,omitempty"`
	Arch              string   `json:"arch"`
	Virtualization    string   `json:"virtualization,omitempty"` // "kvm", "docker"; "" on hardware
	CPUModel          string   `json:"cpu_model,omitempty"`
	CPUs              int      `json:"cpus"`
	MemTotalBytes     uint64   `json:"mem_total_bytes,omitempty"`
	SwapTotalBytes    *uint64  `json:"swap_total_bytes,omitempty"`
	UptimeS           *int64   `json:"uptime_s,omitempty"`
	Processes         int      `json:"processes,omitempty"`
	TimeMS            int64    `json:"time_ms,omitempty"` // by the machine's clock; 0: not set
	ClockSynchronized *bool    `json:"clock_synchronized,omitempty"`
	Timezone          string   `json:"timezone,omitempty"`
	Unfinished        []string `json:"unfinished,omitempty"`
}

// ProcessQuery asks for processes.
type ProcessQuery struct {
	SortBy string        // "cpu" or "memory"
	Limit  int           // processes in the answer
	Window time.Duration // over which CPU time is measured
	Name   string        // only processes whose name contains this; "": all
	Args   bool          // with the command lines, which may hold secrets
}

// Processes are those that use most.
type Processes struct {
	WindowMS   int64     `json:"window_ms"` // 0: CPU time was not measured
	Total      int       `json:"total"`
	Matching   int       `json:"matching"`
	Processes  []Process `json:"processes"`
	Unfinished []string  `json:"unfinished,omitempty"`
}

// Process is one process.
type Process struct {
	PID       int      `json:"pid"`
	PPID      int      `json:"ppid"`
	Name      string   `json:"name"`
	User      string   `json:"user,omitempty"`
	State     string   `json:"state"`
	CPUPct    *float64 `json:"cpu_pct,omitempty"` // 100 is one processor, fully used
	MemBytes  uint64   `json:"mem_bytes"`         // resident
	Threads   int      `json:"threads"`
	StartedMS int64    `json:"started_ms,omitempty"`
	Args      string   `json:"args,omitempty"`
}

// Disks are the file systems and drives of a machine.
type Disks struct {
	Total       int          `json:"total"` // file systems
	Filesystems []Filesystem `json:"filesystems"`
	Disks       []Disk       `json:"disks,omitempty"`
	Unfinished  []string     `json:"unfinished,omitempty"`
}

// Filesystem is one mounted file system. Without figures it has an error, or Disks is unfinished.
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

// Disk is a drive or a card, with what was read and written since the start of the machine.
type Disk struct {
	Name         string  `json:"name"`
	Model        string  `json:"model,omitempty"`
	SizeBytes    uint64  `json:"size_bytes"`
	Removable    bool    `json:"removable"`
	Rotational   bool    `json:"rotational"`
	ReadBytes    *uint64 `json:"read_bytes,omitempty"`
	WrittenBytes *uint64 `json:"written_bytes,omitempty"`
	BusyMS       *uint64 `json:"busy_ms,omitempty"`
}

// NetworkQuery asks for interfaces and routes. A list of all interfaces, and then all routes, is
// given in pages.
type NetworkQuery struct {
	Interface string // only this one and its routes; "": all
	Skip      int    // elements of the list that earlier pages had
}

// Network is a page of the interfaces and routes of a machine.
type Network struct {
	TotalInterfaces int         `json:"total_interfaces"`
	TotalRoutes     int         `json:"total_routes"`
	Interfaces      []Interface `json:"interfaces"`
	Routes          []Route     `json:"routes"`
	Nameservers     []string    `json:"nameservers,omitempty"` // on the first page
	Unfinished      []string    `json:"unfinished,omitempty"`
}

// Interface is a network interface. Its counters are since the start of the machine.
type Interface struct {
	Name      string   `json:"name"`
	Up        bool     `json:"up"` // switched on, and with a carrier
	Loopback  bool     `json:"loopback,omitempty"`
	MAC       string   `json:"mac,omitempty"`
	MTU       int      `json:"mtu,omitempty"`
	SpeedMbps int      `json:"speed_mbps,omitempty"`
	Addresses []string `json:"addresses,omitempty"` // with the length of the prefix
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
	Destination string `json:"destination"` // "default" or a network
	Gateway     string `json:"gateway,omitempty"`
	Interface   string `json:"interface"`
	Metric      int64  `json:"metric"`
}

// Bounds of answers, as in the schemas of the kinds.
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
