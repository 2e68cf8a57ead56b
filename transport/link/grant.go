package link

import (
	"errors"
	"math"
	"time"
)

// ErrGrantExpired is returned by CheckGrant.
var ErrGrantExpired = errors.New("link: the grant has expired")

// setGrantEnd converts the end of a grant to monotonic time, once: a step of the relay's wall
// clock must not cut links.
func (s *Session) setGrantEnd(expiresAt time.Time) { s.grantEnd.Store(grantEnd(expiresAt)) }

// grantEnd is a time as monotonicNow; a zero time is never.
func grantEnd(expiresAt time.Time) int64 {
	if expiresAt.IsZero() {
		return math.MaxInt64
	}
	return monotonicNow() + int64(time.Until(expiresAt))
}

// ExtendGrant moves the end of the grant to a later time: the device has a refreshed token. A
// zero time is never. It may be called by any goroutine.
func (s *Session) ExtendGrant(expiresAt time.Time) {
	end := grantEnd(expiresAt)
	for {
		old := s.grantEnd.Load()
		if end <= old || s.grantEnd.CompareAndSwap(old, end) {
			return
		}
	}
}

// GrantRemaining is how long the grant is still valid: negative after its end, and ok is false
// when it has none.
func (s *Session) GrantRemaining() (d time.Duration, ok bool) {
	end := s.grantEnd.Load()
	if end == math.MaxInt64 {
		return 0, false
	}
	return time.Duration(end - monotonicNow()), true
}

// CheckGrant returns an error when the grant has expired, by monotonic time, or was revoked.
func (s *Session) CheckGrant() error {
	if d, ok := s.GrantRemaining(); ok && d <= 0 {
		return ErrGrantExpired
	}
	if s.CheckActive != nil {
		return s.CheckActive()
	}
	return nil
}
