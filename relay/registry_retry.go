package relay

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/hub"
	"agentctl/relay/storage"
)

// Writes to the node registry while relay.db hangs or fails. A board must become ready all the
// same, so a write that its link makes waits for registryTimeout at most; what was not stored
// is tried again later, while the board is still linked. Without a fault nothing is kept here.

// Times of the registry's writes.
const (
	registryTimeout = 2 * time.Second
	registryRetry   = 5 * time.Second
)

// registryRetries are the boards whose registry entry could not be stored. There are at most
// as many as linked boards: one that is gone is dropped at the next attempt.
type registryRetries struct {
	mu      sync.Mutex // a leaf lock
	pending map[string]registryWrite
}

// registryWrite is what the registry lacks of a board.
type registryWrite struct {
	node *hub.Node // has announced; nil: nothing of it is missing
	boot string    // of the link that was served last; "": stored
}

// put adds what the registry lacks.
func (q *registryRetries) put(nodeID string, w registryWrite) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending == nil {
		q.pending = make(map[string]registryWrite)
	}
	before, known := q.pending[nodeID]
	if !known && len(q.pending) >= hub.MaxNodes {
		return
	}
	if w.node == nil {
		w.node = before.node
	}
	if w.boot == "" {
		w.boot = before.boot
	}
	q.pending[nodeID] = w
}

// take removes and returns everything.
func (q *registryRetries) take() map[string]registryWrite {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.pending
	q.pending = nil
	return all
}

// registryContext bounds a write to the registry. It has ended from the start while relay.db
// does not answer, so that a fleet that reconnects does not wait a second each.
func (r *Relay) registryContext(ctx context.Context) (context.Context, context.CancelFunc) {
	timeout := registryTimeout
	if r.storage.Watch(storeIdentities).Stuck(storage.SlowAfter) != nil {
		timeout = 0
	}
	return context.WithTimeout(ctx, timeout)
}

// registryFailed handles the error of a write to the registry: a fault of the disk is tried
// again, and its monitor logs it; anything else is logged here.
func (r *Relay) registryFailed(nodeID string, w registryWrite, err error) {
	if storage.Classify(err) != "" {
		r.registry.put(nodeID, w)
		return
	}
	r.log.Warn("node registry", zap.String("node_id", nodeID), zap.Error(err))
}

// saveAnnounce stores what a node has announced.
func (r *Relay) saveAnnounce(ctx context.Context, n *hub.Node) error {
	_, err := r.store.UpsertNode(ctx, n.Tenant(), n.ID(), n.ProposedName(), n.Manifest())
	return err
}

// retryRegistry tries again what could not be stored, until ctx ends.
func (r *Relay) retryRegistry(ctx context.Context) {
	every(ctx, registryRetry, func() {
		all := r.registry.take()
		for nodeID, w := range all {
			var err error
			if !r.hub.IsOnline(nodeID) {
				w.node = nil // its next link announces again
			}
			if w.node != nil && ctx.Err() == nil {
				err = r.retryWrite(ctx, func(ctx context.Context) error { return r.saveAnnounce(ctx, w.node) })
			}
			if w.boot != "" && err == nil {
				w.node = nil
				err = r.retryWrite(ctx, func(ctx context.Context) error { return r.store.SaveBoot(ctx, nodeID, w.boot) })
			}
			if err != nil {
				r.registryFailed(nodeID, w, err)
			}
		}
	})
}

func (r *Relay) retryWrite(ctx context.Context, write func(context.Context) error) error {
	ctx, cancel := r.registryContext(ctx)
	defer cancel()
	return write(ctx)
}
