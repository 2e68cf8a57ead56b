package tickets

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// The events that a tenant's tickets are made of. The aggregate is the ticket's id, the
// time of the change is the event's. Each change of a ticket has the next version, so
// that an event which is read twice, or out of turn, changes nothing twice.
const (
	eventCreated      = "ticket.created"
	eventCommented    = "ticket.commented"
	eventAssigned     = "ticket.assigned"
	eventTransitioned = "ticket.transitioned"
	eventDropped      = "ticket.dropped"  // a finished ticket gave way to newer ones
	eventSnapshot     = "ticket.snapshot" // the whole ticket, written before older events are forgotten
	eventComments     = "ticket.comments" // behind a snapshot: some of its comments
)

// payload is the payload of all of them; each uses some of the fields.
type payload struct {
	V     int64  `json:"v,omitempty"` // version of the ticket after this event
	By    string `json:"by,omitempty"`
	Trace string `json:"trace_id,omitempty"`

	Title    string `json:"title,omitempty"` // created
	Body     string `json:"body,omitempty"`
	NodeID   string `json:"node_id,omitempty"`
	Priority string `json:"priority,omitempty"`
	Action   string `json:"action,omitempty"` // of the approval
	Expires  int64  `json:"expires_at,omitempty"`
	Key      string `json:"key,omitempty"`

	N       int    `json:"n,omitempty"` // commented
	Text    string `json:"text,omitempty"`
	AgentID string `json:"agent_id,omitempty"` // assigned; empty: to nobody
	From    Status `json:"from,omitempty"`     // transitioned
	To      Status `json:"to,omitempty"`

	Ticket   *Ticket   `json:"ticket,omitempty"`   // snapshot, without comments
	Comments []Comment `json:"comments,omitempty"` // comments
}

// newEvent makes an event; at is milliseconds since 1970.
func newEvent(tenant, typ, id string, at int64, p payload) kernel.Event {
	data, _ := json.Marshal(p) // strings, numbers: cannot fail
	return kernel.Event{Tenant: tenant, Type: typ, Aggregate: id, Payload: data, CreatedMS: at}
}

// outcome is what applying an event came to.
type outcome int

const (
	applied outcome = iota
	stale           // known already, or about a ticket that was dropped
	gap             // an earlier event of the ticket is missing
	foreign         // not an event of tickets, or one that a newer release wrote
)

// apply makes the change that an event tells of. Live changes and replayed ones come this
// way alike. mu is held.
func (t *tenant) apply(ev *kernel.Event, p *payload) outcome {
	e := t.tickets[ev.Aggregate]
	switch ev.Type {
	case eventDropped:
		if e == nil {
			return stale
		}
		t.remove(ev.Aggregate)
		return applied
	case eventSnapshot:
		if p.Ticket == nil || p.Ticket.ID != ev.Aggregate {
			return foreign
		}
		if e != nil && e.Version >= p.Ticket.Version {
			return stale
		}
		next := &entry{Ticket: *p.Ticket, key: p.Key}
		if e != nil {
			next.Comments = e.Comments
		}
		t.put(next)
		return applied
	case eventComments:
		if e == nil {
			return gap
		}
		next := *e
		next.addComments(p.Comments...)
		t.put(&next)
		return applied
	case eventCreated:
		if e != nil {
			return stale
		}
		t.put(created(ev, p))
		return applied
	case eventCommented, eventAssigned, eventTransitioned:
	default:
		return foreign
	}
	switch {
	case e == nil || p.V > e.Version+1:
		return gap
	case p.V <= e.Version:
		return stale
	}
	next := *e
	next.Version, next.UpdatedAt = p.V, ev.CreatedMS
	switch ev.Type {
	case eventCommented:
		next.addComments(Comment{N: p.N, By: p.By, At: ev.CreatedMS, Text: p.Text})
	case eventAssigned:
		next.AgentID = p.AgentID
	case eventTransitioned:
		next.Status = p.To
		if e.Status == Pending && e.Approval != nil {
			a := *e.Approval
			a.DecidedBy, a.DecidedAt = p.By, ev.CreatedMS
			next.Approval = &a
		}
	}
	t.put(&next)
	return applied
}

func created(ev *kernel.Event, p *payload) *entry {
	e := &entry{key: p.Key, Ticket: Ticket{ID: ev.Aggregate, Title: p.Title, Body: p.Body, Status: Open, Priority: p.Priority,
		NodeID: p.NodeID, CreatedBy: p.By, CreatedAt: ev.CreatedMS, UpdatedAt: ev.CreatedMS, Version: 1}}
	if p.Action != "" {
		e.Status, e.Approval = Pending, &Approval{Action: p.Action, ExpiresAt: p.Expires}
	}
	return e
}

