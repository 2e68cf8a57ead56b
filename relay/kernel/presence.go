package kernel

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Presence says of one device or agent whether it is there. The kernel records it and
// tells of changes; what is made of it (a directory, an alarm) is a plugin's business.
type Presence struct {
	Tenant     string `json:"-"`
	ID         string `json:"id"`
	Kind       string `json:"kind"` // PresenceDevice or PresenceAgent
	Name       string `json:"name,omitempty"`
	Status     string `json:"status"` // Online or Offline; Heartbeat sets it
	Transport  string `json:"transport,omitempty"`
	LastPingMS int64  `json:"last_ping_at"` // wall clock, milliseconds since 1970; Heartbeat sets it
}

// Words of a Presence.
const (
	PresenceDevice = "device"
	PresenceAgent  = "agent"
	Online         = "online"
	Offline        = "offline"
)

// Bounds of presence.
const (
	MaxPresences           = 20_000
	DefaultPresenceTimeout = 90 * time.Second
	presenceForget         = 30 * 24 * time.Hour // after the last sign of life
	presenceFresh          = time.Second         // signs of life closer than this are one
	presenceSweep          = time.Second
	maxPresenceHooks       = 64
)

// Event types that the kernel writes about presence; the payload is a Presence.
const (
	eventOnline  = "presence.online"
	eventOffline = "presence.offline"
)

type presenceKey struct{ tenant, kind, id string }

type presenceEntry struct {
	lastMS atomic.Int64 // last sign of life, wall clock, for people
	// beat is where the timeout begins, by the monotonic clock: the last sign of life, or
	// the replay that found this entry, which so gets one timeout to come back.
	beat   atomic.Int64
	online atomic.Bool
	// protected by presence.mu
	name, transport string
}

type presence struct {
	timeout  time.Duration
	log      Log
	unlogged *atomic.Int64
	began    time.Time // the zero of beats

	// turns keeps changes of status and what is told of them in one order. It is taken
	// before mu and never by those who only repeat that they are there.
	turns sync.Mutex

	mu      sync.RWMutex // protects the fields below
	entries map[presenceKey]*presenceEntry
	hooks   []*func(Presence)
	evicted int64 // when the last search for room was, ms; -1000: never
}

func (p *presence) init(opt Options, unlogged *atomic.Int64) {
	p.unlogged = unlogged
	p.timeout, p.log = opt.PresenceTimeout, opt.Log
	if p.timeout <= 0 {
		p.timeout = DefaultPresenceTimeout
	}
	p.entries = make(map[presenceKey]*presenceEntry)
	p.began, p.evicted = time.Now(), -1000
}

// mono is the monotonic clock, ms.
func (p *presence) mono() int64 { return time.Since(p.began).Milliseconds() }

// Heartbeat records a sign of life: a request, a ping. It costs little, so that doors may call
// it at each of them; signs within a second are one. When MaxPresences are known and all
// are online a new one is not recorded.
func (k *Kernel) Heartbeat(s Presence) {
	p := &k.presence
	now := p.mono()
	key := presenceKey{s.Tenant, s.Kind, s.ID}
	p.mu.RLock()
	e := p.entries[key]
	p.mu.RUnlock()
	if e != nil && e.online.Load() {
		last := e.beat.Load()
		if now-last < presenceFresh.Milliseconds() {
			return
		}
		if e.beat.CompareAndSwap(last, max(now, last)) {
			e.lastMS.Store(time.Now().UnixMilli())
			p.describe(e, &s)
		}
		if e.online.Load() { // else the sweep was quicker
			return
		}
	}
	p.came(key, s, now)
}

// describe keeps the newest name and transport.
func (p *presence) describe(e *presenceEntry, s *Presence) {
	p.mu.RLock()
	same := (s.Name == "" || e.name == s.Name) && (s.Transport == "" || e.transport == s.Transport)
	p.mu.RUnlock()
	if same {
		return
	}
	p.mu.Lock()
	e.name, e.transport = strings.Clone(cmp.Or(s.Name, e.name)), strings.Clone(cmp.Or(s.Transport, e.transport))
	p.mu.Unlock()
}

