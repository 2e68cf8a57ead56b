//go:build linux

package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"agentctl/term"
)

// NotifyReload relays SIGHUP to hup, where it asks a service to reload. A process on a terminal gets
// SIGHUP when the terminal goes away: there it cancels the returned context instead. stop releases
// the signal.
//
// hup holds one signal: those that arrive during a reload become one more reload, which sees all changes
// that were made before them. On a terminal nothing is sent to it.
func NotifyReload(ctx context.Context) (_ context.Context, hup chan os.Signal, stop func()) {
	hup = make(chan os.Signal, 1)
	if term.IsTerminal(os.Stderr) {
		ctx, cancel := signal.NotifyContext(ctx, syscall.SIGHUP)
		return ctx, hup, cancel
	}
	signal.Notify(hup, syscall.SIGHUP)
	return ctx, hup, func() { signal.Stop(hup) }
}
