// Package tickets is the plugin with the fleet's queue of incidents and approvals: an
// alert or an agent opens a ticket, agents and people work on it, and a ticket may ask
// for an approval that somebody else has to give.
//
//	p := tickets.New(k, log)
//	done, err := p.Restore(ctx, log) // what the log remembers
//	err = k.Load(p, false)
//	err = p.Run(ctx)                 // lets approvals expire
//
// Every change is one event in the log before it is answered. docs/tickets.md tells the
// tools, the status machine and the bounds.
package tickets

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Plugin serves the tools and resources. Make one with New.
type Plugin struct {
	k    *kernel.Kernel
	log  kernel.Log
	ids  ids
	wake chan struct{} // of one: there may be a new earliest expiry

	tickets, text atomic.Int64 // of all tenants

	mu      sync.RWMutex // protects tenants
	tenants map[string]*tenant
}

// New makes the plugin. k is told of changed resources; log keeps the events. Without a
// log the tickets live as long as the process.
func New(k *kernel.Kernel, log kernel.Log) *Plugin {
	if log == nil {
		log = &kernel.MemoryLog{Max: 1}
	}
	return &Plugin{k: k, log: log, wake: make(chan struct{}, 1), tenants: make(map[string]*tenant)}
}

var (
	_ kernel.Plugin  = (*Plugin)(nil)
	_ kernel.Reader  = (*Plugin)(nil)
	_ kernel.Watcher = (*Plugin)(nil)
)

// Manifest implements kernel.Plugin.
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "tickets", Version: "1.0.0", Resources: resources, MaxConcurrency: maxConcurrency}
	for i := range tools {
		m.Tools = append(m.Tools, tools[i].tool)
	}
	return m
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for i := range tools {
		if tools[i].tool.Name == r.Tool {
			return tools[i].run(ctx, p, r)
		}
	}
	return nil, manifest.E(manifest.BadRequest, "no tool has this name; tools/list shows the names")
}

// tenant finds a tenant's tickets; nil when there are none and create is false, or when
// there are too many tenants.
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
		t = newTenant(name)
		p.tenants[name] = t
	}
	return t
}

// all lists the tenants in the order of their names.
func (p *Plugin) all() []*tenant {
	p.mu.RLock()
	defer p.mu.RUnlock()
	list := make([]*tenant, 0, len(p.tenants))
	for _, t := range p.tenants {
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b *tenant) int { return strings.Compare(a.name, b.name) })
	return list
}

// change is an event to be made: its type, ticket and payload.
type change struct {
	typ, id string
	payload payload
}

// commit appends changes, all or none, and then makes them. The tenant's gate is held. It
// does not end with ctx: whether the log has kept an event must not be a guess.
func (p *Plugin) commit(ctx context.Context, t *tenant, changes ...change) error {
	now := time.Now().UnixMilli()
	events := make([]kernel.Event, len(changes))
	for i, c := range changes {
		events[i] = newEvent(t.name, c.typ, c.id, now, c.payload)
	}
	if _, err := p.log.Append(context.WithoutCancel(ctx), events...); err != nil {
		// Not E_INTERNAL: that is a fault of the plugin to the kernel, which would soon keep
		// the readers away as well.
		e := &manifest.Error{Code: manifest.RateLimited, Message: "the event log did not take the change; nothing was changed", RetryAfterMS: 10_000, Reason: "event_log"}
		if errors.Is(err, kernel.ErrLogFull) {
			e.RetryAfterMS = 1000
		}
		return e
	}
	touched := make(map[string]bool)
	for i := range events {
		t.touch(touched, events[i].Aggregate)
		p.apply(t, &events[i], &changes[i].payload)
		t.touch(touched, events[i].Aggregate)
	}
	if len(touched) > 0 {
		p.k.NotifyChange(t.name, kernel.Change{Updated: sortedKeys(touched)})
	}
	return nil
}

// apply makes a change and counts. The tenant's gate is held.
func (p *Plugin) apply(t *tenant, ev *kernel.Event, pl *payload) outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	tickets, text := len(t.tickets), t.text
	out := t.apply(ev, pl)
	p.tickets.Add(int64(len(t.tickets) - tickets))
	p.text.Add(int64(t.text - text))
	return out
}

// maxDrops bounds the tickets that are dropped by one append.
const maxDrops = 200

// makeRoom is commit of a change for which finished tickets give way. Very many of them
// go in appends before it.
func (p *Plugin) makeRoom(ctx context.Context, t *tenant, drop []string, c change) error {
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

// Run lets approvals expire that nobody decided in time, until ctx ends.
func (p *Plugin) Run(ctx context.Context) error {
	for {
		next := p.expire(ctx)
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-p.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// poke makes Run look again.
func (p *Plugin) poke() {
	select {
	case p.wake <- struct{}{}:
	default: // it will look anyhow
	}
}

// idle is how long Run sleeps when nothing is pending; wall clocks may be set meanwhile.
const idle = time.Minute

// expire marks what is due and returns when the next one is.
func (p *Plugin) expire(ctx context.Context) time.Duration {
	next := idle
	for _, t := range p.all() {
		for _, k := range t.pick(func(k *Ticket) bool { return k.Status == Pending && k.Approval != nil }) {
			left := time.Until(time.UnixMilli(k.Approval.ExpiresAt))
			if left <= 0 && p.expireOne(ctx, t, k.ID) != nil {
				left = time.Second // the log did not take it
			}
			if left > 0 {
				next = min(next, left)
			}
		}
	}
	return next
}

func (p *Plugin) expireOne(ctx context.Context, t *tenant, id string) error {
	if err := t.lock(ctx); err != nil {
		return err
	}
	defer t.unlock()
	k, err := t.get(id)
	if err != nil || !k.due() {
		return nil // dropped or decided meanwhile
	}
	return p.move(ctx, t, k, Expired, "", "")
}

// due tells whether nobody may decide any more, though it is still pending.
func (t *Ticket) due() bool {
	return t.Status == Pending && t.Approval != nil && time.Now().UnixMilli() >= t.Approval.ExpiresAt
}

// move changes a ticket's status, which was checked. The gate is held.
func (p *Plugin) move(ctx context.Context, t *tenant, k *Ticket, to Status, by, trace string) error {
	var drop []string
	if to.finished() && !k.Status.finished() {
		drop, _ = t.room(0, 1, k.ID)
	}
	return p.makeRoom(ctx, t, drop, change{eventTransitioned, k.ID, payload{V: k.Version + 1, By: by, Trace: trace, From: k.Status, To: to}})
}

// ids mints ULIDs that rise, also within a millisecond and when the clock is set back.
type ids struct {
	mu      sync.Mutex // protects the fields below
	entropy *ulid.MonotonicEntropy
	last    uint64 // milliseconds
}

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

// above makes further ids greater than id.
func (s *ids) above(id string) {
	if u, err := ulid.ParseStrict(id); err == nil {
		s.mu.Lock()
		s.last = max(s.last, u.Time()+1)
		s.mu.Unlock()
	}
}

func sortedKeys(set map[string]bool) []string {
	keys := make([]string, 0, len(set))
	for k := range set {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
