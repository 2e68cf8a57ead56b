package control

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// The tools by purpose:
//
// 	kernel.middleware.list, enable, disable, configure   stages of the pipeline
// 	kernel.transport.list, configure                     ways into the relay
// 	kernel.plugin.load, reload, unload                   external plugins
// 	kernel.plugin.show, allow, disallow                  what plugins may use of the relay
// 	kernel.introspection.router, subscriptions, plugins  what is loaded and who listens
// 	kernel.health.get, reset_counters                    problems and counters
// 	kernel.log.configure                                 the level of the relay's log
//
// Tools that change something answer with the state after the change, so that the caller
// sees its effect. A refused change has changed nothing.

// tool is a tool with the function that runs it. What run returns is the answer, encoded as
// JSON.
type tool struct {
	tool *kernel.Tool
	run  runFunc
}

// runFunc runs a tool with arguments that its check accepted.
type runFunc = func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error)

// What the tools do, for clients that ask a person before a call. A stage can be switched back and a
// plugin unloaded. A configuration that is replaced, counters that begin anew and the calls of an
// unloaded plugin are gone.
const (
	readOnly     kernel.Hints = 0
	reversible                = kernel.HintSafe | kernel.HintIdempotent
	irreversible              = kernel.HintIdempotent
)

// newTool makes a tool. rules are further members of its input schema, output the
// properties of its output schema.
func newTool(name, title, description string, hints kernel.Hints, in arguments.Object, rules, output string, run runFunc) tool {
	t := &kernel.Tool{Name: name, ToolInfo: &kernel.ToolInfo{Title: title, Description: description, Scope: manifest.ScopeKernelAdmin, InputSchema: inputSchema(in, rules),
		OutputSchema: json.RawMessage(`{"type":"object","properties":{` + output + `,"error":` + errorSchema + `},"additionalProperties":false}`),
		CheckArguments: func(raw []byte) ([]byte, error) {
			out, err := in.Check(raw)
			if err == nil && rules != "" {
				err = checkNameOrOrder(out)
			}
			return out, err
		}}}
	if t.Hints = hints | kernel.HintLocal; hints == readOnly {
		t.SafetyClass = manifest.ReadOnly
	}
	return tool{t, run}
}

// nameOrOrderRule is the rule of checkNameOrOrder as members of a schema. It does not use
// oneOf, which some clients refuse at the top of an input schema.
const nameOrOrderRule = `{"minProperties":1,"dependentRequired":{"config":["name"],"name":["config"],"scope":["name"]},"dependentSchemas":{"order":{"maxProperties":1}}}`

// checkNameOrOrder accepts name and config, with or without scope, or order alone. It repeats
// nameOrOrderRule in code, because arguments are not checked by their schema (arguments.Object.Check).
func checkNameOrOrder(raw []byte) error {
	var has map[string]json.RawMessage
	if err := json.Unmarshal(raw, &has); err != nil {
		return err
	}
	if has["order"] != nil && len(has) == 1 || has["order"] == nil && has["name"] != nil && has["config"] != nil {
		return nil
	}
	return arguments.Invalid("arguments: either name and config, or order alone")
}

