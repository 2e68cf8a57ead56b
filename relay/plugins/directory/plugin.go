// Package directory is the plugin that lists presence: the devices and agents of the
// caller's tenant, as mcp://agents/directory.json and as the tool agents.list.
//
//	p := directory.New(directory.Options{Kernel: k, Lookup: lookup, Seen: seen})
//	err := k.Load(p, false)
//	err = p.Run(ctx) // notifies subscribers of changes
//
// The plugin has no state: an answer is made of the kernel's presence and of the registry, both in memory.
// So calls may run at the same time, in the goroutines of their callers.
package directory

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// URI is the resource's.
const URI = "mcp://agents/directory.json"

// Tool is the tool's name; it returns a page of what the resource has.
const Tool = "agents.list"

// Node is what the registry knows about a device.
type Node struct {
	Name        string
	NameSet     bool // by an operator, and not proposed by the device
	Tags        []string
	Description string
}

// Plugin serves the directory. Make one with New.
type Plugin struct{ opt Options }

// Options configure a Plugin. Only Kernel, whose presence is listed, must be given.
type Options struct {
	Kernel *kernel.Kernel
	// Lookup finds a device in the registry, in memory; a device that it does not know is not
	// listed, because an operator removed it. nil lists devices as their presence describes them.
	Lookup func(nodeID string) (Node, bool)
	// Seen calls fn with the devices of a tenant that were ever linked, from memory, in any
	// order. One without presence is listed as offline: its events are older than the event log
	// reaches, or the log is not the one of then. nil: there are none.
	Seen func(tenant string, fn func(nodeID string, lastSeenMS int64))
}

// New makes the plugin.
func New(o Options) *Plugin { return &Plugin{o} }

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// Directory is the content of the resource. At most kernel.MaxPresences entries, ascending by
// kind and id.
type Directory struct {
	Agents []Entry `json:"agents"`
}

// Page is the answer of the tool: a part of the Directory.
type Page struct {
	Agents []json.RawMessage `json:"agents"`
	Total  int               `json:"total"` // entries that the filters select, on all pages
	Next   string            `json:"next_cursor,omitempty"`
}

// Entry is a device or an agent. An agent has none of the members after Presence.
type Entry struct {
	kernel.Presence
	NameSet     *bool    `json:"name_set,omitempty"` // false: the device proposed its name
	Tags        []string `json:"tags,omitempty"`
	Description string   `json:"description,omitempty"`
}

const output = `{"type":"object","properties":{"agents":{"type":"array","items":{"type":"object","properties":{` +
	`"id":{"type":"string"},"kind":{"type":"string","enum":["device","agent"]},"name":{"type":"string"},` +
	`"status":{"type":"string","enum":["online","offline"]},"transport":{"type":"string"},` +
	`"suspect":{"type":"boolean","description":"online, but has not answered for 5 s or more; calls fail at once"},` +
	`"clone_suspected":{"type":"boolean","description":"two installations use this identity"},` +
	`"last_ping_at":{"type":"integer","description":"the last sign of life, milliseconds since 1970"},` +
	`"name_set":{"type":"boolean","description":"devices: an operator chose the name; if false, the device proposed it"},` +
	`"tags":{"type":"array","items":{"type":"string"},"description":"devices: set by an operator"},` +
	`"description":{"type":"string","description":"devices: set by an operator"}},` +
	`"required":["id","kind","status","last_ping_at"],"additionalProperties":false}},` +
	`"total":{"type":"integer","description":"entries on all pages"},"next_cursor":{"type":"string","description":"there are more: give it as cursor"},` +
	`"error":{"type":"object","properties":{"code":{"type":"string"},"message":{"type":"string"}},"required":["code","message"]}},` +
	`"additionalProperties":false}`

// Bounds of an answer, bytes of its entries.
const (
	pageBytes    = 1900      // of one without a limit: some 500 tokens of a model's context
	maxPageBytes = 256 << 10 // of one with a limit
	maxLimit     = 1000
)

var cursorPattern = lazyregexp.New(`^(agent|device):[!-~]{1,128}$`)

// input are the arguments of agents.list.
var input = arguments.Object{
	{Name: "kind", Type: arguments.String, Enum: []string{kernel.PresenceDevice, kernel.PresenceAgent}, Description: "only devices, or only agents"},
	{Name: "status", Type: arguments.String, Enum: []string{kernel.Online, kernel.Offline}, Description: "only those with this status"},
	{Name: "tag", Type: arguments.String, Min: 1, Max: 32, Description: "only devices with this tag", Example: "lab"},
	{Name: "text", Type: arguments.String, Min: 1, Max: 64, Description: "only those whose id begins with this, or whose name or description has it", Example: "attic"},
	{Name: "limit", Type: arguments.Integer, Min: 1, Max: maxLimit, Description: "entries in one answer; unless given, as many as 2 KB hold", Example: 100},
	{Name: "cursor", Type: arguments.String, Pattern: cursorPattern, Form: "next_cursor of the answer before", Description: "next_cursor of the answer before"},
}

