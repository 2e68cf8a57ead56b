// Package link is the device link of RFC-0002: JSON envelopes over one WebSocket.
//
// A device runs a Client, a relay calls Accept for each connection and then Start or Run
// on the Session that it returns. Pipe connects the two in memory.
//
// # Message flow
//
// r is the relay, d the device. Envelopes in another order end the link with 4400.
//
//	r -> d  hello                 at once
//	d -> r  auth                  within AuthTimeout, else close 4408
//	r -> d  auth_ok               or close 4401 / 4403
//	d -> r  announce              within AnnounceTimeout; may be repeated later
//	r -> d  announce_ack          the link is ready
//	r -> d  cmd                   d -> r  cmd_ack
//	r -> d  cmd_cancel            ends a running cmd or a stream; no answer
//	d -> r  metric, stream_end    frames of an open stream
//	d -> r  event                 an alert, not asked for by the relay
//	both    error                 followed by a close when fatal
//
// Each is one text message, a JSON object with the keys type, msg_id, payload and, in an
// answer, in_reply_to; see codec.go:
//
//	{"type":"cmd","msg_id":"01HZ…","payload":{"tool":"sysecho.NODE.echo.invoke","arguments":{…}}}
//	{"type":"cmd_ack","msg_id":"01HZ…","in_reply_to":"01HZ…","payload":{"ok":true,"result":{…}}}
//
// # States of a link
//
//	device  connecting -> ready -> waiting -> connecting ...
//	        connecting -> waiting | refused | tls_untrusted -> connecting ...
//	relay   handshake -> ready -> closed
//
// A close code says why a link ended; Backoff maps it to the time of the next attempt.
// The states of a command are described in calls.go, session time and the expiry of commands
// in sessiontime.go. On v2.1 a session may continue on the next link: the relay's owner decides
// that in AcceptOptions.Admit, the device's side is Client.startSession.
//
// # Goroutines
//
// Device: Client.Run reads the link in the caller's goroutine. It starts one goroutine that
// writes, one that closes the connection when its context ends, which interrupts a blocked read,
// and two for each command: one answers it, one runs the handler. Commands may outlive their link;
// Run waits for all of them at its end.
//
// Relay: a session reads in the goroutine of Run, or, after Start with a Poller, in a
// goroutine that exists while there is input. A second goroutine exists while frames are
// queued for writing. An idle link has neither: its session waits in the Poller.
//
// # Locks
//
// Session.mu, relayConn.writeMu, Poller.mu, Client.mu and clientLink.mu are leaves: none is
// held while another one of them is acquired, and no callback runs under them. Session.mu
// is not held while the connection is written to.
package link

import (
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Subprotocols of the WebSocket. A device offers v2.1 before v2, and the relay takes v2.1
// when it is offered. v2.1 adds to v2 the session time in the relay's pings, the expiry of
// commands, resumed sessions and the proof in auth; on v2 none of them is spoken.
const (
	Subprotocol   = "agentctl.device.v2"
	Subprotocol21 = "agentctl.device.v2.1"
)

// Path is where a relay serves the link.
const Path = "/v1/device/ws"

// Protocol is the protocol version in hello, on either subprotocol.
const Protocol = "v2"

// Types of envelopes, with the Go type of their payload.
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

	AuthTimeout     = 5 * time.Second  // from the upgrade to auth (RFC-0002 §2.3)
	AnnounceTimeout = 5 * time.Second  // from auth_ok to announce
	PingInterval    = 25 * time.Second // +-20 %, skipped when the peer pinged within it
	IdleTimeout     = 60 * time.Second // without a message, ping or pong received
	writeTimeout    = 10 * time.Second
	tcpUserTimeout  = 30 * time.Second
	// eventInterval spaces the events of a device: 20 a second, which the relay's flood limit
	// admits beside everything else that a device sends.
	eventInterval = 50 * time.Millisecond
	// AdmitTimeout bounds AcceptOptions.Admit: the 5 s in which the older link of a node may
	// answer a ping, and a second for the rest.
	AdmitTimeout = 6 * time.Second
	// maxHandshakeTime bounds the whole handshake on the relay, writes included, and starts
	// again when Admit returns.
	maxHandshakeTime = AuthTimeout + AnnounceTimeout + 2*time.Second
	// ResumeTTL is how long the relay keeps a session whose link was lost (RFC-0002 §7.3).
	ResumeTTL = 30 * time.Second

	MaxInflight      = 64      // commands of a node, queued and sent
	MaxStreams       = 32      // streams of a node
	MaxEvent         = 4 << 10 // the data of an event, bytes
	maxQueuedFrames  = 256     // frames that wait for one device; more end the link with 4413
	maxPendingEvents = 256     // events that wait on the device for a link; the oldest is dropped
	clientQueueSize  = 64      // frames that wait on the device; acks wait for space, metrics are dropped
)

