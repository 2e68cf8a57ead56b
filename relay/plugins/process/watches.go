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
type watchSet struct {
	unloaded chan struct{} // closed when the plugin is unloaded: its watches end

	mu       sync.Mutex // protects the fields below
	conn     *conn      // the one that is subscribed; nil while the plugin is down
	watchers map[string]map[*func()]struct{}
}

func newWatchSet() *watchSet {
	return &watchSet{unloaded: make(chan struct{}), watchers: make(map[string]map[*func()]struct{})}
}

// attach subscribes a new connection to the watched resources, and notifies their watchers: they
// may have changed before. A watch that begins from now on subscribes itself.
func (s *watchSet) attach(ctx context.Context, c *conn) {
	s.mu.Lock()
	s.conn = c
	uris := slices.Sorted(maps.Keys(s.watchers))
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	for _, uri := range uris {
		c.subscribe(ctx, uri)
		s.notify(uri)
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
	watchers := s.watchers[uri]
	if watchers == nil {
		watchers = make(map[*func()]struct{})
		s.watchers[uri] = watchers
	}
	watchers[key] = struct{}{}
	isFirst, c := len(watchers) == 1, s.conn
	s.mu.Unlock()
	if isFirst && c != nil {
		c.subscribe(ctx, uri)
	}
	var err error
	select {
	case <-ctx.Done():
		err = ctx.Err()
	case <-s.unloaded:
		err = ErrNotLoaded
	}
	s.mu.Lock()
	delete(watchers, key)
	isLast := len(watchers) == 0
	if isLast {
		delete(s.watchers, uri)
	}
	c = s.conn
	s.mu.Unlock()
	if isLast && c != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = c.call(ctx, "resources/unsubscribe", map[string]any{"uri": serverURI(c.plugin.manifest.Name, uri)})
	}
	return err
}

// notify calls the watchers of uri. They run without the lock, since the kernel may start or end
// a watch meanwhile; one that has just ended may be called once more.
func (s *watchSet) notify(uri string) {
	s.mu.Lock()
	watchers := slices.Collect(maps.Keys(s.watchers[uri]))
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
