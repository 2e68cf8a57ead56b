//go:build !agentctl_omit_relay

package main

import (
	"errors"

	"github.com/spf13/cobra"

	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// explainState adds what to type next to a refused state directory.
func explainState(cmd *cobra.Command, err error) error {
	var bad *auth.StateError
	again := stateDirHint(cmd)
	if relay.CanStartDegraded(err) {
		return exit(exitFailure, "%w\nsee what is damaged with: agentctl relay check%s\nsave what can be read with: agentctl relay salvage DIR%s\nor return to a backup with: agentctl relay restore BACKUP%s\n"+
			"to serve boards meanwhile, without tickets and without a record: agentctl relay --start-degraded%s", err, again, again, again, again)
	}
	if !errors.As(err, &bad) {
		return err
	}
	degraded := ""
	if bad.Store == eventlog.FileName {
		degraded = "\nto serve boards meanwhile, without tickets and without a record: agentctl relay --start-degraded" + again
	}
	return exit(exitFailure, "%w\nput the right file back, or restore a backup with: agentctl relay restore BACKUP%s\nor go on without it, which prints what is lost, with: agentctl relay restore --accept-loss %s%s%s",
		err, again, bad.Store, again, degraded)
}
