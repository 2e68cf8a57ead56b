package kernel

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Presence works like this:
//
//	Heartbeat    offline or unknown -> online, reported; online -> later timeout
//	MarkOffline  online -> offline, reported
//	FlagPresence sets a flag of a known one, reported
//	sweep        online without a heartbeat for the timeout -> offline, reported;
//	             offline for PresenceRetention -> forgotten
//
// A report is an event in the log and a call of each OnPresence function. Reports have the
// order of the changes, since presence.order is held over a change and its report.
// Timeouts use the monotonic clock, so that setting the wall clock marks nobody as offline.

// Presence is the status of one device or agent. The kernel records it and reports
// changes; a directory or an alarm made of it is a plugin's business.
type Presence struct {
	Tenant    string `json:"-"`
	ID        string `json:"id"`
	Kind      string `json:"kind"` // PresenceDevice or PresenceAgent
	Name      string `json:"name,omitempty"`
	Status    string `json:"status"` // Online or Offline; Heartbeat sets it
	Transport string `json:"transport,omitempty"`
	// Suspect: an online device has not answered for some seconds. CloneSuspected: two
	// installations use its identity. FlagPresence sets both.
	Suspect        bool `json:"suspect,omitempty"`
	CloneSuspected bool `json:"clone_suspected,omitempty"`
	// LastPingMS is the time of the last heartbeat, wall clock, milliseconds since 1970.
	// Heartbeat sets it.
	LastPingMS int64 `json:"last_ping_at"`
}

// Values of Presence.Kind and Presence.Status.
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
	PresenceRetention      = 30 * 24 * time.Hour // of who is offline, after the last heartbeat
	heartbeatInterval      = time.Second         // heartbeats within it count as one
	presenceSweep          = time.Second
	maxPresenceHooks       = 64
)

// Types of the events about presence; the payload is a Presence. A snapshot is not a change: the log
// appends it before it deletes older events, and nobody is notified of it. Older releases wrote
// snapshots as eventOnline and eventOffline.
const (
	eventOnline           = "presence.online"
	eventOffline          = "presence.offline"
	eventPresenceSnapshot = "presence.snapshot"
)

// PresenceTypes are the types of the events about presence.
var PresenceTypes = []string{eventOnline, eventOffline, eventPresenceSnapshot}

type presenceKey struct{ tenant, kind, id string }

func (a presenceKey) compare(b presenceKey) int {
	return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id))
}

type presenceEntry struct {
	lastMS atomic.Int64 // last heartbeat, wall clock, shown to people
	// beat is when the timeout begins, monotonic clock, ms: the last heartbeat, or the
	// replay that restored this entry, which therefore gets one full timeout to reconnect.
	beat   atomic.Int64
	online atomic.Bool
	// protected by presence.mu
	name, transport         string
	suspect, cloneSuspected bool
}

type presence struct {
	timeout  time.Duration
	log      Log
	unlogged *atomic.Int64
	started  time.Time // the zero of the monotonic clock

	// order serializes changes of status with their reports. It is taken before mu.
	// Heartbeats of who is online do not take it.
	order sync.Mutex

	mu          sync.RWMutex // protects the fields below
	entries     map[presenceKey]*presenceEntry
	hooks       []*func(Presence)
	lastEvicted int64 // when entries were last searched for one to evict, ms
}

func (p *presence) init(opt Options, unlogged *atomic.Int64) {
	p.unlogged = unlogged
	p.timeout, p.log = opt.PresenceTimeout, opt.Log
	if p.timeout <= 0 {
		p.timeout = DefaultPresenceTimeout
	}
	p.entries = make(map[presenceKey]*presenceEntry)
	p.started, p.lastEvicted = time.Now(), -evictInterval.Milliseconds()
}

// now is the monotonic clock, ms.
func (p *presence) now() int64 { return time.Since(p.started).Milliseconds() }

// Heartbeat records that a device or agent is there: it sent a request or a ping. It is
// cheap enough for each of them: heartbeats within a second count as one, and only a
// change of status takes an exclusive lock. When MaxPresences are known and all are
// online, a new one is not recorded.
func (k *Kernel) Heartbeat(s Presence) {
	p := &k.presence
	now := p.now()
	key := presenceKey{s.Tenant, s.Kind, s.ID}
	p.mu.RLock()
	e := p.entries[key]
	p.mu.RUnlock()
	if e != nil && e.online.Load() {
		last := e.beat.Load()
		if now-last < heartbeatInterval.Milliseconds() {
			return
		}
		if e.beat.CompareAndSwap(last, max(now, last)) {
			e.lastMS.Store(time.Now().UnixMilli())
			p.describe(e, &s)
		}
		if e.online.Load() { // else the sweep was faster
			return
		}
	}
	p.setOnline(key, s, now)
}

