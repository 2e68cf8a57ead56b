// Package control is the local control socket of the daemon, both ends of it:
// JSON-RPC 2.0 with Content-Length headers on a unix socket.
//
// The flow, c = client and s = server (docs/control.md is the whole document):
//
//	c -> s  hello                    first, within 5 s, else everything is unauthorized
//	c -> s  snapshot, status         what the machine and the daemon say now
//	c -> s  start, stop              local push and recording
//	c -> s  set_config               cadences
//	c -> s  burst_subscribe          a faster cadence for a while
//	c -> s  subscribe_metrics        the switch of push, for everybody
//	c -> s  query_history            what was recorded
//	c -> s  get_config               what the daemon is configured with
//	c -> s  capabilities, call       the tools that the device has for its relay
//	s -> c  metrics, state, alert,   events, only to clients that said metrics_stream
//	        update_ready, ping
//
// A daemon joins it so:
//
//	srv, err := control.NewServer(control.Options{Path: path, Prober: p, Status: status})
//	err = srv.Listen()  // what goes wrong here is for a person to read
//	err = srv.Serve(ctx)
//
// and a person's command so:
//
//	c, err := control.Dial(ctx, path)
//	defer c.Close()
//	snap, err := c.Snapshot(ctx, "cpu", "memory")
//
// The requests of one client are worked off one after the other, in their order.
package control

import (
	"time"

	"agentctl/prober"
)

// ProtocolVersion is the version that hello agrees on.
const ProtocolVersion = 1

// WellKnownName is the name the document gives the socket. It is a symbolic link
// beside the socket.
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

	// Additions to the frozen document.
	MethodStatus       = "status"       // none -> what Options.Status gives
	MethodGetConfig    = "get_config"   // none -> what Options.GetConfig gives
	MethodCapabilities = "capabilities" // none -> what Options.Capabilities gives
	MethodCall         = "call"         // {tool, arguments?} -> what the tool answers
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

// Codes of errors, with their message. They are used on this socket and nowhere else.
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

// Sizes and times. What is above a bound is refused, never queued.
const (
	MaxClients      = 16        // connections at a time
	MaxMessage      = 1 << 20   // a message, bytes; a longer one closes its connection
	MaxParams       = 64 << 10  // the params of a request, bytes
	maxHeader       = 1 << 10   // a header line, bytes
	maxLines        = 8         // header lines of a message
	maxID           = 128       // the id of a request, bytes
	maxCommas       = 4096      // commas of a message: elements and members, about
	maxAnswer       = 16 << 20  // a message to a client, bytes
	maxBursts       = 8         // bursts at a time
	maxQueue        = 16        // events that wait for a client that reads slowly
	historyPage     = 2048      // items HistoryEach asks for at a time
	maxQueries      = 2         // query_history that look for their rows at a time
	maxSmallAnswer  = 32 << 10  // items of query_history, bytes; of longer answers there is one at a time
	maxKeptAnswer   = 256 << 10 // beyond it they are not kept in memory
	writeSize       = 32 << 10  // of a longer one, what is written at a time, bytes
	maxNotices      = 32        // alerts and updates that wait likewise
	maxSmallMessage = 16 << 10  // a longer message waits for its turn among those like it

	helloTimeout = 5 * time.Second      // from the connection to a good hello
	frameTimeout = 10 * time.Second     // from a message's first byte to its last
	writeTimeout = 5 * time.Second      // a client that reads nothing for so long is dropped
	callTimeout  = 5 * time.Second      // a method
	queryTimeout = time.Minute          // query_history, until its last byte is written
	pingInterval = 30 * time.Second     // to a client that takes events
	drainTimeout = time.Second          // for the request in work when the daemon stops
	newConnGrace = drainTimeout * 3 / 4 // from its connection, what a client may still ask then

	maxBurstTTL = 10 * time.Minute
)

