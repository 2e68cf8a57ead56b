package daemon

import (
	"context"
	"strconv"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"agentctl/prober"
)

// The interface to systemd: readiness, reload, stop and watchdog. Without systemd these
// functions do nothing.

// stopTimeout is how long a stop may take; the daemon reports it to systemd when a stop
// begins.
//
// It covers the last write of the history on a slow card.
const stopTimeout = 30 * time.Second

// NotifySystemd sends state changes, each in the form VARIABLE=VALUE (sd_notify(3)). It
// ignores errors, because the process does not depend on systemd.
func NotifySystemd(states ...string) {
	_, _ = sd.SdNotify(false, strings.Join(states, "\n"))
}

// NotifyStopping announces the end of the process, so that systemd waits for pending
// writes.
func NotifyStopping() {
	NotifySystemd(sd.SdNotifyStopping, "EXTEND_TIMEOUT_USEC="+strconv.FormatInt(stopTimeout.Microseconds(), 10))
}

// NotifyReloading announces a reload; READY=1 ends it. systemd compares the time with its
// own monotonic clock, which Go does not expose.
func NotifyReloading() {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) == nil {
		NotifySystemd("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(ts.Nano()/1000, 10))
	}
}

// scheduler is what the watchdog supervises; the prober is one.
//
// Stats counts ticks, also those whose reading failed; Interval is the present cadence.
type scheduler interface {
	Stats() prober.Stats
	Interval() time.Duration
}

// runWatchdog feeds systemd's watchdog until ctx ends, then announces the stop.
func (d *Daemon) runWatchdog(ctx context.Context) error {
	return superviseScheduler(ctx, d.device.prober, d.log)
}

// superviseScheduler is runWatchdog for any scheduler. Without a watchdog it waits for ctx only.
// It announces the stop as soon as ctx ends, while the other parts still close.
func superviseScheduler(ctx context.Context, s scheduler, log *zap.Logger) error {
	timeout, err := sd.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("no watchdog: systemd's timeout is not a number", zap.Error(err))
	}
	if timeout > 0 {
		feedWatchdog(ctx, s, timeout, func() { NotifySystemd(sd.SdNotifyWatchdog) })
	}
	<-ctx.Done()
	NotifyStopping()
	return ctx.Err()
}

// feedWatchdog calls feed four times per timeout until ctx ends, as long as the latest tick
// of the scheduler is not older than its interval plus half a timeout. A tick whose reading
// failed counts too: a restart does not repair /proc.
//
// systemd therefore kills a daemon whose scheduler hangs at most an interval and one and a
// half timeouts after its last tick.
func feedWatchdog(ctx context.Context, s scheduler, timeout time.Duration, feed func()) {
	ticker := time.NewTicker(max(timeout/4, time.Millisecond))
	defer ticker.Stop()
	var ticks uint64
	lastTick := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		st := s.Stats()
		if n := st.Samples + st.Errors; n != ticks {
			ticks, lastTick = n, time.Now()
		}
		if time.Since(lastTick) <= s.Interval()+timeout/2 {
			feed()
		}
	}
}
