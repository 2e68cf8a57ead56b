//go:build linux

package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"agentctl/term"
)

// hangups returns SIGHUP as the request to reload of a service. A process of a terminal ends with
// the terminal instead. stop releases the signal.
func hangups(ctx context.Context) (_ context.Context, hup chan os.Signal, stop func()) {
	hup = make(chan os.Signal, 1)
	if term.IsTerminal(os.Stderr) {
		ctx, cancel := signal.NotifyContext(ctx, syscall.SIGHUP)
		return ctx, hup, cancel
	}
	signal.Notify(hup, syscall.SIGHUP)
	return ctx, hup, func() { signal.Stop(hup) }
}
