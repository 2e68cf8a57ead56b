package relay

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/audit"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/fleet"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/triage"
	"agentctl/transport/clock"
	"agentctl/transport/edge"
)

// DefaultListen is where a relay listens if Options do not say.
const DefaultListen = "127.0.0.1:8460"

// Parts of a relay, for Options.Parts. They share the state directory and the event log, but
// no listener.
const (
	PartMCP = "mcp" // boards, tools, metric streams and MCP, on Listen
	PartSSE = "sse" // the event gateway, on a separate listener
)

// Built-in plugins that Options.DisabledPlugins may name. The control plane is always
// loaded.
const (
	PluginTickets   = "tickets"
	PluginDirectory = "directory"
	PluginFleet     = fleet.Name
	PluginTriage    = triage.Name
)

// Values of Options.TLS.
const (
	TLSOwn   = "own"   // a certificate of an authority that the relay makes and keeps
	TLSFiles = "files" // Options.TLSCert and TLSKey
	TLSOff   = "off"   // plain HTTP
)

// Values of Options.PluginSandbox: how the programs of plugins are kept from the state directory.
const (
	SandboxLandlock = process.SandboxLandlock // by Landlock; where it is not available they are not started
	SandboxOff      = process.SandboxOff      // not at all: they can read the relay's keys
)

// PluginConformance is the built-in plugin of test tools for conformance suites, which
// Options.Conformance loads.
const PluginConformance = "conformance"

// EventLogOptions bound the event log; 0 is the default of eventlog.Options.
type EventLogOptions struct {
	MaxBytes            int64         // of all its files
	MaxAge              time.Duration // of events
	CallsMaxAge         time.Duration // of events about calls
	TenantMaxBytes      int64         // of events of one tenant, unless it is the only one
	TenantCallsMaxBytes int64         // of events about calls of one tenant
}

// Bounds of the sizes in EventLogOptions.
const (
	minEventBytes = 1 << 20
	maxEventBytes = 64 << 30
)

// check refuses sizes that make no sense together.
func (o *EventLogOptions) check() error {
	for name, n := range map[string]int64{"EventsMaxBytes": o.MaxBytes, "EventsTenantMaxBytes": o.TenantMaxBytes, "EventsTenantCallsMaxBytes": o.TenantCallsMaxBytes} {
		if n != 0 && (n < minEventBytes || n > maxEventBytes) {
			return badOption(name, "must be 1 to %d MB", maxEventBytes>>20)
		}
	}
	for name, d := range map[string]time.Duration{"EventsMaxAge": o.MaxAge, "EventsCallsMaxAge": o.CallsMaxAge} {
		if d != 0 && d < time.Minute {
			return badOption(name, "must be at least a minute")
		}
	}
	return nil
}

