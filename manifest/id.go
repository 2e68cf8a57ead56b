package manifest

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
)

const (
	// ULIDLen is the length of every ULID in text form.
	ULIDLen = 26
	// MaxNameLen bounds a node's friendly name.
	MaxNameLen = 32
)

// NewNodeID mints a node id: a ULID in lower case Crockford base 32 (RFC-0009 §2).
func NewNodeID() string { return strings.ToLower(NewULID()) }

// NewULID mints an upper case ULID, the form of msg_id, session_id, stream_id and jti. Its
// time part is informative: nothing orders or expires by it.
func NewULID() string {
	return ulid.MustNew(ulid.Timestamp(time.Now()), rand.Reader).String()
}

// shortIDLen is 10 characters of time and 4 random ones, so that boards whose ids were made in the
// same millisecond differ.
const shortIDLen = 14

// ShortID is the start of a node id, by which people and language models tell boards without a
// name apart. Where a board is named it stands for the id, as does any start that only one board has.
func ShortID(nodeID string) string { return nodeID[:min(shortIDLen, len(nodeID))] }

// NewTraceID mints a W3C trace id (Trace Context §3.2.2.3): 32 hex digits, not all zero. It is
// not a secret, so it needs no cryptographic randomness.
func NewTraceID() string {
	var id [16]byte
	binary.BigEndian.PutUint64(id[:], mathrand.Uint64())
	binary.BigEndian.PutUint64(id[8:], mathrand.Uint64()|1)
	return string(hex.AppendEncode(make([]byte, 0, 32), id[:])) // one allocation, on every call
}

// ValidNodeID reports whether s is a node id: a ULID in lower case Crockford base 32. The
// pattern of RFC-0009 §5.1 alone also admits values above the ULID range, whose first
// character is above 7. It runs on every call.
func ValidNodeID(s string) bool {
	if len(s) != ULIDLen || s[0] > '7' {
		return false
	}
	for i := 0; i < len(s); i++ {
		if !isCrockfordLower(s[i]) {
			return false
		}
	}
	return true
}

// ParseULID checks a ULID in either case and returns its upper case form. Unlike the library's
// Parse, it refuses characters outside Crockford base 32.
func ParseULID(s string) (string, bool) {
	if len(s) != ULIDLen {
		return "", false
	}
	u := strings.ToUpper(s)
	if _, err := ulid.ParseStrict(u); err != nil {
		return "", false
	}
	return u, true
}

// ValidTenant reports whether s is a tenant id: ^[a-z0-9][a-z0-9-]{0,31}$.
func ValidTenant(s string) bool { return isWord(s, MaxNameLen, '-') && s[0] != '-' }

// ValidNodeName reports whether s may name a node: ^[a-z0-9][a-z0-9-]{0,31}$.
func ValidNodeName(s string) bool { return ValidTenant(s) }

// isWord reports whether s is 1 to maxLen characters of a-z, 0-9 and extra. Compiling
// regular expressions instead would slow every start of a board.
func isWord(s string, maxLen int, extra byte) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != extra {
			return false
		}
	}
	return s != "" && len(s) <= maxLen
}

// isCrockfordLower reports whether c is a digit of lower case Crockford base 32, which
// leaves out i, l, o and u.
func isCrockfordLower(c byte) bool {
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z' && c != 'i' && c != 'l' && c != 'o' && c != 'u')
}