// came marks somebody as online and tells, if that is new.
func (p *presence) came(key presenceKey, s Presence, now int64) {
	p.turns.Lock()
	defer p.turns.Unlock()
	p.mu.Lock()
	e := p.entries[key]
	if e == nil {
		if len(p.entries) >= MaxPresences && !p.makeRoomLocked(now) {
			p.mu.Unlock()
			return
		}
		e = &presenceEntry{}
		// The strings may be parts of a request's buffer: keep copies.
		key = presenceKey{strings.Clone(key.tenant), strings.Clone(key.kind), strings.Clone(key.id)}
		p.entries[key] = e
	}
	e.name, e.transport = strings.Clone(cmp.Or(s.Name, e.name)), strings.Clone(cmp.Or(s.Transport, e.transport))
	e.beat.Store(now)
	e.lastMS.Store(time.Now().UnixMilli())
	news := e.online.CompareAndSwap(false, true)
	told := e.presence(key)
	p.mu.Unlock()
	if news {
		p.tell(told)
	}
}

// makeRoomLocked forgets the one that has been offline for longest. It is looked for at
// most once a second, so that a flood of new names costs nothing.
func (p *presence) makeRoomLocked(now int64) bool {
	if now-p.evicted < 1000 {
		return false
	}
	p.evicted = now
	var oldest presenceKey
	var at int64
	found := false
	for key, e := range p.entries {
		if last := e.lastMS.Load(); !e.online.Load() && (!found || last < at) {
			oldest, at, found = key, last, true
		}
	}
	if !found {
		return false
	}
	delete(p.entries, oldest)
	return true
}

// MarkOffline marks somebody as offline at once; of somebody unknown nothing is kept.
func (k *Kernel) MarkOffline(tenant, kind, id string) {
	k.presence.went(presenceKey{tenant, kind, id}, func(*presenceEntry) bool { return true })
}

func (p *presence) went(key presenceKey, sure func(*presenceEntry) bool) {
	p.turns.Lock()
	defer p.turns.Unlock()
	p.mu.RLock()
	e := p.entries[key]
	p.mu.RUnlock()
	if e == nil || !sure(e) || !e.online.CompareAndSwap(true, false) {
		return
	}
	p.mu.RLock()
	told := e.presence(key)
	p.mu.RUnlock()
	p.tell(told)
}

// presence is the entry as others see it; p.mu is held.
func (e *presenceEntry) presence(key presenceKey) Presence {
	s := Presence{Tenant: key.tenant, ID: key.id, Kind: key.kind, Name: e.name, Transport: e.transport, Status: Offline, LastPingMS: e.lastMS.Load()}
	if e.online.Load() {
		s.Status = Online
	}
	return s
}

// tell hands a change to the log and the hooks; turns is held.
func (p *presence) tell(s Presence) {
	if p.log != nil {
		if !p.log.Offer(s.event()) {
			p.unlogged.Add(1)
		}
	}
	p.mu.RLock()
	hooks := slices.Clone(p.hooks)
	p.mu.RUnlock()
	for _, fn := range hooks {
		(*fn)(s)
	}
}

func (s *Presence) event() Event {
	typ := eventOffline
	if s.Status == Online {
		typ = eventOnline
	}
	payload, _ := json.Marshal(s) // strings and a number: cannot fail
	return Event{Tenant: s.Tenant, Type: typ, Aggregate: s.ID, Payload: payload}
}