// describe stores the newest name and transport.
func (p *presence) describe(e *presenceEntry, s *Presence) {
	p.mu.RLock()
	same := (s.Name == "" || e.name == s.Name) && (s.Transport == "" || e.transport == s.Transport)
	p.mu.RUnlock()
	if !same {
		p.mu.Lock()
		e.describeLocked(s)
		p.mu.Unlock()
	}
}

// describeLocked copies the strings, which may be parts of a request's buffer.
func (e *presenceEntry) describeLocked(s *Presence) {
	e.name, e.transport = strings.Clone(cmp.Or(s.Name, e.name)), strings.Clone(cmp.Or(s.Transport, e.transport))
}

// setOnline marks somebody as online and reports it, if that is new.
func (p *presence) setOnline(key presenceKey, s Presence, now int64) {
	p.order.Lock()
	defer p.order.Unlock()
	p.mu.Lock()
	e := p.entries[key]
	if e == nil {
		if len(p.entries) >= MaxPresences && !p.evictLocked(now) {
			p.mu.Unlock()
			return
		}
		e = &presenceEntry{}
		key = presenceKey{strings.Clone(key.tenant), strings.Clone(key.kind), strings.Clone(key.id)}
		p.entries[key] = e
	}
	e.describeLocked(&s)
	if !e.online.Load() {
		e.suspect = false // of the link that ended
	}
	e.beat.Store(now)
	e.lastMS.Store(time.Now().UnixMilli())
	isNew := e.online.CompareAndSwap(false, true)
	current := e.presence(key)
	p.mu.Unlock()
	if isNew {
		p.report(current)
	}
}

// evictInterval is the least time between two searches for an entry to evict, so that a
// flood of new ids costs nothing.
const evictInterval = time.Second

// evictLocked forgets the entry that has been offline for longest. It returns false when
// there is none, or when it searched less than evictInterval ago.
func (p *presence) evictLocked(now int64) bool {
	if now-p.lastEvicted < evictInterval.Milliseconds() {
		return false
	}
	p.lastEvicted = now
	var oldest presenceKey
	var oldestMS int64
	found := false
	for key, e := range p.entries {
		if last := e.lastMS.Load(); !e.online.Load() && (!found || last < oldestMS) {
			oldest, oldestMS, found = key, last, true
		}
	}
	delete(p.entries, oldest)
	return found
}

// MarkOffline marks a device or agent as offline at once. An unknown one is not recorded.
func (k *Kernel) MarkOffline(tenant, kind, id string) {
	k.presence.setOffline(presenceKey{tenant, kind, id}, func(*presenceEntry) bool { return true })
}

// setOffline marks somebody as offline and reports it, if the condition holds then.
func (p *presence) setOffline(key presenceKey, condition func(*presenceEntry) bool) {
	p.order.Lock()
	defer p.order.Unlock()
	p.mu.RLock()
	e := p.entries[key]
	isNew := e != nil && condition(e) && e.online.CompareAndSwap(true, false)
	var current Presence
	if isNew {
		current = e.presence(key)
	}
	p.mu.RUnlock()
	if isNew {
		p.report(current)
	}
}

// presence is the entry as others see it. presence.mu is held.
func (e *presenceEntry) presence(key presenceKey) Presence {
	s := Presence{Tenant: key.tenant, ID: key.id, Kind: key.kind, Name: e.name, Transport: e.transport, Status: Offline, LastPingMS: e.lastMS.Load(),
		CloneSuspected: e.cloneSuspected}
	if e.online.Load() {
		s.Status, s.Suspect = Online, e.suspect
	}
	return s
}

// report gives a change to the log and to the OnPresence functions. order is held.
func (p *presence) report(s Presence) {
	if p.log != nil && !p.log.Offer(s.event()) {
		p.unlogged.Add(1)
	}
	p.mu.RLock()
	hooks := slices.Clone(p.hooks)
	p.mu.RUnlock()
	for _, fn := range hooks {
		(*fn)(s)
	}
}

func (s *Presence) event() Event {
	payload, _ := json.Marshal(s) // strings and a number: cannot fail
	return Event{Tenant: s.Tenant, Type: "presence." + s.Status, Aggregate: s.ID, Payload: payload}
}

// HoldPresence calls fn with all entries, as ListPresence does, while no status and no flag changes:
// the log was offered the events of these entries, and no later ones. fn must be quick.
func (k *Kernel) HoldPresence(fn func([]Presence)) {
	k.presence.order.Lock()
	defer k.presence.order.Unlock()
	fn(k.presence.list(func(presenceKey) bool { return true }))
}

// OnPresence calls fn after each change of status or of a flag, one at a time and in their order. fn
// must be quick and may call ListPresence, but not Heartbeat, MarkOffline or remove. At
// most 64 functions are registered; further ones are never called.
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