// Output schemas. An answer has either the requested members or an error.
const (
	errorSchema = `{"type":"object","properties":{"code":{"type":"string"},"message":{"type":"string"},"outcome":{"type":"string"},"reason":{"type":"string"},"retryable":{"type":"boolean"},"retry_after_ms":{"type":"integer"},"trace_id":{"type":"string"}},"required":["code","message"]}`

	stageSchema     = `{"type":"object","properties":{"name":{"type":"string"},"scope":{"type":"string"},"enabled":{"type":"boolean"},"config":{"type":"object"}},"required":["name","scope","enabled","config"],"additionalProperties":false}`
	stagesOutput    = `"middleware":{"type":"array","description":"outermost first; of each stage the global line first","items":` + stageSchema + `}`
	sessionSchema   = `{"type":"object","properties":{"id":{"type":"string","description":"for the scope connection=ID"},"tenant":{"type":"string"},"agent_id":{"type":"string"}},"required":["id","tenant","agent_id"],"additionalProperties":false}`
	transportSchema = `{"type":"object","properties":{"name":{"type":"string"},"adapter":{"type":"string","description":"http, websocket, sse, unix or stdio"},"listen":{"type":"string"},"enabled":{"type":"boolean"},"sessions":{"type":"integer"},"open":{"type":"array","items":` + sessionSchema + `},"config":{"type":"object"}},"required":["name","enabled","sessions","config"],"additionalProperties":false}`
	transportOutput = `"transports":{"type":"array","items":` + transportSchema + `}`
	namesSchema     = `{"type":"array","items":{"type":"string"}}`
	pluginSchema    = `{"type":"object","properties":{"name":{"type":"string"},"version":{"type":"string"},"tenant":{"type":"string"},"state":{"type":"string","enum":["loaded","open","half_open","down"]},` +
		`"in_flight":{"type":"integer"},"calls":{"type":"integer"},"errors":{"type":"integer"},"panics":{"type":"integer"},"timeouts":{"type":"integer"},` +
		`"tools":{"type":"integer"},"resources":{"type":"integer"},"sandbox":{"type":"string","description":"of a program that is a plugin: what keeps it from the relay's files"},` +
		`"failures":{"type":"integer","description":"how often its program ended, hung or did not start"},"last_error":{"type":"string","description":"why it was down the last time"},"notes":` + namesSchema + `,"digest":{"type":"string","description":"SHA-256 of its plugin.json"},` +
		`"manifest":{"type":"object","description":"with name: what it declares, as its plugin.json does"},"manifest_bytes":{"type":"integer"},"tool_names":` + namesSchema + `,"resource_uris":` + namesSchema + `},` +
		`"required":["name","version","state","in_flight","calls","errors","tool_names","resource_uris"],"additionalProperties":false}`
	pluginsOutput = `"total":{"type":"integer"},"boards":{"type":"integer","description":"of total"},"note":{"type":"string"},"next":{"type":"string","description":"give it as after for the next rows"},"plugins":{"type":"array","items":` + pluginSchema + `}`
	tenantSchema  = `{"type":"object","properties":{"tenant":{"type":"string"},"subscribers":{"type":"integer"},"waiting":{"type":"integer"}},"required":["tenant","subscribers","waiting"],"additionalProperties":false}`
	watchSchema   = `{"type":"object","properties":{"tenant":{"type":"string"},"uri":{"type":"string"},"watchers":{"type":"integer"}},"required":["tenant","uri","watchers"],"additionalProperties":false}`
	statsSchema   = `{"type":"object","additionalProperties":{"type":"integer"}}`
)

