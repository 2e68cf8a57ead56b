//go:build linux

package boardcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/control"
	"agentctl/duration"
	"agentctl/monitor"
	"agentctl/term"
)

// newWatch returns the command watch: a live view on a terminal, a stream of JSON elsewhere. Both read the
// same messages from a monitor.Watcher, which reconnects when the daemon restarts.
//
// Messages wait in a bounded queue. When it is full, further ones are dropped and counted in the event
// "lost": a pipe that is read slowly does not slow the daemon down.
//
// The exit code is 0 after Ctrl-C, q, --count or --for, and 3 if no daemon answers at the start. A connection
// that is lost later is opened again, however long that takes, because the daemon was probably restarted.
// Two errors end the command also then: a socket that this user may no longer open (4), and a daemon that
// lacks a module of --modules (2).
func newWatch() *cobra.Command {
	var w monitor.Watcher
	var socket socketFlag
	var out cli.Output
	var limit cli.Limits
	c := &cobra.Command{
		Use:   "watch",
		Short: "Show this machine live: sparklines on a terminal, events as ndjson elsewhere",
		Long: `Show this machine live. On a terminal it is a view with sparklines and alerts; q or Ctrl-C ends it
and restores the terminal. Elsewhere, or with -o ndjson, it prints one JSON object per line:
{"event":"metrics",...}, with the daemon's events under their names, and three more:
"snapshot" (modules that are not pushed), "connection" (state lost or ready, with the alerts that
were raised before) and "lost" (number of events that were dropped because this reader was slow).

The command survives a restart of the daemon. An --interval below the daemon's is requested as a
burst, which ends soon after this command. Watching enables push for all local clients and starts
cpu and memory, like any client that subscribes to events.`,
		Example: `  agentctl watch
  agentctl watch --interval 200ms --modules cpu,temperature
  agentctl watch -o ndjson --count 10 | jq -c 'select(.event=="metrics") | .cpu'`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if w.Interval != 0 && (w.Interval < config.MinInterval || w.Interval > config.MaxInterval) {
				return cli.Errorf(cli.ExitUsage, "--interval %s is out of range: 100ms to 60s", w.Interval)
			}
			if err := limit.Check(); err != nil {
				return err
			}
			if w.Modules, err = monitor.NormalizeModules(w.Modules); err != nil {
				return err
			}
			w.Socket = socket.Path
			ctx, cancel := limit.Context(cmd)
			defer cancel()
			if !out.IsText(cmd) {
				return w.Run(ctx, func(ctx context.Context, msgs <-chan monitor.Message) error {
					return printMessages(ctx, cmd, msgs, limit.Count)
				})
			}
			// Without --modules the view shows all modules, and the stream only those that are pushed.
			w.All = true
			f := term.AsTerminal(cmd.OutOrStdout())
			view := monitor.NewView(term.ColorEnabled(f), term.ASCIIOnly())
			return w.Run(ctx, func(ctx context.Context, msgs <-chan monitor.Message) error {
				return view.Show(ctx, f, msgs, limit.Count)
			})
		},
	}
	out.AddStreamFlags(c)
	socket.addFlags(c)
	c.Flags().Var(duration.NewValue(&w.Interval, 0), "interval", "show a sample every `DURATION`, 100ms to 60s (default: the daemon's interval)")
	c.Flags().StringSliceVar(&w.Modules, "modules", nil, "only these `MODULES`: "+strings.Join(monitor.ModuleNames(), ", "))
	limit.AddFlags(c, "end", "samples")
	return c
}

// printMessages writes one object a line until there were maxSamples (0: no limit) or ctx ends, which is
// the usual end and no error. Only samples count: alerts and changes of the connection come at any time.
// It reports a lost connection on stderr too, for a person who sees only what jq makes of stdout.
func printMessages(ctx context.Context, cmd *cobra.Command, msgs <-chan monitor.Message, maxSamples int) error {
	samples, isLost := 0, false
	for {
		var m monitor.Message
		select {
		// The watcher does not close msgs: it ends ctx, also when the daemon refuses.
		case <-ctx.Done():
			return nil
		case m = <-msgs:
		}
		if _, err := cmd.OutOrStdout().Write(m.Line()); err != nil {
			return cli.Errorf(cli.ExitFailure, "write: %w", err)
		}
		switch m.Event {
		case monitor.EventConnection:
			var c monitor.Connection
			_ = json.Unmarshal(m.Params, &c) // the watcher has encoded it
			wasLost := isLost
			if isLost = c.State == "lost"; isLost {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: the daemon closed the connection; waiting for it to come back")
			} else if wasLost {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: connected again")
			}
		case control.EventMetrics:
			if samples++; samples == maxSamples {
				return nil
			}
		}
	}
}
