//go:build !linux

package relaycmd

import (
	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// errNoStateDir reports a command that would need the state directory of a relay.
func errNoStateDir() error {
	return cli.Errorf(cli.ExitUsage, "a relay and its state directory are on a Linux machine, not on %s; name the relay with --relay URL --token-file FILE, or type this on its machine", cli.SystemName())
}

// The functions of state_linux.go. Commands with --relay and --token-file do not reach them.

func openStore(*cobra.Command, string, bool) (*auth.Store, error) { return nil, errNoStateDir() }

func scopesOfPlugins(*auth.Store, string, ...[]string) (pluginScopes, error) {
	return pluginScopes{}, errNoStateDir()
}

func localPluginScopes(string) []string { return nil }

type changed struct{ NodeID, Target string }

func localChanges(*cobra.Command, string, kernel.Record, bool, func(*kernel.Record) ([]changed, error)) error {
	return errNoStateDir()
}

func localChange(*cobra.Command, string, kernel.Record, bool, func(*kernel.Record) error) error {
	return errNoStateDir()
}
