package kernel

import (
	"cmp"
	"container/list"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Change is what a Subscription reports. Bursts are coalesced: a set flag says that it
// happened at least once since the last Next.
type Change struct {
	Tools     bool // the list of tools changed
	Resources bool // the list of resources changed
	Prompts   bool // the list of prompts of a MethodHandler plugin changed
	// PluginTools says with Tools that the tools of a plugin changed that is no board. Lists without
	// boards (Toolset.HasBoards) have changed only then.
	PluginTools bool
	// Updated are the URIs whose content changed, at most MaxWatched.
	Updated []string
	// Missed says that more URIs changed than are kept: others than those in Updated may
	// have changed, too.
	Missed bool
}

// Bounds of subscriptions. MaxWatched is the number of watched URIs in the kernel, and of
// changed URIs that are kept for a tenant.
const (
	MaxSubscriptions = 10000
	MaxWatched       = 4096
)

// Errors of subscriptions.
var (
	ErrTooManySubscriptions = errors.New("kernel: too many subscriptions")
	ErrNotWatchable         = errors.New("kernel: this resource does not report changes")
	ErrStopped              = errors.New("kernel: stopped")
)

// notifier informs subscribers of changes. Changes are kept once a tenant, coalesced by
// kind and URI, and numbered; a subscription is a number up to which it has taken them.
// So a subscriber who does not read costs one number, and a change costs those who wait
// and nobody else.
//
// It is not built on transport/fanout, whose subscribers have a queue each: a change
// would cost an insertion for each of up to 10,000 subscribers, and coalescing 4,096 URIs
// would cost a map for each of them.
type notifier struct {
	mu     sync.RWMutex // protects the fields below; taken before topic.mu
	topics map[string]*topic
	subs   int

	changes, delivered, coalesced, dropped atomic.Int64
	latency                                histogram
}

// topic is what changed for one tenant that has subscribers.
type topic struct {
	mu      sync.Mutex // protects the fields below
	subs    int
	waiting []*Subscription // those with nothing pending
	seq     uint64          // number of changes
	flags   [3]uint64       // seq of the last change of tools, resources and prompts
	plugins uint64          // seq of the last change of tools with PluginTools
	uris    map[string]*list.Element
	order   list.List // of changedURI, the last change at the back
	evicted uint64    // seq of the newest change of a URI that was evicted
}

type changedURI struct {
	uri string
	seq uint64
}

// Subscription reports the changes that one tenant can see. It is used by one goroutine.
type Subscription struct {
	n      *notifier
	t      *topic
	tenant string
	ready  chan struct{}

	// protected by t.mu
	seen   uint64    // changes up to here were taken
	place  int       // index in t.waiting; -1: not in it
	since  time.Time // of the first change that is pending
	closed bool
}

// Subscribe reports changes of the tools and resources that the tenant can see.
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
		t = &topic{uris: make(map[string]*list.Element)}
		n.topics[tenant] = t
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.subs++
	s := &Subscription{n: n, t: t, tenant: tenant, ready: make(chan struct{}, 1), seen: t.seq}
	t.waitLocked(s)
	return s, nil
}

// Ready is signaled when Next has something.
func (s *Subscription) Ready() <-chan struct{} { return s.ready }

// Next takes everything that is pending. Updated is in ascending order.
func (s *Subscription) Next() (c Change) {
	t := s.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.closed || s.seen == t.seq {
		return Change{}
	}
	taken := int64(0)
	for i, flag := range c.flags() {
		if *flag = t.flags[i] > s.seen; *flag {
			taken++
		}
	}
	c.PluginTools = t.plugins > s.seen
	for e := t.order.Back(); e != nil && e.Value.(*changedURI).seq > s.seen; e = e.Prev() {
		c.Updated = append(c.Updated, e.Value.(*changedURI).uri)
	}
	taken += int64(len(c.Updated))
	if c.Missed = t.evicted > s.seen; c.Missed {
		s.n.dropped.Add(1)
	}
	s.n.delivered.Add(taken)
	s.n.coalesced.Add(int64(t.seq-s.seen) - taken)
	s.n.latency.observe(time.Since(s.since))
	s.seen = t.seq
	t.waitLocked(s)
	slices.Sort(c.Updated)
	return c
}

// flags are the kinds of changes in the order of topic.flags.
func (c *Change) flags() [3]*bool { return [3]*bool{&c.Tools, &c.Resources, &c.Prompts} }

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

// waitLocked adds a subscription with nothing pending to those that a change wakes.
func (t *topic) waitLocked(s *Subscription) {
	s.place = len(t.waiting)
	t.waiting = append(t.waiting, s)
}

// push records changes and wakes the subscriptions that wait; the others find them with
// their next Next.
func (t *topic) push(c Change, uri string) (changes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.seq
	for i, flag := range c.flags() {
		if *flag {
			t.seq++
			t.flags[i] = t.seq
		}
	}
	if c.PluginTools {
		t.plugins = t.flags[0]
	}
	if uri != "" {
		t.seq++
		t.updateLocked(uri)
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
		default: // still signaled
		}
	}
	t.waiting = t.waiting[:0]
	return int64(t.seq - before)
}

// updateLocked makes uri the last that changed. When there are too many it evicts the one
// that has not changed for longest.
func (t *topic) updateLocked(uri string) {
	e := t.uris[uri]
	if e == nil && len(t.uris) >= MaxWatched {
		e = t.order.Front()
		oldest := e.Value.(*changedURI)
		t.evicted = oldest.seq
		delete(t.uris, oldest.uri)
		oldest.uri = uri
	}
	if e == nil {
		e = t.order.PushBack(&changedURI{uri: uri})
	}
	t.uris[uri] = e
	e.Value.(*changedURI).seq = t.seq
	t.order.MoveToBack(e)
}

// push informs the subscribers of a tenant; those of all tenants for "".
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

// notifyListsLocked informs the subscribers of a plugin's tenant that the plugin's tools
// and resources came or went. k.mu is held.
func (k *Kernel) notifyListsLocked(m *Manifest) {
	c := Change{Tools: len(m.Tools) > 0, Resources: len(m.Resources) > 0}
	c.PluginTools = c.Tools && !strings.HasPrefix(m.Name, DevicePrefix)
	k.notify.push(m.Tenant, c, "")
}

// NotifyChange informs the subscribers of a tenant ("": of every tenant) about a change
// that Load and Unload do not see, such as another list of prompts or new content.
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

// stats fills in the figures of subscriptions and changes.
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
