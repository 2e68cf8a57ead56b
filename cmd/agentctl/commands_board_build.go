//go:build linux && agentctl_omit_relay

package main

import (
	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/eventscmd"
)

// relayCommands returns the commands for the events of a gateway. In place of each other command of the full
// build is a hidden one that names the package to install. A command that is added to the full build needs
// its name in this list.
func relayCommands() map[string]func() *cobra.Command {
	all := map[string]func() *cobra.Command{
		"events": func() *cobra.Command { return eventscmd.NewClient(notHere) },
	}
	for _, name := range []string{"relay", "token", "invite", "node", "keys", "mcp", "plugin", "verify", "demo"} {
		all[name] = func() *cobra.Command { return notHere(name) }
	}
	return all
}

// notHere makes a hidden command that fails, and says where the real one is. It accepts all flags, so that
// each line that works in the full build gets the same answer. The exit code is 1 and not 2 (usage): the line
// is right, and the package is missing.
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
