// Package control is the local control socket of the daemon, both ends of it:
// JSON-RPC 2.0 with Content-Length headers on a unix socket.
//
// The flow, c = client and s = server (docs/control.md is the whole document):
//
//	c -> s  hello                    first, within 5 s; until then all else is unauthorized
//	c -> s  snapshot, status         present readings, and the state of the daemon
//	c -> s  start, stop              local push and recording
//	c -> s  set_config               cadences
//	c -> s  burst_subscribe          a faster cadence for a while
//	c -> s  subscribe_metrics        enables or disables push, for all clients
//	c -> s  query_history            what was recorded
//	c -> s  get_config               the daemon's configuration
//	c -> s  capabilities, call       the tools that the device offers its relay
//	s -> c  metrics, state, alert,   events, to clients whose hello named metrics_stream
//	        update_ready, ping
//
// The daemon's end:
//
//	srv, err := control.NewServer(control.Options{Path: path, Prober: p, Status: status})
//	err = srv.Listen()
//	err = srv.Serve(ctx)
//
// A client:
//
//	c, err := control.Dial(ctx, path)
//	defer c.Close()
//	snap, err := c.Snapshot(ctx, "cpu", "memory")
//
// The requests of a client are answered one after the other, in their order.
package control

import (
	"time"

	"agentctl/prober"
)

// ProtocolVersion is the version that hello must name.
const ProtocolVersion = 1

// WellKnownName is the name of the socket in the frozen protocol. It is a symbolic link
// next to the socket.
const WellKnownName = "sys_sensor_v3.rpc"

// Group is the group whose members may use a system daemon's socket.
const Group = "agentctl"

// Methods.
const (
	MethodHello     = "hello"             // HelloParams -> Hello
	MethodSnapshot  = "snapshot"          // {modules?} -> Snapshot
	MethodStart     = "start"             // {modules?} -> {ok, started_modules}
	MethodStop      = "stop"              // none -> {ok}
	MethodSetConfig = "set_config"        // Config -> ConfigResult
	MethodBurst     = "burst_subscribe"   // {modules?, interval_ms, ttl_ms} -> {ok, expires_at}
	MethodSubscribe = "subscribe_metrics" // {enable} -> {ok}
	MethodHistory   = "query_history"     // HistoryQuery -> {ok, items}

	// Additions to the frozen protocol.
	MethodStatus       = "status"       // none -> the value of Options.Status
	MethodGetConfig    = "get_config"   // none -> the value of Options.GetConfig
	MethodCapabilities = "capabilities" // none -> the value of Options.Capabilities
	MethodCall         = "call"         // {tool, arguments?} -> the tool's result
)

// Events.
const (
	EventMetrics     = "metrics"      // Snapshot with seq
	EventState       = "state"        // State
	EventAlert       = "alert"        // Alert
	EventPing        = "ping"         // {}, every 30 s
	EventUpdateReady = "update_ready" // UpdateReady
)

// Capabilities a client may name in hello.
const (
	CapMetricsStream = "metrics_stream" // events to this connection; push on; cpu and mem started
	CapBurstMode     = "burst_mode"
	CapHistoryQuery  = "history_query" // served when there is a history
)

// Codes of errors, with their message (codeNames). They belong to this socket.
const (
	CodeParse          = -32700 // parse_error
	CodeInvalidRequest = -32600 // invalid_request
	CodeMethodNotFound = -32601 // method_not_found
	CodeInvalidParams  = -32001 // invalid_params
	CodeUnauthorized   = -32040 // unauthorized
	CodeNotSupported   = -32050 // not_supported
	CodeRateLimited    = -32060 // rate_limited
	CodeInternal       = -32099 // internal
)

// Bounds of what a client may use. A request beyond one is refused, never queued.
const (
	// MaxClients bounds the clients at a time: connections whose hello was valid.
	MaxClients = 16
	// Of these, users other than root and the daemon's own get at most maxOtherClients together,
	// and each at most maxUserClients: the operator can always ask, and one user leaves places
	// to the others of the group.
	maxOtherClients = 12
	maxUserClients  = 8
	// maxNewConns bounds the connections before their hello. A new one replaces the oldest of
	// the user that has the most.
	maxNewConns = 8
	// MaxMessage bounds a message from a client, in bytes. A longer one closes its
	// connection.
	MaxMessage = 1 << 20
	// MaxParams bounds the params of a request, in bytes.
	MaxParams = 64 << 10

	maxHeader = 1 << 10 // bytes of a header line
	maxLines  = 8       // header lines of a message
	maxID     = 128     // bytes of a request's id
	maxCommas = 4096    // commas of a message, about its elements and members
	maxBursts = 8       // bursts at a time
	// maxQueue and maxNotices bound the events that wait for a slow client: metrics and
	// states, and alerts and updates.
	maxQueue   = 16
	maxNotices = 32
	// maxSmallMessage is the length, in bytes, beyond which a message needs the server's
	// message buffer.
	maxSmallMessage = 16 << 10
	maxBurstTTL     = 10 * time.Minute
)

// Bounds of an answer of query_history, in bytes of items; query_history.go explains them.
const (
	maxAnswer      = 16 << 20 // the whole answer
	maxSmallAnswer = 32 << 10 // without the server's answer slot
	maxKeptAnswer  = 1 << 20  // kept by its holder: a day in steps of a minute, with all modules
	keptPart       = 64 << 10 // kept in one piece
	writeSize      = 32 << 10 // written at a time, of a longer answer
	maxQueries     = 2        // count passes at a time
	historyPage    = 2048     // items that HistoryEach requests at a time
)

