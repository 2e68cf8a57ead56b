package auth

import (
	"crypto/sha256"
	"sync"
	"unsafe"
)

// The cache holds verified identities, because an Ed25519 check costs 50 us and a hash
// half of one. Its key is the SHA-256 of the token: no token stays in memory, and the
// time of a lookup reveals nothing useful about one. Only valid tokens enter, so a
// flood of bad ones cannot evict them.
//
// Revocation and expiry evict nothing. Verify calls Active on every hit, which compares
// the identity with the clock and the current deny list; a client that keeps sending a
// stopped token is therefore refused for the price of a hash.
const (
	cacheShards   = 16
	maxGeneration = 512 // entries of one generation of one shard: 16,384 in all
)

// tokenDigest is the SHA-256 of a token.
type tokenDigest [sha256.Size]byte

// tokenHash hashes a token without copying it.
func tokenHash(token string) tokenDigest {
	// The bytes are only read; a []byte(token) would allocate the token's size on
	// every call.
	return sha256.Sum256(unsafe.Slice(unsafe.StringData(token), len(token)))
}

// tokenCache is an approximate LRU. Each shard has two generations: when the young one
// is full it becomes the old one, and the previous old one is dropped. A hit in the old
// generation moves the entry to the young one.
type tokenCache struct {
	shards [cacheShards]cacheShard
}

// cacheShard is one of the shards; calls of different tokens rarely meet in one.
type cacheShard struct {
	mu         sync.Mutex // protects the fields below
	young, old map[tokenDigest]*Identity
}

func (c *tokenCache) shard(k tokenDigest) *cacheShard { return &c.shards[k[0]%cacheShards] }

// get returns the cached identity, nil for none.
func (c *tokenCache) get(k tokenDigest) *Identity {
	s := c.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.young[k]; ok {
		return id
	}
	id, ok := s.old[k]
	if ok {
		delete(s.old, k)
		s.addLocked(k, id)
	}
	return id
}

func (c *tokenCache) add(k tokenDigest, id *Identity) {
	s := c.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(k, id)
}

func (s *cacheShard) addLocked(k tokenDigest, id *Identity) {
	if s.young == nil || len(s.young) >= maxGeneration {
		s.old, s.young = s.young, make(map[tokenDigest]*Identity)
	}
	s.young[k] = id
}
