package relay

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// device is a connected device as a plugin of the kernel: its link loads the plugin and
// unloads it, and its capabilities are the plugin's tools. Commands go through the hub's
// node. It also offers the newest metric frame as a resource.
//
// Only the frame of a device changes. When its node announces other capabilities, resumes its session,
// or is unlisted, another device replaces it in the kernel. Capabilities that stay the same keep their
// limit, because calls of the earlier device may be in flight.
type device struct {
	node     *hub.Node
	manifest *kernel.Manifest
	tools    []manifest.Tool

	mu          sync.Mutex      // protects the fields below
	lastFrame   *manifest.Frame // newest frame of a watched resource
	lastFrameAt time.Time
}

// defaultIntervalMS is the cadence of a metric stream that names none (RFC-0009 §4).
const defaultIntervalMS = 5000

// newDevice makes the plugin of a node that is ready. Tools of one capability share its limit;
// the kernel acquires it for calls, subscribe for streams. before is the plugin of the same
// session on an earlier link, or nil: its limits stay, since its calls may be in flight.
func newDevice(n *hub.Node, before *device) *device {
	d := &device{node: n, tools: n.Tools()}
	m := &kernel.Manifest{Name: kernel.DevicePrefix + n.ID(), Version: "1.0.0", Tenant: n.Tenant(), Tools: make([]*kernel.Tool, 0, len(d.tools)), Inline: true, Untrusted: true}
	limits := make(map[*manifest.Capability]*manifest.Limit, 2)
	for i := range d.tools {
		t := &d.tools[i]
		if limits[t.Capability] == nil {
			limits[t.Capability] = before.limit(t)
		}
		if limits[t.Capability] == nil {
			limits[t.Capability] = manifest.NewLimit(t.Capability.Constraints, manifest.RelayWindow)
		}
		m.Tools = append(m.Tools, &kernel.Tool{Name: t.Canonical, NodeID: n.ID(), Limit: limits[t.Capability], ToolInfo: deviceToolInfo(t, false)})
		// Of several capabilities of that kind the first one serves the resource, as in metricsTool.
		if t.Kind.Name == manifest.KindMetrics && t.Verb.Name == manifest.VerbSnapshot && m.Resources == nil {
			m.Resources = append(m.Resources, metricsResource(n.ID()))
		}
	}
	d.manifest = m
	return d
}

// limit returns the limit of the capability of a tool that d has with the same constraints;
// nil if it has none, or d is nil.
func (d *device) limit(t *manifest.Tool) *manifest.Limit {
	if d == nil {
		return nil
	}
	for i := range d.tools {
		if old := &d.tools[i]; old.Canonical == t.Canonical && old.Capability.Constraints == t.Capability.Constraints {
			return d.manifest.Tools[i].Limit
		}
	}
	return nil
}

// unlisted returns the same plugin, which is in no list any more.
func (d *device) unlisted() *device {
	m := *d.manifest
	m.Unlisted = true
	return &device{node: d.node, tools: d.tools, manifest: &m}
}

// toolKind says which tools of boards have the same description. The kind registry bounds the number of
// its values, whatever boards announce.
type toolKind struct {
	verb       *manifest.Verb
	isUnlisted bool
	isOffline  bool
}

// toolInfos has a *kernel.ToolInfo for each toolKind, which the tools of all boards share.
var toolInfos sync.Map

// deviceToolInfo describes one verb of a device as a tool of the kernel. All its texts come from the
// kind registry, none from the device. The check of the arguments of a device that is offline
// refuses, so that a client learns that before anything else.
func deviceToolInfo(t *manifest.Tool, isOffline bool) *kernel.ToolInfo {
	key := toolKind{t.Verb, !t.HasOwnWord(), isOffline}
	if info, ok := toolInfos.Load(key); ok {
		return info.(*kernel.ToolInfo)
	}
	in, _ := manifest.Schema(t.Verb.Input)
	out, _ := manifest.Schema(t.Verb.Output)
	group := kernel.GroupBoardOther
	if t.Kind.Name == manifest.KindEcho || t.Kind.Name == manifest.KindMetrics {
		group = kernel.GroupBoardBasic
	}
	check := func(args []byte) ([]byte, error) { return manifest.CheckArgs(key.verb.Input, args) }
	if isOffline {
		check = func([]byte) ([]byte, error) { return nil, errOffline() }
	}
	info, _ := toolInfos.LoadOrStore(key, &kernel.ToolInfo{
		Title: t.Verb.Title, Description: t.Verb.Description,
		InputSchema: in, OutputSchema: out,
		SafetyClass: t.Kind.Safety, Scope: manifest.ScopeForClass(t.Kind.Safety),
		Inspects: t.Kind.ExtraScope == manifest.ScopeBoardsInspect,
		Streams:  t.Verb.Stream(), Group: group, CheckArguments: check, LogCalls: true,
		Unlisted: key.isUnlisted,
	})
	return info.(*kernel.ToolInfo)
}

// devicesURI is the prefix of the devices' resource URIs.
const devicesURI = "mcp://devices/"

// metricsResource returns the resource of a device with the capability metrics.
func metricsResource(nodeID string) *kernel.Resource {
	uri := devicesURI + nodeID + "/metrics.json"
	return &kernel.Resource{
		URI: uri, Name: strings.TrimPrefix(uri, devicesURI), Title: "Metrics",
		Description: "The newest CPU, memory, disk and load figures of this device. Subscribe to hear of new ones.",
		MIME:        "application/json", Scope: manifest.ScopeCallReadOnly, NodeID: nodeID, Watchable: true,
	}
}

// Manifest implements kernel.Plugin.
func (d *device) Manifest() *kernel.Manifest { return d.manifest }

