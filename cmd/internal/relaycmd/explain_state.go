//go:build linux

package relaycmd

import (
	"errors"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/storage"
)

// ExplainState adds to the error of a state directory what to type next, with the --state-dir of cmd.
// Other errors, and nil, are returned as they are.
//
// The order of the steps is by what they cost: a check changes nothing, salvage keeps what can be
// read, a backup loses what came after it, and --accept-loss loses the store. The packages below know
// what is wrong with a store and no commands.
//
//	events.db is damaged             check, salvage, restore; --start-degraded meanwhile
//	relay.db is damaged              check, restore, --accept-loss; no salvage: see newSalvage
//	a file may not be read           another user
//	relay.json is another relay's    --accept-loss, which loses nothing: relay.db has its values
//	a store is not the recorded one  restore, --accept-loss; for events.db also --start-degraded
//
// The exit code is 1.
func ExplainState(cmd *cobra.Command, err error) error {
	var bad *auth.StateError
	again := cli.StateDirHint(cmd)
	if relay.CanStartDegraded(err) {
		return cli.Errorf(cli.ExitFailure, "%w\nsee what is damaged with: agentctl relay check%s\nsave what can be read with: agentctl relay salvage DIR%s\nor return to a backup with: agentctl relay restore BACKUP%s\n"+
			"to serve boards meanwhile, without tickets and without a record: agentctl relay --start-degraded%s", err, again, again, again, again)
	}
	if fault, ok := errors.AsType[*storage.Error](err); ok && fault.Store == auth.DatabaseFile && fault.Kind == storage.Damaged {
		return cli.Errorf(cli.ExitFailure, "%w\nsee what is damaged with: agentctl relay check%s\nreturn to a backup with: agentctl relay restore BACKUP%s\n"+
			"or go on without it, which prints what is lost, with: agentctl relay restore --accept-loss %s%s", err, again, again, auth.DatabaseFile, again)
	}
	if _, plain := errors.AsType[*fs.PathError](err); plain && errors.Is(err, fs.ErrPermission) && !errors.As(err, new(*storage.Error)) {
		return cli.Errorf(cli.ExitFailure, "%w; run this as the owner of the state directory, or with sudo", err)
	}
	if !errors.As(err, &bad) {
		return err
	}
	if bad.Store == auth.RelayFile && bad.Problem == auth.StoreForeign {
		return cli.Errorf(cli.ExitFailure, "%w\nput the right file back, or make it anew with: agentctl relay restore --accept-loss %s%s", err, bad.Store, again)
	}
	degraded := ""
	if bad.Store == eventlog.FileName {
		degraded = "\nto serve boards meanwhile, without tickets and without a record: agentctl relay --start-degraded" + again
	}
	return cli.Errorf(cli.ExitFailure, "%w\nput the right file back, or restore a backup with: agentctl relay restore BACKUP%s\nor go on without it, which prints what is lost, with: agentctl relay restore --accept-loss %s%s%s",
		err, again, bad.Store, again, degraded)
}
