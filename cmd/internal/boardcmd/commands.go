//go:build linux

package boardcmd

import "github.com/spf13/cobra"

// Commands returns, by their names, the constructors of the commands of a board: those of its daemon, and
// those that call the daemon over its control socket.
//
// A constructor makes a new command, and reads the defaults of its flags from the environment.
func Commands() map[string]func() *cobra.Command {
	return map[string]func() *cobra.Command{
		"run": newRun, "join": newJoin, "leave": newLeave, "config": newConfig, "doctor": newDoctor,
		"status": newStatus, "snapshot": newSnapshot, "watch": newWatch, "history": newHistory,
		"burst": newBurst, "start": newStart, "stop": newStop,
		"journal-helper": newJournalHelper, "processes-helper": newProcessesHelper,
	}
}
