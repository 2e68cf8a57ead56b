package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"agentctl/lazyregexp"
	"agentctl/manifest"
)

// Manifest lists what a plugin offers. A connected device is a plugin: its capability
// manifest becomes one of these.
type Manifest struct {
	Name      string // unique; a device's is "device:<node_id>"
	Version   string // semantic version
	Tenant    string // whose callers see it; empty: everybody's
	Tools     []*Tool
	Resources []*Resource
	// MaxConcurrency bounds the plugin's calls in flight; 0: DefaultConcurrency. Devices
	// have the limits of their capabilities instead (RFC-0005 §7).
	MaxConcurrency int
	// CallTimeout ends a call earlier than CallBudget, which it cannot exceed; 0: CallBudget.
	CallTimeout time.Duration
	// Inline calls run in the caller's goroutine. It is for trusted code that obeys its
	// context. Calls of other plugins get a goroutine each, so that a plugin that ignores
	// its context cannot block its caller; MaxConcurrency bounds the goroutines that such a
	// plugin leaks.
	Inline bool
	// Unlisted tools and resources can be used by who knows their names, but are in no list:
	// those of a device that may be back in a moment.
	Unlisted bool
	// Forwards is set if the tools end in calls of other plugins, whose errors and timeouts then say
	// nothing about this one: only panics open its breaker. Otherwise one bad board could take these
	// tools from every tenant.
	Forwards bool
	// Untrusted plugins answer with text that boards or callers wrote, see
	// Request.MarkUntrusted.
	Untrusted bool
	// Sandbox says what keeps the program of an external plugin from the relay's files, for
	// operators (package process). Empty for a plugin that runs inside the relay.
	Sandbox string
}

// DefaultConcurrency is MaxConcurrency of a plugin that sets none.
const DefaultConcurrency = 64

// Tool is a function that a client calls by name. Each capability of each board has one, so what
// is the same for all boards is in ToolInfo, which they share.
type Tool struct {
	Name   string // canonical spelling, unique in the kernel
	NodeID string // of a device tool
	// Limit is the capability's rate and concurrency. The kernel enforces it on unary
	// tools; a streaming plugin charges it when it really opens a stream, since joining
	// one costs the device nothing.
	Limit *manifest.Limit
	*ToolInfo
}

// ToolInfo describes a tool. It is read only once its plugin is loaded.
type ToolInfo struct {
	Title        string
	Description  string
	InputSchema  json.RawMessage
	OutputSchema json.RawMessage // nil: the tool has content only
	SafetyClass  manifest.SafetyClass
	Scope        string // what a caller must hold; never empty
	Streams      bool   // answers with a stream
	// Inspects is set if a caller must also hold boards:inspect.
	Inspects bool
	// LogCalls offers each successful call to Options.Log: ids, decision and code, never
	// arguments or results (RFC-0005 §12). Plugins with domain events append those
	// instead.
	LogCalls bool
	// Hints say what clients may assume of a tool without a SafetyClass. Of one with a class,
	// the class says it.
	Hints Hints
	// Unlisted tools are in no list, although their plugin's others are. A name with a word in
	// it that a board chose is such a tool: who knows the name may call it.
	Unlisted bool
	// MayStream tools open a stream if their arguments ask for one, and else answer at once.
	MayStream bool
	// Group says which lists have the tool, see Toolset.
	Group ToolGroup
	// CheckArguments validates the arguments against InputSchema and returns them in their
	// normal form. It runs before dispatch.
	CheckArguments func(args []byte) ([]byte, error)
	// CheckResult, when set, validates the structured answer against OutputSchema. An
	// answer that breaks it is a fault of the plugin. nil: the plugin is trusted.
	CheckResult func(structured []byte) error
}

// Hints are what a client may assume of a tool that changes something: whether it asks a person
// before a call, or may repeat one. They are those of MCP (ToolAnnotations) as a set of bits; an
// empty set says nothing, and the client assumes the worst.
type Hints uint8

// The hints.
const (
	HintSafe       Hints = 1 << iota // not destructive: a call removes or replaces nothing for good
	HintIdempotent                   // the same call again changes nothing more
	HintLocal                        // a call reaches nothing beyond the relay and its boards
	HintReadOnly                     // a call changes nothing
)

// Resource is a readable document with a URI.
type Resource struct {
	URI         string
	Name        string
	Title       string
	Description string
	MIME        string
	Scope       string
	NodeID      string
	Watchable   bool
}

// Plugin serves the tools and resources of its manifest. Call, Read and Watch may run
// concurrently.
type Plugin interface {
	Manifest() *Manifest
	Call(ctx context.Context, r *Request) (*Result, error)
}

