//go:build linux

package relaycmd

import "github.com/spf13/cobra"

// StateCommands returns the subcommands of 'agentctl relay': what an operator does with a relay's
// state directory, and its status over the socket there. 'agentctl relay' alone runs the relay.
//
// backup, status and check work while the relay runs. restore and salvage refuse to: they exchange files
// that it has open, or read a log that it writes. All need the rights of the directory's owner, and no token.
func StateCommands() []*cobra.Command {
	return []*cobra.Command{
		newBackup(),
		newRestore(),
		newStatus(),
		newCheck(),
		newSalvage(),
	}
}
