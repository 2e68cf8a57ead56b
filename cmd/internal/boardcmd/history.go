package boardcmd

import (
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

// The source of records is a daemon or a board behind a relay. It is asked for its time first: records are
// stamped with that, and ages such as 24h count back from it. Package monitor reads records page by page, so
// that an export of a year needs no more memory than one of an hour. A chart has its points in memory; their
// number is bounded by the width of the terminal.

// historyFlags are the flags of history, and the window that they select. window gets its source in run,
// and its times in show.
type historyFlags struct {
	window       monitor.Window
	socket       socketFlag
	board        boardFlags
	since, until string // an age or a time, by the clock of the daemon or board that recorded
	format       string // of an export; "" draws a chart
	step         time.Duration
}

// newHistory returns the command history. Without -o it draws, also into a pipe. A window without records
// has exit code 0: the chart says so, and an export is empty. 3 means that no daemon runs, 5 that the board is
// offline or has never connected.
func newHistory() *cobra.Command {
	var h historyFlags
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
apart, and ts is the start of each step.`,
		Example: `  agentctl history
  agentctl history --since 24h --modules cpu,temperature
  agentctl history --since 7d --step 10m -o csv > week.csv
  agentctl history --board attic --since 24h
  agentctl history --since 2026-01-02T00:00:00Z --until 2026-01-03T00:00:00Z -o ndjson`,
		RunE: func(cmd *cobra.Command, _ []string) error { return h.run(cmd) },
	}
	f := c.Flags()
	f.VarP(&term.FormatFlag{Format: &h.format, Allowed: monitor.Formats}, "output", "o", "print `FORMAT` instead of a chart: csv, json, ndjson or yaml")
	cli.AddJSONFlag(c, &h.format)
	h.socket.addFlags(c)
	h.board.addFlags(c)
	f.StringVar(&h.since, "since", "1h", "start at this `TIME` or age")
	f.StringVar(&h.until, "until", "0s", "end at this `TIME` or age")
	f.Var(duration.NewValue(&h.step, 0), "step", "keep one record per `DURATION`")
	f.StringSliceVar(&h.window.Modules, "modules", nil, "only these `MODULES`: "+strings.Join(monitor.ModuleNames(), ", ")+" (chart: cpu and memory, export: all)")
	return c
}

// run shows the history of a board if one is named, else that of this machine. What is wrong with the
// flags is reported before anything is asked, but for the order of the times, which needs the clock of
// the daemon or board.
func (h *historyFlags) run(cmd *cobra.Command) (err error) {
	if h.window.Modules, err = monitor.NormalizeModules(h.window.Modules); err != nil {
		return err
	}
	if cmd.Flags().Changed("step") && h.step < time.Millisecond {
		return cli.Errorf(cli.ExitUsage, "--step is at least 1ms")
	}
	h.window.StepMS = h.step.Milliseconds()
	// The form only. The times themselves, and their order, depend on the clock of who recorded.
	if _, _, err := parseTimes(time.Now(), h.since, h.until); err != nil {
		return err
	}
	isBoard, err := h.board.isNamed(cmd)
	switch {
	case err != nil:
		return err
	case isBoard:
		now, err := h.board.open(cmd, &h.window)
		if err != nil {
			return err
		}
		return h.show(cmd.Context(), cmd, now)
	// --board works on any system, so this is not checked earlier.
	case !cli.IsLinux:
		return cli.Errorf(cli.ExitUsage, "this machine has no history, because daemons run on Linux only; name a board: --board NODE; see: agentctl ls")
	}
	return h.socket.withClient(cmd, func(ctx context.Context, cl *control.Client) error {
		// While the daemon does not know the time, now is this process's, and ClockUnset makes an empty
		// chart say so.
		now, isSet := monitor.Clock(ctx, cl)
		h.window.Source, h.window.ClockUnset = cl, !isSet
		return h.show(ctx, cmd, now)
	})
}

// show exports the records, or draws them. now is the time by the clock that stamped them, which ages
// such as 24h count back from: that of this machine may differ.
//
// Without --since a chart begins with the first record, because a board that was set up a minute ago
// would otherwise have a chart that is almost empty.
func (h *historyFlags) show(ctx context.Context, cmd *cobra.Command, now time.Time) error {
	if err := setWindow(&h.window, now, h.since, h.until); err != nil {
		return err
	}
	if h.format != "" {
		// Of a board only: a daemon of this machine exports every record.
		h.board.setStep(cmd, &h.window)
		return h.window.Export(ctx, cmd.OutOrStdout(), h.format)
	}
	if !cmd.Flags().Changed("since") {
		if err := h.window.Trim(ctx); err != nil {
			return err
		}
	}
	return h.window.Draw(ctx, cmd.OutOrStdout(), time.Local)
}

// setWindow sets the window of h from the texts of --since and --until. A --since before 1970 counts as
// 1970: a long age such as 3000w means everything.
func setWindow(h *monitor.Window, now time.Time, since, until string) error {
	from, to, err := parseTimes(now, since, until)
	if err != nil {
		return err
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

// parseTimes parses the texts of --since and --until.
func parseTimes(now time.Time, since, until string) (from, to time.Time, err error) {
	if from, err = monitor.ParseTime(since, now); err != nil {
		return from, to, cli.Errorf(cli.ExitUsage, "--since: %w", err)
	}
	if to, err = monitor.ParseTime(until, now); err != nil {
		return from, to, cli.Errorf(cli.ExitUsage, "--until: %w", err)
	}
	return from, to, nil
}
