//go:build linux

package boardcmd

import "github.com/spf13/cobra"

// Commands returns the commands of a board: those of its daemon, and those that call the
// daemon over its control socket.
//
// Each call makes new commands, and reads the defaults of their flags from the environment.
func Commands() []*cobra.Command {
	return []*cobra.Command{
		newRun(), newJoin(), newLeave(), newConfig(), newDoctor(),
		newStatus(), newSnapshot(), newWatch(), newHistory(),
		newBurst(), newStart(), newStop(),
		newJournalHelper(), newProcessesHelper(),
	}
}