// Reader is a plugin with resources.
type Reader interface {
	Read(ctx context.Context, c *Caller, uri string) ([]byte, error)
}

// Watcher is a plugin with resources that change. Watch blocks until ctx ends and calls
// changed after each change.
type Watcher interface {
	Watch(ctx context.Context, uri string, changed func()) error
}

// TemplateResolver is a plugin with resource templates. A URI mcp://NAME/... that is not listed
// belongs to the plugin of that name.
type TemplateResolver interface {
	// ResolveURI returns the resource of a URI, or nil if no template has it. It must not block.
	ResolveURI(uri string) *Resource
}

// MethodHandler is a plugin that answers MCP methods beyond tools and resources (prompts,
// completion, resource templates, logging).
type MethodHandler interface {
	// Methods lists the methods.
	Methods() []string
	// HandleMethod answers one; params and result are JSON.
	HandleMethod(ctx context.Context, c *Caller, s Session, method string, params json.RawMessage) (json.RawMessage, error)
}

// Declarer is a plugin that was declared by a document.
type Declarer interface {
	// Declaration returns the document, to be encoded as JSON, and its digest, SHA-256 in hex. The
	// document is read only. It is called under the kernel's lock: it must not block nor call the kernel.
	Declaration() (document any, digest string)
}

// Bounds of the registry. Each device is a plugin; the relay adds its built-in ones.
const (
	MaxPlugins        = 20_256
	MaxToolsPerPlugin = 256 // and resources
)

// Errors of Load and UnloadByName.
var (
	ErrAlreadyLoaded  = errors.New("kernel: a plugin of this name is loaded")
	ErrNotLoaded      = errors.New("kernel: no such plugin is loaded")
	ErrTooManyPlugins = errors.New("kernel: too many plugins")
)

// Load registers a plugin's tools and resources and notifies the subscribers. With replace
// it takes the place of a plugin of the same name in one step, so that no client sees a
// moment without its tools.
func (k *Kernel) Load(p Plugin, replace bool) error {
	_, err := k.load(p, replace, false)
	return err
}

