package main

import (
	"context"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"

	"agentctl/control"
	"agentctl/prober"
)

// What ties the daemon to systemd. Without systemd each of these does nothing.

// stopTime is how long a stop may take, told to systemd when it begins.
const stopTime = 30 * time.Second

// sdNotify tells systemd about changes of state, VARIABLE=VALUE each (sd_notify(3)).
func sdNotify(states ...string) {
	_, _ = daemon.SdNotify(false, strings.Join(states, "\n")) // nobody is worse off without
}

// sdStopping says that the process ends, so that systemd waits for what is still
// written.
func sdStopping() {
	sdNotify(daemon.SdNotifyStopping, "EXTEND_TIMEOUT_USEC="+strconv.FormatInt(stopTime.Microseconds(), 10))
}

// serviceSocket is the control socket that agentctl.socket holds open over restarts of
// the daemon, nil when the daemon was not started with one.
func serviceSocket() (net.Listener, error) { return control.InheritedListener(os.Getenv) }

// scheduler is what the watchdog looks at; the prober is one.
type scheduler interface {
	Stats() prober.Stats
	Interval() time.Duration
}

// supervised is the part of the daemon that feeds systemd's watchdog as long as the
// scheduler advances, and says so when the daemon stops.
func supervised(s scheduler, log *zap.Logger) func(context.Context) error {
	return func(ctx context.Context) error {
		timeout, err := daemon.SdWatchdogEnabled(false)
		if err != nil {
			log.Warn("no watchdog: systemd's timeout is not understood", zap.Error(err))
		}
		if timeout > 0 {
			feed(ctx, s, timeout, func() { sdNotify(daemon.SdNotifyWatchdog) })
		}
		<-ctx.Done()
		sdStopping()
		return ctx.Err()
	}
}

// feed calls fed four times each timeout until ctx ends, as long as the newest tick of
// the scheduler is younger than its interval and half a timeout. A tick whose reading
// failed counts: a restart would not mend /proc. A scheduler that stands still is so
// killed at most an interval and a half timeout and a timeout after its last tick.
func feed(ctx context.Context, s scheduler, timeout time.Duration, fed func()) {
	t := time.NewTicker(max(timeout/4, time.Millisecond))
	defer t.Stop()
	var ticks uint64
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		st := s.Stats()
		if n := st.Samples + st.Errors; n != ticks {
			ticks, last = n, time.Now()
		}
		if time.Since(last) <= s.Interval()+timeout/2 {
			fed()
		}
	}
}
