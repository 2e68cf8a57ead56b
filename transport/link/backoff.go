package link

import (
	"math/rand/v2"
	"time"
)

// Backoff decides how long a device waits before it dials again. It is pure: the caller
// tells what happened and gets a duration.
type Backoff struct {
	spread   time.Duration
	failures int
	badFrame []time.Duration // when close 4400 came, at most 3
	takeover time.Duration   // last wait after 4409
}

// Bounds of reconnecting.
const (
	defaultSpread = 5 * time.Second
	maxSpread     = 10 * time.Minute
	maxBackoff    = time.Minute
	firstBackoff  = time.Second
	readyLong     = time.Minute // a link that was ready this long starts afresh
	refusedWait   = 5 * time.Minute
	firstTakeover = time.Minute
	maxTakeover   = time.Hour
	// cloneFor is how long a takeover is remembered. It is longer than the longest wait:
	// two installs that alternate are each ready for as long as the other one waits, and
	// that must not start the doubling afresh.
	cloneFor = 2 * time.Hour
)

// SetSpread takes reconnect_spread_ms of the last auth_ok.
func (b *Backoff) SetSpread(d time.Duration) { b.spread = min(max(d, 0), maxSpread) }

// Next is the wait after a link ended with a close code (0: it broke or could not be
// dialled) at the monotonic moment now, having been ready for the given time.
func (b *Backoff) Next(code int, ready, now time.Duration) time.Duration {
	if ready >= readyLong {
		b.failures = 0
	}
	if ready >= cloneFor {
		b.takeover = 0
	}
	b.failures++
	switch code {
	case CloseGoingAway, CloseServiceRestart, CloseDraining:
		return b.inSpread()
	case CloseAuthFailed, CloseForbidden:
		return refusedWait + jitter(refusedWait/10)
	case CloseSuperseded:
		b.takeover = min(max(2*b.takeover, firstTakeover), maxTakeover)
		return b.takeover
	case CloseManifestInvalid, CloseUpgradeRequired:
		return time.Hour + jitter(5*time.Minute)
	case CloseRateLimited:
		return maxBackoff/2 + jitter(maxBackoff/2)
	case CloseBadFrame:
		if b.tooManyBad(now) {
			return maxBackoff/2 + jitter(maxBackoff/2)
		}
	}
	if b.failures == 1 {
		return b.inSpread()
	}
	ceil := maxBackoff
	if n := b.failures - 2; n < 6 {
		ceil = min(firstBackoff<<n, maxBackoff)
	}
	return jitter(ceil) // full jitter
}

func (b *Backoff) tooManyBad(now time.Duration) bool {
	b.badFrame = append(b.badFrame, now)
	if len(b.badFrame) > 3 {
		b.badFrame = b.badFrame[1:]
	}
	return len(b.badFrame) == 3 && now-b.badFrame[0] < 10*time.Minute
}

func (b *Backoff) inSpread() time.Duration {
	s := b.spread
	if s <= 0 {
		s = defaultSpread
	}
	return jitter(s)
}

// jitter is uniform in [0, d].
func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }
