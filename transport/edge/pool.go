package edge

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"agentctl/manifest"
)

// Identity is who shares of a Pool belong to: what a valid token proves.
type Identity struct{ Tenant, Subject string }

// Pool bounds a resource that all clients of a server share. An identity holds at most half of
// it, and the identities of one tenant together at most three quarters, so that neither a token
// nor a tenant can take it from everybody else. Its methods may be called from any goroutine.
type Pool struct {
	limit int64
	total *semaphore.Weighted

	used    atomic.Int64
	refused atomic.Uint64

	mu     sync.Mutex          // protects the fields below
	shares map[Identity]*share // of identities, and of tenants, whose key has no Subject
}

// share is the part of a pool that one holder may have. Pool.mu protects its counts; a share with
// neither units nor waiters is idle, and may be removed.
type share struct {
	*semaphore.Weighted
	units   int64 // that its holder has
	waiters int   // calls of Acquire in progress
}

// maxShares is the number of shares from which idle ones are removed before another one is added.
const maxShares = 1024

// NewPool makes a pool of limit units.
func NewPool(limit int64) *Pool {
	return &Pool{limit: limit, total: semaphore.NewWeighted(limit), shares: make(map[Identity]*share)}
}

// PoolStats are the figures of a pool, in its units.
type PoolStats struct {
	InUse, Limit int64
	Refused      uint64 // since the start
}

// Stats returns the figures.
func (p *Pool) Stats() PoolStats {
	return PoolStats{p.used.Load(), p.limit, p.refused.Load()}
}

// Acquire takes n units for an identity, for which it waits until ctx ends. It reports whether it
// has them; the caller then calls Release, for all of them or for parts.
func (p *Pool) Acquire(ctx context.Context, id Identity, n int64) bool {
	return p.acquire(id, n, func(s *semaphore.Weighted) bool { return s.Acquire(ctx, n) == nil })
}

// TryAcquire is Acquire without waiting.
func (p *Pool) TryAcquire(id Identity, n int64) bool {
	return p.acquire(id, n, func(s *semaphore.Weighted) bool { return s.TryAcquire(n) })
}

// acquire takes the units of the identity's share first: those who wait for their own share hold
// nothing of the tenant's and of the pool. All callers take the three in the same order, so they cannot
// deadlock.
func (p *Pool) acquire(id Identity, n int64, take func(*semaphore.Weighted) bool) bool {
	if n > p.shareOf(1, 2) { // more than any share; Acquire would wait for it until the end
		p.refused.Add(1)
		return false
	}
	p.mu.Lock()
	own := p.shareLocked(id, p.shareOf(1, 2))
	own.waiters++ // before the next shareLocked, which may remove idle shares
	tenant := p.shareLocked(Identity{Tenant: id.Tenant}, p.shareOf(3, 4))
	tenant.waiters++
	p.mu.Unlock()
	all := [...]*semaphore.Weighted{own.Weighted, tenant.Weighted, p.total}
	taken := 0
	for taken < len(all) && take(all[taken]) {
		taken++
	}
	ok := taken == len(all)
	p.mu.Lock()
	own.waiters--
	tenant.waiters--
	if ok {
		own.units += n
		tenant.units += n
	}
	p.mu.Unlock()
	if ok {
		p.used.Add(n)
		return true
	}
	for _, s := range all[:taken] {
		s.Release(n)
	}
	p.refused.Add(1)
	return false
}

// shareOf returns a fraction of the pool, at least one unit.
func (p *Pool) shareOf(n, d int64) int64 { return max(1, p.limit*n/d) }

// shareLocked returns the share of a holder, which it makes if there is none. p.mu is held.
func (p *Pool) shareLocked(holder Identity, limit int64) *share {
	s := p.shares[holder]
	if s == nil {
		if len(p.shares) >= maxShares {
			for h, s := range p.shares {
				if s.units == 0 && s.waiters == 0 {
					delete(p.shares, h)
				}
			}
		}
		s = &share{Weighted: semaphore.NewWeighted(limit)}
		p.shares[holder] = s
	}
	return s
}

// Release gives n units of an identity back.
func (p *Pool) Release(id Identity, n int64) {
	p.mu.Lock()
	own, tenant := p.shares[id], p.shares[Identity{Tenant: id.Tenant}]
	own.units -= n
	tenant.units -= n
	p.mu.Unlock()
	for _, s := range []*semaphore.Weighted{own.Weighted, tenant.Weighted, p.total} {
		s.Release(n)
	}
	p.used.Add(-n)
}

// Exhausted is the error of a caller whose share of a pool is used up: 429.
func Exhausted(message string, retryAfter time.Duration) *manifest.Error {
	return &manifest.Error{Code: manifest.RateLimited, Message: message, Reason: "share", RetryAfterMS: retryAfter.Milliseconds()}
}
