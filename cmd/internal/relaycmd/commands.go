//go:build linux

package relaycmd

import "github.com/spf13/cobra"

// StateCommands returns the subcommands of 'agentctl relay': what an operator does with a relay's
// state directory, and its status over the socket there. 'agentctl relay' alone runs the relay.
func StateCommands() []*cobra.Command {
	return []*cobra.Command{
		newBackup(),
		newRestore(),
		newStatus(),
		newCheck(),
		newSalvage(),
	}
}
