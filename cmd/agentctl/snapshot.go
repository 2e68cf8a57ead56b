package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"agentctl/control"
	"agentctl/monitor"
	"agentctl/term"
)

func newSnapshot() *cobra.Command {
	var out output
	var socket socketFlag
	var modules []string
	c := &cobra.Command{
		Use:     "snapshot",
		Short:   "One reading of this box, now",
		Example: "  agentctl snapshot\n  agentctl snapshot --modules cpu,memory -o json",
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if modules, err = monitor.NormalizeModules(modules); err != nil {
				return err
			}
			return socket.connected(cmd, func(ctx context.Context, cl *control.Client) error {
				s, err := cl.Snapshot(ctx, modules...)
				if err != nil {
					return err
				}
				return out.print(cmd, s, func() error { return printSnapshot(cmd.OutOrStdout(), s) })
			})
		},
	}
	out.flags(c)
	socket.flags(c)
	c.Flags().StringSliceVar(&modules, "modules", monitor.ModuleNames(), "only these `MODULES`; what this machine does not have is left out")
	return c
}

func printSnapshot(w io.Writer, s *control.Snapshot) error {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-7s %s\n", name, fmt.Sprintf(format, args...))
	}
	at := "the clock is not set yet"
	if s.TS > 0 {
		at = time.UnixMilli(s.TS).Format(time.DateTime)
	}
	row("Time", "%s", at)
	if s.CPU != nil {
		row("CPU", "%.1f %%", s.CPU.UsagePercent)
	}
	if s.Memory != nil {
		row("Memory", "%d of %d MiB", s.Memory.Used, s.Memory.Total)
	}
	if s.Disk != nil {
		row("Disk", "%.1f %% used", s.Disk.UsagePercent)
	}
	if l := s.Load; l != nil {
		row("Load", "%.2f %.2f %.2f", l.Load1, l.Load5, l.Load15)
	}
	if n := s.Network; n != nil {
		row("Network", "%s in, %s out", term.Value(n.BytesInPerS, "B/s"), term.Value(n.BytesOutPerS, "B/s"))
	}
	if s.Temperature != nil {
		row("Temp", "%.1f C", s.Temperature.HottestC)
	}
	if text := powerText(s); text != "" {
		row("Power", "%s", text)
	}
	if s.Wear != nil && s.Wear.UsedPct != nil {
		row("Wear", "%.0f %% of the card's life used", *s.Wear.UsedPct)
	}
	return nil
}

// powerText is what the firmware reports about supply and heat, "" when it reports nothing.
func powerText(s *control.Snapshot) string {
	b, err := json.Marshal(s)
	if err != nil {
		return ""
	}
	r, err := monitor.ParseReading(b)
	if err != nil {
		return ""
	}
	text, _ := monitor.PowerText(r.Values)
	return text
}