// tools are the tools of the control plane. Those that read have the safety class read_only.
// Their schemas are made when a relay needs them first, and not at the start of every command.
var tools = sync.OnceValue(func() []tool {
	return append([]tool{
		newTool("kernel.middleware.list", "List middleware", "The stages of the pipeline in their order, with scopes, state and configuration.", readOnly,
			nil, "", stagesOutput, func(_ context.Context, p *Plugin, _ *kernel.Request, _ *args) (any, error) {
				return p.middleware(), nil
			}),
		newTool("kernel.middleware.enable", "Enable middleware", "Switches a stage on, for every request or for one scope.", reversible,
			arguments.Object{required(argStage), argScope}, "", stagesOutput, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.setEnabled(ctx, r, a, "enable", p.opt.Middleware.Enable)
			}),
		newTool("kernel.middleware.disable", "Disable middleware", "Switches a stage off, for every request or for one scope.", reversible,
			arguments.Object{required(argStage), argScope}, "", stagesOutput, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.setEnabled(ctx, r, a, "disable", p.opt.Middleware.Disable)
			}),
		newTool("kernel.middleware.configure", "Configure middleware", "Gives a stage another configuration (name, config, scope), or puts the stages into another order (order).", irreversible,
			arguments.Object{argStage, argScope, argConfig, argOrder}, nameOrOrderRule, stagesOutput, configureMiddleware),
		newTool("kernel.transport.list", "List transports", "The ways into the relay: adapters, listeners, sessions, and what can be configured.", readOnly,
			nil, "", transportOutput, func(_ context.Context, p *Plugin, _ *kernel.Request, _ *args) (any, error) {
				return p.transports(), nil
			}),
		newTool("kernel.transport.configure", "Configure a transport", "Changes what a transport lets change while it runs; the fields are those that kernel.transport.list shows.", irreversible,
			arguments.Object{required(text("name", wordPattern, "the transport, as kernel.transport.list names it")),
				{Name: "config", Type: arguments.Map, Required: true, Description: "an object with the fields to change, at most 16 KiB"}}, "", transportOutput, configureTransport),
		newTool("kernel.introspection.router", "Inspect the router", "How many plugins, tools and resources there are and which stages are in force; with tool, where calls of it go.", readOnly,
			arguments.Object{text("tool", cursorPattern, "a tool's name")}, "",
			`"stages":`+namesSchema+`,"plugins":{"type":"integer"},"tools":{"type":"integer"},"resources":{"type":"integer"},"in_flight":{"type":"integer"},`+
				`"route":{"type":"object","properties":{"tool":{"type":"string"},"plugin":{"type":"string"},"tenant":{"type":"string"},"scope":{"type":"string"},"streams":{"type":"boolean"}},"required":["tool","plugin","scope","streams"],"additionalProperties":false}`,
			router),
		newTool("kernel.introspection.subscriptions", "Inspect subscriptions", "Who listens to changes: subscribers by tenant, and watched resources.", readOnly,
			nil, "", `"tenants":{"type":"array","items":`+tenantSchema+`},"watches":{"type":"array","items":`+watchSchema+`},"total_tenants":{"type":"integer"},"total_watches":{"type":"integer"}`, subscriptions),
		newTool("kernel.introspection.plugins", "Inspect plugins", "The loaded plugins by name: versions, states, calls and faults, and what they offer; with name, one with its manifest.", readOnly,
			arguments.Object{argAfter, argLimit, argPlugin}, "", pluginsOutput, func(_ context.Context, p *Plugin, _ *kernel.Request, a *args) (any, error) {
				if a.Name != "" {
					return p.plugin(a.Name)
				}
				return p.plugins(a.After, cmp.Or(a.Limit, 100)), nil
			}),
		newTool("kernel.plugin.load", "Load a plugin", "Loads a plugin from the relay's plugin directory by the name of its folder.", reversible,
			arguments.Object{required(text("name", pluginPattern, "the plugin's folder below the plugin directory"))}, "",
			`"name":{"type":"string"}`, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.load(ctx, r, a, "load", Plugins.Load)
			}),
		newTool("kernel.plugin.reload", "Reload a plugin", "Starts the version of a plugin that its folder has now, checks it, and puts it in the place of the running one, without a call that fails. If a check fails, the running one stays.", reversible,
			arguments.Object{required(text("name", pluginPattern, "the plugin"))}, "",
			`"name":{"type":"string"}`, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.load(ctx, r, a, "reload", Plugins.Reload)
			}),
		newTool("kernel.plugin.unload", "Unload a plugin", "Unloads a plugin after its calls in flight: NAME or NAME@VERSION. A device is unloaded by the end of its link.", irreversible,
			arguments.Object{required(text("name", versionPattern, "the plugin, with or without its version"))}, "",
			`"name":{"type":"string"}`, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.load(ctx, r, a, "unload", Plugins.Unload)
			}),
		newTool("kernel.health.get", "Get health", "Whether the kernel is well, what is wrong if not, and its figures.", readOnly,
			nil, "", `"status":{"type":"string","enum":["ok","degraded"]},"problems":`+namesSchema+`,"uptime_ms":{"type":"integer"},"figures":`+statsSchema, health),
		newTool("kernel.log.configure", "Configure the log", "Changes the level of the relay's log while it runs: debug, info, warn or error.", reversible,
			arguments.Object{required(text("level", wordPattern, "debug, info, warn or error"))}, "",
			`"previous":{"type":"string"},"current":{"type":"string"}`, configureLog),
		newTool("kernel.health.reset_counters", "Reset counters", "Begins all counters of the kernel and its plugins anew; gauges stay.", irreversible,
			nil, "", `"reset":{"type":"boolean"}`, func(ctx context.Context, p *Plugin, r *kernel.Request, _ *args) (any, error) {
				err := p.change(ctx, r, EventCounters, MetricsURI, Change{Action: "reset"}, func() error {
					p.opt.Kernel.ResetCounters()
					if p.opt.ResetMetrics != nil {
						p.opt.ResetMetrics()
					}
					return nil
				})
				return map[string]bool{"reset": true}, err
			}),
	}, consentTools()...)
})

