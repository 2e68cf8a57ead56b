package kernel

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
)

// watcher runs one Watch of a plugin for each watched resource and tenant, in goroutines
// of Run. A watch waits for Run if that was not called yet.
type watcher struct {
	mu      sync.Mutex // protects the fields below
	watches map[watchKey]*watch
	ctx     context.Context // of Run; nil before it
	stopped bool
	wg      sync.WaitGroup
}

type watchKey struct{ tenant, uri string }

type watch struct {
	refs   int
	cancel context.CancelFunc // nil until it runs
	start  func()             // starts it, when Run was not yet called
}

// Watch makes the changes of a resource's content appear as Updated in the tenant's
// subscriptions. The first watcher of a URI starts the plugin's work, the last release
// ends it. release may be called more than once.
func (k *Kernel) Watch(c *Caller, uri string) (release func(), err error) {
	e, err := k.resource(c, uri)
	if err != nil {
		return nil, err
	}
	p, ok := e.plugin.plugin.(Watcher)
	if !ok || !e.resource.Watchable {
		return nil, ErrNotWatchable
	}
	n := &k.watcher
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
		w.start = func() { n.startLocked(k, key, w, p) }
		if n.ctx != nil {
			w.start()
		}
	}
	w.refs++
	return sync.OnceFunc(func() { n.release(key, w) }), nil
}

// watchRetry is how long a watch waits after its plugin's Watch ended early, for example
// because the device disconnected, before it looks up the resource again.
const watchRetry = time.Second

func (n *watcher) startLocked(k *Kernel, key watchKey, w *watch, p Watcher) {
	ctx, cancel := context.WithCancel(n.ctx)
	w.cancel, w.start = cancel, nil
	n.wg.Go(func() {
		defer cancel()
		for ctx.Err() == nil {
			watchRecovered(ctx, p, key.uri, func() { k.notify.push(key.tenant, Change{}, key.uri) })
			select {
			case <-ctx.Done():
				return
			case <-time.After(watchRetry):
			}
			// A device that reconnected is another plugin with the same resource.
			e, ok := k.findResource(key.uri)
			if !ok || !e.plugin.visibleTo(&Caller{Tenant: key.tenant}) {
				continue // still offline; Watch of the old plugin returns at once
			}
			if p, ok = e.plugin.plugin.(Watcher); !ok {
				return
			}
		}
	})
}

// watchRecovered survives a panic of the plugin. The watch is retried as after any other
// early end. The panic is not counted: counters.panics are calls, which counters.errors has as well.
func watchRecovered(ctx context.Context, p Watcher, uri string, changed func()) {
	defer func() { _ = recover() }()
	_ = p.Watch(ctx, uri, changed)
}

// release drops one reference; dropping the last one ends the watch.
func (n *watcher) release(key watchKey, w *watch) {
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

// run starts the watches that are waiting for it and returns after ctx ends and all
// watches have.
func (n *watcher) run(ctx context.Context) error {
	n.mu.Lock()
	n.ctx = ctx
	for _, w := range n.watches {
		if w.start != nil {
			w.start()
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

func (n *watcher) info() []WatchInfo {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []WatchInfo
	for key, w := range n.watches {
		all = append(all, WatchInfo{Tenant: key.tenant, URI: key.uri, Watchers: w.refs})
	}
	slices.SortFunc(all, func(a, b WatchInfo) int { return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.URI, b.URI)) })
	return all
}
