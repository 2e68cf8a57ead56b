package auth

import (
	"crypto/sha256"
	"sync"
	"unsafe"
)

// The cache remembers verified tokens, because an Ed25519 check costs 50 us and a hash
// half of one. It is keyed by the SHA-256 of the token, so no token is kept in memory
// and the time of a lookup says nothing of use about one. Only good tokens enter: a
// flood of bad ones cannot push them out.
//
// Nothing is taken out on revocation or expiry: a hit is still asked whether it is
// Active, which reads the clock and the current deny list, and so a caller who goes on
// with a stopped token is refused for the price of a hash.
const (
	cacheShards   = 16
	maxGeneration = 512 // entries of one generation of one shard: 16,384 in all
)

type tokenDigest [sha256.Size]byte

// tokenHash hashes a token without copying it.
func tokenHash(token string) tokenDigest {
	// The bytes of the string are only read; a []byte(token) would cost an allocation
	// of the token's size on every call.
	return sha256.Sum256(unsafe.Slice(unsafe.StringData(token), len(token)))
}

// tokenCache is the cache: in each shard two generations. A full young one becomes the
// old one, and what nobody asked for since is dropped with the old one before it.
type tokenCache struct {
	shards [cacheShards]struct {
		mu         sync.Mutex // protects the fields below
		young, old map[tokenDigest]*Identity
	}
}

func (c *tokenCache) get(k tokenDigest) *Identity {
	s := &c.shards[k[0]%cacheShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.young[k]; ok {
		return id
	}
	id, ok := s.old[k]
	if ok {
		delete(s.old, k)
		c.addLocked(k, id)
	}
	return id
}

func (c *tokenCache) add(k tokenDigest, id *Identity) {
	s := &c.shards[k[0]%cacheShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	c.addLocked(k, id)
}

func (c *tokenCache) addLocked(k tokenDigest, id *Identity) {
	s := &c.shards[k[0]%cacheShards]
	if s.young == nil || len(s.young) >= maxGeneration {
		s.old, s.young = s.young, make(map[tokenDigest]*Identity)
	}
	s.young[k] = id
}

// size counts the entries, for Stats.
func (c *tokenCache) size() (n int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		n += len(s.young) + len(s.old)
		s.mu.Unlock()
	}
	return n
}
