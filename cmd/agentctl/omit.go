//go:build agentctl_omit_relay

package main

import "github.com/spf13/cobra"

// addRelayCommands: a board build has none; it says where they are.
func addRelayCommands(root *cobra.Command) {
	for _, name := range []string{"relay", "token", "events", "mcp", "plugin", "demo"} {
		root.AddCommand(&cobra.Command{
			Use:                name,
			Short:              "Not in this build: install the package agentctl-relay",
			DisableFlagParsing: true,
			Hidden:             true,
			Args:               cobra.ArbitraryArgs,
			RunE: func(*cobra.Command, []string) error {
				return exit(exitFailure, "this is the board build of agentctl, without %q; install the package agentctl-relay, or build without -tags agentctl_omit_relay", name)
			},
		})
	}
}
