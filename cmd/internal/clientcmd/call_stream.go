package clientcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
	"agentctl/transport/sse"
)

// A metric stream is often interrupted for a reason that passes: the relay restarts, the board's network
// fails, the token of a context ends after an hour. client.Follow opens it again with growing waits, reports
// the gap, and fills it with --backfill. The first attempt is not repeated: a wrong name or token would fail
// forever.

// streamFlags say what to do when a stream is interrupted.
type streamFlags struct {
	backfill bool // print the missed frames from the board's history
	once     bool // end instead of connecting again
}

func (f *streamFlags) addFlags(c *cobra.Command) {
	c.Flags().BoolVar(&f.backfill, "backfill", false, "after an interruption print the missed frames from the board's history, with \"backfilled\":true")
	c.Flags().BoolVar(&f.once, "no-reconnect", false, "end a stream when it is interrupted, with an exit code that says why")
}

// check refuses --backfill without a reconnection: nothing is missed then.
func (f *streamFlags) check() error {
	if f.backfill && f.once {
		return cli.Errorf(cli.ExitUsage, "--backfill fills what was missed before a reconnection: leave out --no-reconnect")
	}
	return nil
}

// run calls fn with each frame of a stream, and reconnects with a client of the flags rf unless
// --no-reconnect says otherwise. It reports interruptions on stderr, because frames go to stdout.
//
// It returns nil when ctx ends after the first frame: Ctrl-C and --for are the usual ends of a stream.
// fn and the callbacks run in the caller's goroutine, so that nothing here needs a lock. rc is used with
// --no-reconnect only: Follow makes a client for each attempt, which reads a token file that was replaced
// meanwhile.
func (f *streamFlags) run(ctx context.Context, cmd *cobra.Command, rf *cli.RelayFlags, rc *client.Client, tool string, arguments json.RawMessage, fn func([]byte) error) error {
	if f.once {
		// The exit code says why the stream was interrupted; a normal end is no interruption.
		err := rc.Metrics(ctx, tool, arguments, fn)
		var closed *client.StreamClosedError
		if errors.As(err, &closed) && closed.Code == sse.Normal {
			return nil // with the token of a context the client says so
		}
		return err
	}
	// While the relay is away, each attempt fails for the same reason: it is printed once.
	lastReason := ""
	follow := client.Follow{
		Open: rf.Client, Tool: tool, Arguments: arguments, Backfill: f.backfill, OnFrame: fn,
		OnRetry: func(err error, _ time.Duration) {
			if reason := err.Error(); reason != lastReason {
				lastReason = reason
				fmt.Fprintf(cmd.ErrOrStderr(), "%s; reconnecting\n", term.SafeLine(reason))
			}
		},
		OnGap: func(g client.Gap) {
			// The stream is back: a later interruption is reported, whatever its reason.
			lastReason = ""
			fmt.Fprintln(cmd.ErrOrStderr(), term.SafeLine(gapText(&g, f.backfill)))
		},
	}
	return follow.Run(ctx)
}

// gapText describes an interruption that has ended: what was missed, and how much of it was filled.
//
// The times are those of the frames before and after the gap: by the board's clock, in this machine's zone.
// Missed is an estimate from the requested interval.
func gapText(g *client.Gap, backfill bool) string {
	at := func(ms int64) string { return time.UnixMilli(ms).Format(time.RFC3339) }
	text := fmt.Sprintf("missed %s to %s: %d frames", at(g.FromMS), at(g.ToMS), g.Missed)
	switch {
	case g.Missed == 0:
		return "connected again; nothing was missed"
	case g.Err != nil:
		return text + fmt.Sprintf(", %d filled; the rest cannot be: %v", g.Filled, g.Err)
	case backfill:
		return text + fmt.Sprintf(", %d filled from the board's history", g.Filled)
	}
	return text
}