// Options configure a relay. Only StateDir is required. Open checks them before it creates
// or changes anything; what it cannot serve is an *OptionError, from which the caller makes
// a message in the words of its flags.
type Options struct {
	StateDir string // keys, tokens, nodes, event log and audit log
	// AuditMaxBytes and AuditMaxAge bound the audit log; 0 is the default of audit.Options.
	AuditMaxBytes int64
	AuditMaxAge   time.Duration
	// Events bounds the event log.
	Events        EventLogOptions
	Listen        string       // HOST:PORT; default DefaultListen
	Listener      net.Listener // served instead of Listen; Open takes it over
	MetricsListen string       // HOST:PORT of /metrics; "" serves none
	Public        string       // URL that clients use; default: the listener's
	Audience      string       // see auth.Options

	TLS       string    // TLSOwn, TLSFiles or TLSOff; "": see checkTLS
	TLSCert   string    // PEM files, both or none; read again when they change
	TLSKey    string    // of TLSCert
	BuildTime time.Time // of this binary: when certificates of TLSOwn begin to be valid; see clockGuard too
	Insecure  bool      // allow plain HTTP beyond loopback, behind a TLS proxy

	// TrustedProxies are the proxies whose X-Forwarded-For is believed: limits by address then
	// count a proxy's clients, and not the proxy. The gateway (SSE) has them too.
	TrustedProxies edge.TrustedProxies

	// StartDegraded serves boards without the event log if that is damaged, missing or not
	// the relay's (degraded.go). A log that can be opened is used.
	StartDegraded bool

	// AcceptClock lets boards link although the clock is before the build or before the newest
	// event (clockGuard). Now is the wall clock, default time.Now, and Synchronized reports
	// whether NTP keeps it right; default clock.NTPSynchronized.
	AcceptClock  bool
	Now          func() time.Time
	Synchronized func() bool

	AllowOrigin []string // origins of pages that may call; default none
	// AllowOriginFile has more of them, one a line; # begins a comment. Reload reads it again.
	AllowOriginFile string
	Anonymous       bool      // on loopback only: a caller without a token may read
	ScopelessUntil  time.Time // see auth.Options
	RequireProof    bool      // refuse boards whose token is not bound to a key

	Plugins         []func(*kernel.Kernel) kernel.Plugin // loaded by Open
	DisabledPlugins []string                             // built-in plugins that are not loaded
	// TriagePriorities are the priorities of tickets that alerts open, by level or rule of the alert.
	TriagePriorities map[string]string
	Conformance      bool     // load PluginConformance
	PluginDir        string   // of external plugins; default STATE/plugins
	ExternalPlugins  []string // names in PluginDir that Run starts
	PluginSockets    string   // directory of the sockets of plugins that are services; "" for none
	PluginSandbox    string   // SandboxLandlock, SandboxOff; default SandboxLandlock

	Parts []string         // parts to run; default PartMCP, and PartSSE if SSE is set
	SSE   *gateway.Options // of the event gateway
	// ReadSSE reads the gateway's tokens and origins again, for Reload, without those of
	// AllowOrigin; nil: they do not change.
	ReadSSE     func() (gateway.Access, error)
	MaxRestarts int // of a part that crashes, in a row; then the relay ends

	// StreamQuota is the number of a tenant's metric streams above which a counter
	// grows; 0 is no quota. With EnforceQuota further streams are closed with 4429.
	StreamQuota  int
	EnforceQuota bool

	// NoMemoryTuning leaves the garbage collector of the process as it is (memory.go): for tests, which run
	// many relays in a process, where each would collect the garbage of all of them.
	NoMemoryTuning bool

	Version string
	Logger  *zap.Logger      // default: none
	Level   *zap.AtomicLevel // of Logger; nil: the control plane cannot change it
}

// setDefaults fills in what Open needs before anything else. Other defaults are set by the
// packages that get the option.
func (o *Options) setDefaults() {
	if o.Listener != nil {
		// checkOptions decides by this address whether the relay is on loopback.
		o.Listen = o.Listener.Addr().String()
	}
	o.Listen = cmp.Or(o.Listen, DefaultListen)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Synchronized == nil {
		o.Synchronized = clock.NTPSynchronized
	}
}

// ErrOptions is what every OptionError is (errors.Is).
var ErrOptions = errors.New("relay: bad options")

// ErrPlainHTTP refuses a listener beyond loopback without TLS. Options.Insecure allows it,
// for a relay behind a proxy that terminates TLS.
var ErrPlainHTTP = errors.New("refusing plain HTTP: tokens would cross the network in the clear")

// OptionError says which field of Options cannot be served, and why.
type OptionError struct {
	Option string // name of the field
	Err    error
}

func (e *OptionError) Error() string { return e.Option + ": " + e.Err.Error() }

// Unwrap makes the error ErrOptions as well as its cause.
func (e *OptionError) Unwrap() []error { return []error{ErrOptions, e.Err} }

func badOption(option, format string, args ...any) error {
	return &OptionError{option, fmt.Errorf(format, args...)}
}

