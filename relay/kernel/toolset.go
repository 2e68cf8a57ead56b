package kernel

import (
	"slices"
	"strings"
)

// ToolGroup divides tools by the lists that have them. It is a byte because each capability of each
// board has a Tool.
type ToolGroup uint8

// The groups.
const (
	GroupRelay      ToolGroup = iota // the relay's own tools, and those of external plugins
	GroupBoardBasic                  // echo and metrics of boards, which DefaultToolset has
	GroupBoardOther                  // boards' other tools, only in lists of boards
	GroupFleet                       // tools for many boards; their number does not grow with the boards
	numGroups
)

// Toolset is a choice of tools to list. It limits nothing else: who knows the name of another tool
// may call it. The zero value is DefaultToolset.
type Toolset struct {
	groups  uint8    // a bit for each ToolGroup
	plugins []string // whose tools are listed too, if their groups are not
}

// Toolsets that can be joined with And.
var (
	DefaultToolset = toolset(GroupRelay, GroupBoardBasic)
	BoardsToolset  = toolset(GroupBoardBasic, GroupBoardOther)
	FleetToolset   = toolset(GroupFleet)
	PluginToolset  = toolset(GroupRelay, GroupFleet) // of plugins that are not boards
	AllTools       = toolset(GroupRelay, GroupBoardBasic, GroupBoardOther, GroupFleet)
)

func toolset(groups ...ToolGroup) (s Toolset) {
	for _, g := range groups {
		s.groups |= 1 << g
	}
	return s
}

func (s Toolset) has(g ToolGroup) bool {
	if s.groups == 0 && s.plugins == nil {
		s = DefaultToolset
	}
	return s.groups&(1<<g) != 0
}

// HasBoards reports whether the set has tools of boards, so that it changes with them.
func (s Toolset) HasBoards() bool { return s.has(GroupBoardBasic) || s.has(GroupBoardOther) }

// And returns a set with the tools of both.
func (s Toolset) And(o Toolset) Toolset {
	return Toolset{s.groups | o.groups, append(slices.Clone(s.plugins), o.plugins...)}
}

// WithPlugin returns the set with the tools of a plugin.
func (s Toolset) WithPlugin(name string) Toolset { return s.And(Toolset{plugins: []string{name}}) }

// PluginNames are the plugins that Toolset.WithPlugin can name for a caller, ascending: those with
// tools that the caller may use. Boards are not among them.
func (k *Kernel) PluginNames(c *Caller) (names []string) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(c.Tenant)
	for _, v := range []*view{own, shared} {
		for _, g := range []ToolGroup{GroupRelay, GroupFleet} {
			for _, t := range v.tools[g] {
				l := k.tools[t.Name].plugin
				if c.Has(t.Scope) && !l.isDevice() && !(k.pipe.MayRefuse() && k.pipe.Refuses(t.request(c, "", l))) {
					names = append(names, l.manifest.Name)
				}
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// PluginToolNames are the names of the listed tools of all plugins of a tenant that are not boards. It
// checks no scope.
func (k *Kernel) PluginToolNames(tenant string) (names []string) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	own, shared := k.viewsLocked(tenant)
	for _, v := range []*view{own, shared} {
		for _, g := range []ToolGroup{GroupRelay, GroupFleet} {
			for _, t := range v.tools[g] {
				if t.NodeID == "" {
					names = append(names, t.Name)
				}
			}
		}
	}
	return names
}

// pluginToolsLocked are the tools of the set's plugins, ascending by name, without those of its
// groups. mu is held.
func (k *Kernel) pluginToolsLocked(c *Caller, set Toolset) (list sorted[*Tool]) {
	for i, name := range set.plugins {
		l := k.plugins[name]
		if l == nil || !l.visibleTo(c) || l.manifest.Unlisted || slices.Contains(set.plugins[:i], name) {
			continue
		}
		for _, t := range l.manifest.Tools {
			if !t.Unlisted && !set.has(t.Group) {
				list = append(list, t)
			}
		}
	}
	slices.SortFunc(list, func(a, b *Tool) int { return strings.Compare(a.Name, b.Name) })
	return list
}
