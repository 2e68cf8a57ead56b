package kernel

import (
	"slices"
	"strings"
)

type entry struct {
	tool   *Tool
	plugin *loaded
}

type resourceEntry struct {
	resource *Resource
	plugin   *loaded
}

// view is what one tenant's plugins offer, in order. The view of tenant "" is shared.
type view struct {
	tools     sorted[*Tool]
	resources sorted[*Resource]
}

// named is what a sorted list is in the order of.
type named interface {
	comparable
	key() string
	scope() string
}

func (t *Tool) key() string       { return t.Name }
func (t *Tool) scope() string     { return t.Scope }
func (r *Resource) key() string   { return r.URI }
func (r *Resource) scope() string { return r.Scope }

// sorted is a list in ascending order of keys; a page of it costs no sorting however often
// devices come and go. Pointers keep an insertion among 30,000 at some microseconds.
type sorted[T named] []T

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

// after returns the elements behind key; all of them for "".
func (s sorted[T]) after(key string) sorted[T] {
	if key == "" {
		return s
	}
	i, found := s.find(key)
	if found {
		i++
	}
	return s[i:]
}

func (k *Kernel) viewLocked(tenant string) *view {
	v, ok := k.views[tenant]
	if !ok {
		v = &view{}
		k.views[tenant] = v
	}
	return v
}

// page walks two lists as one and takes up to limit elements that the caller has the
// scope for; more tells whether another follows.
func page[T named](c *Caller, own, shared sorted[T], limit int) (taken []T, more bool) {
	asked, has := "", false // neighbours mostly need the same scope
	for len(own) > 0 || len(shared) > 0 {
		var next T
		if len(shared) == 0 || (len(own) > 0 && own[0].key() <= shared[0].key()) {
			next, own = own[0], own[1:]
		} else {
			next, shared = shared[0], shared[1:]
		}
		if scope := next.scope(); scope != asked {
			asked, has = scope, c.Has(scope)
		}
		if !has {
			continue
		}
		if len(taken) == limit {
			return taken, true
		}
		if taken == nil {
			taken = make([]T, 0, min(limit, len(own)+len(shared)+1))
		}
		taken = append(taken, next)
	}
	return taken, false
}

// ListTools returns up to limit tools that the caller may use, in ascending order of
// their names, starting behind the name `after` ("" for the start). more tells whether
// another page follows. Nobody else's tools, and none the caller lacks the scope for,
// are ever in it.
func (k *Kernel) ListTools(c *Caller, after string, limit int) (tools []*Tool, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(c.Tenant)
	return page(c, own.tools.after(after), shared.tools.after(after), limit)
}

// ListResources is ListTools for resources.
func (k *Kernel) ListResources(c *Caller, after string, limit int) (resources []*Resource, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(c.Tenant)
	return page(c, own.resources.after(after), shared.resources.after(after), limit)
}

// nothing is the view of a tenant that has no plugins.
var nothing = new(view)

func (k *Kernel) viewsLocked(tenant string) (own, shared *view) {
	own, shared = nothing, nothing
	if v, ok := k.views[""]; ok {
		shared = v
	}
	if v, ok := k.views[tenant]; ok && tenant != "" {
		own = v
	}
	return own, shared
}

// tool finds a tool by its canonical name, whosever it is.
func (k *Kernel) tool(name string) (entry, bool) {
	k.mu.RLock()
	e, ok := k.tools[name]
	k.mu.RUnlock()
	return e, ok
}

// Tool returns the tool of that name if the caller may use it.
func (k *Kernel) Tool(c *Caller, name string) (*Tool, bool) {
	e, ok := k.tool(name)
	if !ok || !e.visible(c) || !c.Has(e.tool.Scope) {
		return nil, false
	}
	return e.tool, true
}

func (e entry) visible(c *Caller) bool {
	return e.plugin.manifest.Tenant == "" || e.plugin.manifest.Tenant == c.Tenant
}

// Counts tells how many plugins, tools and resources are registered.
func (k *Kernel) Counts() (plugins, tools, resources int) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return len(k.plugins), len(k.tools), len(k.resources)
}
