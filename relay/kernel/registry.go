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
	tools     sorted
	resources sorted
}

// sorted is a set of strings in ascending order; a page of it costs no sorting however
// often devices come and go.
type sorted []string

func (s *sorted) insert(v string) {
	if i, found := slices.BinarySearch(*s, v); !found {
		*s = slices.Insert(*s, i, v)
	}
}

func (s *sorted) remove(v string) {
	if i, found := slices.BinarySearch(*s, v); found {
		*s = slices.Delete(*s, i, i+1)
	}
}

// after returns the elements behind v; all of them for "".
func (s sorted) after(v string) sorted {
	if v == "" {
		return s
	}
	i, found := slices.BinarySearch(s, v)
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

// merged walks two sorted lists as one.
func merged(a, b sorted, yield func(string) bool) {
	for len(a) > 0 || len(b) > 0 {
		var next string
		if len(b) == 0 || (len(a) > 0 && strings.Compare(a[0], b[0]) <= 0) {
			next, a = a[0], a[1:]
		} else {
			next, b = b[0], b[1:]
		}
		if !yield(next) {
			return
		}
	}
}

// ListTools returns up to limit tools that the caller may use, in ascending order of
// their names, starting behind the name `after` ("" for the start). more tells whether
// another page follows. Nobody else's tools, and none the caller lacks the scope for,
// are ever in it.
func (k *Kernel) ListTools(c *Caller, after string, limit int) (page []*Tool, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.listsLocked(c.Tenant, func(v *view) sorted { return v.tools.after(after) })
	merged(own, shared, func(name string) bool {
		t := k.tools[name].tool
		if t == nil || !c.Has(t.Scope) {
			return true
		}
		if len(page) == limit {
			more = true
			return false
		}
		page = append(page, t)
		return true
	})
	return page, more
}

// ListResources is ListTools for resources.
func (k *Kernel) ListResources(c *Caller, after string, limit int) (page []*Resource, more bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.listsLocked(c.Tenant, func(v *view) sorted { return v.resources.after(after) })
	merged(own, shared, func(uri string) bool {
		r := k.resources[uri].resource
		if r == nil || !c.Has(r.Scope) {
			return true
		}
		if len(page) == limit {
			more = true
			return false
		}
		page = append(page, r)
		return true
	})
	return page, more
}

func (k *Kernel) listsLocked(tenant string, pick func(*view) sorted) (own, shared sorted) {
	if v, ok := k.views[""]; ok {
		shared = pick(v)
	}
	if v, ok := k.views[tenant]; ok && tenant != "" {
		own = pick(v)
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
