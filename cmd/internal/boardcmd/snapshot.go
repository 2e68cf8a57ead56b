//go:build linux

package boardcmd

import (
	"context"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/monitor"
)

// newSnapshot returns the command snapshot. Its readings are at most a second old (docs/control.md),
// whether their modules are pushed to clients or not.
func newSnapshot() *cobra.Command {
	var out cli.Output
	var socket socketFlag
	var modules []string
	c := &cobra.Command{
		Use:     "snapshot",
		Short:   "Print the current readings of this machine",
		Example: "  agentctl snapshot\n  agentctl snapshot --modules cpu,memory -o json",
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if modules, err = monitor.NormalizeModules(modules); err != nil {
				return err
			}
			return socket.withClient(cmd, func(ctx context.Context, cl *control.Client) error {
				s, err := cl.Snapshot(ctx, modules...)
				if err != nil {
					return err
				}
				return out.Print(cmd, s, func() error { return monitor.WriteSnapshot(cmd.OutOrStdout(), s) })
			})
		},
	}
	out.AddFlags(c)
	socket.addFlags(c)
	// All by name: the daemon answers a request without modules with cpu and memory only.
	c.Flags().StringSliceVar(&modules, "modules", monitor.ModuleNames(), "only these `MODULES`; modules that this machine lacks are omitted")
	return c
}
