//go:build linux

package main

import "github.com/spf13/cobra"

// addBoardCommands adds the commands of a board: its daemon, and what asks it over its socket.
func addBoardCommands(root *cobra.Command) {
	root.AddCommand(newRun(), newJoin(), newLeave(), newStatus(), newSnapshot(), newWatch(), newBurst(), newStart(), newStop(), newDoctor(), newConfig(), newJournalHelper(), newProcessesHelper())
}
