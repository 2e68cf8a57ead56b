package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
	"agentctl/monitor"
	"agentctl/term"
)

func newSnapshot() *cobra.Command {
	var out output
	var socket string
	var modules []string
	c := &cobra.Command{
		Use:     "snapshot",
		Short:   "One reading of this box, now",
		Example: "  agentctl snapshot\n  agentctl snapshot --modules cpu,memory -o json",
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if modules, err = monitor.NormalizeModules(modules); err != nil {
				return err
			}
			cl, err := control.Dial(cmd.Context(), socket)
			if err != nil {
				return err
			}
			defer func() { _ = cl.Close() }()
			s, err := cl.Snapshot(cmd.Context(), modules...)
			if err != nil {
				return err
			}
			return out.print(cmd, s, func() error { return printSnapshot(cmd.OutOrStdout(), s) })
		},
	}
	out.flags(c)
	c.Flags().StringVar(&socket, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	c.Flags().StringSliceVar(&modules, "modules", monitor.ModuleNames(), "only these `MODULES`; what this machine does not have is left out")
	return c
}

func printSnapshot(w io.Writer, s *control.Snapshot) error {
	if s.TS > 0 {
		fmt.Fprintf(w, "%-7s %s\n", "Time", time.UnixMilli(s.TS).Format(time.DateTime))
	} else {
		fmt.Fprintf(w, "%-7s %s\n", "Time", "the clock is not set yet")
	}
	if s.CPU != nil {
		fmt.Fprintf(w, "%-7s %.1f %%\n", "CPU", s.CPU.UsagePercent)
	}
	if s.Memory != nil {
		fmt.Fprintf(w, "%-7s %d of %d MiB\n", "Memory", s.Memory.Used, s.Memory.Total)
	}
	if s.Disk != nil {
		fmt.Fprintf(w, "%-7s %.1f %% used\n", "Disk", s.Disk.UsagePercent)
	}
	if s.Load != nil {
		fmt.Fprintf(w, "%-7s %.2f %.2f %.2f\n", "Load", s.Load.Load1, s.Load.Load5, s.Load.Load15)
	}
	if n := s.Network; n != nil {
		fmt.Fprintf(w, "%-7s %s in, %s out\n", "Network", term.Value(n.BytesInPerS, "B/s"), term.Value(n.BytesOutPerS, "B/s"))
	}
	if s.Temperature != nil {
		fmt.Fprintf(w, "%-7s %.1f C\n", "Temp", s.Temperature.HottestC)
	}
	values := map[string]float64{}
	if b, err := json.Marshal(s); err == nil {
		if r, err := monitor.ParseReading(b); err == nil {
			values = r.Values
		}
	}
	if text, _ := monitor.PowerText(values); text != "" {
		fmt.Fprintf(w, "%-7s %s\n", "Power", text)
	}
	if s.Wear != nil && s.Wear.UsedPct != nil {
		fmt.Fprintf(w, "%-7s %.0f %% of the card's life used\n", "Wear", *s.Wear.UsedPct)
	}
	return nil
}
