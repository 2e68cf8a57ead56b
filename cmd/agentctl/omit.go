//go:build linux && agentctl_omit_relay

package main

import (
	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/eventscmd"
)

// addRelayCommands: a board build has only those that speak to a relay; of the others it
// says where they are.
func addRelayCommands(root *cobra.Command) {
	for _, name := range []string{"relay", "token", "invite", "node", "keys", "mcp", "plugin", "verify", "demo"} {
		root.AddCommand(notHere(name))
	}
	root.AddCommand(eventscmd.NewClient(notHere))
}

func notHere(name string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              "Not in this build: install the package agentctl-relay",
		DisableFlagParsing: true,
		Hidden:             true,
		Args:               cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.Errorf(cli.ExitFailure, "this is the board build of agentctl, without %q; install the package agentctl-relay, or build without -tags agentctl_omit_relay", cmd.Name())
		},
	}
}
