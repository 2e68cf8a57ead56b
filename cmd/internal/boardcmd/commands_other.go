//go:build !linux

package boardcmd

import "github.com/spf13/cobra"

// Commands returns the constructors of the commands that work without a daemon on this machine: history
// asks a relay for that of a board. Package main has hidden commands in place of the others, which say
// where they work.
func Commands() map[string]func() *cobra.Command {
	return map[string]func() *cobra.Command{"history": newHistory}
}