// checkOptions checks the options and sets what follows from them: loopback and public. It
// touches neither the disk nor the network, so that a wrong option has no side effect.
func (r *Relay) checkOptions() error {
	o := &r.opt
	for _, part := range o.Parts {
		if part != PartMCP && part != PartSSE {
			return badOption("Parts", "no such part: %q (use %s and %s)", part, PartMCP, PartSSE)
		}
	}
	if o.PluginSandbox == "" {
		o.PluginSandbox = SandboxLandlock
	}
	if o.PluginSandbox != SandboxLandlock && o.PluginSandbox != SandboxOff {
		return badOption("PluginSandbox", "no such sandbox: %q (use %s or %s)", o.PluginSandbox, SandboxLandlock, SandboxOff)
	}
	for _, name := range o.DisabledPlugins {
		if name != PluginTickets && name != PluginDirectory && name != PluginFleet && name != PluginTriage {
			return badOption("DisabledPlugins", "plugin %q cannot be left out; %s, %s, %s and %s can", name, PluginTickets, PluginDirectory, PluginFleet, PluginTriage)
		}
	}
	if err := checkTriage(o.TriagePriorities); err != nil {
		return err
	}
	if o.AuditMaxBytes != 0 && (o.AuditMaxBytes < audit.MinBytes || o.AuditMaxBytes > audit.MaxBytes) {
		return badOption("AuditMaxBytes", "must be 1 to 65536 MB")
	}
	if err := o.Events.check(); err != nil {
		return err
	}
	if o.MaxRestarts < 0 {
		return badOption("MaxRestarts", "%d is below 0", o.MaxRestarts)
	}
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return badOption("Listen", "not HOST:PORT: %q", o.Listen)
	}
	r.loopback = edge.IsLoopback(host)
	if err := r.checkTLS(); err != nil {
		return err
	}
	// Whoever reaches a loopback listener is a user or a program of this machine.
	if o.Anonymous && !r.loopback {
		return badOption("Anonymous", "for loopback only, not for %s", o.Listen)
	}
	if o.Public != "" {
		u, err := url.Parse(o.Public)
		if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
			return badOption("Public", "not an http or https URL: %q", o.Public)
		}
		// Invites would name a URL on which boards get no answer. With TLSFiles a proxy may serve the
		// public URL, so only TLSOwn is certain to be wrong.
		if u.Scheme == "http" && o.TLS == TLSOwn {
			return badOption("Public", "%q is plain HTTP, but this relay serves TLS; use https://", o.Public)
		}
		r.public = u
	}
	for _, a := range o.AllowOrigin {
		if err := checkOrigin(a); err != nil {
			return &OptionError{"AllowOrigin", err}
		}
	}
	return nil
}

// checkTLS refuses contradicting TLS options. Where Options.TLS is empty it decides first:
//
//	certificate files are given         TLSFiles
//	on loopback, or Options.Insecure    TLSOff: nobody listens in, or a proxy terminates TLS
//	otherwise                           TLSOwn
func (r *Relay) checkTLS() error {
	o := &r.opt
	hasFiles := o.TLSCert != "" || o.TLSKey != ""
	if o.TLS == "" {
		switch {
		case hasFiles:
			o.TLS = TLSFiles
		case r.loopback || o.Insecure:
			o.TLS = TLSOff
		default:
			o.TLS = TLSOwn
		}
	}
	switch {
	case (o.TLSCert == "") != (o.TLSKey == ""):
		return badOption("TLSCert", "the certificate and its key go together")
	case !slices.Contains([]string{TLSOwn, TLSFiles, TLSOff}, o.TLS):
		return badOption("TLS", "no such mode: %q (use %s, %s or %s)", o.TLS, TLSOwn, TLSFiles, TLSOff)
	case o.TLS == TLSFiles && !hasFiles:
		return badOption("TLS", "%s needs a certificate and its key; %s needs none", TLSFiles, TLSOwn)
	case o.TLS != TLSFiles && hasFiles:
		return badOption("TLS", "%s has no use for a certificate file; use %s, or give no file", o.TLS, TLSFiles)
	case o.TLS == TLSOwn && o.Insecure:
		return badOption("TLS", "%s serves TLS, and Insecure plain HTTP; choose one", TLSOwn)
	case o.TLS == TLSOff && !r.loopback && !o.Insecure:
		return badOption("Listen", "%s: %w", o.Listen, ErrPlainHTTP)
	}
	return nil
}

// partEnabled reports whether a part is served. Without Options.Parts the gateway is served
// where it is configured.
func (r *Relay) partEnabled(part string) bool {
	if len(r.opt.Parts) > 0 {
		return slices.Contains(r.opt.Parts, part)
	}
	return part == PartMCP || r.opt.SSE != nil
}

// pluginEnabled reports whether a built-in plugin is loaded.
func (r *Relay) pluginEnabled(name string) bool {
	return !slices.Contains(r.opt.DisabledPlugins, name)
}