// HelloParams open a connection.
type HelloParams struct {
	AppVersion      string   `json:"app_version"` // at most 256 bytes
	ProtocolVersion int      `json:"protocol_version"`
	Token           string   `json:"token"` // not empty; at most 4 KiB
	Capabilities    []string `json:"capabilities,omitempty"`
}

// Hello is the answer to hello.
type Hello struct {
	ServerVersion   string   `json:"server_version"`
	ProtocolVersion int      `json:"protocol_version"`
	Capabilities    []string `json:"capabilities"` // what is served, not what was asked for
	SessionID       string   `json:"session_id"`   // UUID v4
}

// Snapshot is what the modules say at one moment: the answer to snapshot, and the
// event metrics. A module that was not asked for, or is not due, is missing.
type Snapshot struct {
	TS     int64   `json:"ts"`            // trusted wall clock, milliseconds since 1970
	Seq    uint64  `json:"seq,omitempty"` // metrics only; rises by one an event
	CPU    *CPU    `json:"cpu,omitempty"`
	Memory *Memory `json:"memory,omitempty"`
	Disk   *Disk   `json:"disk,omitempty"`
	Load   *Load   `json:"load,omitempty"`

	prober.ModuleReadings // the optional modules, as members of Snapshot
}

// CPU is the module cpu.
type CPU struct {
	UsagePercent float64 `json:"usage_percent"` // all CPUs together, 0..100
}

// Memory is the module mem. MiB, rounded down.
type Memory struct {
	Total uint64 `json:"total"`
	Used  uint64 `json:"used"` // total less what is available
}

// Disk is the module disk.
type Disk struct {
	UsagePercent float64 `json:"usage_percent"` // 0..100, as df counts
}

// Load is the module load.
type Load struct {
	Load1  float64 `json:"load_1m"`
	Load5  float64 `json:"load_5m"`
	Load15 float64 `json:"load_15m"`
}

// State is the event state: one after each start, stop and burst_subscribe.
type State struct {
	TS     int64  `json:"ts"`               // milliseconds since 1970
	Phase  string `json:"phase"`            // start, stop, burst
	Reason string `json:"reason,omitempty"` // the method that caused it
	Extra  any    `json:"extra,omitempty"`  // start: {modules}; burst: {interval_ms, expires_at}
}

// Alert is the event alert: a figure went beyond a threshold, or came back (then its
// level is info).
type Alert struct {
	Level     string  `json:"level"` // info, warn, error
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Threshold float64 `json:"threshold"`
	RuleID    string  `json:"rule_id,omitempty"`
	Message   string  `json:"message"` // one line for a person
	TS        int64   `json:"ts"`      // milliseconds since 1970
}

// UpdateReady is the event update_ready: a newer version is there, and comes into
// force when the component is started again.
type UpdateReady struct {
	Component string `json:"component"`
	Version   string `json:"version"`
}

// Config is what set_config changes; what is zero stays as it is.
type Config struct {
	BaseIntervalMS  int64            `json:"base_interval_ms,omitempty"` // 100..60000
	ModuleIntervals map[string]int64 `json:"module_intervals,omitempty"` // by module, 100..60000
	Persist         bool             `json:"persist,omitempty"`
}

// ConfigResult is the answer to set_config.
type ConfigResult struct {
	OK                 bool             `json:"ok"`
	BaseIntervalMS     int64            `json:"base_interval_ms"`
	EffectiveIntervals map[string]int64 `json:"effective_intervals"` // of each module that was asked for
	Persisted          *bool            `json:"persisted,omitempty"` // only when asked for: whether it outlives the daemon
}

type startResult struct {
	OK             bool     `json:"ok"`
	StartedModules []string `json:"started_modules"`
}

type burstResult struct {
	OK        bool  `json:"ok"`
	ExpiresAt int64 `json:"expires_at"` // milliseconds since 1970
}

type okResult struct {
	OK bool `json:"ok"`
}
