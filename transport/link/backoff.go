package link

import (
	"math/rand/v2"
	"time"
)

// Backoff decides how long a device waits before it dials again. It is pure: the caller
// tells what happened and gets a duration.
type Backoff struct {
	spread       time.Duration
	failures     int
	badFrames    []time.Duration // when close 4400 came, at most 3
	takeoverWait time.Duration   // last wait after 4409
}

// Bounds of reconnecting.
const (
	defaultSpread   = 5 * time.Second
	maxSpread       = 10 * time.Minute
	maxBackoff      = time.Minute
	minBackoff      = time.Second
	stableAfter     = time.Minute // a link that was ready this long starts afresh
	refusedWait     = 5 * time.Minute
	minTakeoverWait = time.Minute
	maxTakeoverWait = time.Hour
	// takeoverMemory is how long a takeover is remembered. It is longer than the longest wait:
	// two installs that alternate are each ready for as long as the other one waits, and
	// that must not start the doubling afresh.
	takeoverMemory = 2 * time.Hour
)

// SetSpread takes reconnect_spread_ms of the last auth_ok.
func (b *Backoff) SetSpread(d time.Duration) { b.spread = min(max(d, 0), maxSpread) }

// Next is the wait after a link ended with a close code (0: it broke or could not be
// dialled) at the monotonic moment now, having been ready for the given time.
func (b *Backoff) Next(code int, ready, now time.Duration) time.Duration {
	if ready >= stableAfter {
		b.failures = 0
	}
	if ready >= takeoverMemory {
		b.takeoverWait = 0
	}
	b.failures++
	switch code {
	case CloseGoingAway, CloseServiceRestart, CloseDraining:
		return b.spreadWait()
	case CloseAuthFailed, CloseForbidden:
		return refusedWait + jitter(refusedWait/10)
	case CloseSuperseded:
		b.takeoverWait = min(max(2*b.takeoverWait, minTakeoverWait), maxTakeoverWait)
		return b.takeoverWait
	case CloseManifestInvalid, CloseUpgradeRequired:
		return time.Hour + jitter(5*time.Minute)
	case CloseRateLimited:
		return maxBackoff/2 + jitter(maxBackoff/2)
	case CloseBadFrame:
		if b.tooManyBadFrames(now) {
			return maxBackoff/2 + jitter(maxBackoff/2)
		}
	}
	if b.failures == 1 {
		return b.spreadWait()
	}
	ceil := maxBackoff
	if n := b.failures - 2; n < 6 {
		ceil = min(minBackoff<<n, maxBackoff)
	}
	return jitter(ceil) // full jitter
}

func (b *Backoff) tooManyBadFrames(now time.Duration) bool {
	b.badFrames = append(b.badFrames, now)
	if len(b.badFrames) > 3 {
		b.badFrames = b.badFrames[1:]
	}
	return len(b.badFrames) == 3 && now-b.badFrames[0] < 10*time.Minute
}

func (b *Backoff) spreadWait() time.Duration {
	s := b.spread
	if s <= 0 {
		s = defaultSpread
	}
	return jitter(s)
}

// jitter is uniform in [0, d].
func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }
