package tickets

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	jsonv2 "github.com/go-json-experiment/json"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Event sourcing: the tickets in memory are the result of applying the events of the log in
// their order. A live change and a replayed one go through the same function, tenant.apply,
// so they cannot differ.
//
// 	live     tool -> checks -> payload -> log.Append -> apply -> notify
// 	restart  log.Replay -> replay -> apply
// 	pruning  Snapshot -> log.Append -> the log deletes the older events
//
// Every ticket has a version, which is the number of its changes. apply accepts an event
// only with the next version: a smaller one was applied before (stale), a larger one has
// lost a predecessor (gap). Snapshots carry the version that they have reached.

// Types of the events that change tickets. The aggregate is the ticket's id, the time of
// the change is that of the event. Each change of a ticket has the next version, so that an
// event that is read twice, or in another order, is not applied twice.
const (
	eventCreated      = "ticket.created"
	eventCommented    = "ticket.commented"
	eventAssigned     = "ticket.assigned"
	eventTransitioned = "ticket.transitioned"
	eventDropped      = "ticket.dropped"  // a finished ticket was dropped for newer ones
	eventSnapshot     = "ticket.snapshot" // the whole ticket, appended before older events are deleted
	eventComments     = "ticket.comments" // after a snapshot: some of its comments
)

// payload is the payload of these events; each type uses some of the fields.
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
	AgentID string `json:"agent_id,omitempty"` // assigned; empty: unassigned
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

// outcome is the result of applying an event.
type outcome int

const (
	applied outcome = iota
	stale           // applied before, or about a ticket that was dropped
	gap             // an earlier event of the ticket is missing
	foreign         // not an event of tickets, or one of a newer release
)

// apply applies an event, of a change that is just made or of a replay. mu is held.
//
// It puts a changed copy in place of an entry and does not write to the old one, whose
// comments and approval are shared with the copies that readers have.
//
// Some events need no version. A drop removes the ticket with all its changes. A creation is
// the first change. The comments of a snapshot are identified by their numbers: the snapshot
// keeps the comments that were applied before it, and ticket.comments adds those that are
// missing.
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
		// Every transition out of pending decides the approval. DecidedBy stays empty when the
		// clock decided (Expired).
		if e.Status == Pending && e.Approval != nil {
			a := *e.Approval
			a.DecidedBy, a.DecidedAt = p.By, ev.CreatedMS
			next.Approval = &a
		}
	}
	t.put(&next)
	return applied
}

// created returns the ticket that an event creates: pending if it asks for an approval.
func created(ev *kernel.Event, p *payload) *entry {
	e := &entry{key: p.Key, Ticket: Ticket{ID: ev.Aggregate, Title: p.Title, Body: p.Body, Status: Open, Priority: p.Priority,
		NodeID: p.NodeID, CreatedBy: p.By, CreatedAt: ev.CreatedMS, UpdatedAt: ev.CreatedMS, Version: 1}}
	if p.Action != "" {
		e.Status, e.Approval = Pending, &Approval{Action: p.Action, ExpiresAt: p.Expires}
	}
	return e
}

// addComments adds the comments that are not there yet, by number. It does not write to the
// elements of the old slice, which copies of the ticket share.
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

// RestoreStats counts the events that Restore read and the tickets that it rebuilt.
type RestoreStats struct {
	// Events were applied. Skipped ones could not be read or had lost their ticket.
	Events  int `json:"events"`
	Skipped int `json:"skipped"`
	// Tickets and Tenants are the totals afterwards.
	Tickets int `json:"tickets"`
	Tenants int `json:"tenants"`
}

// maxParked bounds the events that Restore sets aside, and the dropped tickets that it
// remembers. Beyond it, an event with a gap counts as skipped.
const maxParked = 10_000