// middleware is the content of MiddlewareURI.
func (p *Plugin) middleware() any {
	return map[string][]Stage{"middleware": append([]Stage{}, p.opt.Middleware.List()...)}
}

// setEnabled switches a stage on or off.
func (p *Plugin) setEnabled(ctx context.Context, r *kernel.Request, a *args, action string, do func(name, scope string) error) (any, error) {
	a.Scope = cmp.Or(a.Scope, "global")
	err := p.change(ctx, r, EventMiddleware, MiddlewareURI, Change{Action: action, Name: a.Name, Scope: a.Scope}, func() error { return do(a.Name, a.Scope) })
	return p.middleware(), err
}

// configureMiddleware answers kernel.middleware.configure: with a name it configures a
// stage, otherwise it reorders them.
func configureMiddleware(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
	c := Change{Action: "reorder", Order: a.Order}
	do := func() error { return p.opt.Middleware.Reorder(a.Order) }
	if a.Name != "" {
		a.Scope = cmp.Or(a.Scope, "global")
		c = Change{Action: "configure", Name: a.Name, Scope: a.Scope, Digest: digest(a.Config)}
		do = func() error { return p.opt.Middleware.Configure(a.Name, a.Scope, a.Config) }
	}
	err := p.change(ctx, r, EventMiddleware, MiddlewareURI, c, do)
	return p.middleware(), err
}

// digest is how the event log records a configuration: its SHA-256 in hex.
func digest(config []byte) string {
	sum := sha256.Sum256(config)
	return hex.EncodeToString(sum[:])
}

// transports is the content of TransportsURI.
func (p *Plugin) transports() any {
	list := []Transport{}
	if p.opt.Transports != nil {
		list = append(list, p.opt.Transports.List()...)
	}
	for i := range list {
		if len(list[i].Config) == 0 {
			list[i].Config = json.RawMessage("{}")
		}
	}
	return map[string][]Transport{"transports": list}
}

// configureTransport answers kernel.transport.configure.
func configureTransport(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
	if p.opt.Transports == nil {
		return nil, manifest.E(manifest.BadRequest, "this relay has no transport to configure")
	}
	err := p.change(ctx, r, EventTransport, TransportsURI, Change{Action: "configure", Name: a.Name, Digest: digest(a.Config)},
		func() error { return p.opt.Transports.Configure(a.Name, a.Config) })
	return p.transports(), err
}

// route is where calls of a tool go.
type route struct {
	Tool    string `json:"tool"`
	Plugin  string `json:"plugin"`
	Tenant  string `json:"tenant,omitempty"`
	Scope   string `json:"scope"`
	Streams bool   `json:"streams"`
}

// router answers kernel.introspection.router.
func router(_ context.Context, p *Plugin, _ *kernel.Request, a *args) (any, error) {
	s, in := p.opt.Kernel.Stats(), p.opt.Kernel.Info()
	out := struct {
		Stages    []string `json:"stages"`
		Plugins   int      `json:"plugins"`
		Tools     int      `json:"tools"`
		Resources int      `json:"resources"`
		InFlight  int64    `json:"in_flight"`
		Route     *route   `json:"route,omitempty"`
	}{append([]string{}, in.Stages...), s.Plugins, s.Tools, s.Resources, s.InFlight, nil}
	if a.Tool == "" {
		return out, nil
	}
	name := manifest.Canonical(a.Tool)
	for _, i := range in.Plugins {
		for _, t := range i.Manifest.Tools {
			if t.Name == name {
				out.Route = &route{name, i.Name, i.Tenant, t.Scope, t.Streams}
				return out, nil
			}
		}
	}
	return nil, manifest.E(manifest.BadRequest, "no loaded plugin has a tool of this name")
}

// maxRows bounds the rows of an answer without pages. The totals beside them count all, so
// that a caller sees how many are missing.
const maxRows = 500

