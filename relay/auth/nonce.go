package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"time"
)

// Bounds of a nonce.
const (
	NonceLifetime = 60 * time.Second

	nonceTimeLen   = 8  // bytes: milliseconds since the start of the relay
	nonceRandomLen = 8  // bytes
	nonceMACLen    = 16 // bytes of the HMAC-SHA256 over time and random
	nonceLen       = nonceTimeLen + nonceRandomLen + nonceMACLen
)

// nonceMaker makes nonces that need no state: a nonce carries its time and an HMAC.
//
// The key is new at each start, and the time is monotonic. A restart therefore voids the
// nonces that are out, and a client gets another one; a clock that is set changes nothing.
type nonceMaker struct {
	key     [32]byte
	started time.Time
}

func newNonceMaker() *nonceMaker {
	n := &nonceMaker{started: time.Now()}
	_, _ = rand.Read(n.key[:]) // never fails (crypto/rand)
	return n
}

// Nonce makes a nonce for an enrollment or a refresh, good for NonceLifetime.
func (s *Store) Nonce() string { return s.nonces.make() }

func (n *nonceMaker) make() string {
	b := make([]byte, nonceLen)
	binary.BigEndian.PutUint64(b, uint64(time.Since(n.started).Milliseconds()))
	_, _ = rand.Read(b[nonceTimeLen : nonceTimeLen+nonceRandomLen])
	copy(b[nonceTimeLen+nonceRandomLen:], n.mac(b))
	return base64.RawURLEncoding.EncodeToString(b)
}

// mac is the HMAC of a nonce's time and random part.
func (n *nonceMaker) mac(nonce []byte) []byte {
	h := hmac.New(sha256.New, n.key[:])
	h.Write(nonce[:nonceTimeLen+nonceRandomLen])
	return h.Sum(nil)[:nonceMACLen]
}

// issuedAt returns when this maker made a nonce, as the time since its start, whatever the
// nonce's age. ok is false for a nonce that it did not make.
func (n *nonceMaker) issuedAt(nonce string) (at time.Duration, ok bool) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(nonce)
	if err != nil || len(b) != nonceLen || !hmac.Equal(n.mac(b), b[nonceTimeLen+nonceRandomLen:]) {
		return 0, false
	}
	return time.Duration(binary.BigEndian.Uint64(b)) * time.Millisecond, true
}

// valid reports whether a nonce is of this maker and young enough.
func (n *nonceMaker) valid(nonce string) bool {
	at, ok := n.issuedAt(nonce)
	return ok && time.Since(n.started)-at <= NonceLifetime
}
