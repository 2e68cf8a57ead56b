package kernel

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"
)

// Change is what a Subscription reports. Bursts are coalesced: a set flag says that it
// happened at least once since the last Next.
type Change struct {
	Tools     bool     // the list of tools changed
	Resources bool     // the list of resources changed
	Prompts   bool     // the list of prompts of a Methods plugin changed
	Updated   []string // URIs whose content changed, at most MaxWatched
}

// Bounds of subscriptions.
const (
	MaxSubscriptions = 10000
	MaxWatched       = 4096 // watched URIs in the kernel, and pending ones a subscription
)

// Errors of subscriptions.
var (
	ErrTooManySubscriptions = errors.New("kernel: too many subscriptions")
	ErrNotWatchable         = errors.New("kernel: this resource does not report changes")
	ErrStopped              = errors.New("kernel: stopped")
)

// Subscription hears of the changes that one tenant can see. Its memory is bounded: it
// keeps flags and a set of URIs, not a queue.
type Subscription struct {
	n      *notifier
	tenant string
	ready  chan struct{}

	mu      sync.Mutex // protects the fields below
	pending Change
	uris    map[string]struct{}
}

// Ready is signalled when Next has something.
func (s *Subscription) Ready() <-chan struct{} { return s.ready }

// Next takes everything that is pending; Updated is in ascending order.
func (s *Subscription) Next() Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.pending
	for u := range s.uris {
		c.Updated = append(c.Updated, u)
	}
	slices.Sort(c.Updated)
	clear(s.uris)
	s.pending = Change{}
	return c
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.n.mu.Lock()
	delete(s.n.subs, s)
	s.n.mu.Unlock()
}

func (s *Subscription) push(c Change, uri string) {
	s.mu.Lock()
	s.pending.Tools = s.pending.Tools || c.Tools
	s.pending.Resources = s.pending.Resources || c.Resources
	s.pending.Prompts = s.pending.Prompts || c.Prompts
	if uri != "" && len(s.uris) < MaxWatched {
		s.uris[uri] = struct{}{}
	}
	s.mu.Unlock()
	select {
	case s.ready <- struct{}{}:
	default: // already signalled
	}
}

type notifier struct {
	mu      sync.Mutex // protects the fields below
	subs    map[*Subscription]struct{}
	watches map[watchKey]*watch
	ctx     context.Context // of Run; nil before it
	stopped bool
	wg      sync.WaitGroup
}

type watchKey struct{ tenant, uri string }

type watch struct {
	refs    int
	cancel  context.CancelFunc
	pending func() // starts it, when Run was not yet called
}

func (n *notifier) init() {
	n.subs = make(map[*Subscription]struct{})
	n.watches = make(map[watchKey]*watch)
}

// Subscribe hears of changes in what the tenant can see.
func (k *Kernel) Subscribe(tenant string) (*Subscription, error) {
	n := &k.notify
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.subs) >= MaxSubscriptions {
		return nil, ErrTooManySubscriptions
	}
	s := &Subscription{n: n, tenant: tenant, ready: make(chan struct{}, 1), uris: make(map[string]struct{})}
	n.subs[s] = struct{}{}
	return s, nil
}

func (k *Kernel) changedLocked(m *Manifest) {
	k.notify.push(m.Tenant, Change{Tools: len(m.Tools) > 0, Resources: len(m.Resources) > 0}, "")
}

// Changed tells the subscribers of a tenant ("": of every tenant) about a change that
// Load and Unload cannot see, such as another list of prompts.
func (k *Kernel) Changed(tenant string, c Change) {
	for _, uri := range c.Updated {
		k.notify.push(tenant, Change{}, uri)
	}
	c.Updated = nil
	if c.Tools || c.Resources || c.Prompts {
		k.notify.push(tenant, c, "")
	}
}

func (n *notifier) push(tenant string, c Change, uri string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for s := range n.subs {
		if tenant == "" || s.tenant == tenant {
			s.push(c, uri)
		}
	}
}

// Watch makes the changes of a resource's content appear as Updated in the tenant's
// subscriptions. The first watcher of a URI starts the plugin's work, the last
// release ends it. release may be called more than once.
func (k *Kernel) Watch(c *Caller, uri string) (release func(), err error) {
	e, err := k.resource(c, uri)
	if err != nil {
		return nil, err
	}
	p, ok := e.plugin.plugin.(Watcher)
	if !ok || !e.resource.Watchable {
		return nil, ErrNotWatchable
	}
	n := &k.notify
	key := watchKey{c.Tenant, uri}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped {
		return nil, ErrStopped
	}
	w := n.watches[key]
	if w == nil {
		if len(n.watches) >= MaxWatched {
			return nil, ErrTooManySubscriptions
		}
		w = &watch{}
		n.watches[key] = w
		w.pending = func() { n.startLocked(k, key, w, p) }
		if n.ctx != nil {
			w.pending()
		}
	}
	w.refs++
	return sync.OnceFunc(func() { n.release(key, w) }), nil
}

// watchRetry is how long a watch waits after its plugin's Watch ended early (the device
// went away) before it looks for the resource again.
const watchRetry = time.Second

func (n *notifier) startLocked(k *Kernel, key watchKey, w *watch, p Watcher) {
	ctx, cancel := context.WithCancel(n.ctx)
	w.cancel, w.pending = cancel, nil
	n.wg.Go(func() {
		defer cancel()
		for ctx.Err() == nil {
			_ = p.Watch(ctx, key.uri, func() { n.push(key.tenant, Change{}, key.uri) })
			select {
			case <-ctx.Done():
				return
			case <-time.After(watchRetry):
			}
			// A device that came back is another plugin with the same resource.
			k.mu.RLock()
			e, ok := k.resources[key.uri]
			k.mu.RUnlock()
			if !ok || (e.plugin.manifest.Tenant != "" && e.plugin.manifest.Tenant != key.tenant) {
				continue // still away; Watch of the old one returns at once
			}
			if p, ok = e.plugin.plugin.(Watcher); !ok {
				return
			}
		}
	})
}

func (n *notifier) release(key watchKey, w *watch) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w.refs--; w.refs > 0 {
		return
	}
	if w.cancel != nil {
		w.cancel()
	}
	if n.watches[key] == w {
		delete(n.watches, key)
	}
}

func (n *notifier) run(ctx context.Context) error {
	n.mu.Lock()
	n.ctx = ctx
	for _, w := range n.watches {
		if w.pending != nil {
			w.pending()
		}
	}
	n.mu.Unlock()
	<-ctx.Done()
	n.mu.Lock()
	n.stopped = true
	n.mu.Unlock()
	n.wg.Wait()
	return context.Cause(ctx)
}

func (n *notifier) info() Subscriptions {
	n.mu.Lock()
	defer n.mu.Unlock()
	count := make(map[string]int)
	for s := range n.subs {
		count[s.tenant]++
	}
	var in Subscriptions
	for _, t := range slices.Sorted(maps.Keys(count)) {
		in.Tenants = append(in.Tenants, TenantSubscriptions{Tenant: t, Subscribers: count[t]})
	}
	for key, w := range n.watches {
		in.Watches = append(in.Watches, WatchInfo{Tenant: key.tenant, URI: key.uri, Watchers: w.refs})
	}
	slices.SortFunc(in.Watches, func(a, b WatchInfo) int { return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.URI, b.URI)) })
	return in
}

func (n *notifier) stats(s *Stats) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s.Subscriptions, s.Watches = len(n.subs), len(n.watches)
}

func (n *notifier) reset() {}
