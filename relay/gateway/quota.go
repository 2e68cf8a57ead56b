package gateway

import (
	"sync"

	"agentctl/transport/sse"
)

// Bounds of the resources that subscribers use. Queued events are shared between
// subscribers, but each queue may hold different ones, so their bytes count for each queue.
//
// The total bound protects the process. The bound of one identity keeps its slow streams
// from using up the total bound, so that other identities can still subscribe.
const (
	maxTotalQueued = 128 << 20 // bytes that are queued for all subscribers together
	identityShare  = 2         // one identity gets at most half of the streams and of the bytes
)

// quotas bounds for each identity its open streams, the bytes that are queued for them, and
// its replays.
type quotas struct {
	maxBytes int64
	total    *sse.Budget

	mu         sync.Mutex // protects byIdentity and quota.streams
	byIdentity map[string]*quota
}

// quota counts what one identity uses. It exists while the identity has streams.
type quota struct {
	quotas   *quotas
	identity string
	budget   *sse.Budget
	replays  *slots // of the log, see acquireReplay
	streams  int
}

func newQuotas(maxBytes int64) *quotas {
	return &quotas{maxBytes: maxBytes, total: sse.NewBudget(maxBytes, nil), byIdentity: make(map[string]*quota)}
}

// acquireStream counts a stream, or returns nil when the identity has maxStreams. A shared
// identity (see Identity.isShared) is bounded by the totals alone.
func (qs *quotas) acquireStream(identity string, shared bool, maxStreams int) *quota {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q := qs.byIdentity[identity]
	if q == nil {
		maxBytes := qs.maxBytes / identityShare
		if shared {
			maxBytes = 0
		}
		q = &quota{quotas: qs, identity: identity, budget: sse.NewBudget(maxBytes, qs.total), replays: newSlots(maxReplaysPerIdentity)}
		qs.byIdentity[identity] = q
	}
	if !shared && q.streams >= maxStreams {
		return nil
	}
	q.streams++
	return q
}

// releaseStream undoes acquireStream. The quota is removed with its last stream; its budget
// is empty then, since a Writer releases its queue when it closes.
func (q *quota) releaseStream() {
	q.quotas.mu.Lock()
	defer q.quotas.mu.Unlock()
	if q.streams--; q.streams == 0 {
		delete(q.quotas.byIdentity, q.identity)
	}
}
