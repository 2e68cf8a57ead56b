package manifest

// SafetyClass grades what a tool may do to the device. Version 1 serves read_only; the
// other two are reserved and refused.
type SafetyClass string

// The safety classes.
const (
	ReadOnly    SafetyClass = "read_only"
	Mutating    SafetyClass = "mutating"    // reserved: needs a commit_token
	Destructive SafetyClass = "destructive" // reserved: needs a commit_token
)

// Scopes of tokens. The set is closed: another word is refused at mint and grants nothing.
const (
	ScopeCallReadOnly    = "tools:call:read_only"
	ScopeToolsList       = "tools:list"
	ScopeDeviceConnect   = "device:connect"
	ScopeDeviceEnroll    = "device:enroll"
	ScopeEventsSubscribe = "events:subscribe"
	ScopeEventsIngest    = "events:ingest"
	ScopeTicketsRead     = "tickets:read"
	ScopeTicketsWrite    = "tickets:write"
	ScopeKernelAdmin     = "kernel:admin"
)

// Scopes lists the closed set.
var Scopes = []string{
	ScopeCallReadOnly, ScopeToolsList, ScopeDeviceConnect, ScopeDeviceEnroll,
	ScopeEventsSubscribe, ScopeEventsIngest, ScopeTicketsRead, ScopeTicketsWrite, ScopeKernelAdmin,
}

// ScopeForClass is the scope that a caller of a tool of class c needs: `tools:call:<c>`.
func ScopeForClass(c SafetyClass) string {
	if c == ReadOnly {
		return ScopeCallReadOnly // not a new string for each tool of each device
	}
	return "tools:call:" + string(c)
}

// Verb names, a closed set.
const (
	VerbInvoke    = "invoke"
	VerbSnapshot  = "snapshot"
	VerbSubscribe = "subscribe"
)

// Kind names, a closed set.
const (
	KindEcho    = "system.echo"
	KindMetrics = "system.metrics"
)

// Kind is one row of the kind registry. The registry is data, closed per release;
// a new kind is an amendment here and a set of schemas.
type Kind struct {
	Name   string      // "system.metrics"
	Short  string      // first segment of its tools, at most 8 characters
	Safety SafetyClass // the only class the kind admits (RFC-0001 allOf clamp)
	Verbs  []Verb
}

// Verb is what a kind can do, with the schemas of its tool.
type Verb struct {
	Name        string
	Input       string // schema reference of the arguments
	Ack         string // schema reference of cmd_ack.payload.result
	Output      string // schema reference of what the caller gets as the structured result
	Frame       string // schema reference of a stream's frames; empty for a unary verb
	Title       string
	Description string // constant text: nothing a device says is ever in it
}

// Stream reports whether the verb answers with a stream of frames.
func (v *Verb) Stream() bool { return v.Frame != "" }

// FrameRef is the schema reference of a metric frame (RFC-0009 §5.1).
const FrameRef = "mcp://schemas/system.metrics.subscribe.frame@1.0.0"

// Kinds is the kind registry.
var Kinds = []Kind{
	{
		Name: KindEcho, Short: "sysecho", Safety: ReadOnly,
		Verbs: []Verb{{
			Name:        VerbInvoke,
			Input:       "mcp://schemas/system.echo.invoke.input@1.0.0",
			Ack:         "mcp://schemas/system.echo.invoke.output@1.0.0",
			Output:      "mcp://schemas/system.echo.invoke.output@1.0.0",
			Title:       "Echo",
			Description: "Send a short ASCII message to this device and get it back unchanged, with the device's clock. Use it to prove that the device answers. Changes nothing.",
		}},
	},
	{
		Name: KindMetrics, Short: "sys", Safety: ReadOnly,
		Verbs: []Verb{
			{
				Name:        VerbSnapshot,
				Input:       "mcp://schemas/system.metrics.snapshot.input@1.0.0",
				Ack:         "mcp://schemas/system.metrics.snapshot.output@1.0.0",
				Output:      "mcp://schemas/system.metrics.snapshot.output@1.0.0",
				Title:       "Metrics snapshot",
				Description: "Read this device's CPU, memory, disk and load figures once, now. Changes nothing.",
			},
			{
				Name:        VerbSubscribe,
				Input:       "mcp://schemas/system.metrics.subscribe.input@1.0.0",
				Ack:         "mcp://schemas/system.metrics.subscribe.output@1.0.0",
				Output:      FrameRef,
				Frame:       FrameRef,
				Title:       "Metrics stream",
				Description: "Watch this device's CPU, memory, disk and load figures at a cadence of 1 to 60 seconds (interval_ms). Frames arrive as progress notifications for a bounded time; the result is the last frame. Changes nothing.",
			},
		},
	},
}

// LookupKind finds a kind by name.
func LookupKind(name string) (*Kind, bool) {
	for i := range Kinds {
		if Kinds[i].Name == name {
			return &Kinds[i], true
		}
	}
	return nil, false
}

func lookupShort(short string) (*Kind, bool) {
	for i := range Kinds {
		if Kinds[i].Short == short {
			return &Kinds[i], true
		}
	}
	return nil, false
}

// Verb finds one of the kind's verbs.
func (k *Kind) Verb(name string) (*Verb, bool) {
	for i := range k.Verbs {
		if k.Verbs[i].Name == name {
			return &k.Verbs[i], true
		}
	}
	return nil, false
}
