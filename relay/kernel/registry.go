package kernel

import (
	"slices"
	"strings"

	"agentctl/manifest"
)

// toolEntry is a tool in the registry, with the plugin that provides it.
type toolEntry struct {
	tool   *Tool
	plugin *loaded
}

// resourceEntry is a resource in the registry, with the plugin that provides it.
type resourceEntry struct {
	resource *Resource
	plugin   *loaded
}

// view is what the plugins of one tenant offer, in order. The view of tenant "" is shared
// by all tenants.
type view struct {
	tools     [numGroups]sorted[*Tool]
	resources sorted[*Resource]
}

// isEmpty reports whether the view has neither tools nor resources.
func (v *view) isEmpty() bool {
	for i := range v.tools {
		if len(v.tools[i]) > 0 {
			return false
		}
	}
	return len(v.resources) == 0
}

// sortable is an element of a sorted list.
type sortable interface {
	comparable
	key() string
	scope() string
	inspects() bool // also needs manifest.ScopeBoardsInspect
}

func (t *Tool) key() string        { return t.Name }
func (t *Tool) scope() string      { return t.Scope }
func (t *Tool) inspects() bool     { return t.Inspects }
func (r *Resource) key() string    { return r.URI }
func (r *Resource) scope() string  { return r.Scope }
func (r *Resource) inspects() bool { return false }

// sorted is a list in ascending order of keys, so that a page of it costs no sorting,
// however often devices connect. Its elements are pointers: an insertion among 30,000
// takes some microseconds.
type sorted[T sortable] []T

func (s sorted[T]) find(key string) (int, bool) {
	return slices.BinarySearchFunc(s, key, func(v T, key string) int { return strings.Compare(v.key(), key) })
}

func (s *sorted[T]) insert(v T) {
	if i, found := s.find(v.key()); !found {
		*s = slices.Insert(*s, i, v)
	}
}

func (s *sorted[T]) remove(key string) {
	if i, found := s.find(key); found {
		*s = slices.Delete(*s, i, i+1)
	}
}

// after returns the elements with a key above the given one; all of them for "".
func (s sorted[T]) after(key string) sorted[T] {
	i, found := s.find(key)
	if found {
		i++
	}
	return s[i:]
}

// viewLocked returns the view of a tenant, which it makes if there is none. mu is held.
func (k *Kernel) viewLocked(tenant string) *view {
	v := k.views[tenant]
	if v == nil {
		v = &view{}
		k.views[tenant] = v
	}
	return v
}

// page merges sorted lists and returns up to limit elements that the caller has the scope for and
// that hides, if it is set, does not hide. more reports whether another one follows.
func page[T sortable](c *Caller, limit int, hides func(T) bool, lists ...sorted[T]) (taken []T, more bool) {
	checked, has := "", false // the last scope: neighbors mostly need the same one
	mayInspect := c.Has(manifest.ScopeBoardsInspect)
	size := 1
	for _, l := range lists {
		size += len(l)
	}
	for {
		first := -1
		for i, l := range lists {
			if len(l) > 0 && (first < 0 || l[0].key() < lists[first][0].key()) {
				first = i
			}
		}
		if first < 0 {
			return taken, false
		}
		next := lists[first][0]
		lists[first] = lists[first][1:]
		if scope := next.scope(); scope != checked {
			checked, has = scope, c.Has(scope)
		}
		if !has || next.inspects() && !mayInspect || hides != nil && hides(next) {
			continue
		}
		if len(taken) == limit {
			return taken, true
		}
		if taken == nil {
			taken = make([]T, 0, min(limit, size))
		}
		taken = append(taken, next)
	}
}

// ListTools is ListToolset for the tools that a client gets which asks for no others.
func (k *Kernel) ListTools(c *Caller, after string, limit int) (tools []*Tool, more bool) {
	return k.ListToolset(c, "", DefaultToolset, after, limit)
}

