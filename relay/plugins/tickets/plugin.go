// Package tickets is the plugin with the fleet's queue of incidents and approvals: an
// alert or an agent opens a ticket, agents and people work on it, and a ticket may ask
// for an approval, which its creator cannot give.
//
//	p := tickets.New(k, log)
//	done, err := p.Restore(ctx, log) // from the events in the log
//	err = k.Load(p, false)
//	err = p.Run(ctx)                 // lets approvals expire
//
// A change is made in this order: acquire the tenant's change slot, check, append its events
// to the log, apply them to memory, notify the subscribers of the queues, release the slot,
// answer. So memory never has a change that the log has not, and the log has the order of
// the changes. Restore applies the same events with the same function. docs/tickets.md has
// the tools, the status machine and the bounds.
//
//	plugin.go  Plugin: commits changes, expires approvals, makes ids
//	tenant.go  the tickets of a tenant in memory, its change slot and its bounds
//	ticket.go  Ticket and its statuses
//	events.go  events of the log, and how they are applied; Restore and Snapshot
//	tools.go   the tools tickets.*; fleet.go has fleet.ticket and others, which call the same functions
//	queues.go  the resources, which are computed from the tickets
//	boards.go  how a ticket names its board
//	digest.go  digests, by which the relay compares the tickets with the log
package tickets

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Plugin serves the tools and resources. Make one with New. Its methods may be called from any
// goroutine.
//
// Lock order: tenant.changeSlot, then tenant.mu. Plugin.mu and ids.mu are leaf locks: no other
// lock is acquired while one of them is held.
type Plugin struct {
	k      *kernel.Kernel
	log    kernel.Log
	ids    ids
	boards Boards
	wakeup chan struct{} // capacity 1: there may be a new earliest expiry

	// Totals of all tenants: tickets, and bytes of their text (Ticket.size). MaxAllTickets and maxAllText
	// bound them.
	tickets, text atomic.Int64

	maxText, maxAllText int // MaxText and MaxAllText, or less in a small log

	mu      sync.RWMutex // protects tenants
	tenants map[string]*tenant
}

// New makes the plugin. It notifies the subscribers of k and appends its events to log.
// Without a log the tickets live as long as the process.
func New(k *kernel.Kernel, log kernel.Log) *Plugin {
	if log == nil {
		log = &kernel.MemoryLog{Max: 1}
	}
	return &Plugin{k: k, log: log, maxText: MaxText, maxAllText: MaxAllText, wakeup: make(chan struct{}, 1), tenants: make(map[string]*tenant)}
}

// FitLog makes the bounds on text fit an event log of so many bytes. Before that removes old events of
// a tenant, it stores what is known about each of its tickets again, in the part of the log that is
// kept free for this; a tenant with more would stop it for good. Call it before Restore.
func (p *Plugin) FitLog(bytes int64) {
	p.maxText, p.maxAllText = int(min(MaxText, bytes/32)), int(min(MaxAllText, bytes/4))
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "tickets", Version: "1.0.0", Resources: resources, MaxConcurrency: maxConcurrency, Untrusted: true}
	for _, t := range allTools() {
		m.Tools = append(m.Tools, t.tool)
	}
	return m
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for _, t := range allTools() {
		if t.tool.Name == r.Tool {
			return t.run(ctx, p, r)
		}
	}
	return nil, manifest.E(manifest.BadRequest, "no tool has this name; tools/list shows the names")
}

// tenant returns a tenant's tickets; nil when there are none and create is false, or when
// there are too many tenants. A tenant is kept until the process ends, even without tickets.
func (p *Plugin) tenant(name string, create bool) *tenant {
	p.mu.RLock()
	t := p.tenants[name]
	p.mu.RUnlock()
	if t != nil || !create {
		return t
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t = p.tenants[name]; t == nil && len(p.tenants) < MaxTenants {
		name = strings.Clone(name) // it may be part of a request's buffer
		t = newTenant(name, p.maxText)
		p.tenants[name] = t
	}
	return t
}

// tenantList returns the tenants in the order of their names.
func (p *Plugin) tenantList() []*tenant {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.SortedFunc(maps.Values(p.tenants), func(a, b *tenant) int { return strings.Compare(a.name, b.name) })
}

// change is an event that is not appended yet: its type, ticket and payload.
type change struct {
	typ, id string
	payload payload
}

// commit appends changes, all or none, and then applies them. The change slot is held.
// commit does not end with ctx, since it would then be unknown whether the log has the events.
//
// apply cannot refuse these events: the change slot was held since their versions were chosen.
func (p *Plugin) commit(ctx context.Context, t *tenant, changes ...change) error {
	now := time.Now().UnixMilli()
	events := make([]kernel.Event, len(changes))
	for i, c := range changes {
		events[i] = newEvent(t.name, c.typ, c.id, now, c.payload)
	}
	if _, err := p.log.Append(context.WithoutCancel(ctx), events...); err != nil {
		if errors.Is(err, kernel.ErrLogFull) {
			return p.explainBusy(&manifest.Error{Code: manifest.RateLimited, Message: "the event log is behind; nothing was changed", RetryAfterMS: 1000, Reason: reasonQueue})
		}
		return manifest.AsError(err) // reason "storage" for a fault of the disk
	}
	touched := make(map[string]bool)
	for i := range events {
		// Before and after: a change may move the ticket from one queue to another.
		t.addQueues(touched, events[i].Aggregate)
		p.apply(t, &events[i], &changes[i].payload)
		t.addQueues(touched, events[i].Aggregate)
	}
	if len(touched) > 0 {
		p.k.NotifyChange(t.name, kernel.Change{Updated: slices.Sorted(maps.Keys(touched))})
	}
	return nil
}

// acquire acquires a tenant's change slot. The caller must call release after a nil error.
func (p *Plugin) acquire(ctx context.Context, t *tenant) error { return p.explainBusy(t.acquire(ctx)) }

// explainBusy replaces the refusal of a change that waited for others by the fault of the log
// that holds them up, if there is one.
func (p *Plugin) explainBusy(err error) error {
	if e, ok := errors.AsType[*manifest.Error](err); ok && e.Reason == reasonQueue {
		if fault := kernel.LogFault(p.log); fault != nil {
			return manifest.AsError(fault)
		}
	}
	return err
}

// apply applies an event and updates the totals. The change slot is held.
func (p *Plugin) apply(t *tenant, ev *kernel.Event, pl *payload) outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	tickets, text := len(t.tickets), t.text
	out := t.apply(ev, pl)
	p.tickets.Add(int64(len(t.tickets) - tickets))
	p.text.Add(int64(t.text - text))
	return out
}

