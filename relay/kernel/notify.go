package kernel

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Change is what a Subscription reports. Bursts are coalesced: a set flag says that it
// happened at least once since the last Next.
type Change struct {
	Tools     bool     // the list of tools changed
	Resources bool     // the list of resources changed
	Prompts   bool     // the list of prompts of a Methods plugin changed
	Updated   []string // URIs whose content changed, at most MaxWatched
	// Missed tells that more URIs changed than are kept: any may have, beyond Updated.
	Missed bool
}

// Bounds of subscriptions.
const (
	MaxSubscriptions = 10000
	MaxWatched       = 4096 // watched URIs in the kernel, and changed ones kept for a tenant
)

// Errors of subscriptions.
var (
	ErrTooManySubscriptions = errors.New("kernel: too many subscriptions")
	ErrNotWatchable         = errors.New("kernel: this resource does not report changes")
	ErrStopped              = errors.New("kernel: stopped")
)

// notifier tells subscribers of changes. What changed is kept once a tenant, in the order
// of the changes; a subscription is a place in that order. So a subscriber who does not
// come costs a place, and a change costs those who wait for one and nobody else.
type notifier struct {
	mu     sync.RWMutex // protects the fields below; taken before topic.mu
	topics map[string]*topic
	subs   int

	changes, delivered, coalesced, dropped atomic.Int64
	latency                                histogram
}

// topic is what changed for one tenant that has subscribers.
type topic struct {
	mu                        sync.Mutex // protects the fields below
	subs                      int
	waiting                   []*Subscription // nothing is pending for them
	seq                       uint64          // number of changes
	tools, resources, prompts uint64          // seq of the last change of each kind
	uris                      map[string]*changedURI
	ring                      changedURI // list of uris in the order of their last change
	forgotten                 uint64     // seq of the newest change of a URI that was pushed out
}

// changedURI is an element of a ring.
type changedURI struct {
	uri        string
	seq        uint64
	prev, next *changedURI
}

// Subscription hears of the changes that one tenant can see. It is used by one goroutine.
type Subscription struct {
	n      *notifier
	t      *topic
	tenant string
	ready  chan struct{}

	// protected by t.mu
	seen   uint64    // changes up to here were taken
	place  int       // in t.waiting; -1: it is not there
	since  time.Time // of the first change that is pending
	closed bool
}

