package relay

import (
	"cmp"
	"context"
	"maps"
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

// registryRetries are the boards whose registry entry could not be stored, at most hub.MaxNodes.
//
// A value is pending until a retry has stored it, or a newer link of the board writes: that first drops
// what is pending of the link before. A retry that fails leaves the value where it is and does not put
// it back, because a newer link's may have replaced it meanwhile. A newer link that writes between a
// retry's get and its write is overwritten with the older manifest until the next announce: no lock is
// held across both, because a link must not wait for a retry that hangs.
type registryRetries struct {
	mu      sync.Mutex // a leaf lock
	pending map[string]registryWrite
}

// registryWrite is what the registry lacks of a board.
type registryWrite struct {
	node *hub.Node // has announced; nil: nothing of it is missing
	boot string    // of the link that was served last; "": stored
}

// put adds what the registry lacks, in place of what is pending of the same kind.
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
	q.pending[nodeID] = registryWrite{w.node, cmp.Or(w.boot, before.boot)}
}

// drop removes from what is pending of a board what equals w.
func (q *registryRetries) drop(nodeID string, w registryWrite) {
	q.mu.Lock()
	defer q.mu.Unlock()
	left, known := q.pending[nodeID]
	if !known {
		return
	}
	if left.node == w.node {
		left.node = nil
	}
	if left.boot == w.boot {
		left.boot = ""
	}
	if q.pending[nodeID] = left; left == (registryWrite{}) {
		delete(q.pending, nodeID)
	}
}

// all returns what boards lack.
func (q *registryRetries) all() map[string]registryWrite {
	q.mu.Lock()
	defer q.mu.Unlock()
	return maps.Clone(q.pending)
}

// get returns what a board lacks, the zero value for nothing.
func (q *registryRetries) get(nodeID string) registryWrite {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending[nodeID]
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
		for nodeID := range r.registry.all() {
			if ctx.Err() != nil {
				return
			}
			r.retryBoard(ctx, nodeID)
		}
	})
}

// retryBoard tries again what could not be stored of a board. The boot_id is stored also if the board
// has left: it says which link was served last.
func (r *Relay) retryBoard(ctx context.Context, nodeID string) {
	w := r.registry.get(nodeID) // now: a link may have written since the round began
	var err error
	if w.node != nil && r.hub.IsOnline(nodeID) { // else its next link announces again
		err = r.retryWrite(ctx, func(ctx context.Context) error { return r.saveAnnounce(ctx, w.node) })
	}
	if storage.Classify(err) != "" {
		return
	}
	r.registry.drop(nodeID, registryWrite{node: w.node})
	if w.boot != "" && err == nil {
		err = r.retryWrite(ctx, func(ctx context.Context) error { return r.store.SaveBoot(ctx, nodeID, w.boot) })
	}
	if storage.Classify(err) != "" {
		return
	}
	r.registry.drop(nodeID, w)
	if err != nil {
		r.log.Warn("node registry", zap.String("node_id", nodeID), zap.Error(err))
	}
}

func (r *Relay) retryWrite(ctx context.Context, write func(context.Context) error) error {
	ctx, cancel := r.registryContext(ctx)
	defer cancel()
	return write(ctx)
}