// Hello is the relay's first message.
type Hello struct {
	Protocol     string `json:"protocol"`
	Nonce        string `json:"nonce"` // 32 bytes, base64url
	ServerTimeMS int64  `json:"server_time_ms"`
}

// Auth is the device's answer to hello.
type Auth struct {
	Token        string  `json:"token"`
	AgentVersion string  `json:"agent_version"`
	BootID       string  `json:"boot_id"`     // ULID, new at each process start
	InstanceID   string  `json:"instance_id"` // 32 hex digits, created once per installation
	Name         string  `json:"name,omitempty"`
	Proof        string  `json:"proof,omitempty"` // enrollment.LinkMessage, signed; v2.1 only
	Resume       *Resume `json:"resume,omitempty"`

	// Set by Accept for the authenticator, not part of the message.
	Nonce string `json:"-"` // of hello, which Proof signs
	V21   bool   `json:"-"` // the link speaks Subprotocol21
}

// Resume asks to continue an earlier session. Accept removes it from an Auth on v2.
type Resume struct {
	SessionID string           `json:"session_id"`
	Seen      []ResumedCommand `json:"seen"`
}

// ResumedCommand is one command that the device has received.
type ResumedCommand struct {
	MsgID string `json:"msg_id"`
	State string `json:"state"` // SeenRunning or SeenDone
}

// States of ResumedCommand, a closed set.
const (
	SeenRunning = "running"
	SeenDone    = "done"
)

// AuthOK accepts the device.
type AuthOK struct {
	NodeID            string `json:"node_id"`
	TenantID          string `json:"tenant_id"`
	SessionID         string `json:"session_id"`
	Resumed           bool   `json:"resumed"`
	ServerTimeMS      int64  `json:"server_time_ms"`
	ReconnectSpreadMS int64  `json:"reconnect_spread_ms"`
	Limits            Limits `json:"limits"`
}

// Limits are the bounds that the relay keeps towards the device.
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

// AnnounceAck lists the tools that the relay serves and the capabilities that it rejected.
type AnnounceAck struct {
	Tools    []string   `json:"tools"`
	Rejected []Rejected `json:"rejected"`
}

// Rejected is one capability that the relay does not serve.
type Rejected struct {
	CapID string        `json:"cap_id"`
	Code  manifest.Code `json:"code"`
}

// Cmd is one command (RFC-0005 §6).
type Cmd struct {
	Tool       string         `json:"tool"`
	Arguments  strictjson.Raw `json:"arguments"`
	DeadlineMS int64          `json:"deadline_ms,omitempty"` // relative; only when it differs from the capability's
	TraceID    string         `json:"trace_id,omitempty"`    // 32 hex digits; only when the caller sent one
	Expiry
}

// Expiry says until when a device may start a command, in the session time of the link (see
// sessiontime.go). The zero value sets no bound; it is the only one on v2.
type Expiry struct {
	IssuedAtMS  int64 `json:"issued_at_ms,omitempty"`
	ExpiresInMS int64 `json:"expires_in_ms,omitempty"`
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

// StreamEnd says that the device has ended a stream.
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

// Event is a message that the device sends without being asked.
type Event struct {
	Topic string         `json:"topic"` // TopicAlert
	Data  strictjson.Raw `json:"data"`  // an object of at most MaxEvent bytes, on one line
}

// TopicAlert is the topic of an alert that was raised or cleared. Other topics are
// refused with 4400.
const TopicAlert = "alert"

// ErrorPayload reports an error of the peer.
type ErrorPayload struct {
	Code    manifest.Code `json:"code"`
	Message string        `json:"message"`
}

// Close codes, relay to device (RFC-0002; 4xxx are private codes of this protocol).
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