// query are the arguments of a call.
type query struct {
	Kind, Status, Tag, Text, Cursor string
	Limit                           int
}

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{
		Name: "directory", Version: "1.0.0", Inline: true, Untrusted: true,
		Tools: []*kernel.Tool{{Name: Tool, ToolInfo: &kernel.ToolInfo{
			Title: "List devices and agents", Description: "The devices and agents of your tenant, page by page: who is online and when each gave its last sign of life.",
			InputSchema: input.Schema(), OutputSchema: json.RawMessage(output), CheckArguments: input.Check,
			SafetyClass: manifest.ReadOnly, Scope: manifest.ScopeToolsList,
		}}},
		Resources: []*kernel.Resource{{
			URI: URI, Name: "agents/directory", Title: "Devices and agents", MIME: "application/json", Scope: manifest.ScopeToolsList, Watchable: true,
			Description: "The devices and agents of your tenant, online and offline. Subscribe to hear who comes and goes.",
		}},
	}
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	var q query
	if err := json.Unmarshal(r.Arguments, &q); err != nil {
		return nil, arguments.Invalid("arguments: must be one strict JSON object")
	}
	page, err := q.page(p.list(r.Caller))
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(page)
	return &kernel.Result{Structured: data}, err
}

// page selects entries and encodes the first of them after the cursor. A cursor is a position and no
// entry, so entries that come and go between two pages shift nothing.
func (q *query) page(all []Entry) (Page, error) {
	page := Page{Agents: []json.RawMessage{}}
	limit, maxBytes := q.Limit, maxPageBytes
	if limit == 0 {
		limit, maxBytes = maxLimit, pageBytes
	}
	size, last := 0, "" // bytes of the entries on the page, and the cursor of the last one
	for i := range all {
		e := &all[i]
		if !q.selects(e) {
			continue
		}
		page.Total++
		if page.Next != "" || cursorOf(e) <= q.Cursor { // only counted: after this page, or before it
			continue
		}
		data, err := json.Marshal(e)
		if err != nil {
			return Page{}, err
		}
		if size += len(data) + 1; len(page.Agents) > 0 && (len(page.Agents) == limit || size > maxBytes) {
			page.Next = last
			continue
		}
		page.Agents, last = append(page.Agents, data), cursorOf(e)
	}
	return page, nil
}

// cursorOf orders entries as list does: by kind, then by id.
func cursorOf(e *Entry) string { return e.Kind + ":" + e.ID }

// selects reports whether the filters select an entry. Names are lower case.
func (q *query) selects(e *Entry) bool {
	text := strings.ToLower(q.Text)
	return (q.Kind == "" || e.Kind == q.Kind) && (q.Status == "" || e.Status == q.Status) && (q.Tag == "" || slices.Contains(e.Tags, q.Tag)) &&
		(text == "" || strings.HasPrefix(strings.ToLower(e.ID), text) || strings.Contains(e.Name, text) || strings.Contains(strings.ToLower(e.Description), text))
}

// Read implements kernel.Reader.
func (p *Plugin) Read(_ context.Context, c *kernel.Caller, uri string) ([]byte, error) {
	if uri != URI {
		return nil, kernel.ErrNoResource
	}
	return json.Marshal(Directory{Agents: p.list(c)})
}

// list returns all entries of the caller's tenant. It is not nil, which would be null in JSON.
func (p *Plugin) list(c *kernel.Caller) []Entry {
	present := p.known(c.Tenant)
	list := make([]Entry, 0, len(present))
	for _, s := range present {
		e := Entry{Presence: s}
		if s.Kind == kernel.PresenceDevice && p.opt.Lookup != nil {
			n, ok := p.opt.Lookup(s.ID)
			if !ok {
				continue
			}
			// The registry is newer: an operator may have named the device since it came online.
			e.Name, e.NameSet, e.Tags, e.Description = n.Name, &n.NameSet, n.Tags, n.Description
		}
		list = append(list, e)
	}
	return list
}

// known returns the presence of a tenant, and the devices of the registry that have none.
func (p *Plugin) known(tenant string) []kernel.Presence {
	present := p.opt.Kernel.ListPresence(tenant)
	if p.opt.Seen == nil {
		return present
	}
	isPresent := make(map[string]bool, len(present))
	for i := range present {
		if present[i].Kind == kernel.PresenceDevice {
			isPresent[present[i].ID] = true
		}
	}
	listed := len(present)
	p.opt.Seen(tenant, func(nodeID string, lastSeenMS int64) {
		if !isPresent[nodeID] && len(present) < kernel.MaxPresences {
			present = append(present, kernel.Presence{Tenant: tenant, ID: nodeID, Kind: kernel.PresenceDevice, Status: kernel.Offline, LastPingMS: lastSeenMS})
		}
	})
	if len(present) > listed {
		slices.SortFunc(present, func(a, b kernel.Presence) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID)) })
	}
	return present
}

// Watch implements kernel.Watcher. Run notifies the subscribers of the tenant concerned,
// so Watch only waits.
func (p *Plugin) Watch(ctx context.Context, _ string, _ func()) error {
	<-ctx.Done()
	return ctx.Err()
}

// Run notifies the subscribers of a tenant when one of its devices or agents goes online or
// offline, until ctx ends.
func (p *Plugin) Run(ctx context.Context) error {
	remove := p.opt.Kernel.OnPresence(func(s kernel.Presence) {
		p.opt.Kernel.NotifyChange(s.Tenant, kernel.Change{Updated: []string{URI}})
	})
	defer remove()
	<-ctx.Done()
	return context.Cause(ctx)
}