// OnPresence calls fn after each change of status, one at a time and in their order. fn
// must be quick and may call ListPresence, but not Heartbeat, MarkOffline or remove. At most 64 are
// kept; further ones are never called.
func (k *Kernel) OnPresence(fn func(Presence)) (remove func()) {
	p := &k.presence
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.hooks) >= maxPresenceHooks {
		return func() {}
	}
	hook := &fn
	p.hooks = append(p.hooks, hook)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.hooks = slices.DeleteFunc(p.hooks, func(h *func(Presence)) bool { return h == hook })
	}
}

// ListPresence lists a tenant's devices and agents in ascending order of kind and id.
func (k *Kernel) ListPresence(tenant string) []Presence {
	return k.presence.list(func(key presenceKey) bool { return key.tenant == tenant })
}

// PresenceSnapshot gives all that is known as events from which RestorePresence makes it
// again; a log appends them before it forgets the events they came from.
func (k *Kernel) PresenceSnapshot() []Event {
	all := k.presence.list(func(presenceKey) bool { return true })
	events := make([]Event, len(all))
	for i := range all {
		events[i] = all[i].event()
	}
	return events
}

func (p *presence) list(want func(presenceKey) bool) []Presence {
	p.mu.RLock()
	var all []Presence
	for key, e := range p.entries {
		if want(key) {
			all = append(all, e.presence(key))
		}
	}
	p.mu.RUnlock()
	slices.SortFunc(all, func(a, b Presence) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// RestorePresence rebuilds who was there from a log, before Run. Who was online is shown
// so for one more timeout, since a restart of the relay is no absence; nobody is told.
func (k *Kernel) RestorePresence(ctx context.Context, log Log) error {
	p := &k.presence
	now := time.Now().UnixMilli()
	return log.Replay(ctx, 0, func(ev Event) error {
		var s Presence
		if (ev.Type != eventOnline && ev.Type != eventOffline) || json.Unmarshal(ev.Payload, &s) != nil ||
			s.ID == "" || now-s.LastPingMS > presenceForget.Milliseconds() {
			return nil
		}
		e := &presenceEntry{name: s.Name, transport: s.Transport}
		e.beat.Store(p.mono())
		e.lastMS.Store(s.LastPingMS)
		e.online.Store(ev.Type == eventOnline)
		p.mu.Lock()
		defer p.mu.Unlock()
		key := presenceKey{ev.Tenant, s.Kind, s.ID}
		if p.entries[key] != nil || len(p.entries) < MaxPresences {
			p.entries[key] = e
		}
		return nil
	})
}

// run marks the silent as offline and forgets those who stay away.
func (p *presence) run(ctx context.Context) {
	tick := time.NewTicker(presenceSweep)
	defer tick.Stop()
	next := int64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if now := p.mono(); now >= next {
				next = p.sweep(now, time.Now().UnixMilli())
			}
		}
	}
}

// sweep judges silence by the monotonic clock, now, and years by the wall clock. Before
// next nobody can fall silent: who comes meanwhile has a whole timeout.
func (p *presence) sweep(now, wall int64) (next int64) {
	next = now + p.timeout.Milliseconds()
	silent := func(e *presenceEntry) bool { return now-e.beat.Load() >= p.timeout.Milliseconds() }
	var gone, old []presenceKey
	p.mu.RLock()
	for key, e := range p.entries {
		switch {
		case e.online.Load():
			if silent(e) {
				gone = append(gone, key)
			} else {
				next = min(next, e.beat.Load()+p.timeout.Milliseconds())
			}
		case wall-e.lastMS.Load() > presenceForget.Milliseconds():
			old = append(old, key)
		}
	}
	p.mu.RUnlock()
	slices.SortFunc(gone, func(a, b presenceKey) int {
		return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id))
	})
	for _, key := range gone {
		p.went(key, silent)
	}
	if len(old) == 0 {
		return next
	}
	p.mu.Lock()
	for _, key := range old {
		if e := p.entries[key]; e != nil && !e.online.Load() {
			delete(p.entries, key)
		}
	}
	p.mu.Unlock()
	return next
}
