package auth

import "time"

// Identity is who holds a verified token. It is shared by everyone who presented that
// token: treat it as immutable.
type Identity struct {
	Tenant   string
	Subject  string // agent id, or the node id of a device
	Class    string // ClassAgent, ClassDevice or ClassEnroll
	NodeID   string // device tokens only; equals Subject
	Scopes   Scopes
	JTI      string // upper case ULID
	Expires  time.Time
	Instance string // claim iid, hex SHA-256 of the instance_id this token is bound to; empty is not bound
	Gen      int    // claim gen, counts refreshes of a device token

	issuedAt        int64 // claim iat, Unix seconds: what a revocation by subject, node or tenant compares
	validUntil      int64 // Unix seconds at which it stops, leeway included; 0 is never
	hasNoScopeClaim bool  // had no scope claim; until is then the end of the tolerance, if earlier
}

// Has reports whether the identity holds a scope. It does not allocate, and nobody
// (nil) holds nothing.
func (id *Identity) Has(scope string) bool { return id != nil && id.Scopes.Has(scope) }

// ValidUntil is when the identity stops by itself, leeway included; the zero time is never.
func (id *Identity) ValidUntil() time.Time {
	if id.validUntil == 0 {
		return time.Time{}
	}
	return time.Unix(id.validUntil, 0)
}

// expiryError tells why the identity is over at a time in Unix seconds, nil if it is not.
func (id *Identity) expiryError(now int64) error {
	switch {
	case id.validUntil == 0 || now < id.validUntil:
		return nil
	case id.hasNoScopeClaim && now < id.Expires.Unix():
		return errScopelessEnded
	}
	return errExpired
}