// Times.
const (
	helloTimeout = 5 * time.Second      // from the connection to a valid hello
	frameTimeout = 10 * time.Second     // from a message's first byte to its last
	writeTimeout = 5 * time.Second      // for a client to read; then it is disconnected
	callTimeout  = 5 * time.Second      // a method
	queryTimeout = time.Minute          // query_history, until its last byte is written
	pingInterval = 30 * time.Second     // to a client that takes events
	drainTimeout = time.Second          // for a request in progress when the daemon stops
	newConnGrace = drainTimeout * 3 / 4 // for a new client to send its request then
)

// HelloParams are the params of hello.
type HelloParams struct {
	// AppVersion is the client's version, at most 256 bytes.
	AppVersion      string `json:"app_version"`
	ProtocolVersion int    `json:"protocol_version"`
	// Token is not empty and at most 4 KiB long.
	Token string `json:"token"`
	// Capabilities are what the client wants; an unknown one is an error.
	Capabilities []string `json:"capabilities,omitempty"`
}

// Hello is the answer to hello.
type Hello struct {
	ServerVersion   string `json:"server_version"`
	ProtocolVersion int    `json:"protocol_version"`
	// Capabilities are those that the server has, whatever was asked for.
	Capabilities []string `json:"capabilities"`
	SessionID    string   `json:"session_id"` // UUID v4
}

// Snapshot is the readings of modules at one moment: the answer to snapshot, and the event
// metrics. A module that was not asked for, or is not due, is missing. The members and
// fields are those of the sensor catalogue.
type Snapshot struct {
	// TS is the trusted wall clock, milliseconds since 1970.
	TS int64 `json:"ts"`
	// Seq counts the events metrics, from 1. The answer to snapshot has none.
	Seq    uint64  `json:"seq,omitempty"`
	CPU    *CPU    `json:"cpu,omitempty"`
	Memory *Memory `json:"memory,omitempty"`
	Disk   *Disk   `json:"disk,omitempty"`
	Load   *Load   `json:"load,omitempty"`

	// ModuleReadings are the optional modules, each as a member of the snapshot.
	prober.ModuleReadings
}

// CPU is the module cpu.
type CPU struct {
	// UsagePercent is the busy share of all CPUs together, 0..100.
	UsagePercent float64 `json:"usage_percent"`
}

// Memory is the module mem, in MiB, rounded down.
type Memory struct {
	Total uint64 `json:"total"`
	// Used is Total less what is available to programs.
	Used uint64 `json:"used"`
}

// Disk is the module disk.
type Disk struct {
	// UsagePercent is 0..100, as df computes it.
	UsagePercent float64 `json:"usage_percent"`
}

// Load is the module load: the averages of the kernel.
type Load struct {
	Load1  float64 `json:"load_1m"`
	Load5  float64 `json:"load_5m"`
	Load15 float64 `json:"load_15m"`
}

// State is the event state, sent after each start, stop and burst_subscribe, and after a
// hello with metrics_stream.
type State struct {
	TS    int64  `json:"ts"`    // milliseconds since 1970
	Phase string `json:"phase"` // start, stop or burst
	// Reason is the method that caused the event.
	Reason string `json:"reason,omitempty"`
	// Extra is {modules} for start and {interval_ms, expires_at} for burst.
	Extra any `json:"extra,omitempty"`
}

// Alert is the event alert: a metric went beyond a threshold, or came back (then its level
// is info). Package prober/alert makes them.
type Alert struct {
	Level     string  `json:"level"` // info, warn or error
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Threshold float64 `json:"threshold"`
	RuleID    string  `json:"rule_id,omitempty"`
	// Message is one line for a person.
	Message string `json:"message"`
	TS      int64  `json:"ts"` // milliseconds since 1970
}

// UpdateReady is the event update_ready: a newer version is installed and takes effect when
// the component is restarted.
type UpdateReady struct {
	Component string `json:"component"`
	Version   string `json:"version"`
}

// Config is what set_config changes; zero values change nothing.
type Config struct {
	// BaseIntervalMS is the base cadence of the sampler, 100..60000.
	BaseIntervalMS int64 `json:"base_interval_ms,omitempty"`
	// ModuleIntervals are 100..60000, by name of the module.
	ModuleIntervals map[string]int64 `json:"module_intervals,omitempty"`
	// Persist saves the change, so that it survives a restart.
	Persist bool `json:"persist,omitempty"`
}

// ConfigResult is the answer to set_config.
type ConfigResult struct {
	OK             bool  `json:"ok"`
	BaseIntervalMS int64 `json:"base_interval_ms"` // now in force
	// EffectiveIntervals are those of the modules that the request named.
	EffectiveIntervals map[string]int64 `json:"effective_intervals"`
	// Persisted reports whether the change survives a restart, if that was requested.
	Persisted *bool `json:"persisted,omitempty"`
}

// startResult is the answer to start.
type startResult struct {
	OK             bool     `json:"ok"`
	StartedModules []string `json:"started_modules"`
}

// burstResult is the answer to burst_subscribe.
type burstResult struct {
	OK bool `json:"ok"`
	// ExpiresAt is the end of the burst, milliseconds since 1970.
	ExpiresAt int64 `json:"expires_at"`
}

// okResult is the answer to stop and subscribe_metrics.
type okResult struct {
	OK bool `json:"ok"`
}
