// Package clock keeps trusted time on boards that may boot in 1970.
//
// Three sources are compared: the local clock, a floor (a time that has certainly passed)
// and the relay's time from the last handshake. A local clock that NTP keeps right is trusted
// whatever the others say. Any other one is not trusted below the floor, and is replaced by the
// relay's time, advanced by the monotonic clock, when the two differ by more than MaxSkew. The
// package never sets the system clock.
package clock

import (
	"sync"
	"time"
)

// MinMS is the smallest timestamp that a metric frame may carry (RFC-0009 §5.1), in
// Unix milliseconds.
const MinMS = 1_700_000_000_000

// MaxSkew is the largest difference from the relay's clock at which the local clock is
// still trusted.
const MaxSkew = 5 * time.Minute

// State names the source of trusted time.
type State string

// States of a clock.
const (
	Local    State = "local"    // the system clock
	Relay    State = "relay"    // the relay's time, advanced by the monotonic clock
	Unsynced State = "unsynced" // no trusted time yet
)

// Clock gives trusted time. Make one with New; it is safe for concurrent use.
type Clock struct {
	floor        time.Time
	synchronized func() bool

	mu       sync.Mutex // protects the fields below
	relayMS  int64      // the relay's time at syncedAt, Unix milliseconds
	syncedAt time.Time  // with its monotonic reading; zero before the first Sync
}

// New makes a clock with a floor: the newest time that has certainly passed, such as the
// build time or the time of a state file. A floor below MinMS is raised to MinMS.
// synchronized reports whether the local clock is right, as NTPSynchronized does; nil: nobody
// knows. It is asked whenever the local clock would not be trusted otherwise, so that a change
// counts at once.
func New(floor time.Time, synchronized func() bool) *Clock {
	if lowest := time.UnixMilli(MinMS); floor.Before(lowest) {
		floor = lowest
	}
	if synchronized == nil {
		synchronized = func() bool { return false }
	}
	return &Clock{floor: floor, synchronized: synchronized}
}

// Sync sets the relay's time, which auth_ok carries in server_time_ms. A time below MinMS
// is ignored: the relay's own clock is wrong then.
func (c *Clock) Sync(relayMS int64) {
	if relayMS < MinMS {
		return
	}
	c.mu.Lock()
	c.relayMS, c.syncedAt = relayMS, time.Now()
	c.mu.Unlock()
}

// NowMS returns trusted time in Unix milliseconds. While there is none, ok is false and ms
// is the local time.
func (c *Clock) NowMS() (ms int64, ok bool) {
	ms, state, _ := c.now()
	return ms, state != Unsynced
}

// State names the source of trusted time and the relay's offset: relay minus local, in
// milliseconds; 0 before the first Sync.
func (c *Clock) State() (s State, offsetMS int64) {
	_, s, offsetMS = c.now()
	return s, offsetMS
}

// now compares the three sources.
func (c *Clock) now() (ms int64, s State, offsetMS int64) {
	local := time.Now()
	c.mu.Lock()
	relayMS, syncedAt := c.relayMS, c.syncedAt
	c.mu.Unlock()
	ms, s = local.UnixMilli(), Local
	trusted := !local.Before(c.floor)
	if !syncedAt.IsZero() {
		relayMS += local.Sub(syncedAt).Milliseconds()
		offsetMS = relayMS - ms
		trusted = trusted && max(offsetMS, -offsetMS) <= MaxSkew.Milliseconds()
	}
	switch {
	case trusted, ms >= MinMS && c.synchronized():
	case syncedAt.IsZero():
		s = Unsynced
	default:
		ms, s = relayMS, Relay
	}
	return ms, s, offsetMS
}

// TLSTime returns the time for certificate checks: the local time, raised to the floor unless NTP
// keeps it right. The relay's time is not used, since certificates are checked before the relay is
// trusted.
func (c *Clock) TLSTime() time.Time {
	now := time.Now()
	if now.After(c.floor) || now.UnixMilli() >= MinMS && c.synchronized() {
		return now
	}
	return c.floor
}