// load is Load. With drain it returns the channel of Replace.
func (k *Kernel) load(p Plugin, replace, drain bool) (drained <-chan struct{}, err error) {
	m := p.Manifest()
	if err := checkManifest(m); err != nil {
		return nil, fmt.Errorf("load plugin%s: %w", nameOf(m), err)
	}
	l := &loaded{plugin: p, manifest: m}
	var methods []string // read before the lock: the plugin may call the kernel
	if h, ok := p.(MethodHandler); ok {
		methods = h.Methods()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.plugins[m.Name]
	if err := k.admitLocked(m, old, replace); err != nil {
		return nil, fmt.Errorf("load plugin %s: %w", m.Name, err)
	}
	promptsChange := slices.Contains(methods, methodPrompts)
	if old != nil {
		promptsChange = promptsChange || slices.Contains(k.methods[methodPrompts], old)
		k.removeLocked(old)
	}
	k.insertLocked(l, methods)
	switch {
	case old == nil:
		drained = closedChannel
	case drain:
		drained = k.drainLocked(old)
	default:
		k.retireLocked(old)
	}
	k.notifyReplacedLocked(old, m)
	if promptsChange {
		k.notify.push(m.Tenant, Change{Prompts: true}, "")
	}
	return drained, nil
}

// methodPrompts is the method of plugins with prompts. Its answer is a list that changes when such a
// plugin comes or goes.
const methodPrompts = "prompts/list"

// Refresh registers the tools and resources that the manifest of a loaded plugin has now, in place of
// those that it had. Its counters and its breaker stay. ErrNotLoaded: p is not loaded, or was
// replaced.
func (k *Kernel) Refresh(p Plugin) error {
	m := p.Manifest()
	if err := checkManifest(m); err != nil {
		return fmt.Errorf("refresh plugin%s: %w", nameOf(m), err)
	}
	l := &loaded{plugin: p, manifest: m}
	var methods []string
	if h, ok := p.(MethodHandler); ok {
		methods = h.Methods()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.plugins[m.Name]
	if old == nil || old.plugin != p {
		return fmt.Errorf("refresh plugin %s: %w", m.Name, ErrNotLoaded)
	}
	if err := k.admitLocked(m, old, true); err != nil {
		return fmt.Errorf("refresh plugin %s: %w", m.Name, err)
	}
	l.counts.add(&old.counts)
	l.breaker.Store(old.breaker.Load())
	k.removeLocked(old)
	k.retireLocked(old)
	k.insertLocked(l, methods)
	k.notifyReplacedLocked(old, m)
	return nil
}

// notifyReplacedLocked informs the subscribers that a plugin with manifest m has taken the place of
// old, which is nil for a new one. mu is held.
func (k *Kernel) notifyReplacedLocked(old *loaded, m *Manifest) {
	if old == nil {
		k.notifyListsLocked(m)
	} else if !sameSurface(old.manifest, m) {
		k.notifyListsLocked(old.manifest) // its lists may have shrunk, perhaps for another tenant
		k.notifyListsLocked(m)
	}
}

// nameOf is the name in the errors of manifests, which may have none.
func nameOf(m *Manifest) string {
	if m == nil || m.Name == "" {
		return ""
	}
	return " " + m.Name
}

// admitLocked says why a plugin cannot be loaded, possibly in place of old. mu is held.
func (k *Kernel) admitLocked(m *Manifest, old *loaded, replace bool) error {
	if old != nil && !replace {
		return ErrAlreadyLoaded
	}
	if old == nil && len(k.plugins) >= MaxPlugins {
		return ErrTooManyPlugins
	}
	for _, t := range m.Tools {
		if e, ok := k.tools[t.Name]; ok && e.plugin != old {
			return errors.New("a tool of the same name belongs to another plugin")
		}
	}
	if !strings.HasPrefix(m.Name, DevicePrefix) && k.sharesFlatNameLocked(m, old) {
		return errors.New("a tool's name is that of another plugin's tool when dots become underscores (names=flat)")
	}
	for _, r := range m.Resources {
		if e, ok := k.resources[r.URI]; ok && e.plugin != old {
			return errors.New("a resource of the same URI belongs to another plugin")
		}
	}
	return nil
}

// sharesFlatNameLocked reports whether a tool is spelled as one of another plugin where names have no
// dots: a_b.c and a.b_c. One plugin could otherwise take the calls of another. mu is held.
func (k *Kernel) sharesFlatNameLocked(m *Manifest, old *loaded) bool {
	flat := make(map[string]bool, len(m.Tools))
	for _, t := range m.Tools {
		flat[strings.ReplaceAll(t.Name, ".", "_")] = true
	}
	for _, l := range k.plugins {
		if l == old || l.isDevice() {
			continue
		}
		for _, t := range l.manifest.Tools {
			if flat[strings.ReplaceAll(t.Name, ".", "_")] {
				return true
			}
		}
	}
	return false
}

// insertLocked enters a plugin into the registry. mu is held.
func (k *Kernel) insertLocked(l *loaded, methods []string) {
	m := l.manifest
	k.plugins[m.Name] = l
	for _, method := range methods {
		list := k.methods[method]
		i, _ := slices.BinarySearchFunc(list, l, func(a, b *loaded) int { return strings.Compare(a.manifest.Name, b.manifest.Name) })
		if i == len(list) || list[i] != l {
			k.methods[method] = slices.Insert(list, i, l)
		}
	}
	v := k.viewLocked(m.Tenant)
	for _, t := range m.Tools {
		k.tools[t.Name] = toolEntry{tool: t, plugin: l}
		if !m.Unlisted && !t.Unlisted {
			v.tools[t.Group].insert(t)
		}
	}
	for _, r := range m.Resources {
		k.resources[r.URI] = resourceEntry{resource: r, plugin: l}
		if !m.Unlisted {
			v.resources.insert(r)
		}
	}
}

// removeLocked removes a plugin from the registry. mu is held.
func (k *Kernel) removeLocked(l *loaded) {
	m := l.manifest
	delete(k.plugins, m.Name)
	if l.isDevice() {
		k.unloadedBoards.add(&l.counts) // without the outcomes of calls that are in flight
	}
	if _, ok := l.plugin.(MethodHandler); ok { // whatever Methods returns by now
		for method, list := range k.methods {
			if list = slices.DeleteFunc(list, func(o *loaded) bool { return o == l }); len(list) == 0 {
				delete(k.methods, method)
			} else {
				k.methods[method] = list
			}
		}
	}
	v := k.viewLocked(m.Tenant)
	for _, t := range m.Tools {
		delete(k.tools, t.Name)
		v.tools[t.Group].remove(t.Name)
	}
	for _, r := range m.Resources {
		delete(k.resources, r.URI)
		v.resources.remove(r.URI)
	}
	if m.Tenant != "" && v.isEmpty() {
		delete(k.views, m.Tenant)
	}
}

// Unload removes a plugin only if it is still p: a late unload of a plugin that was
// replaced changes nothing.
func (k *Kernel) Unload(p Plugin) bool {
	name := p.Manifest().Name
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.loadedLocked(name, p)
	if l == nil {
		return false
	}
	k.unloadLocked(l)
	return true
}

// loadedLocked returns the entry of p, or nil if it is not loaded, or another plugin of its name is.
// mu is held.
func (k *Kernel) loadedLocked(name string, p Plugin) *loaded {
	if l := k.plugins[name]; l != nil && l.plugin == p {
		return l
	}
	return nil
}

// UnloadByName removes the plugin that ref names: NAME, or NAME@VERSION, which must be the
// loaded version. Devices are not unloaded by name but by the end of their link.
func (k *Kernel) UnloadByName(ref string) error {
	name, version, hasVersion := strings.Cut(ref, "@")
	if strings.HasPrefix(name, DevicePrefix) {
		return fmt.Errorf("unload %s: a device is unloaded by the end of its link", name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	l, ok := k.plugins[name]
	switch {
	case !ok:
		return fmt.Errorf("unload %s: %w", name, ErrNotLoaded)
	case hasVersion && l.manifest.Version != version:
		return fmt.Errorf("unload %s: the loaded version is %s: %w", ref, l.manifest.Version, ErrNotLoaded)
	}
	k.unloadLocked(l)
	return nil
}

// unloadLocked unloads a plugin without waiting for its calls. mu is held.
func (k *Kernel) unloadLocked(l *loaded) {
	k.withdrawLocked(l)
	k.retireLocked(l)
}

// withdrawLocked removes a plugin from the registry, and notifies who has its lists. The caller
// retires it. mu is held.
func (k *Kernel) withdrawLocked(l *loaded) {
	hadPrompts := slices.Contains(k.methods[methodPrompts], l)
	k.removeLocked(l)
	k.notifyListsLocked(l.manifest)
	if hadPrompts {
		k.notify.push(l.manifest.Tenant, Change{Prompts: true}, "")
	}
}

// maxVersion bounds a plugin's version, bytes.
const maxVersion = 64

// semanticVersion is the regular expression that semver.org 2.0.0 suggests.
var semanticVersion = lazyregexp.New(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?` +
	`(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$`)

// IsVersion reports whether s is a semantic version.
func IsVersion(s string) bool { return semanticVersion.MatchString(s) }

// checkManifest returns the error in a manifest, before its names are compared with
// those of other plugins.
func checkManifest(m *Manifest) error {
	switch {
	case m == nil || m.Name == "":
		return errors.New("the manifest needs a name")
	case len(m.Tools) > MaxToolsPerPlugin || len(m.Resources) > MaxToolsPerPlugin:
		return fmt.Errorf("too many tools or resources (use at most %d each)", MaxToolsPerPlugin)
	case len(m.Version) > maxVersion || !semanticVersion.MatchString(m.Version):
		return fmt.Errorf("not a semantic version: %q (use one like 1.0.0)", m.Version)
	case m.MaxConcurrency < 0 || m.CallTimeout < 0:
		return errors.New("MaxConcurrency and CallTimeout must not be negative")
	}
	isDevice := strings.HasPrefix(m.Name, DevicePrefix)
	seen := make(map[string]bool, len(m.Tools)+len(m.Resources))
	for _, t := range m.Tools {
		if t.Name == "" || t.ToolInfo == nil || t.Scope == "" || seen[t.Name] {
			return errors.New("every tool needs a unique name and a scope")
		}
		if t.Group >= numGroups {
			return errors.New("a tool is in no known group")
		}
		if _, ok := manifest.ParseToolName(t.Name); ok && !isDevice {
			return fmt.Errorf("the tool name %s is reserved for devices", t.Name)
		}
		seen[t.Name] = true
	}
	clear(seen)
	for _, r := range m.Resources {
		if r.URI == "" || r.Scope == "" || seen[r.URI] {
			return errors.New("every resource needs a unique URI and a scope")
		}
		seen[r.URI] = true
	}
	return nil
}

// sameSurface reports whether clients see no difference between a plugin and its
// replacement.
func sameSurface(a, b *Manifest) bool {
	return a.Tenant == b.Tenant && a.Unlisted == b.Unlisted &&
		slices.EqualFunc(a.Tools, b.Tools, func(x, y *Tool) bool {
			return x.Name == y.Name && (x.ToolInfo == y.ToolInfo || x.Title == y.Title && x.Description == y.Description &&
				x.SafetyClass == y.SafetyClass && x.Hints == y.Hints && x.Unlisted == y.Unlisted && x.Scope == y.Scope && x.Inspects == y.Inspects &&
				x.Group == y.Group && string(x.InputSchema) == string(y.InputSchema) &&
				string(x.OutputSchema) == string(y.OutputSchema))
		}) &&
		slices.EqualFunc(a.Resources, b.Resources, func(x, y *Resource) bool { return *x == *y })
}
