package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"time"

	"agentctl/relay/topic"
)

// Identity is who holds a verified token. Everyone who presents that token shares it:
// treat it as immutable.
type Identity struct {
	Tenant   string
	Subject  string // agent id, or the node id of a device
	Class    string // ClassAgent, ClassDevice or ClassEnroll
	NodeID   string // device tokens only; equals Subject
	Scopes   Scopes
	JTI      string // upper case ULID
	Instance string // claim iid, hex SHA-256 of the instance_id this token is bound to; empty is not bound
	Gen      int    // claim gen, counts refreshes of a device token
	// KeyThumbprint is claim cnf.jkt: whoever presents the token on a device link must prove
	// that he holds this key. Empty for a token that an operator minted.
	KeyThumbprint string

	topics          *topic.Patterns // claim topics; nil: none. A pointer, as boards have none
	key             *verifyKey      // that signed the token; nil for an identity that no token made
	issuedAt        int64           // claim iat in Unix seconds: a revocation by subject, node or tenant compares it
	expires         int64           // claim exp in Unix seconds
	validUntil      int64           // Unix seconds, leeway included; 0 is never, for an identity that no token made
	hasNoScopeClaim bool            // validUntil is then the end of the tolerance, if that is earlier
}

// Has reports whether the identity holds a scope. It does not allocate. A nil identity
// holds no scope.
func (id *Identity) Has(scope string) bool { return id != nil && id.Scopes.Has(scope) }

// Topics are the topics of events that the identity may subscribe to and publish, as far as it has
// the scopes to; nil is all, also for a nil identity.
func (id *Identity) Topics() topic.Patterns {
	if id == nil || id.topics == nil {
		return nil
	}
	return *id.topics
}

// HasTopic reports whether the identity may have to do with a topic.
func (id *Identity) HasTopic(topic string) bool { return id.Topics().Match(topic) }

// BoundTo reports whether the token is valid on the install that uses it. A token of a board
// that has joined is bound to one install by the hash of its instance id. A token without an
// instance is valid on any.
func (id *Identity) BoundTo(instanceID string) bool {
	if id.Instance == "" {
		return true
	}
	sum := sha256.Sum256([]byte(instanceID))
	return subtle.ConstantTimeCompare([]byte(id.Instance), []byte(hex.EncodeToString(sum[:]))) == 1
}

// ValidUntil is when the identity expires, leeway included; the zero time is never.
func (id *Identity) ValidUntil() time.Time {
	if id.validUntil == 0 {
		return time.Time{}
	}
	return time.Unix(id.validUntil, 0)
}

// expiryError returns why the identity has expired at a time in Unix seconds, nil if it
// has not.
func (id *Identity) expiryError(now int64) error {
	switch {
	case id.validUntil == 0 || now < id.validUntil:
		return nil
	case id.hasNoScopeClaim && now < id.expires:
		return errScopelessEnded
	}
	return errExpired
}
