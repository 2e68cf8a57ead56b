package control

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Bounds of PluginsURI. The tool kernel.introspection.plugins has pages, and shows each manifest.
const (
	maxBoardRows     = 200
	maxManifest      = 64 << 10  // bytes of one manifest
	maxManifestBytes = 512 << 10 // of all
)

// pluginRow is a plugin with the names of its tools and the URIs of its resources.
type pluginRow struct {
	kernel.PluginInfo
	ToolNames []string `json:"tool_names"`
	URIs      []string `json:"resource_uris"`
	// Document is the manifest, where it is shown. ManifestBytes is its size where it is left out.
	Document      json.RawMessage `json:"manifest,omitempty"`
	ManifestBytes int             `json:"manifest_bytes,omitempty"`
}

// pluginsAnswer is a page of plugins. Next is empty on the last one.
type pluginsAnswer struct {
	Total   int         `json:"total"`
	Boards  int         `json:"boards,omitempty"` // of Total
	Next    string      `json:"next,omitempty"`
	Note    string      `json:"note,omitempty"` // what is left out, and how to get it
	Plugins []pluginRow `json:"plugins"`
}

// newPluginRow makes a row without a manifest.
func newPluginRow(i *kernel.PluginInfo) pluginRow {
	row := pluginRow{PluginInfo: *i, ToolNames: []string{}, URIs: []string{}}
	for _, t := range i.Manifest.Tools {
		row.ToolNames = append(row.ToolNames, t.Name)
	}
	for _, r := range i.Manifest.Resources {
		row.URIs = append(row.URIs, r.URI)
	}
	return row
}

func isBoard(i *kernel.PluginInfo) bool { return strings.HasPrefix(i.Name, kernel.DevicePrefix) }

// countBoards counts the plugins that are boards.
func countBoards(all []kernel.PluginInfo) (n int) {
	for i := range all {
		if isBoard(&all[i]) {
			n++
		}
	}
	return n
}

// plugins is a page of the loaded plugins, in the order of their names, after one name.
func (p *Plugin) plugins(after string, limit int) any {
	// The last name of a page is its cursor. Names are unique and sorted, so it stays right while boards
	// come and go.
	all := p.opt.Kernel.Info().Plugins
	out := pluginsAnswer{Total: len(all), Boards: countBoards(all), Plugins: []pluginRow{}}
	from, found := slices.BinarySearchFunc(all, after, func(i kernel.PluginInfo, name string) int { return cmp.Compare(i.Name, name) })
	if found {
		from++
	}
	for i := from; i < len(all); i++ {
		if len(out.Plugins) == limit {
			out.Next = out.Plugins[limit-1].Name
			break
		}
		out.Plugins = append(out.Plugins, newPluginRow(&all[i]))
	}
	return out
}

// plugin is one plugin with its manifest.
func (p *Plugin) plugin(name string) (any, error) {
	all := p.opt.Kernel.Info().Plugins
	i, found := slices.BinarySearchFunc(all, name, func(i kernel.PluginInfo, name string) int { return cmp.Compare(i.Name, name) })
	if !found {
		return nil, manifest.E(manifest.BadRequest, "no plugin of this name is loaded; without name the answer lists them")
	}
	row := newPluginRow(&all[i])
	document, err := manifestOf(&all[i])
	row.Document = document
	return pluginsAnswer{Total: len(all), Boards: countBoards(all), Plugins: []pluginRow{row}}, err
}

// pluginsResource is the content of PluginsURI: first the plugins that are no boards, with their
// manifests, then some of the boards. A manifest that is larger than the rest of maxManifestBytes is left
// out; a smaller one after it may still be shown.
func (p *Plugin) pluginsResource() (any, error) {
	all := p.opt.Kernel.Info().Plugins
	out := pluginsAnswer{Total: len(all), Plugins: []pluginRow{}}
	var boards []pluginRow
	left, leftOut := maxManifestBytes, 0
	for i := range all {
		if isBoard(&all[i]) {
			if out.Boards++; len(boards) < maxBoardRows {
				boards = append(boards, newPluginRow(&all[i]))
			}
			continue
		}
		row := newPluginRow(&all[i])
		document, err := manifestOf(&all[i])
		if err != nil {
			return nil, err
		}
		if len(document) <= min(left, maxManifest) {
			row.Document, left = document, left-len(document)
		} else {
			row.ManifestBytes = len(document)
			leftOut++
		}
		out.Plugins = append(out.Plugins, row)
	}
	out.Plugins = append(out.Plugins, boards...)
	var notes []string
	if out.Boards > len(boards) {
		out.Next = boards[len(boards)-1].Name
		notes = append(notes, fmt.Sprintf("%d of %d boards are left out: kernel.introspection.plugins {\"after\":%q} lists them", out.Boards-len(boards), out.Boards, out.Next))
	}
	if leftOut > 0 {
		notes = append(notes, fmt.Sprintf("%d manifests are left out: kernel.introspection.plugins {\"name\":NAME} shows one", leftOut))
	}
	out.Note = strings.Join(notes, "; ")
	return out, nil
}

// builtinManifest is the manifest of a plugin without a plugin.json, in the same form.
type builtinManifest struct {
	Name         string            `json:"name"`
	Version      string            `json:"version"`
	Tools        []builtinTool     `json:"tools,omitempty"`
	Resources    []builtinResource `json:"resources,omitempty"`
	Capabilities []string          `json:"capabilities"` // the scopes of all
}

// builtinTool has the member names of a plugin.json, so that manifests of built-in plugins look like those
// of external ones.
type builtinTool struct {
	Name         string               `json:"name"`
	Title        string               `json:"title,omitempty"`
	Description  string               `json:"description"`
	InputSchema  json.RawMessage      `json:"inputSchema"`
	OutputSchema json.RawMessage      `json:"outputSchema,omitempty"`
	SafetyClass  manifest.SafetyClass `json:"safetyClass,omitempty"`
	Capability   string               `json:"capability"`
}

type builtinResource struct {
	URI          string `json:"uri"`
	Description  string `json:"description"`
	MIME         string `json:"mimeType,omitempty"`
	Subscribable bool   `json:"subscribable"`
	Capability   string `json:"capability"`
}

// manifestOf returns the manifest of a plugin: what its plugin.json says, or what it offers.
func manifestOf(i *kernel.PluginInfo) (json.RawMessage, error) {
	if i.Declaration != nil {
		return json.Marshal(i.Declaration)
	}
	m := builtinManifest{Name: i.Name, Version: i.Version, Capabilities: []string{}}
	add := func(scope string) string {
		if !slices.Contains(m.Capabilities, scope) {
			m.Capabilities = append(m.Capabilities, scope)
		}
		return scope
	}
	for _, t := range i.Manifest.Tools {
		m.Tools = append(m.Tools, builtinTool{t.Name, t.Title, t.Description, t.InputSchema, t.OutputSchema, t.SafetyClass, add(t.Scope)})
	}
	for _, r := range i.Manifest.Resources {
		m.Resources = append(m.Resources, builtinResource{r.URI, r.Description, r.MIME, r.Watchable, add(r.Scope)})
	}
	slices.Sort(m.Capabilities)
	return json.Marshal(m)
}
