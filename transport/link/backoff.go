package link

import (
	"math/rand/v2"
	"time"
)

// Backoff computes how long a device waits before it dials again. It has no clock: the
// caller reports each end of a link and the time, and gets a duration. The zero value is
// ready.
//
//	close code            wait
//	1001, 1012, 4503      within the spread: the relay restarts, all devices come back;
//	                      repeated ones not faster than after any other failure
//	4401, 4403            5 min + 10 %; a new token ends the wait early
//	4409                  1 min, doubled each time, at most 1 h: another installation
//	                      uses this identity
//	4422, 4426            1 h + 5 min: nothing changes without an update
//	4429                  30 to 60 s
//	4400, three in 10 min 30 to 60 s
//	other, first failure  within the spread
//	other, then           full jitter: below max(1 s, spread/8), doubled each time, at most the
//	                      spread or 4 s; below 60 s after five minutes without a link
//
// The spread grows with the number of devices of the relay. It bounds the waits as well, so that
// a few devices are back in seconds, and many do not dial more often than the relay can answer.
type Backoff struct {
	spread       time.Duration
	failures     int             // since the link was last ready for stableAfter
	failingSince time.Duration   // when the last ready link ended, or the first dial failed
	badFrames    []time.Duration // times of the last three 4400 closes
	takeoverWait time.Duration   // last wait after 4409
	wakes        int             // wakes without a pause of wakeMemory
	lastWake     time.Duration   // when the last wake let the device dial
}

// Bounds of reconnecting.
const (
	defaultSpread   = 5 * time.Second
	maxSpread       = 10 * time.Minute
	maxBackoff      = time.Minute
	minBackoff      = time.Second
	minCap          = 4 * time.Second // smallest bound of the growing waits
	longOutage      = 5 * time.Minute // so long without a link raises the bound to maxBackoff
	stableAfter     = time.Minute     // a link that was ready this long resets the failures
	refusedWait     = 5 * time.Minute
	minTakeoverWait = time.Minute
	maxTakeoverWait = time.Hour
	// takeoverMemory is how long a takeover is remembered. It exceeds maxTakeoverWait: of
	// two installations that alternate, each is ready for as long as the other one waits,
	// which must not reset the doubling.
	takeoverMemory = 2 * time.Hour
	maxBadFrames   = 3
	badFrameWindow = 10 * time.Minute
	// Wakes may come in any number, from interfaces that come and go. A device dials for the
	// first one at once, for freeWakes of them once in minWakeGap, and for more at growing
	// distances beside its back-off.
	minWakeGap = time.Second
	freeWakes  = 8
	wakeMemory = 2 * maxBackoff // after this long without a wake the next one counts as the first
)

// SetSpread sets the spread to reconnect_spread_ms of the last auth_ok. The relay chooses
// it by the number of its devices, so that they do not all come back at once.
func (b *Backoff) SetSpread(d time.Duration) { b.spread = min(max(d, 0), maxSpread) }

// Next is the wait after a link ended with a close code (0: it broke, or the dial failed)
// at the monotonic time now, after it had been ready for the given time.
func (b *Backoff) Next(code int, ready, now time.Duration) time.Duration {
	if ready >= stableAfter {
		b.failures = 0
	}
	if ready >= takeoverMemory {
		b.takeoverWait = 0
	}
	b.failures++
	if b.failures == 1 || ready > 0 { // a relay that restarts often is not one that is away
		b.failingSince = now
	}
	switch code {
	case CloseGoingAway, CloseServiceRestart, CloseDraining:
		return jitter(max(b.spreadOrDefault(), b.ceiling(now)))
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
		return jitter(b.spreadOrDefault())
	}
	return jitter(b.ceiling(now))
}

// ceiling is the longest wait after the second and later failures; 0 after the first.
func (b *Backoff) ceiling(now time.Duration) time.Duration {
	if b.failures == 1 {
		return 0
	}
	if now-b.failingSince >= longOutage {
		return maxBackoff
	}
	spread := b.spreadOrDefault()
	doublings := min(b.failures-2, 6)
	return min(max(minBackoff, spread/8)<<doublings, max(spread, minCap), maxBackoff)
}

// Wake is the wait before the next dial when the network or the configuration changed at the time
// now, and remaining is left of the present wait: none, unless such changes are frequent. The
// waits start over, since what failed before the change says nothing about the time after it.
func (b *Backoff) Wake(remaining, now time.Duration) time.Duration {
	if now-b.lastWake >= wakeMemory {
		b.wakes = 0
	}
	b.wakes++
	wait := time.Duration(0)
	if b.wakes > 1 {
		gap := min(minWakeGap<<min(max(b.wakes-freeWakes, 0), 6), maxBackoff)
		wait = min(max(b.lastWake+gap-now, 0), remaining)
	}
	if b.wakes <= freeWakes {
		b.failures, b.failingSince = min(b.failures, 1), now
	}
	b.lastWake = now + wait
	return wait
}

// tooManyBadFrames counts a 4400 close: a peer with a defect is not dialed at full speed.
func (b *Backoff) tooManyBadFrames(now time.Duration) bool {
	b.badFrames = append(b.badFrames, now)
	if len(b.badFrames) > maxBadFrames {
		b.badFrames = b.badFrames[1:]
	}
	return len(b.badFrames) == maxBadFrames && now-b.badFrames[0] < badFrameWindow
}

func (b *Backoff) spreadOrDefault() time.Duration {
	if b.spread <= 0 {
		return defaultSpread
	}
	return b.spread
}

// jitter is uniform in [0, d].
func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }
