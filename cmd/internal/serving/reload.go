//go:build linux && !agentctl_omit_relay

package serving

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/daemon"
	"agentctl/relay"
)

// Reloads starts to call reload for each signal of hup until ctx ends, and reports the result in the log
// and to systemd. serving is the status that the result is appended to. wait returns after the last
// reload, so that none runs after the command. One goroutine calls reload, so reloads do not overlap; a
// signal that arrives during one waits in hup (cli.NotifyReload). READY=1 tells systemd that the reload has
// ended, also after a failure: the process serves as before, and the status says what failed.
func Reloads(ctx context.Context, hup <-chan os.Signal, log *zap.Logger, serving string, reload func() []relay.Reloaded) (wait func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				daemon.NotifyReloading()
				daemon.NotifySystemd("READY=1", "STATUS="+serving+"; "+describeReload(log, reload()))
			}
		}
	})
	return wg.Wait
}

// describeReload logs what was reloaded, and sums it up on one line for the status of the unit: failures
// first, then what was reloaded.
func describeReload(log *zap.Logger, list []relay.Reloaded) string {
	var done, failed []string
	for _, r := range list {
		if r.Err != nil {
			log.Error("not reloaded; what was there before stays in force", zap.String("source", r.Source), zap.Error(r.Err))
			failed = append(failed, fmt.Sprintf("%s: %v", r.Source, r.Err))
			continue
		}
		log.Info("reloaded", zap.String("source", r.Source))
		done = append(done, r.Source)
	}
	at := "reloaded at " + time.Now().Format(time.TimeOnly)
	switch {
	case len(list) == 0:
		log.Info("nothing to reload: no plugin has changed, and no flag names a file")
		return at + ": nothing"
	case len(failed) > 0:
		at = "reload at " + time.Now().Format(time.TimeOnly) + " failed for " + strings.Join(failed, "; ")
		if len(done) > 0 {
			at += "; done for " + strings.Join(done, ", ")
		}
		return strings.ReplaceAll(at, "\n", " ")
	}
	return at + ": " + strings.Join(done, ", ")
}
