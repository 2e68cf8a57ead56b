//go:build !windows

package monitor

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"agentctl/term"
)

// Show draws the view on the terminal f until ctx ends, q is typed, or maxSamples samples have
// arrived (0: no limit). It takes over the terminal, restores it even after a panic, and then
// prints a summary line.
//
// SIGHUP and SIGQUIT end it as the end of ctx does, so that the terminal is restored after them,
// too. The goroutine that reads keys has ended before the screen is left.
func (v *View) Show(ctx context.Context, f *os.File, msgs <-chan Message, maxSamples int) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	resized, suspended := notify(syscall.SIGWINCH), notify(syscall.SIGTSTP)
	defer signal.Stop(resized)
	defer signal.Stop(suspended)
	screen := term.NewScreen(f)
	var keys sync.WaitGroup
	screen.Enter()
	defer func() {
		cancel()
		keys.Wait()
		screen.Leave()
		fmt.Fprintf(f, "watched %d samples; see more with: agentctl history\n", v.samples)
	}()
	keys.Go(func() { term.WatchKeys(ctx, cancel) })

	redraw := time.NewTicker(time.Second)
	defer redraw.Stop()
	for maxSamples == 0 || v.samples < maxSamples {
		width, height, _ := term.Size(f)
		if err := screen.Draw(v.lines(width, height, time.Now())); err != nil {
			return fmt.Errorf("write to the terminal: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case m := <-msgs:
			v.handle(m)
		case <-resized:
		case <-suspended:
			screen.Suspend()
		case <-redraw.C:
		}
	}
	return nil
}

// notify is signal.Notify with a channel that keeps one signal.
//
// One is enough: two signals of a kind before the next redraw have the effect of one.
func notify(sig os.Signal) chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, sig)
	return c
}