// subscriptions answers kernel.introspection.subscriptions.
func subscriptions(_ context.Context, p *Plugin, _ *kernel.Request, _ *args) (any, error) {
	s := p.opt.Kernel.SubscriptionsInfo()
	return struct {
		Tenants      []kernel.TenantSubscriptions `json:"tenants"`
		Watches      []kernel.WatchInfo           `json:"watches"`
		TotalTenants int                          `json:"total_tenants"`
		TotalWatches int                          `json:"total_watches"`
	}{append([]kernel.TenantSubscriptions{}, s.Tenants[:min(len(s.Tenants), maxRows)]...),
		append([]kernel.WatchInfo{}, s.Watches[:min(len(s.Watches), maxRows)]...), len(s.Tenants), len(s.Watches)}, nil
}

// load loads or unloads a plugin, which may take seconds. It acquires the change slot only
// afterwards, for the event, so that other changes do not wait. Beyond maxLoading it refuses at once: a
// caller that waits could use up its kernel.CallBudget before its plugin begins to start.
func (p *Plugin) load(ctx context.Context, r *kernel.Request, a *args, action string, do func(Plugins, context.Context, string) error) (any, error) {
	if p.opt.Plugins == nil {
		return nil, manifest.E(manifest.BadRequest, "this relay loads no plugins; give it a plugin directory with --plugin-dir")
	}
	select {
	case p.loadSlots <- struct{}{}:
	default:
		return nil, &manifest.Error{Code: manifest.RateLimited, Message: "other plugins are being loaded; retry in a moment", RetryAfterMS: 1000, Reason: "loading"}
	}
	defer func() { <-p.loadSlots }()
	if err := p.begin(ctx, r, a.Name); err != nil {
		return nil, err
	}
	if err := do(p.opt.Plugins, ctx, a.Name); err != nil {
		return nil, err
	}
	// The plugin has changed, so its event is stored even if the caller has given up.
	err := p.apply(context.WithoutCancel(ctx), r, EventPlugin, PluginsURI, Change{Action: action, Name: a.Name}, func() error { return nil })
	return map[string]string{"name": a.Name}, err
}

// metrics is the content of MetricsURI.
func (p *Plugin) metrics() any {
	out := struct {
		Kernel     kernel.Stats           `json:"kernel"`
		Classes    any                    `json:"classes,omitempty"`
		Plugins    []kernel.PluginFigures `json:"plugins"`
		Transports any                    `json:"transports,omitempty"`
	}{Kernel: p.opt.Kernel.Stats(), Plugins: p.opt.Kernel.PluginFigures()}
	if p.opt.TransportFigures != nil {
		out.Transports = p.opt.TransportFigures()
	}
	if p.opt.Metrics != nil {
		out.Classes = p.opt.Metrics()
	}
	return out
}

// configureLog answers kernel.log.configure.
func configureLog(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
	if p.opt.Level == nil {
		return nil, manifest.E(manifest.BadRequest, "this relay's log has one level")
	}
	previous := p.opt.Level.Level()
	err := p.change(ctx, r, EventLog, MetricsURI, Change{Action: "configure", Name: a.Level}, func() error { return p.opt.Level.SetLevel(a.Level) })
	return struct {
		Previous string `json:"previous"`
		Current  string `json:"current"`
	}{previous, p.opt.Level.Level()}, err
}

// health answers kernel.health.get. Its status "degraded" says that there is any problem, not only that the
// relay runs without its event log, as that word means elsewhere.
func health(_ context.Context, p *Plugin, _ *kernel.Request, _ *args) (any, error) {
	s := p.opt.Kernel.Stats()
	problems := []string{}
	if s.BreakersOpen > 0 {
		problems = append(problems, "plugins fail and are not called for now; kernel.introspection.plugins shows which")
	}
	if p.opt.Health != nil {
		problems = append(problems, p.opt.Health()...)
	}
	status := "ok"
	if len(problems) > 0 {
		status = "degraded"
	}
	return struct {
		Status   string       `json:"status"`
		Problems []string     `json:"problems"`
		UptimeMS int64        `json:"uptime_ms"`
		Figures  kernel.Stats `json:"figures"`
	}{status, problems, time.Since(p.started).Milliseconds(), s}, nil
}