// maxDrops bounds the tickets that one append drops. With the change itself they stay below
// the 256 events that a log takes at once (eventlog.MaxAppend).
const maxDrops = 200

// commitWithDrops is commit of a change that also drops finished tickets, to stay within
// the bounds. Beyond maxDrops they go in appends before it, which stay in the log when a later
// append fails: the tickets were finished, and were evicted.
func (p *Plugin) commitWithDrops(ctx context.Context, t *tenant, drop []string, c change) error {
	changes := make([]change, 0, min(len(drop), maxDrops)+1)
	for _, id := range drop {
		if changes = append(changes, change{eventDropped, id, payload{Trace: c.payload.Trace}}); len(changes) == maxDrops {
			if err := p.commit(ctx, t, changes...); err != nil {
				return err
			}
			changes = changes[:0]
		}
	}
	return p.commit(ctx, t, append(changes, c)...)
}

// Run marks approvals as expired that were not decided in time, until ctx ends. The
// caller owns its goroutine. transition marks one that is due as well, so a late Run lets no
// caller decide it.
func (p *Plugin) Run(ctx context.Context) error {
	for {
		next := p.expire(ctx)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.wakeup:
		case <-time.After(next):
		}
	}
}

// wakeRun makes Run compute the next expiry again, after a new approval or a
// Restore: one may be due before the expiry that Run sleeps for.
func (p *Plugin) wakeRun() {
	select {
	case p.wakeup <- struct{}{}:
	default: // it is awake already
	}
}

// maxSleep bounds how long Run sleeps: the wall clock may be set meanwhile.
const maxSleep = time.Minute

// expire marks the approvals that are due and returns how long until the next one is, at most
// maxSleep.
func (p *Plugin) expire(ctx context.Context) time.Duration {
	next := maxSleep
	for _, t := range p.tenantList() {
		for _, k := range t.filter(func(k *Ticket) bool { return k.Status == Pending && k.Approval != nil }) {
			left := time.Until(time.UnixMilli(k.Approval.ExpiresAt))
			if left <= 0 && p.expireOne(ctx, t, k.ID) != nil {
				left = time.Second // the log refused it; try again
			}
			if left > 0 {
				next = min(next, left)
			}
		}
	}
	return next
}

// expireOne expires one approval. It checks again after it has the change slot, since the
// approval may have been decided meanwhile.
func (p *Plugin) expireOne(ctx context.Context, t *tenant, id string) error {
	if err := p.acquire(ctx, t); err != nil {
		return err
	}
	defer t.release()
	k, err := t.get(id)
	if err != nil || !k.isDue() {
		return nil // dropped or decided meanwhile
	}
	return p.changeStatus(ctx, t, k, Expired, "", "")
}

// isDue reports whether the time to decide is over, although Run has not marked it yet.
func (t *Ticket) isDue() bool {
	return t.Status == Pending && t.Approval != nil && time.Now().UnixMilli() >= t.Approval.ExpiresAt
}

// changeStatus changes a ticket's status, after the checks. A ticket that becomes finished
// may push out older ones. The change slot is held.
func (p *Plugin) changeStatus(ctx context.Context, t *tenant, k *Ticket, to Status, by, trace string) error {
	var drop []string
	if to.isFinished() && !k.Status.isFinished() {
		drop, _ = t.dropsFor(0, 1, k.ID)
	}
	return p.commitWithDrops(ctx, t, drop, change{eventTransitioned, k.ID, payload{V: k.Version + 1, By: by, Trace: trace, From: k.Status, To: to}})
}

// ids makes ULIDs in ascending order, also within a millisecond and after the clock was set
// back.
type ids struct {
	mu      sync.Mutex // protects the fields below
	entropy *ulid.MonotonicEntropy
	last    uint64 // milliseconds
}

// next returns a new id. Ids order tickets by creation, which lists and cursors rely on.
func (s *ids) next() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entropy == nil {
		s.entropy = ulid.Monotonic(rand.Reader, 0)
	}
	s.last = max(s.last, ulid.Now())
	for {
		if id, err := ulid.New(s.last, s.entropy); err == nil {
			return id.String()
		}
		s.last++ // this millisecond is used up
	}
}

// skipPast makes further ids greater than id.
func (s *ids) skipPast(id string) {
	if u, err := ulid.ParseStrict(id); err == nil {
		s.mu.Lock()
		s.last = max(s.last, u.Time()+1)
		s.mu.Unlock()
	}
}