// addComments adds those that are not there yet. What others hold of t.Comments is not
// written to.
func (t *Ticket) addComments(more ...Comment) {
	list := slices.Clip(t.Comments)
	for _, c := range more {
		i, found := slices.BinarySearchFunc(list, c.N, func(a Comment, n int) int { return cmp.Compare(a.N, n) })
		switch {
		case found:
		case i == len(list):
			list = append(list, c)
		default:
			list = slices.Insert(slices.Clone(list), i, c)
		}
	}
	t.Comments = list
}

// Restored tells what Restore did.
type Restored struct {
	Events  int `json:"events"`  // that were applied
	Skipped int `json:"skipped"` // events of tickets that could not be read or had lost their ticket
	Tickets int `json:"tickets"` // in the end, of all tenants
	Tenants int `json:"tenants"`
}

// maxParked bounds what Restore sets aside.
const maxParked = 10_000

// Restore rebuilds the tickets from a log. It runs before the plugin is loaded. Events of
// other kinds are passed over; what is there already changes nothing, so that it may be
// run again. An event that came to the log between the making of a Snapshot and its own
// append is set aside until the snapshot was read.
func (p *Plugin) Restore(ctx context.Context, log kernel.Log) (Restored, error) {
	var done Restored
	var parked []kernel.Event
	dropped := make(map[string]bool)
	one := func(ev kernel.Event) (outcome, error) {
		var pl payload
		if !manifest.ValidTenant(ev.Tenant) || json.Unmarshal(ev.Payload, &pl) != nil {
			return foreign, nil
		}
		if id, ok := manifest.ParseULID(ev.Aggregate); !ok || id != ev.Aggregate {
			return foreign, nil
		}
		t := p.tenant(ev.Tenant, true)
		if t == nil {
			return foreign, nil
		}
		if err := t.lock(ctx); err != nil {
			return foreign, err
		}
		defer t.unlock()
		return p.apply(t, &ev, &pl), nil
	}
	err := log.Replay(ctx, 0, func(ev kernel.Event) error {
		if len(ev.Type) < 7 || ev.Type[:7] != "ticket." {
			return nil
		}
		if ev.Type == eventDropped && len(dropped) < maxParked {
			dropped[ev.Aggregate] = true
		}
		if dropped[ev.Aggregate] && ev.Type != eventDropped {
			return nil // an older snapshot of it
		}
		out, err := one(ev)
		switch {
		case err != nil:
			return err
		case out == applied:
			done.Events++
		case out == gap && len(parked) < maxParked:
			parked = append(parked, ev)
		case out == gap || out == foreign:
			done.Skipped++
		}
		return nil
	})
	if err != nil {
		return done, fmt.Errorf("restore the tickets: %w", err)
	}
	for _, ev := range parked { // in the order of the log, which is that of the versions
		switch out, err := one(ev); {
		case err != nil:
			return done, fmt.Errorf("restore the tickets: %w", err)
		case out == applied:
			done.Events++
		case out == gap || out == foreign:
			done.Skipped++
		}
	}
	for _, t := range p.all() {
		t.mu.RLock()
		done.Tickets += len(t.tickets)
		if len(t.order) > 0 {
			p.ids.above(t.order[len(t.order)-1])
		}
		t.mu.RUnlock()
		done.Tenants++
	}
	p.poke()
	return done, nil
}

// maxChunk bounds the comments of one event: their texts, were each byte to be escaped,
// stay below kernel.MaxPayload.
const maxChunk = kernel.MaxPayload / 8

// Snapshot gives all tickets as events from which Restore makes them again. A log appends
// them before it forgets the events they came from, which are those up to the log's Last
// before this call.
func (p *Plugin) Snapshot() []kernel.Event {
	var events []kernel.Event
	for _, t := range p.all() {
		t.mu.RLock()
		for _, id := range t.order {
			events = t.tickets[id].snapshot(events, t.name)
		}
		t.mu.RUnlock()
	}
	return events
}

func (e *entry) snapshot(events []kernel.Event, tenant string) []kernel.Event {
	base := e.Ticket
	base.Comments = nil
	events = append(events, newEvent(tenant, eventSnapshot, e.ID, e.UpdatedAt, payload{Ticket: &base, Key: e.key}))
	for rest := e.Comments; len(rest) > 0; {
		n, size := 1, len(rest[0].Text)
		for n < len(rest) && n < 50 && size+len(rest[n].Text) <= maxChunk {
			size += len(rest[n].Text)
			n++
		}
		events = append(events, newEvent(tenant, eventComments, e.ID, e.UpdatedAt, payload{Comments: rest[:n]}))
		rest = rest[n:]
	}
	return events
}
