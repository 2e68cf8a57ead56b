package gateway

import (
	"sync"

	"agentctl/transport/sse"
)

// Bounds of what subscribers may cost. Events that wait are shared between subscribers,
// but each may wait for different ones, so their bytes count for each.
//
// The bound for all protects the process. The share of one identity keeps it from using up
// that bound, or all places, with slow streams of its own: others then still get theirs.
const (
	maxTotalQueued = 128 << 20 // bytes that wait for all subscribers together
	identityShare  = 4         // one identity has at most a quarter of the streams and of the bytes
)

// quotas bounds what each identity has: its open streams, the bytes that wait for them, and
// its replays.
type quotas struct {
	maxBytes int64
	total    *sse.Budget

	mu         sync.Mutex // protects byIdentity and quota.streams
	byIdentity map[string]*quota
}

// quota is the part of one identity. It exists while the identity has streams.
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

// acquireStream counts a stream; nil when the identity has maxStreams. An identity that
// is shared, by all holders of one token or by everybody, has no bounds of its own.
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

// releaseStream undoes acquireStream. The quota is forgotten with its last stream; its
// budget is empty then, since a Writer releases what waits when it closes.
func (q *quota) releaseStream() {
	q.quotas.mu.Lock()
	defer q.quotas.mu.Unlock()
	if q.streams--; q.streams == 0 {
		delete(q.quotas.byIdentity, q.identity)
	}
}
