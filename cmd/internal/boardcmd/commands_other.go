//go:build !linux

package boardcmd

import "github.com/spf13/cobra"

// Commands returns the commands that work without a daemon on this machine: history asks a
// relay for that of a board.
func Commands() []*cobra.Command { return []*cobra.Command{newHistory()} }
