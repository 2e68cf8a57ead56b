package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"agentctl/control"
)

func newSnapshot() *cobra.Command {
	var out output
	var socket string
	var modules []string
	c := &cobra.Command{
		Use:     "snapshot",
		Short:   "One reading of this box, now",
		Example: "  agentctl snapshot\n  agentctl snapshot --modules cpu,memory -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := dialSocket(cmd.Context(), socket)
			if err != nil {
				return err
			}
			defer func() { _ = cl.Close() }()
			s, err := cl.Snapshot(cmd.Context(), modules...)
			if err != nil {
				return socketError(err)
			}
			return out.print(cmd, s, func() error { return printSnapshot(cmd.OutOrStdout(), s) })
		},
	}
	out.flags(c)
	c.Flags().StringVar(&socket, "socket", env("AGENTCTL_SOCKET", clientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	c.Flags().StringSliceVar(&modules, "modules", []string{"cpu", "memory", "disk", "load"}, "only these `MODULES`: cpu, memory, disk, load")
	return c
}

func printSnapshot(w io.Writer, s *control.Snapshot) error {
	fmt.Fprintf(w, "%-7s %s\n", "Time", time.UnixMilli(s.TS).Format(time.DateTime))
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
	return nil
}
