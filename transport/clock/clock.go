// Package clock keeps trusted time on boards that may boot in 1970.
//
// A local clock below the floor is not believed. After the relay told its time, a local
// clock that is off by more than MaxSkew is replaced by the relay's time carried forward
// on the monotonic clock. Nothing here ever sets the system's clock.
package clock

import (
	"sync"
	"time"
)

// MinMS is the smallest timestamp that a frame may carry (RFC-0009 §5.1), in ms.
const MinMS = 1_700_000_000_000

// MaxSkew is how far the local clock may be off the relay's before it is replaced.
const MaxSkew = 5 * time.Minute

// State tells where trusted time comes from.
type State string

// States of a clock.
const (
	Local    State = "local"    // the system clock, above the floor
	Relay    State = "relay"    // the relay's time carried forward
	Unsynced State = "unsynced" // no trusted time yet
)

// Clock gives trusted time. Make one with New; it is safe for concurrent use.
type Clock struct {
	floor time.Time

	mu       sync.Mutex // protects the fields below
	synced   bool
	serverMS int64
	at       time.Time // monotonic moment of serverMS
}

// New makes a clock with a floor: the newest moment that has surely passed (build time,
// a state file's time). A zero floor means MinMS.
func New(floor time.Time) *Clock {
	if least := time.UnixMilli(MinMS); floor.Before(least) {
		floor = least
	}
	return &Clock{floor: floor}
}

// Sync takes the relay's time, as told at auth.
func (c *Clock) Sync(serverMS int64) {
	if serverMS < MinMS {
		return // a relay with a broken clock is no help
	}
	c.mu.Lock()
	c.synced, c.serverMS, c.at = true, serverMS, time.Now()
	c.mu.Unlock()
}

// NowMS is trusted time in Unix milliseconds; ok is false while there is none.
func (c *Clock) NowMS() (ms int64, ok bool) {
	ms, state := c.now()
	return ms, state != Unsynced
}

// State tells where trusted time comes from, and by how much the local clock differs
// from the relay's (relay minus local, in ms; 0 before the first Sync).
func (c *Clock) State() (s State, offsetMS int64) {
	_, s = c.now()
	local := time.Now()
	c.mu.Lock()
	synced, relayMS := c.synced, c.serverMS+local.Sub(c.at).Milliseconds()
	c.mu.Unlock()
	if synced {
		offsetMS = relayMS - local.UnixMilli()
	}
	return s, offsetMS
}

func (c *Clock) now() (int64, State) {
	local := time.Now()
	c.mu.Lock()
	synced, relayMS := c.synced, c.serverMS+local.Sub(c.at).Milliseconds()
	c.mu.Unlock()
	sane := !local.Before(c.floor)
	switch {
	case !synced && sane:
		return local.UnixMilli(), Local
	case !synced:
		return local.UnixMilli(), Unsynced
	case sane && max(relayMS-local.UnixMilli(), local.UnixMilli()-relayMS) <= MaxSkew.Milliseconds():
		return local.UnixMilli(), Local
	}
	return relayMS, Relay
}

// TLSTime is the time to check certificates against: the local clock, but never below
// the floor.
func (c *Clock) TLSTime() time.Time {
	if now := time.Now(); now.After(c.floor) {
		return now
	}
	return c.floor
}
