package edge

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
)

// TestPoolShares: an identity gets half, a tenant three quarters, and what is released serves
// others.
func TestPoolShares(t *testing.T) {
	p := NewPool(16)
	a, b, other := Identity{"t", "a"}, Identity{"t", "b"}, Identity{"u", "a"}
	count := func(id Identity) (n int64) {
		for p.TryAcquire(id, 1) {
			n++
		}
		return n
	}
	if n := count(a); n != 8 {
		t.Errorf("an identity got %d of 16", n)
	}
	if n := count(b); n != 4 {
		t.Errorf("the second identity of the tenant got %d, want 4", n)
	}
	if n := count(other); n != 4 {
		t.Errorf("another tenant got %d, want 4", n)
	}
	if st := p.Stats(); st != (PoolStats{16, 16, 3}) {
		t.Errorf("stats %+v", st)
	}
	p.Release(a, 8)
	if n := count(other); n != 4 {
		t.Errorf("another tenant got %d more, want 4", n)
	}
	p.Release(b, 4)
	p.Release(other, 8)
	if st := p.Stats(); st.InUse != 0 {
		t.Errorf("stats %+v", st)
	}
	if p.TryAcquire(a, 9) {
		t.Error("more than a share was given")
	}
}

// TestPoolWaits: Acquire waits for its own share until its context ends.
func TestPoolWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, id := NewPool(4), Identity{"t", "a"}
		if !p.TryAcquire(id, 2) {
			t.Fatal("nothing is free")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if start := time.Now(); p.Acquire(ctx, id, 1) || time.Since(start) != time.Second {
			t.Errorf("it did not wait for a second: %s", time.Since(start))
		}
		time.AfterFunc(time.Second, func() { p.Release(id, 2) })
		if !p.Acquire(t.Context(), id, 1) {
			t.Error("what was released was not given")
		}
		p.Release(id, 1)
	})
}

// TestPoolForgets: shares of identities that hold nothing do not accumulate, and the figures
// return to zero whatever the order of calls.
func TestPoolForgets(t *testing.T) {
	p := NewPool(1 << 40)
	held := map[Identity]int64{}
	for i := range 10 * maxShares {
		id := Identity{"t", string(rune(i))}
		n := rand.Int64N(100) + 1
		if !p.TryAcquire(id, n) {
			t.Fatal("refused")
		}
		held[id] += n
		if i%10 > 0 {
			p.Release(id, held[id])
			delete(held, id)
		}
	}
	if n := len(p.shares); n > len(held)+maxShares+2 {
		t.Errorf("%d shares for %d holders", n, len(held))
	}
	for id, n := range held {
		p.Release(id, n)
	}
	if st := p.Stats(); st.InUse != 0 {
		t.Errorf("stats %+v", st)
	}
}

// TestPoolFull: the first identity of another tenant gets a share that lasts while at least
// maxShares others are in use.
func TestPoolFull(t *testing.T) {
	p := NewPool(1 << 40)
	for i := range maxShares {
		p.TryAcquire(Identity{"t", string(rune(i))}, 1)
	}
	first := Identity{"another tenant", "a"}
	if !p.TryAcquire(first, 1) {
		t.Fatal("refused, although nearly all of the pool is free")
	}
	if p.shares[first] == nil {
		t.Fatal("the share of an identity with units was removed")
	}
	p.Release(first, 1)
}
