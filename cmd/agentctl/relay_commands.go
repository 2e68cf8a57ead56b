//go:build linux && !agentctl_omit_relay

package main

import "github.com/spf13/cobra"

// relayCommands returns the subcommands of 'agentctl relay': what an operator does with a relay's
// state directory. 'agentctl relay' alone runs the relay; usageArgs refuses unknown subcommands.
func relayCommands() []*cobra.Command {
	return []*cobra.Command{
		newRelayBackup(),
		newRelayRestore(),
		newRelayStatus(),
		newRelayCheck(),
		newRelaySalvage(),
	}
}
