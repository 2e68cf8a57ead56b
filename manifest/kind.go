package manifest

// SafetyClass grades what a tool may do to the device. Version 1 serves read_only. The other
// two are reserved and refused: they need a human's approval, which is not specified yet.
type SafetyClass string

// The safety classes.
const (
	ReadOnly    SafetyClass = "read_only"
	Mutating    SafetyClass = "mutating"    // reserved: needs a commit_token
	Destructive SafetyClass = "destructive" // reserved: needs a commit_token
)

// Verb names, a closed set.
const (
	VerbInvoke    = "invoke"
	VerbSnapshot  = "snapshot"
	VerbSubscribe = "subscribe"
	VerbQuery     = "query"
	VerbGet       = "get"
	VerbRead      = "read"
	VerbTop       = "top"
	VerbList      = "list"
	VerbRun       = "run"
)

// Kind names, a closed set.
const (
	KindEcho      = "system.echo"
	KindMetrics   = "system.metrics"
	KindHistory   = "system.history"
	KindInfo      = "system.info"
	KindModules   = "system.modules"
	KindProcesses = "system.processes"
	KindServices  = "system.services"
	KindJournal   = "system.journal"
	KindDisks     = "system.disks"
	KindNetwork   = "system.network"
	KindDoctor    = "system.doctor"
)

// Kind is one row of the kind registry. The registry is data and closed in each release; a
// new kind is a row here and a set of schemas.
type Kind struct {
	Name   string      // "system.metrics"
	Short  string      // first segment of its tools, at most 8 characters
	Safety SafetyClass // the only class the kind admits (RFC-0001 allOf clamp)
	Verbs  []Verb
	// ExtraScope is needed beside the scope of the safety class; "" for none.
	ExtraScope string
	// SinceV21 is set for kinds that came with version v2.1 of the device link. A link of
	// version v2 neither announces nor accepts them, so that its bytes stay as they were.
	SinceV21 bool
}

// Verb is one thing that a kind can do, with the schemas of its tool. The device checks
// arguments against Input and the relay checks its answer against Ack.
type Verb struct {
	Name        string
	Input       string // schema reference of the arguments
	Ack         string // schema reference of cmd_ack.payload.result
	Output      string // schema reference of what the caller gets as the structured result
	Frame       string // schema reference of a stream's frames; empty for a unary verb
	Title       string
	Description string // constant: no text of a device is part of it
}

// Stream reports whether the verb answers with a stream of frames.
func (v *Verb) Stream() bool { return v.Frame != "" }

// FrameRef is the schema reference of a metric frame (RFC-0009 §5.1). CheckFrame checks each
// frame of a stream against it.
const FrameRef = "mcp://schemas/system.metrics.subscribe.frame@1.0.0"

// Kinds is the kind registry. Its order is the order in which a board lists what it can do.
// The texts are read by language models: they say what a tool does and when to use it.
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
				Description: "Watch this device's CPU, memory, disk and load figures at a cadence of 1 to 60 seconds (interval_ms). Frames arrive as progress notifications for at most 20 s; the result is the last frame, and in its text all of them. Changes nothing.",
			},
		},
	},
	{
		Name: KindHistory, Short: "syshist", Safety: ReadOnly, SinceV21: true,
		Verbs: []Verb{{
			Name:        VerbQuery,
			Input:       "mcp://schemas/system.history.query.input@1.0.0",
			Ack:         "mcp://schemas/system.history.query.output@1.0.0",
			Output:      "mcp://schemas/system.history.query.output@1.0.0",
			Title:       "Metrics history",
			Description: "Read what this device recorded of its own metrics: one value for each step_ms from from_ms on, null where it recorded nothing. Times are milliseconds since 1970 by the device's clock, as ts_ms of a metrics snapshot; to_ms 0 means now. A result with next_cursor has more: call again with the same arguments and that cursor. Changes nothing.",
		}},
	},
	inspection(KindInfo, "sysinfo", VerbGet, "", "Device information",
		"Read what this device is: model, operating system, kernel, processor, memory, uptime, clock. Use it to tell boards apart or to find old software. Changes nothing."),
	inspection(KindModules, "sysmod", VerbRead, "", "Sensors",
		"Read this device's temperatures, power warnings and throttling, eMMC wear and network traffic, now. Use it when a board is slow, hot or restarts by itself. Changes nothing."),
	inspection(KindProcesses, "sysproc", VerbTop, ScopeBoardsInspect, "Top processes",
		"List the processes of this device that use most CPU (sort_by cpu, measured over window_ms) or memory, or those of a name. Use it to find what makes a board slow or whether a program runs. Changes nothing."),
	inspection(KindServices, "syssvc", VerbList, ScopeBoardsInspect, "Services",
		"List the systemd services of this device with state, since when, restarts and last exit. Use state failed to find what is broken. A result with next_cursor has more: call again with it as cursor. Changes nothing."),
	inspection(KindJournal, "sysjrnl", VerbQuery, ScopeBoardsInspect, "Journal",
		"Read lines of this device's log (systemd journal), newest first, by unit, priority, time or text. Use it to find why a service failed. A result with next_cursor has more: call again with the same arguments and that cursor. Changes nothing."),
	inspection(KindDisks, "sysdisk", VerbList, "", "Disks",
		"List the file systems of this device with size, use and errors, and its drives. Use it when a disk is full, read-only or does not answer. A result with next_cursor has more: call again with it as cursor. Changes nothing."),
	inspection(KindNetwork, "sysnet", VerbList, ScopeBoardsInspect, "Network",
		"List the network interfaces of this device with addresses and counters, its routes and name servers. Use it to find why a board cannot be reached. Scans nothing. A result with next_cursor has more: call again with it as cursor. Changes nothing."),
	inspection(KindDoctor, "sysdoc", VerbRun, ScopeBoardsInspect, "Self-check",
		"Run the checks that agentctl has for this device: service, storage, clock, power, temperature, link. Each problem comes with a next step. Use it first when a board behaves oddly. Changes nothing."),
}

// inspection returns the row of a kind with one verb that reads something of the machine.
func inspection(kind, short, verb, scope, title, description string) Kind {
	ref := SchemaPrefix + kind + "." + verb
	return Kind{
		Name: kind, Short: short, Safety: ReadOnly, ExtraScope: scope, SinceV21: true,
		Verbs: []Verb{{
			Name:  verb,
			Input: ref + ".input@1.0.0", Ack: ref + ".output@1.0.0", Output: ref + ".output@1.0.0",
			Title: title, Description: description,
		}},
	}
}

// LookupKind returns the kind of a name.
func LookupKind(name string) (*Kind, bool) {
	return find(Kinds, func(k *Kind) bool { return k.Name == name })
}

// LookupShort returns the kind whose tools have this first segment.
func LookupShort(short string) (*Kind, bool) {
	return find(Kinds, func(k *Kind) bool { return k.Short == short })
}

// Verb returns one of the kind's verbs.
func (k *Kind) Verb(name string) (*Verb, bool) {
	return find(k.Verbs, func(v *Verb) bool { return v.Name == name })
}

// find returns a pointer to the first element that matches; the tables are short.
func find[T any](list []T, match func(*T) bool) (*T, bool) {
	for i := range list {
		if match(&list[i]) {
			return &list[i], true
		}
	}
	return nil, false
}