// PresenceSnapshot returns all entries as events from which RestorePresence rebuilds them.
// A log appends them before it deletes older events.
func (k *Kernel) PresenceSnapshot() []Event {
	all := k.presence.list(func(presenceKey) bool { return true })
	events := make([]Event, len(all))
	for i := range all {
		events[i] = all[i].event()
		events[i].Type = eventPresenceSnapshot
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
		return presenceKey{a.Tenant, a.Kind, a.ID}.compare(presenceKey{b.Tenant, b.Kind, b.ID})
	})
	return all
}

// RestorePresence rebuilds the entries from a log, before Run. Who was online stays online
// for one more timeout, since a restart of the relay is not an absence. Nothing is
// reported.
//
// Of each device or agent, the first event is decoded, which makes the entry, and the newest one: one
// that comes and goes has thousands.
func (k *Kernel) RestorePresence(ctx context.Context, log Log) error {
	p := &k.presence
	newest := make(map[presenceKey]Event) // of known ones, so MaxPresences at most
	err := ReplayPresence(ctx, log, func(ev Event) error {
		key := presenceKey{ev.Tenant, kindOf(ev.Payload), ev.Aggregate}
		p.mu.RLock()
		isKnown := p.entries[key] != nil
		p.mu.RUnlock()
		if isKnown {
			newest[key] = ev
		} else {
			p.restore(&ev)
		}
		return nil
	})
	for _, ev := range newest {
		p.restore(&ev)
	}
	return err
}

// PresenceKind returns what an event about presence is about, such as PresenceDevice; the tenant and the
// aggregate say which one. ok is false for other events. It allocates for a kind only that no
// release knows.
func PresenceKind(e *Event) (kind string, ok bool) {
	switch e.Type {
	case eventOnline, eventOffline, eventPresenceSnapshot:
		return kindOf(e.Payload), true
	}
	return "", false
}

// kindOf returns the kind in the payload of an event about presence, without decoding it: quotes in
// other texts are escaped. "" if there is none.
func kindOf(payload []byte) string {
	const key = `"kind":"`
	_, rest, _ := bytes.Cut(payload, []byte(key))
	kind, _, _ := bytes.Cut(rest, []byte{'"'})
	switch string(kind) { // without an allocation
	case PresenceDevice:
		return PresenceDevice
	case PresenceAgent:
		return PresenceAgent
	}
	return string(kind)
}

// restore sets the entry of an event.
func (p *presence) restore(ev *Event) {
	var s Presence
	if json.Unmarshal(ev.Payload, &s) != nil || s.ID == "" {
		return
	}
	key := presenceKey{ev.Tenant, s.Kind, s.ID}
	isOnline := ev.Type == eventOnline || ev.Type == eventPresenceSnapshot && s.Status == Online
	if !isOnline && time.Now().UnixMilli()-s.LastPingMS > PresenceRetention.Milliseconds() {
		p.mu.Lock()
		delete(p.entries, key) // of an older event
		p.mu.Unlock()
		return
	}
	e := &presenceEntry{name: s.Name, transport: s.Transport, cloneSuspected: s.CloneSuspected}
	e.beat.Store(p.now())
	e.lastMS.Store(s.LastPingMS)
	e.online.Store(isOnline)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.entries[key] != nil || len(p.entries) < MaxPresences {
		p.entries[key] = e
	}
}

// run sweeps until ctx ends.
func (p *presence) run(ctx context.Context) {
	tick := time.NewTicker(presenceSweep)
	defer tick.Stop()
	next := int64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if now := p.now(); now >= next {
				next = p.sweep(now, time.Now().UnixMilli())
			}
		}
	}
}

// sweep marks who is silent as offline, by the monotonic clock now, and forgets who has
// been offline for long, by the wall clock. It returns when the next sweep is due: before
// that nobody can time out, since a new heartbeat starts a full timeout.
func (p *presence) sweep(now, wall int64) (next int64) {
	timeout := p.timeout.Milliseconds()
	next = now + timeout
	isSilent := func(e *presenceEntry) bool { return now-e.beat.Load() >= timeout }
	var silent, expired []presenceKey
	p.mu.RLock()
	for key, e := range p.entries {
		switch {
		case e.online.Load() && isSilent(e):
			silent = append(silent, key)
		case e.online.Load():
			next = min(next, e.beat.Load()+timeout)
		case wall-e.lastMS.Load() > PresenceRetention.Milliseconds():
			expired = append(expired, key)
		}
	}
	p.mu.RUnlock()
	slices.SortFunc(silent, presenceKey.compare)
	for _, key := range silent {
		p.setOffline(key, isSilent)
	}
	if len(expired) == 0 {
		return next
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range expired {
		if e := p.entries[key]; e != nil && !e.online.Load() {
			delete(p.entries, key)
		}
	}
	return next
}