// Restore rebuilds the tickets from a log, before the plugin is loaded. It ignores events
// of other kinds, and events that were applied before, so that it may run again. An event
// that was appended between the making of a Snapshot and the Snapshot's own append precedes
// it in the log; it is set aside until the whole log was read.
//
// New ids are greater than all restored ones, even if the clock was set back. After an error,
// which is that of the log or of ctx, the tickets are incomplete and must not be served.
func (p *Plugin) Restore(ctx context.Context, log kernel.Log) (RestoreStats, error) {
	var stats RestoreStats
	var parked []kernel.Event
	dropped := make(map[string]bool)
	apply := func(ev kernel.Event, park bool) error {
		out, err := p.replay(ctx, &ev)
		switch {
		case err != nil:
			return err
		case out == applied:
			stats.Events++
		case out == gap && park && len(parked) < maxParked:
			parked = append(parked, ev)
		case out == gap || out == foreign:
			stats.Skipped++
		}
		return nil
	}
	err := log.Replay(ctx, 0, func(ev kernel.Event) error {
		if ev.Type == eventDropped && len(dropped) < maxParked {
			dropped[ev.Aggregate] = true
		}
		if dropped[ev.Aggregate] && ev.Type != eventDropped {
			return nil // from a snapshot that is older than the drop
		}
		return apply(ev, true)
	}, "ticket.*")
	for _, ev := range parked { // in the order of the log, which is that of the versions
		if err == nil {
			err = apply(ev, false)
		}
	}
	if err != nil {
		return stats, fmt.Errorf("restore the tickets: %w", err)
	}
	for _, t := range p.tenantList() {
		t.mu.RLock()
		stats.Tickets += len(t.tickets)
		if len(t.order) > 0 {
			p.ids.skipPast(t.order[len(t.order)-1])
		}
		t.mu.RUnlock()
		stats.Tenants++
	}
	p.wakeRun()
	return stats, nil
}

// replay applies an event of the log. It checks ids and payload, since a newer release
// may have written the event: one that does not fit is foreign. The error is that of ctx.
func (p *Plugin) replay(ctx context.Context, ev *kernel.Event) (outcome, error) {
	var pl payload
	if id, ok := manifest.ParseULID(ev.Aggregate); !ok || id != ev.Aggregate ||
		!manifest.ValidTenant(ev.Tenant) || jsonv2.Unmarshal(ev.Payload, &pl) != nil {
		return foreign, nil
	}
	t := p.tenant(ev.Tenant, true)
	if t == nil {
		return foreign, nil
	}
	if err := t.acquire(ctx); err != nil {
		return foreign, err
	}
	defer t.release()
	return p.apply(t, ev, &pl), nil
}

// maxSnapshotText bounds the text of the comments in one event: even if each byte has to be
// escaped, they stay below kernel.MaxPayload.
const maxSnapshotText = kernel.MaxPayload / 8

// Snapshot returns all tickets as events from which Restore rebuilds them. A log appends
// them before it deletes the events up to its Last before this call.
//
// Changes continue meanwhile: it locks one tenant at a time, for reading. A change that is
// made after its tenant was read has a higher version than the snapshot, and Restore applies
// it on top.
func (p *Plugin) Snapshot() []kernel.Event {
	var events []kernel.Event
	for _, t := range p.tenantList() {
		t.mu.RLock()
		for _, id := range t.order {
			events = t.tickets[id].snapshot(events, t.name)
		}
		t.mu.RUnlock()
	}
	return events
}

// snapshot appends the events of one ticket: the ticket, then its comments in parts of at most
// 50 comments and about maxSnapshotText bytes, since they may not fit into one event.
func (e *entry) snapshot(events []kernel.Event, tenant string) []kernel.Event {
	base := e.Ticket
	base.Comments = nil
	events = append(events, newEvent(tenant, eventSnapshot, e.ID, e.UpdatedAt, payload{Ticket: &base, Key: e.key}))
	for rest := e.Comments; len(rest) > 0; {
		n, size := 1, len(rest[0].Text)
		for n < len(rest) && n < 50 && size+len(rest[n].Text) <= maxSnapshotText {
			size += len(rest[n].Text)
			n++
		}
		events = append(events, newEvent(tenant, eventComments, e.ID, e.UpdatedAt, payload{Comments: rest[:n]}))
		rest = rest[n:]
	}
	return events
}
