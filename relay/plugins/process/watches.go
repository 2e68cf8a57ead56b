package process

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// watchSet is the watched resources of a plugin. It outlasts connections and versions: each new
// connection is subscribed to what is watched then.
//
// Watches begin and end at any time. The end of the last one unsubscribes, the next one subscribes, and
// these requests could reach the server in the wrong order. settle prevents that: one goroutine at a time
// sends requests for a resource, until the last one is what the watches need.
type watchSet struct {
	unloaded chan struct{} // closed when the plugin is unloaded: its watches end

	mu      sync.Mutex          // protects the fields below; not held during a request
	conn    *conn               // the one that is subscribed; nil while the plugin is down
	watched map[string]*watched // by the URI that clients know
}

// watched is a resource that is watched, or whose last watch has just ended.
type watched struct {
	watchers     map[*func()]struct{}
	isSubscribed bool  // what the server of watchSet.conn was asked for last
	asking       *conn // on which settle has a request in flight; nil: none
}

func newWatchSet() *watchSet {
	return &watchSet{unloaded: make(chan struct{}), watched: make(map[string]*watched)}
}

// attach subscribes a new connection to the watched resources, and notifies their watchers: they
// may have changed before. A watch that begins from now on subscribes itself.
func (s *watchSet) attach(ctx context.Context, c *conn) {
	s.mu.Lock()
	s.conn = c
	for _, w := range s.watched {
		w.isSubscribed, w.asking = false, nil // the new server has been asked for nothing
	}
	uris := slices.Sorted(maps.Keys(s.watched))
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	for _, uri := range uris {
		s.settle(ctx, uri, initializeTimeout)
		s.notify(uri)
	}
}

// settle subscribes the server to a resource, or unsubscribes it, until that is what its watches need. Each
// request may take limit; one without an answer counts as done. If another goroutine has a request in
// flight, that one continues.
func (s *watchSet) settle(ctx context.Context, uri string, limit time.Duration) {
	for {
		s.mu.Lock()
		w, c := s.watched[uri], s.conn
		if w == nil || c != nil && w.asking == c {
			s.mu.Unlock()
			return
		}
		isWanted := len(w.watchers) > 0
		if c == nil || w.isSubscribed == isWanted {
			if !isWanted {
				delete(s.watched, uri)
			}
			s.mu.Unlock()
			return
		}
		w.asking, w.isSubscribed = c, isWanted
		s.mu.Unlock()
		timed, cancel := context.WithTimeout(ctx, limit)
		if isWanted {
			c.subscribe(timed, uri)
		} else {
			c.unsubscribe(timed, uri)
		}
		cancel()
		s.mu.Lock()
		if w.asking == c {
			w.asking = nil
		}
		s.mu.Unlock()
	}
}

// detach forgets a connection that ends, unless another one has taken its place.
func (s *watchSet) detach(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == c {
		s.conn = nil
	}
}

// watch calls changed after each change of a resource, until ctx ends or the plugin is unloaded. The
// first watch of a URI subscribes at the server, the last one unsubscribes.
func (s *watchSet) watch(ctx context.Context, uri string, changed func()) error {
	// Functions cannot be compared, so the pointer identifies this watch.
	key := &changed
	s.mu.Lock()
	w := s.watched[uri]
	if w == nil {
		w = &watched{watchers: make(map[*func()]struct{})}
		s.watched[uri] = w
	}
	w.watchers[key] = struct{}{}
	s.mu.Unlock()
	// The end of this watch must not cancel the request: other watches rely on the subscription, too.
	s.settle(context.WithoutCancel(ctx), uri, initializeTimeout)
	var err error
	select {
	case <-ctx.Done():
		err = ctx.Err()
	case <-s.unloaded:
		err = ErrNotLoaded
	}
	s.mu.Lock()
	delete(w.watchers, key)
	s.mu.Unlock()
	s.settle(context.WithoutCancel(ctx), uri, time.Second)
	return err
}

// notify calls the watchers of uri. They run without the lock, since the kernel may start or end
// a watch meanwhile; one that has just ended may be called once more.
func (s *watchSet) notify(uri string) {
	s.mu.Lock()
	var watchers []*func()
	if w := s.watched[uri]; w != nil {
		watchers = slices.Collect(maps.Keys(w.watchers))
	}
	s.mu.Unlock()
	for _, changed := range watchers {
		(*changed)()
	}
}

// subscribe asks the server to report changes of a resource that its version has. A refusal is only
// logged: the watch goes on, and the next server may accept it.
func (c *conn) subscribe(ctx context.Context, uri string) {
	if !c.plugin.isWatchable(uri) {
		return
	}
	log := c.plugin.log
	switch _, err := c.call(ctx, "resources/subscribe", map[string]any{"uri": serverURI(c.plugin.manifest.Name, uri)}); {
	case err == nil:
		log.Debug("plugin accepted a subscription", zap.String("uri", uri))
	case ctx.Err() == nil:
		log.Warn("plugin refused a subscription", zap.String("uri", uri), zap.Error(err))
	}
}

// unsubscribe asks the server to report no more changes of a resource.
func (c *conn) unsubscribe(ctx context.Context, uri string) {
	_, _ = c.call(ctx, "resources/unsubscribe", map[string]any{"uri": serverURI(c.plugin.manifest.Name, uri)})
}
