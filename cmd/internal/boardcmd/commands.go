//go:build linux

package boardcmd

import "github.com/spf13/cobra"

// Commands returns the commands of a board: those of its daemon, and those that call the
// daemon over its control socket.
//
// Each call makes new commands, whose flags have the values of the environment as defaults: a tree is used
// for one run.
func Commands() []*cobra.Command {
	return []*cobra.Command{
		newRun(), newJoin(), newLeave(), newConfig(), newDoctor(),
		newStatus(), newSnapshot(), newWatch(), newHistory(),
		newBurst(), newStart(), newStop(),
		newJournalHelper(), newProcessesHelper(),
	}
}
