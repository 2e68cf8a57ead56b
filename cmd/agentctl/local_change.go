//go:build linux && !agentctl_omit_relay

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/relay/audit"
	"agentctl/relay/kernel"
)

// localChange makes a change in a state directory and records it in the audit log there, unless it
// is a dry run. change may add to the record what it is about.
func localChange(cmd *cobra.Command, dir string, r kernel.Record, dryRun bool, change func(*kernel.Record) error) error {
	if dryRun {
		return change(&r)
	}
	return audit.LocalChange(dir, r, change, func(err error) {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: the change is made, but its outcome is not in the audit log: %v\n", err)
	})
}

// recordLocal records a change of a whole state directory after it was made.
func recordLocal(cmd *cobra.Command, dir string, r kernel.Record) {
	if err := audit.RecordLocal(dir, r); err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: the change is made, but it is not in the audit log: %v\n", err)
	}
}
