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

	issued    int64 // claim iat, Unix seconds: what a revocation by subject, node or tenant compares
	until     int64 // Unix seconds at which it stops, leeway included; 0 is never
	scopeless bool  // had no scope claim; until is then the end of the tolerance, if earlier
}

// Has reports whether the identity holds a scope. It does not allocate, and nobody
// (nil) holds nothing.
func (id *Identity) Has(scope string) bool { return id != nil && id.Scopes.Has(scope) }

// ValidUntil is when the identity stops by itself, leeway included; the zero time is never.
func (id *Identity) ValidUntil() time.Time {
	if id.until == 0 {
		return time.Time{}
	}
	return time.Unix(id.until, 0)
}

// stopped tells why the identity is over at a time in Unix seconds, nil if it is not.
func (id *Identity) stopped(now int64) error {
	switch {
	case id.until == 0 || now < id.until:
		return nil
	case id.scopeless && now < id.Expires.Unix():
		return errScopelessX
	}
	return errExpired
}