// ListToolset returns up to limit tools of a set that the caller may use, in ascending order of
// their names, beginning after the name `after` ("" for the start). more reports whether another
// page follows. It lists neither tools of other tenants, nor tools that the caller lacks the scope
// for, nor tools whose calls on the connection connID ("": none) a stage refuses.
func (k *Kernel) ListToolset(c *Caller, connID string, set Toolset, after string, limit int) (tools []*Tool, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(c.Tenant)
	lists := make([]sorted[*Tool], 0, 2*numGroups+1)
	for g := range numGroups {
		if set.has(g) {
			lists = append(lists, own.tools[g].after(after), shared.tools[g].after(after))
		}
	}
	if list := k.pluginToolsLocked(c, set); len(list) > 0 {
		lists = append(lists, list.after(after))
	}
	var hides func(*Tool) bool
	if k.pipe.MayRefuse() {
		hides = func(t *Tool) bool { return k.pipe.Refuses(t.request(c, connID, k.tools[t.Name].plugin)) }
	}
	return page(c, limit, hides, lists...)
}

// ListResources is ListToolset for resources.
func (k *Kernel) ListResources(c *Caller, connID, after string, limit int) (resources []*Resource, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(c.Tenant)
	var hides func(*Resource) bool
	if k.pipe.MayRefuse() {
		hides = func(r *Resource) bool { return k.pipe.Refuses(r.request(c, connID, k.resources[r.URI].plugin)) }
	}
	return page(c, limit, hides, own.resources.after(after), shared.resources.after(after))
}

// request is a call of the tool as the stages see it.
func (t *Tool) request(c *Caller, connID string, l *loaded) *Request {
	return &Request{Caller: c, Method: MethodCall, Tool: t.Name, ConnID: connID, plugin: l, scope: t.Scope}
}

// request is a read of the resource as the stages see it.
func (r *Resource) request(c *Caller, connID string, l *loaded) *Request {
	return &Request{Caller: c, Method: MethodRead, URI: r.URI, ConnID: connID, plugin: l, scope: r.Scope}
}

// Refuses reports whether a stage refuses every call of a tool by this caller, so that lists leave it
// out. It does not check scopes.
func (k *Kernel) Refuses(c *Caller, connID, tool string) bool {
	if !k.pipe.MayRefuse() {
		return false
	}
	r := &Request{Caller: c, Tool: tool, ConnID: connID}
	k.resolve(r)
	return k.pipe.Refuses(r)
}

// Applies reports whether a stage is enabled for calls of a tool by this caller.
func (k *Kernel) Applies(stage string, c *Caller, connID string, t *Tool) bool {
	if !k.pipe.MayApply(stage) {
		return false
	}
	e, ok := k.tool(t.Name)
	return ok && k.pipe.Applies(stage, t.request(c, connID, e.plugin))
}

// emptyView is the view of a tenant that has no plugins. It is read only.
var emptyView = new(view)

// viewsLocked returns the tenant's own view and the shared one. mu is held.
func (k *Kernel) viewsLocked(tenant string) (own, shared *view) {
	own, shared = emptyView, emptyView
	if v, ok := k.views[""]; ok {
		shared = v
	}
	if v, ok := k.views[tenant]; ok && tenant != "" {
		own = v
	}
	return own, shared
}

// tool finds a tool by its canonical name, of whatever tenant.
func (k *Kernel) tool(name string) (toolEntry, bool) {
	k.mu.RLock()
	e, ok := k.tools[name]
	k.mu.RUnlock()
	return e, ok
}

// Tool returns the tool of that name if the caller may use it.
func (k *Kernel) Tool(c *Caller, name string) (*Tool, bool) {
	e, ok := k.tool(name)
	if !ok || !e.plugin.visibleTo(c) || e.tool.missingScope(c) != nil {
		return nil, false
	}
	return e.tool, true
}

// Counts returns how many plugins, tools and resources are registered.
func (k *Kernel) Counts() (plugins, tools, resources int) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return len(k.plugins), len(k.tools), len(k.resources)
}
