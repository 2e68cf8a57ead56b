package relaycmd

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/relay/audit"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// openStore opens a relay's state. If existing is false, a directory without a state becomes that of a
// new relay: a token can be made before the relay runs for the first time. Only token create does so,
// because every other command would hide a wrong --state-dir behind an empty state.
//
// Several processes may have the store open at a time: a relay that runs sees a new token at
// once, and a revocation within seconds. The store holds a shared lock, which makes a restore fail
// with auth.ErrInUse; a command that starts during a restore waits up to 2 s for it.
//
// Opening is more than reading: like the start of a relay it completes a restore that was cut short and
// migrates a database of an older agentctl. Files that root makes here get the owner of the directory.
func openStore(cmd *cobra.Command, dir string, existing bool) (*auth.Store, error) {
	s, err := auth.Open(auth.Options{StateDir: dir, Existing: true})
	if errors.Is(err, auth.ErrNoState) && !existing {
		fmt.Fprintf(cmd.ErrOrStderr(), "a new relay's keys are made in %s; it is started with: agentctl relay%s\n", dir, cli.StateDirHint(cmd))
		s, err = auth.Open(auth.Options{StateDir: dir})
	}
	if errors.Is(err, auth.ErrNoState) {
		err = fmt.Errorf("%w; name the relay's with --state-dir", err)
	}
	return s, ExplainState(cmd, err)
}

// localChange makes a change in a state directory and records it in the audit log there, unless it
// is a dry run. change may add to the record what it is about.
//
// The record is begun before the change, and a change that cannot be recorded is not made. If the
// outcome cannot be recorded afterwards, the change stays and the command warns. Both lines have the
// actor local:UID, of the user who typed the command (0 with sudo).
func localChange(cmd *cobra.Command, dir string, r kernel.Record, dryRun bool, change func(*kernel.Record) error) error {
	return localChanges(cmd, dir, r, dryRun, func(r *kernel.Record) ([]changed, error) { return nil, change(r) })
}

// changed is what one change of several is about: a node and a target of the audit log.
type changed = audit.Subject

// localChanges is localChange for a change of several tokens: the outcome has a line for each.
func localChanges(cmd *cobra.Command, dir string, r kernel.Record, dryRun bool, change func(*kernel.Record) ([]changed, error)) error {
	if dryRun {
		_, err := change(&r)
		return err
	}
	return audit.LocalChanges(dir, r, change, func(err error) {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: the change is made, but its outcome is not in the audit log: %v\n", err)
	})
}

// recordLocal records a change of a whole state directory after it was made. Before it, the audit log
// may be one of those files that the change replaces.
func recordLocal(cmd *cobra.Command, dir string, r kernel.Record) {
	if err := audit.RecordLocal(dir, r); err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: the change is made, but it is not in the audit log: %v\n", err)
	}
}

// scopesOfPlugins reads which scopes plugins declare, if a scope is named at all. The directory is
// that of AGENTCTL_PLUGIN_DIR, as for the relay, or the one with which the relay last started. A command
// in a terminal rarely has the environment of the service, so the second is the usual case.
func scopesOfPlugins(s *auth.Store, stateDir string, named ...[]string) (p pluginScopes, err error) {
	if len(slices.Concat(named...)) == 0 {
		return p, nil
	}
	at, err := s.Endpoint()
	if err != nil {
		return p, err
	}
	at.PluginDir = cli.EnvOr("AGENTCTL_PLUGIN_DIR", at.PluginDir)
	p.dir = relay.PluginDir(stateDir, at)
	p.scopes, p.problems = relay.PluginScopes(p.dir)
	return p, nil
}

// localPluginScopes returns the scopes of plugins for completion. It returns none where there is no
// state, and drops errors: the shell would print them into the command line.
func localPluginScopes(stateDir string) []string {
	s, err := auth.Open(auth.Options{StateDir: stateDir, Existing: true})
	if err != nil {
		return nil
	}
	defer func() { _ = s.Close() }()
	p, _ := scopesOfPlugins(s, stateDir, []string{"any"})
	return p.scopes
}
