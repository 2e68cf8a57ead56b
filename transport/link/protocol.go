// Package link is the device link of RFC-0002: JSON envelopes over one WebSocket.
//
// The flow, r = relay and d = device:
//
//	r -> d  hello                 at once
//	d -> r  auth                  within 5 s, else close 4408
//	r -> d  auth_ok               or close 4401 / 4403
//	d -> r  announce              within 5 s; may be repeated later
//	r -> d  announce_ack          the link is ready
//	r -> d  cmd                   d -> r  cmd_ack
//	r -> d  cmd_cancel            ends a running cmd or a stream; no answer
//	d -> r  metric, stream_end    frames of an open stream
//	both    error                 followed by a close when fatal
//
// A device uses Client; a relay uses Accept and the Session that it returns. Pipe is
// the in-memory pair of both.
package link

import (
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Subprotocol is the WebSocket subprotocol of the link.
const Subprotocol = "agentctl.device.v2"

// Path is where a relay serves the link.
const Path = "/v1/device/ws"

// Protocol is the word in hello.
const Protocol = "v2"

// Types of envelopes, with their payload.
const (
	TypeHello       = "hello"        // Hello
	TypeAuth        = "auth"         // Auth
	TypeAuthOK      = "auth_ok"      // AuthOK
	TypeAnnounce    = "announce"     // Announce
	TypeAnnounceAck = "announce_ack" // AnnounceAck
	TypeMetric      = "metric"       // Metric
	TypeCmd         = "cmd"          // Cmd
	TypeCmdAck      = "cmd_ack"      // CmdAck
	TypeCmdCancel   = "cmd_cancel"   // {} with in_reply_to
	TypeStreamEnd   = "stream_end"   // StreamEnd
	TypeError       = "error"        // ErrorPayload
	TypeEvent       = "event"        // Event
)

// Sizes and times of the link.
const (
	MaxFrame    = 64 << 10  // any frame but announce, bytes
	MaxAnnounce = 256 << 10 // an announce, bytes

	AuthTimeout      = 5 * time.Second  // from the upgrade to auth (RFC-0002 §2.3)
	AnnounceTimeout  = 5 * time.Second  // from auth_ok to announce
	PingInterval     = 25 * time.Second // +-20 %, skipped when the peer pinged within it
	IdleTimeout      = 60 * time.Second // without a message, ping or pong received
	writeTimeout     = 10 * time.Second
	tcpUserTimeout   = 30 * time.Second
	maxHandshakeTime = AuthTimeout + AnnounceTimeout + 2*time.Second // whatever the peer does

	MaxInflight      = 64      // commands a node, queued and sent
	MaxStreams       = 32      // streams a node
	maxQueuedFrames  = 256     // frames that wait for one device; more end the link with 4413
	MaxEvent         = 4 << 10 // the data of an event, bytes
	maxPendingEvents = 32      // events that wait on the device for a link; the oldest makes room
	clientQueueSize  = 64      // frames that wait on the device; acks wait for room, metrics are dropped
)

// Hello is the relay's first word.
type Hello struct {
	Protocol     string `json:"protocol"`
	Nonce        string `json:"nonce"` // 32 bytes, base64url
	ServerTimeMS int64  `json:"server_time_ms"`
}

// Auth is the device's answer to hello.
type Auth struct {
	Token        string  `json:"token"`
	AgentVersion string  `json:"agent_version"`
	BootID       string  `json:"boot_id"`     // ULID, new at every process start
	InstanceID   string  `json:"instance_id"` // 32 hex digits, made once an install
	Name         string  `json:"name,omitempty"`
	Proof        string  `json:"proof,omitempty"`
	Resume       *Resume `json:"resume,omitempty"`
}

// Resume asks to go on with an earlier session.
type Resume struct {
	SessionID string           `json:"session_id"`
	Seen      []ResumedCommand `json:"seen"`
}

// ResumedCommand is one command that the device knows.
type ResumedCommand struct {
	MsgID string `json:"msg_id"`
	State string `json:"state"` // SeenRunning or SeenDone
}

// States of ResumedCommand, a closed set.
const (
	SeenRunning = "running"
	SeenDone    = "done"
)

// AuthOK admits the device.
type AuthOK struct {
	NodeID            string `json:"node_id"`
	TenantID          string `json:"tenant_id"`
	SessionID         string `json:"session_id"`
	Resumed           bool   `json:"resumed"`
	ServerTimeMS      int64  `json:"server_time_ms"`
	ReconnectSpreadMS int64  `json:"reconnect_spread_ms"`
	Limits            Limits `json:"limits"`
}

// Limits tells the device what the relay will use at most.
type Limits struct {
	MaxInflight int `json:"max_inflight"`
	MaxStreams  int `json:"max_streams"`
}

// Announce is the device's manifest (RFC-0005 §9).
type Announce struct {
	ManifestVersion int            `json:"manifest_version"`
	ManifestSHA256  string         `json:"manifest_sha256"` // hex, of the raw bytes of Capabilities
	Capabilities    strictjson.Raw `json:"capabilities"`
}

// AnnounceAck lists what is served and what is not.
type AnnounceAck struct {
	Tools    []string   `json:"tools"`
	Rejected []Rejected `json:"rejected"`
}

// Rejected is a capability that is not served.
type Rejected struct {
	CapID string        `json:"cap_id"`
	Code  manifest.Code `json:"code"`
}

// Cmd is one command (RFC-0005 §6).
type Cmd struct {
	Tool       string         `json:"tool"`
	Arguments  strictjson.Raw `json:"arguments"`
	DeadlineMS int64          `json:"deadline_ms,omitempty"` // relative; only when it is not the capability's
	TraceID    string         `json:"trace_id,omitempty"`    // 32 hex digits; only when the caller sent one
}

// CmdAck is the answer to a Cmd.
type CmdAck struct {
	OK     bool           `json:"ok"`
	Result strictjson.Raw `json:"result,omitempty"`
	Code   manifest.Code  `json:"code,omitempty"`
	Detail string         `json:"detail,omitempty"` // at most 200 printable ASCII; never shown to a caller
}

// Subscribed is the result of a subscribe command.
type Subscribed struct {
	StreamID   string `json:"stream_id"`
	IntervalMS int64  `json:"interval_ms"`
}

// Metric is one frame of a stream.
type Metric struct {
	StreamID string         `json:"stream_id"`
	Seq      int64          `json:"seq"` // from 1; a gap is a frame that the device dropped
	Sample   strictjson.Raw `json:"sample"`
}

// StreamEnd ends a stream from the device's side.
type StreamEnd struct {
	StreamID string `json:"stream_id"`
	Reason   string `json:"reason"` // EndCanceled, EndHandlerError or EndShutdown
}

// Reasons of StreamEnd, a closed set.
const (
	EndCanceled     = "cancelled"
	EndHandlerError = "handler_error"
	EndShutdown     = "shutdown"
)

// Event is news of the board that nobody asked for.
type Event struct {
	Topic string         `json:"topic"` // TopicAlert
	Data  strictjson.Raw `json:"data"`  // an object of at most MaxEvent bytes, on one line
}

// TopicAlert is the one topic of Event: an alert of the board was raised or cleared.
const TopicAlert = "alert"

// ErrorPayload reports a fault of the peer.
type ErrorPayload struct {
	Code    manifest.Code `json:"code"`
	Message string        `json:"message"`
}

// Close codes, relay to device (RFC-0002; 4xxx are the application's).
const (
	CloseNormal          = 1000
	CloseGoingAway       = 1001
	CloseServiceRestart  = 1012
	CloseBadFrame        = 4400
	CloseAuthFailed      = 4401
	CloseForbidden       = 4403
	CloseTimeout         = 4408 // auth or idle
	CloseSuperseded      = 4409
	CloseTooLarge        = 4413 // or backpressure
	CloseManifestInvalid = 4422
	CloseUpgradeRequired = 4426
	CloseRateLimited     = 4429
	CloseDraining        = 4503
)
