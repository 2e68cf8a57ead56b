package boardcmd

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/duration"
	"agentctl/monitor"
	"agentctl/term"
)

func newHistory() *cobra.Command {
	var h monitor.Window
	var socket socketFlag
	var board boardFlags
	var since, until, format string
	var step time.Duration
	c := &cobra.Command{
		Use:   "history",
		Short: "Show what was recorded on this machine or a board: a chart, or an export",
		Long: `Show what was recorded on this machine, or with --board on a board behind a relay: a chart or,
with -o, the records.

A time is an age (90s, 15m, 24h, 7d, 2w), an RFC 3339 time (2026-01-02T15:04:05Z), or a day
(2026-01-02, local time). --step keeps the last record of each interval; without it a chart uses
what fits its width and an export contains every record. Without --since a chart starts one hour
ago, or with the first record if that is younger. In an export, ts is in milliseconds since 1970.

The board keeps its history itself, so --board needs it online. Its records are at least one second
apart, and ts is the begin of each step.`,
		Example: `  agentctl history
  agentctl history --since 24h --modules cpu,temperature
  agentctl history --since 7d --step 10m -o csv > week.csv
  agentctl history --board attic --since 24h
  agentctl history --since 2026-01-02T00:00:00Z --until 2026-01-03T00:00:00Z -o ndjson`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if h.Modules, err = monitor.NormalizeModules(h.Modules); err != nil {
				return err
			}
			if cmd.Flags().Changed("step") && step < time.Millisecond {
				return cli.Errorf(cli.ExitUsage, "--step is at least 1ms")
			}
			h.StepMS = step.Milliseconds()
			show := func(ctx context.Context, now time.Time, isSet bool) error {
				h.ClockUnset = !isSet
				if err := setWindow(&h, now, since, until); err != nil {
					return err
				}
				if format != "" {
					board.setStep(cmd, &h)
					return h.Export(ctx, cmd.OutOrStdout(), format)
				}
				if !cmd.Flags().Changed("since") {
					if err := h.Trim(ctx); err != nil {
						return err
					}
				}
				return h.Draw(ctx, cmd.OutOrStdout(), time.Local)
			}
			if isSet, err := board.isSet(cmd); err != nil || isSet {
				return cmp.Or(err, board.connected(cmd, &h, show))
			}
			if !cli.IsLinux {
				return cli.Errorf(cli.ExitUsage, "this machine has no history, because daemons run on Linux only; name a board: --board NODE; see: agentctl ls")
			}
			return socket.withClient(cmd, func(ctx context.Context, cl *control.Client) error {
				h.Source = cl
				now, isSet := monitor.Clock(ctx, cl)
				return show(ctx, now, isSet)
			})
		},
	}
	f := c.Flags()
	f.VarP(&term.FormatFlag{Format: &format, Allowed: monitor.Formats}, "output", "o", "print `FORMAT` instead of a chart: csv, json, ndjson or yaml")
	cli.AddJSONFlag(c, &format)
	socket.addFlags(c)
	board.flags(c)
	f.StringVar(&since, "since", "1h", "start at this `TIME` or age")
	f.StringVar(&until, "until", "0s", "end at this `TIME` or age")
	f.Var(duration.NewValue(&step, 0), "step", "keep one record per `DURATION`")
	f.StringSliceVar(&h.Modules, "modules", nil, "only these `MODULES`: "+strings.Join(monitor.ModuleNames(), ", ")+" (chart: cpu and memory, export: all)")
	return c
}

// setWindow sets the times asked for, by the daemon's clock.
func setWindow(h *monitor.Window, now time.Time, since, until string) error {
	from, err := monitor.ParseTime(since, now)
	if err != nil {
		return cli.Errorf(cli.ExitUsage, "--since: %w", err)
	}
	to, err := monitor.ParseTime(until, now)
	if err != nil {
		return cli.Errorf(cli.ExitUsage, "--until: %w", err)
	}
	if !from.Before(to) {
		return cli.Errorf(cli.ExitUsage, "--since %s is not before --until %s", since, until)
	}
	h.FromMS, h.ToMS = max(from.UnixMilli(), 0), to.UnixMilli()
	if h.ToMS < h.FromMS {
		return cli.Errorf(cli.ExitUsage, "--until %s is before 1970", until)
	}
	return nil
}
