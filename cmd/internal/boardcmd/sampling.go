//go:build linux

package boardcmd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/monitor"
	"agentctl/term"
)

// start, stop and burst change what the daemon pushes to local clients, for all of them at once. stop also
// ends recording, and start adds its modules to those that the configuration and the alert rules need.
// Streams to a relay and the readings of status and snapshot do not depend on it. The daemon keeps the
// choice in memory: after a restart it pushes cpu and memory again, and records.

// change is what start, stop and burst print with -o json: how local push and recording
// were, how they are now (or would be, with --dry-run), and the command that undoes it. Scripts read it:
// fields are added and not renamed.
type change struct {
	DryRun    bool             `json:"dry_run"`
	Before    control.Sampling `json:"before"`
	After     control.Sampling `json:"after"`
	ExpiresAt int64            `json:"expires_at,omitempty"` // of a burst, milliseconds since 1970
	Undo      string           `json:"undo"`
}

// changer is what the commands have in common that change sampling.
//
// A change affects all clients of the daemon, so each of these commands prints the state before it and a
// command that undoes it.
type changer struct {
	out    cli.Output
	socket socketFlag
	dryRun bool
}

func (c *changer) addFlags(cmd *cobra.Command) {
	c.out.AddFlags(cmd)
	c.socket.addFlags(cmd)
	cli.AddDryRunFlag(cmd, &c.dryRun)
}

// run reads the present sampling, calls do, and prints the change. With --dry-run do fills in the change
// without making it. Another client may change the same between both requests: Before is for the
// person who wants to undo, not a lock.
//
// do sets Undo and After, and returns a line about the result for people.
func (c *changer) run(cmd *cobra.Command, do func(context.Context, *control.Client, *change) (text string, err error)) error {
	return c.socket.withClient(cmd, func(ctx context.Context, cl *control.Client) error {
		var s struct {
			Sampling control.Sampling `json:"sampling"`
		}
		if err := cl.Status(ctx, &s); err != nil {
			return err
		}
		ch := &change{DryRun: c.dryRun, Before: s.Sampling, After: s.Sampling}
		text, err := do(ctx, cl, ch)
		if err != nil {
			return err
		}
		return c.out.Print(cmd, ch, func() error {
			if c.dryRun {
				text = "would be: " + text
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s\nbefore: %s\nundo: %s\n", text, samplingText(s.Sampling), ch.Undo)
			return err
		})
	})
}

// samplingText describes the modules and the interval for people.
func samplingText(s control.Sampling) string {
	if !s.Running {
		return "stopped"
	}
	return fmt.Sprintf("%s every %s", strings.Join(s.Modules, ", "), term.Span(time.Duration(s.IntervalMS)*time.Millisecond))
}

// undo is the command that brings back how sampling was.
func undo(s control.Sampling) string {
	if !s.Running {
		return "agentctl stop"
	}
	return strings.TrimSpace("agentctl start " + strings.Join(s.Modules, " "))
}

// newStart returns the command start. It replaces the list of modules, and does not add to it: the same
// command always leads to the same state.
func newStart() *cobra.Command {
	var c changer
	cmd := &cobra.Command{
		Use:   "start [MODULE...]",
		Short: "Choose the modules that are pushed to local clients and recorded",
		Long: `Push the given modules, and no others, to local clients, and record them; without a MODULE, cpu
and memory. The choice applies to all local clients until the next start or stop. It does not
affect streams to a relay.

The modules are ` + strings.Join(monitor.ModuleNames(), ", ") + `.`,
		Example: "  agentctl start\n  agentctl start cpu memory temperature power\n  agentctl start cpu --dry-run",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			modules, err := monitor.NormalizeModules(args)
			if err != nil {
				return err
			}
			return c.run(cmd, func(ctx context.Context, cl *control.Client, ch *change) (string, error) {
				ch.Undo = undo(ch.Before) + cli.GivenFlags(cmd, "socket")
				ch.After.Running, ch.After.Modules = true, modules
				// For a dry run: what a daemon of this version starts without names. Else its answer counts.
				if len(modules) == 0 {
					ch.After.Modules = []string{"cpu", "memory"}
				}
				if !c.dryRun {
					if ch.After.Modules, err = cl.Start(ctx, modules...); err != nil {
						return "", err
					}
				}
				return "started: " + samplingText(ch.After), nil
			})
		},
	}
	c.addFlags(cmd)
	return cmd
}

// newStop returns the command stop. It does not stop the daemon, which its Long says, because people
// expect that of the word.
func newStop() *cobra.Command {
	var c changer
	cmd := &cobra.Command{
		Use:   "stop",
		Short: "Stop pushing to local clients and recording; the daemon keeps running",
		Long: `Stop pushing to local clients and recording, for all local clients. The daemon keeps running, with
its link and the streams to a relay. To stop the daemon: systemctl stop agentctl.`,
		Example: "  agentctl stop\n  agentctl stop --dry-run",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.run(cmd, func(ctx context.Context, cl *control.Client, ch *change) (string, error) {
				ch.Undo = undo(ch.Before) + cli.GivenFlags(cmd, "socket")
				ch.After.Running = false
				if !c.dryRun {
					if err := cl.Stop(ctx); err != nil {
						return "", err
					}
				}
				return "stopped: nothing is pushed to local clients or recorded; streams to a relay go on", nil
			})
		},
	}
	c.addFlags(cmd)
	return cmd
}