// Call implements kernel.Plugin: it sends a command to the device, or joins one of its
// streams. The kernel has checked the arguments, and for a command acquired the limit.
func (d *device) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	t := d.tool(r.Target())
	opt := hub.CallOptions{TraceID: r.TraceID, Traced: r.Traced}
	if !t.Verb.Stream() {
		result, err := d.node.Call(ctx, t, r.Arguments, opt)
		if err != nil {
			return nil, err
		}
		return &kernel.Result{Structured: result}, nil
	}
	var args struct {
		IntervalMS int64 `json:"interval_ms"`
	}
	if err := strictjson.Unmarshal(r.Arguments, &args); err != nil {
		return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not fit the tool's schema")
	}
	if args.IntervalMS == 0 {
		args.IntervalMS = defaultIntervalMS
	}
	s, err := d.subscribe(ctx, t, args.IntervalMS, r.Target().Limit, opt)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Stream: s}, nil
}

// subscribe joins the device's stream of that interval. The first subscriber opens it and
// acquires the capability's limit; later ones share it, so any number of clients costs the
// device one stream for each interval.
func (d *device) subscribe(ctx context.Context, t *manifest.Tool, intervalMS int64, limit *manifest.Limit, opt hub.CallOptions) (*hub.Subscriber, error) {
	acquire := func() (func(), error) { return limit.Release, limit.Acquire(time.Now()) }
	return d.node.Subscribe(ctx, t, hub.IntervalArgs(intervalMS), intervalMS, acquire, opt)
}

// tool returns the tool that the kernel calls by target. The kernel routes only tools of the manifest
// here, so an unknown one is a bug. A device has a handful of tools, which a loop finds without a map.
func (d *device) tool(target *kernel.Tool) *manifest.Tool {
	for i, t := range d.manifest.Tools {
		if t == target {
			return &d.tools[i]
		}
	}
	panic("relay: the kernel routed a tool that this device does not have")
}

// metricsTool returns the tool of a verb of the metrics capability, with its limit; nil if
// the device has none.
func (d *device) metricsTool(verb string) (*manifest.Tool, *manifest.Limit) {
	for i := range d.tools {
		if t := &d.tools[i]; t.Kind.Name == manifest.KindMetrics && t.Verb.Name == verb {
			return t, d.manifest.Tools[i].Limit
		}
	}
	return nil, nil
}

// Read implements kernel.Reader: the newest frame while the resource is watched, else a
// snapshot that the device takes now.
func (d *device) Read(ctx context.Context, _ *kernel.Caller, _ string) ([]byte, error) {
	d.mu.Lock()
	f, at := d.lastFrame, d.lastFrameAt
	d.mu.Unlock()
	// An older frame is of a watch that has ended, or the device is late.
	if f != nil && time.Since(at) < defaultIntervalMS*time.Millisecond {
		return f.Data, nil
	}
	t, limit := d.metricsTool(manifest.VerbSnapshot)
	if t == nil {
		return nil, kernel.ErrNoResource
	}
	if err := limit.Acquire(time.Now()); err != nil {
		return nil, err
	}
	defer limit.Release()
	return d.node.Call(ctx, t, []byte("{}"), hub.CallOptions{})
}

// Watch implements kernel.Watcher: it reports each new frame of the metrics resource until
// ctx ends or the device goes offline.
func (d *device) Watch(ctx context.Context, _ string, changed func()) error {
	t, limit := d.metricsTool(manifest.VerbSubscribe)
	if t == nil {
		return kernel.ErrNotWatchable
	}
	// Only opening the stream has the deadline of a call; the watch lasts until ctx ends.
	openCtx, cancel := context.WithTimeout(ctx, kernel.CallBudget)
	r, err := d.subscribe(openCtx, t, defaultIntervalMS, limit, hub.CallOptions{})
	cancel()
	if err != nil {
		return err
	}
	defer r.Close()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-r.Ready():
		}
		for f, ok := r.Next(); ok; f, ok = r.Next() {
			d.mu.Lock()
			d.lastFrame, d.lastFrameAt = f, time.Now()
			d.mu.Unlock()
			changed()
		}
		if err := r.Err(); err != nil {
			return err
		}
	}
}

// explainMissing returns the error of a call to a tool that no loaded plugin has. A node of
// another tenant and a node that does not exist get the same answer, so that a caller
// cannot probe for nodes.
func (r *Relay) explainMissing(c *kernel.Caller, tool string) error {
	name, ok := manifest.ParseToolName(tool)
	if !ok {
		return &manifest.Error{Code: manifest.BadRequest, Message: "no tool has this name; tools/list shows the names", Reason: "name"}
	}
	owner, known := r.store.NodeTenant(name.NodeID)
	switch {
	case !known || owner != c.Tenant:
		return r.unknownBoard(c.Tenant, name.NodeID)
	case !r.hasAnnounced(c.Tenant, name):
		return &manifest.Error{Code: manifest.BadRequest, Message: "the node is yours but has no such tool; tools/list shows its tools", Reason: "tool"}
	}
	return errOffline()
}

// hasAnnounced reports whether the node's last manifest has the tool. A node that never
// connected may have any tool of the registry.
func (r *Relay) hasAnnounced(tenant string, name manifest.ToolName) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	n, err := r.store.Node(ctx, tenant, name.NodeID)
	if err != nil || len(n.Manifest) == 0 {
		return manifest.KnownTool(name)
	}
	return slices.ContainsFunc(announcedTools(&n), func(t manifest.Tool) bool { return t.Name() == name })
}

// The interfaces that the kernel discovers by assertion.
var (
	_ kernel.Plugin  = (*device)(nil)
	_ kernel.Reader  = (*device)(nil)
	_ kernel.Watcher = (*device)(nil)
	_ kernel.Stream  = (*hub.Subscriber)(nil)
)
