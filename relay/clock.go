package relay

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/transport/clock"
)

// clockGuard finds out that the relay's clock cannot be right. Boards without a battery-backed clock
// take the relay's, and tokens are checked against it: with a clock that is behind, the one would
// date their history into the past and the other would refuse them as not valid yet. Such a relay
// refuses new links with 4503 and the reason "clock", which boards retry. It goes on by itself when
// the clock is right. Links that are open stay: nothing about them depends on the wall clock.
//
// A clock that is ahead cannot be recognized by the relay. Boards whose own clock NTP keeps right
// do not follow it.
type clockGuard struct {
	accept       bool // the operator says that the clock is right
	build        time.Time
	now          func() time.Time
	synchronized func() bool      // NTP keeps the clock right
	newestEvent  func() time.Time // the zero time: the log has none
	log          *zap.Logger

	mu      sync.Mutex // protects problem
	problem string     // that was logged last
}

// clockTolerance is how far the clock may be behind the newest event: it may be stepped by a few
// seconds when NTP begins to set it.
const clockTolerance = time.Minute

// newClockGuard is made when the event log is open.
func (r *Relay) newClockGuard() *clockGuard {
	g := &clockGuard{accept: r.opt.AcceptClock, build: r.opt.BuildTime, now: r.opt.Now, synchronized: r.opt.Synchronized,
		newestEvent: r.newestEvent, log: r.log}
	if first := time.UnixMilli(clock.MinMS); g.build.Before(first) { // a build without its time
		g.build = first
	}
	return g
}

// check says why the clock cannot be right; "" if nothing speaks against it. It logs each change.
func (g *clockGuard) check() (problem string) {
	if !g.accept {
		problem = g.find()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case problem == "" && g.problem != "":
		g.log.Info("the clock is plausible again; boards may link", zap.Time("now", g.now()))
	case problem != "" && g.problem == "":
		g.log.Error("boards are refused: "+problem, zap.String("hint", "set the clock, best by NTP: timedatectl set-ntp true; if it is right, start the relay with --accept-clock"))
	}
	g.problem = problem
	return problem
}

func (g *clockGuard) find() string {
	const format = time.RFC3339
	now := g.now().UTC()
	// Such a clock is wrong even if NTP claims to have set it.
	if now.Before(g.build) {
		return fmt.Sprintf("the clock says %s, which is before this version of agentctl was built (%s)", now.Format(format), g.build.UTC().Format(format))
	}
	newest := g.newestEvent()
	// Either of the two may be wrong: the event may be from a time when the clock was ahead. If NTP
	// sets the clock, the event is.
	if newest.Sub(now) > clockTolerance && !g.synchronized() {
		return fmt.Sprintf("the clock says %s, which is before the newest event of the event log (%s), and NTP does not set it", now.Format(format), newest.UTC().Format(format))
	}
	return ""
}