// Subscribe hears of changes in what the tenant can see.
func (k *Kernel) Subscribe(tenant string) (*Subscription, error) {
	n := &k.notify
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subs >= MaxSubscriptions {
		return nil, ErrTooManySubscriptions
	}
	n.subs++
	t := n.topics[tenant]
	if t == nil {
		if n.topics == nil {
			n.topics = make(map[string]*topic)
		}
		t = &topic{uris: make(map[string]*changedURI)}
		t.ring.prev, t.ring.next = &t.ring, &t.ring
		n.topics[tenant] = t
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.subs++
	s := &Subscription{n: n, t: t, tenant: tenant, ready: make(chan struct{}, 1), seen: t.seq}
	t.waitLocked(s)
	return s, nil
}

// Ready is signalled when Next has something.
func (s *Subscription) Ready() <-chan struct{} { return s.ready }

// Next takes everything that is pending; Updated is in ascending order.
func (s *Subscription) Next() (c Change) {
	t := s.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.closed || s.seen == t.seq {
		return Change{}
	}
	took := int64(0)
	for _, f := range []struct {
		at   uint64
		flag *bool
	}{{t.tools, &c.Tools}, {t.resources, &c.Resources}, {t.prompts, &c.Prompts}} {
		if f.at > s.seen {
			*f.flag = true
			took++
		}
	}
	for u := t.ring.prev; u != &t.ring && u.seq > s.seen; u = u.prev {
		c.Updated = append(c.Updated, u.uri)
	}
	took += int64(len(c.Updated))
	if c.Missed = t.forgotten > s.seen; c.Missed {
		s.n.dropped.Add(1)
	}
	s.n.delivered.Add(took)
	s.n.coalesced.Add(int64(t.seq-s.seen) - took)
	s.n.latency.observe(time.Since(s.since))
	s.seen = t.seq
	t.waitLocked(s)
	slices.Sort(c.Updated)
	return c
}

// Close ends the subscription. It may be called more than once.
func (s *Subscription) Close() {
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	if s.place >= 0 {
		last := s.t.waiting[len(s.t.waiting)-1]
		s.t.waiting[s.place], last.place = last, s.place
		s.t.waiting = s.t.waiting[:len(s.t.waiting)-1]
	}
	s.n.subs--
	if s.t.subs--; s.t.subs == 0 {
		delete(s.n.topics, s.tenant)
	}
}

func (t *topic) waitLocked(s *Subscription) {
	s.place = len(t.waiting)
	t.waiting = append(t.waiting, s)
}

// push records a change and wakes those who wait for one; the others have it coming.
func (t *topic) push(c Change, uri string) (changes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.seq
	if c.Tools {
		t.seq++
		t.tools = t.seq
	}
	if c.Resources {
		t.seq++
		t.resources = t.seq
	}
	if c.Prompts {
		t.seq++
		t.prompts = t.seq
	}
	if uri != "" {
		t.seq++
		t.touchLocked(uri)
	}
	if t.seq == before || len(t.waiting) == 0 {
		return int64(t.seq - before)
	}
	now := time.Now()
	for i, s := range t.waiting {
		s.since, s.place = now, -1
		t.waiting[i] = nil
		select {
		case s.ready <- struct{}{}:
		default: // still signalled
		}
	}
	t.waiting = t.waiting[:0]
	return int64(t.seq - before)
}

// touchLocked makes uri the last that changed; the one that has not changed for longest
// is forgotten when there are too many.
func (t *topic) touchLocked(uri string) {
	u := t.uris[uri]
	switch {
	case u != nil:
		u.prev.next, u.next.prev = u.next, u.prev
	case len(t.uris) >= MaxWatched:
		u = t.ring.next
		t.forgotten = u.seq
		t.ring.next, u.next.prev = u.next, &t.ring
		delete(t.uris, u.uri)
		u.uri = uri
		t.uris[uri] = u
	default:
		u = &changedURI{uri: uri}
		t.uris[uri] = u
	}
	u.seq = t.seq
	u.prev, u.next = t.ring.prev, &t.ring
	u.prev.next, t.ring.prev = u, u
}

// push tells the subscribers of a tenant; those of all tenants for "".
func (n *notifier) push(tenant string, c Change, uri string) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if tenant != "" {
		if t := n.topics[tenant]; t != nil {
			n.changes.Add(t.push(c, uri))
		}
		return
	}
	for _, t := range n.topics {
		n.changes.Add(t.push(c, uri))
	}
}

func (k *Kernel) changedLocked(m *Manifest) {
	k.notify.push(m.Tenant, Change{Tools: len(m.Tools) > 0, Resources: len(m.Resources) > 0}, "")
}

// NotifyChange tells the subscribers of a tenant ("": of every tenant) about a change that
// Load and Unload cannot see, such as another list of prompts or new content.
func (k *Kernel) NotifyChange(tenant string, c Change) {
	for _, uri := range c.Updated {
		k.notify.push(tenant, Change{}, uri)
	}
	if c.Tools || c.Resources || c.Prompts {
		k.notify.push(tenant, c, "")
	}
}

func (n *notifier) info() []TenantSubscriptions {
	n.mu.RLock()
	defer n.mu.RUnlock()
	all := make([]TenantSubscriptions, 0, len(n.topics))
	for tenant, t := range n.topics {
		t.mu.Lock()
		all = append(all, TenantSubscriptions{Tenant: tenant, Subscribers: t.subs, Waiting: len(t.waiting)})
		t.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b TenantSubscriptions) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all
}

func (n *notifier) stats(s *Stats) {
	for _, t := range n.info() {
		s.Subscriptions += t.Subscribers
		s.Pending += t.Subscribers - t.Waiting
	}
	s.Changes, s.Delivered, s.Coalesced, s.Dropped = n.changes.Load(), n.delivered.Load(), n.coalesced.Load(), n.dropped.Load()
	s.FanoutP50US, s.FanoutP95US, s.FanoutP99US = n.latency.quantile(50), n.latency.quantile(95), n.latency.quantile(99)
}

func (n *notifier) reset() {
	for _, c := range []*atomic.Int64{&n.changes, &n.delivered, &n.coalesced, &n.dropped} {
		c.Store(0)
	}
	n.latency.reset()
}
