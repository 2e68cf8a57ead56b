package link

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"time"
)

// Session time is the clock of one link on v2.1: auth_ok.server_time_ms, and from there the
// relay's monotonic time, in milliseconds. A resumed session uses that of its newest auth_ok.
//
// The relay says in each command until when the device may start it, in session time. The
// device estimates session time from the relay's pings, which carry it. Neither end's wall
// clock matters after auth_ok.
//
// The estimate is never ahead of session time, apart from rounding, and it is behind by the
// delay of the fastest ping that the device remembers. That delay is at most the smallest
// round trip that the relay has measured with the same pings, so the relay deducts this round
// trip from the expiry. A link that holds a command back for long therefore cannot make the
// device start it after its caller was answered:
//
//	expiry   = deadline - smallest round trip - expiryMargin
//	estimate >= session time - smallest round trip
//	started  => estimate < expiry => session time < deadline - expiryMargin

// Sizes of the two windows. The device remembers more pings than the relay measures, so that
// the fastest one that the relay counts is among them; the excess is what may be in flight.
// auth_ok, with the announce that answers it, is the first ping in both windows: a link whose
// first pong is late, or was read late, would otherwise count as slow until the second ping.
const (
	estimateWindow = 10
	rttWindow      = 8
	// maxUnansweredPings bounds the pings whose pong the relay recognizes. The relay pings
	// three times before IdleTimeout, and at most one Probe is active.
	maxUnansweredPings = 4
	// expiryMargin covers rounding and the drift of two monotonic clocks between pings.
	expiryMargin = 100 * time.Millisecond
)

// ErrExpired is returned by Session.Stamp: a device could not start the command in time. The
// command has not been sent.
var ErrExpired = errors.New("link: the deadline is too near for the command to reach the device")

// pingLog is the relay's record of its pings: which are unanswered, and how long the last
// answers took. The zero value is ready; Session.mu protects it.
type pingLog struct {
	last       int64                     // payload of the last ping: payloads increase, so each is unique
	unanswered [maxUnansweredPings]int64 // newest first
	rtts       [rttWindow]int32          // milliseconds; a ring
	measured   uint32                    // round trips that were put into rtts
}

// next is the payload of a ping that is about to be written: the session time, or a little
// more when another ping has it.
func (p *pingLog) next(nowMS int64) (payload int64) {
	p.last = max(nowMS, p.last+1)
	if oldest := p.unanswered[maxUnansweredPings-1]; oldest != 0 {
		p.measure(nowMS - oldest) // it is given up, but the device may remember it
	}
	copy(p.unanswered[1:], p.unanswered[:])
	p.unanswered[0] = p.last
	return p.last
}

// onPong measures the round trip of the ping that a pong answers; false: it answers none. A
// pong also answers the pings before, as RFC 6455 §5.5.3 allows.
func (p *pingLog) onPong(payload, nowMS int64) bool {
	first := slices.Index(p.unanswered[:], payload)
	if first < 0 || payload == 0 {
		return false
	}
	for i := maxUnansweredPings - 1; i >= first; i-- {
		if sent := p.unanswered[i]; sent != 0 {
			p.measure(nowMS - sent)
		}
	}
	clear(p.unanswered[first:])
	return true
}

func (p *pingLog) measure(rttMS int64) {
	p.rtts[p.measured%rttWindow] = milliseconds(rttMS)
	p.measured++
}

// onAnnounce measures the round trip of auth_ok. It comes before that of the first ping, which
// may have been answered already.
func (p *pingLog) onAnnounce(rttMS int64) {
	copy(p.rtts[1:], p.rtts[:])
	p.rtts[0] = milliseconds(rttMS)
	p.measured++
}

// minRTT is the smallest round trip, in milliseconds, of those that the device remembers for
// certain: it may have received the unanswered pings as well.
func (p *pingLog) minRTT() int64 {
	window := uint32(estimateWindow)
	for _, sent := range p.unanswered {
		if sent != 0 {
			window--
		}
	}
	least := int32(math.MaxInt32)
	for n := range min(window, rttWindow, p.measured) {
		least = min(least, p.rtts[(p.measured-1-n)%rttWindow])
	}
	return int64(least)
}

// milliseconds fits a duration into the ring; no round trip of a live link is that long.
func milliseconds(ms int64) int32 { return int32(min(max(ms, 0), 1<<30)) }

// appendPing appends the payload of a ping: the session time in decimal.
func appendPing(b []byte, payload int64) []byte { return strconv.AppendInt(b, payload, 10) }

// parsePing is the inverse of appendPing; false: the payload is something else.
func parsePing(payload []byte) (sessionMS int64, ok bool) {
	sessionMS, err := strconv.ParseInt(string(payload), 10, 64)
	return sessionMS, err == nil && sessionMS > 0
}

// timeEstimate is the device's estimate of session time. The zero value knows nothing. Its
// owner's lock protects it.
type timeEstimate struct {
	start   time.Time             // zero of the local times below
	offsets [estimateWindow]int64 // session time minus local time at its arrival, milliseconds
	count   int
}

// observe takes the session time that has just arrived.
func (e *timeEstimate) observe(sessionMS int64, now time.Time) {
	if e.count == 0 {
		e.start = now
	}
	e.offsets[e.count%estimateWindow] = sessionMS - now.Sub(e.start).Milliseconds()
	e.count++
}

// nowMS is the session time by the message that was delayed least; false: none has come.
func (e *timeEstimate) nowMS(now time.Time) (sessionMS int64, ok bool) {
	if e.count == 0 {
		return 0, false
	}
	best := e.offsets[0]
	for _, offset := range e.offsets[:min(e.count, estimateWindow)] {
		best = max(best, offset)
	}
	return best + now.Sub(e.start).Milliseconds(), true
}

// isExpired reports whether a command may no longer be started. Without an estimate it may:
// the relay has sent its time before any command.
func (e *timeEstimate) isExpired(x Expiry, now time.Time) bool {
	sessionMS, ok := e.nowMS(now)
	return x != (Expiry{}) && (x.ExpiresInMS <= 0 || ok && sessionMS >= x.IssuedAtMS+x.ExpiresInMS)
}

// startTime begins the session time: it is serverTimeMS, the value in auth_ok, now.
func (s *Session) startTime(serverTimeMS int64) {
	s.timeBaseMS, s.timeBaseAt = serverTimeMS, monotonicNow()
}

// NowMS is the session time, milliseconds. It is valid after Accept.
func (s *Session) NowMS() int64 {
	return s.timeBaseMS + (monotonicNow()-s.timeBaseAt)/int64(time.Millisecond)
}

// Age is the time since auth_ok. It is valid after Accept.
func (s *Session) Age() time.Duration { return time.Duration(monotonicNow() - s.timeBaseAt) }

// Stamp is the expiry of a command whose caller waits until deadline, to be written now. It is
// zero on v2, whose commands have none. The error is ErrExpired.
func (s *Session) Stamp(deadline time.Time) (Expiry, error) {
	if !s.V21 {
		return Expiry{}, nil
	}
	s.mu.Lock()
	rtt := s.pings.minRTT()
	s.mu.Unlock()
	x := Expiry{IssuedAtMS: s.NowMS(), ExpiresInMS: (time.Until(deadline) - expiryMargin).Milliseconds() - rtt}
	if x.ExpiresInMS <= 0 {
		return Expiry{}, ErrExpired
	}
	return x, nil
}
