package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
)

// Manifest says what a plugin offers. A connected device is a plugin: its capability
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
	// context. Other plugins run in goroutines of their own, so that one that ignores its
	// context cannot hold its caller; MaxConcurrency bounds what such a plugin leaks.
	Inline bool
}

// DefaultConcurrency is the number of calls in flight of a plugin that names none.
const DefaultConcurrency = 64

// Tool is one callable thing.
type Tool struct {
	Name         string // canonical spelling, unique in the kernel
	Title        string
	Description  string
	InputSchema  json.RawMessage
	OutputSchema json.RawMessage // nil: the tool has content only
	SafetyClass  manifest.SafetyClass
	Scope        string // what a caller must hold; never empty
	NodeID       string // of a device tool
	Streams      bool   // answers with a stream
	// LogCalls offers each served call to Options.Log: ids, decision and code, never
	// arguments or results (RFC-0005 §12). Plugins with a domain of their own append
	// their own events instead. (It stands here for the size: there is one for each tool
	// of each board.)
	LogCalls bool
	// CheckArguments validates the arguments against InputSchema and returns them in their
	// normal form. It runs before dispatch.
	CheckArguments func(args []byte) ([]byte, error)
	// Limit is the capability's rate and concurrency. The kernel enforces it on unary
	// tools; a streaming plugin charges it when it really opens a stream, since joining
	// one costs the device nothing.
	Limit *manifest.Limit
	// CheckResult, when set, holds the structured answer against OutputSchema. A plugin
	// whose answers break it has a fault. nil: the plugin is trusted.
	CheckResult func(structured []byte) error
}

// Resource is one readable thing.
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

// MethodHandler is a plugin that answers MCP methods beyond tools and resources (prompts,
// completion, resource templates, logging).
type MethodHandler interface {
	// Methods lists the methods.
	Methods() []string
	// HandleMethod answers one; params and result are JSON.
	HandleMethod(ctx context.Context, c *Caller, s Session, method string, params json.RawMessage) (json.RawMessage, error)
}

// Bounds of the registry.
const (
	MaxPlugins        = 20_256 // each device is one, and the relay has some of its own
	MaxToolsPerPlugin = 256
)

var (
	// ErrAlreadyLoaded is returned by Load for a name that is taken.
	ErrAlreadyLoaded = errors.New("kernel: a plugin of this name is loaded")
	// ErrNotLoaded is returned by UnloadByName for what is not there.
	ErrNotLoaded = errors.New("kernel: no such plugin is loaded")
	// ErrTooManyPlugins is returned by Load when MaxPlugins are loaded.
	ErrTooManyPlugins = errors.New("kernel: too many plugins")
)

// Load registers a plugin's tools and resources and tells the subscribers. With replace
// a plugin of the same name gives way in the same step, so that no moment without its
// tools can be seen.
func (k *Kernel) Load(p Plugin, replace bool) error {
	m := p.Manifest()
	if err := checkManifest(m); err != nil {
		return err
	}
	l := &loaded{plugin: p, manifest: m}
	var serves []string // asked before the lock: the plugin may ask the kernel in its turn
	if methods, ok := p.(MethodHandler); ok {
		serves = methods.Methods()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	old, taken := k.plugins[m.Name]
	if taken && !replace {
		return fmt.Errorf("load plugin %s: %w", m.Name, ErrAlreadyLoaded)
	}
	if !taken && len(k.plugins) >= MaxPlugins {
		return ErrTooManyPlugins
	}
	for _, t := range m.Tools {
		if e, clash := k.tools[t.Name]; clash && (!taken || e.plugin != old) {
			return fmt.Errorf("load plugin %s: a tool of the same name belongs to another plugin", m.Name)
		}
	}
	for _, r := range m.Resources {
		if e, clash := k.resources[r.URI]; clash && (!taken || e.plugin != old) {
			return fmt.Errorf("load plugin %s: a resource of the same URI belongs to another plugin", m.Name)
		}
	}
	if taken {
		k.dropLocked(old)
	}
	k.plugins[m.Name] = l
	k.indexMethodsLocked(l, serves)
	v := k.viewLocked(m.Tenant)
	for _, t := range m.Tools {
		k.tools[t.Name] = entry{tool: t, plugin: l}
		v.tools.insert(t)
	}
	for _, r := range m.Resources {
		k.resources[r.URI] = resourceEntry{resource: r, plugin: l}
		v.resources.insert(r)
	}
	if !taken {
		k.changedLocked(m)
	} else if !sameSurface(old.manifest, m) {
		k.changedLocked(old.manifest) // what it had may be gone, for another tenant perhaps
		k.changedLocked(m)
	}
	return nil
}

// Unload removes a plugin, only if it is still p: a late unload of a plugin that was
// replaced changes nothing.
func (k *Kernel) Unload(p Plugin) bool {
	name := p.Manifest().Name
	k.mu.Lock()
	defer k.mu.Unlock()
	l, ok := k.plugins[name]
	if !ok || l.plugin != p {
		return false
	}
	k.unloadLocked(l)
	return true
}

// UnloadByName removes the plugin that ref names: name, or name@version, which must be the
// loaded one. Devices are not unloaded by name; they leave when their link ends.
func (k *Kernel) UnloadByName(ref string) error {
	name, version, pinned := strings.Cut(ref, "@")
	if strings.HasPrefix(name, devicePrefix) {
		return fmt.Errorf("unload %s: a device is unloaded by the end of its link", name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	l, ok := k.plugins[name]
	switch {
	case !ok:
		return fmt.Errorf("unload %s: %w", name, ErrNotLoaded)
	case pinned && l.manifest.Version != version:
		return fmt.Errorf("unload %s: the loaded version is %s: %w", ref, l.manifest.Version, ErrNotLoaded)
	}
	k.unloadLocked(l)
	return nil
}

func (k *Kernel) unloadLocked(l *loaded) {
	k.dropLocked(l)
	delete(k.plugins, l.manifest.Name)
	k.changedLocked(l.manifest)
}

// indexMethodsLocked enters what a Methods plugin serves.
func (k *Kernel) indexMethodsLocked(l *loaded, serves []string) {
	for _, method := range serves {
		list := k.methods[method]
		i, _ := slices.BinarySearchFunc(list, l, func(a, b *loaded) int { return strings.Compare(a.manifest.Name, b.manifest.Name) })
		if i == len(list) || list[i] != l {
			k.methods[method] = slices.Insert(list, i, l)
		}
	}
}

// dropMethodsLocked forgets it, whatever the plugin says now that it serves.
func (k *Kernel) dropMethodsLocked(l *loaded) {
	if _, ok := l.plugin.(MethodHandler); !ok {
		return
	}
	for method, list := range k.methods {
		if list = slices.DeleteFunc(list, func(o *loaded) bool { return o == l }); len(list) == 0 {
			delete(k.methods, method)
		} else {
			k.methods[method] = list
		}
	}
}

func (k *Kernel) dropLocked(l *loaded) {
	k.dropMethodsLocked(l)
	v := k.viewLocked(l.manifest.Tenant)
	for _, t := range l.manifest.Tools {
		delete(k.tools, t.Name)
		v.tools.remove(t.Name)
	}
	for _, r := range l.manifest.Resources {
		delete(k.resources, r.URI)
		v.resources.remove(r.URI)
	}
	if l.manifest.Tenant != "" && len(v.tools) == 0 && len(v.resources) == 0 {
		delete(k.views, l.manifest.Tenant)
	}
}

// maxVersion bounds a plugin's version, bytes.
const maxVersion = 64

// semanticVersion is the regular expression that semver.org 2.0.0 suggests.
var semanticVersion = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?` +
	`(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$`)

func checkManifest(m *Manifest) error {
	if m == nil || m.Name == "" {
		return errors.New("kernel: a plugin manifest needs a name")
	}
	if len(m.Tools) > MaxToolsPerPlugin || len(m.Resources) > MaxToolsPerPlugin {
		return fmt.Errorf("load plugin %s: at most %d tools and resources each", m.Name, MaxToolsPerPlugin)
	}
	if len(m.Version) > maxVersion || !semanticVersion.MatchString(m.Version) {
		return fmt.Errorf("load plugin %s: not a semantic version: %q (use one like 1.0.0)", m.Name, m.Version)
	}
	if m.MaxConcurrency < 0 || m.CallTimeout < 0 {
		return fmt.Errorf("load plugin %s: MaxConcurrency and CallTimeout are not negative", m.Name)
	}
	device := strings.HasPrefix(m.Name, devicePrefix)
	names := make(map[string]bool, len(m.Tools))
	for _, t := range m.Tools {
		if t.Name == "" || t.Scope == "" || names[t.Name] {
			return fmt.Errorf("load plugin %s: every tool needs a name of its own and a scope", m.Name)
		}
		if _, ofDevice := manifest.ParseToolName(t.Name); ofDevice && !device {
			return fmt.Errorf("load plugin %s: the name of tool %s is a device's", m.Name, t.Name)
		}
		names[t.Name] = true
	}
	uris := make(map[string]bool, len(m.Resources))
	for _, r := range m.Resources {
		if r.URI == "" || r.Scope == "" || uris[r.URI] {
			return fmt.Errorf("load plugin %s: every resource needs a URI of its own and a scope", m.Name)
		}
		uris[r.URI] = true
	}
	return nil
}

// sameSurface tells whether a replacement shows a client exactly what it replaces.
func sameSurface(a, b *Manifest) bool {
	return a.Tenant == b.Tenant &&
		slices.EqualFunc(a.Tools, b.Tools, func(x, y *Tool) bool {
			return x.Name == y.Name && x.Title == y.Title && x.Description == y.Description &&
				x.SafetyClass == y.SafetyClass && x.Scope == y.Scope && string(x.InputSchema) == string(y.InputSchema) &&
				string(x.OutputSchema) == string(y.OutputSchema)
		}) &&
		slices.EqualFunc(a.Resources, b.Resources, func(x, y *Resource) bool { return *x == *y })
}
