package tickets

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A queue is computed from the tickets at each reading: a tenant has at most 2,500 of them.
// Subscribers learn that a queue may have changed and read it again; notifications carry
// no content.

// queue is a resource that lists some of a tenant's tickets, the most urgent first and
// then the oldest.
type queue struct {
	uri, name, title, about string
	contains                func(k *Ticket, actor string) bool
}

// queues are the resources of the plugin. "mine" depends on the reader, so its subscribers
// are notified of the changes of every assigned ticket of the tenant.
var queues = []queue{
	{"mcp://tickets/queue/open.json", "open", "Open tickets",
		"The tickets that are open, in progress or waiting, most urgent first. Subscribe to hear of changes.",
		func(k *Ticket, _ string) bool { return k.Status.isActive() }},
	{"mcp://tickets/queue/approvals.json", "approvals", "Pending approvals",
		"The approvals that nobody has decided yet, most urgent first. Subscribe to hear of changes.",
		func(k *Ticket, _ string) bool { return k.Status == Pending }},
	{"mcp://tickets/queue/mine.json", "mine", "My tickets",
		"The unfinished tickets that are assigned to you, most urgent first. Subscribe to hear of changes.",
		func(k *Ticket, actor string) bool { return !k.Status.isFinished() && k.AgentID == actor }},
}

// maxQueue bounds the tickets in one reading of a queue. Its total counts all of them, so a
// reader sees that there are more; tickets.list has pages.
const maxQueue = 100

// resources are the queues as the kernel lists them.
var resources = func() (list []*kernel.Resource) {
	for _, q := range queues {
		list = append(list, &kernel.Resource{URI: q.uri, Name: "tickets/" + q.name, Title: q.title, Description: q.about,
			MIME: "application/json", Scope: manifest.ScopeTicketsRead, Watchable: true})
	}
	return list
}()

// Read implements kernel.Reader. Within a priority the oldest ticket comes first: filter
// returns them in the order of creation, and the sort is stable.
func (p *Plugin) Read(_ context.Context, c *kernel.Caller, uri string) ([]byte, error) {
	i := slices.IndexFunc(queues, func(q queue) bool { return q.uri == uri })
	if i < 0 {
		return nil, kernel.ErrNoResource
	}
	q := queues[i]
	found := p.tenant(c.Tenant, false).filter(func(k *Ticket) bool { return q.contains(k, c.Actor) })
	slices.SortStableFunc(found, func(a, b *Ticket) int {
		return cmp.Compare(slices.Index(Priorities, b.Priority), slices.Index(Priorities, a.Priority))
	})
	body := struct {
		Queue   string    `json:"queue"`
		Total   int       `json:"total"`
		Tickets []summary `json:"tickets"`
	}{q.name, len(found), p.summaries(c.Tenant, found[:min(len(found), maxQueue)])}
	return json.Marshal(body)
}

// Watch implements kernel.Watcher. commit notifies the subscribers of the tenant, so Watch
// only waits.
func (p *Plugin) Watch(ctx context.Context, _ string, _ func()) error {
	<-ctx.Done()
	return ctx.Err()
}

// addQueues adds the URIs of the queues that contain a ticket. Of "mine", which depends on
// the reader, it assumes the assigned agent.
func (t *tenant) addQueues(set map[string]bool, id string) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	e := t.tickets[id]
	if e == nil {
		return
	}
	for _, q := range queues {
		if q.contains(&e.Ticket, e.AgentID) && (q.name != "mine" || e.AgentID != "") {
			set[q.uri] = true
		}
	}
}
