package relaycmd

import (
	"errors"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// adminFlags are the flags of commands that administer a tenant: over HTTP, or in the state
// directory of a relay on this machine.
type adminFlags struct {
	relay    cli.RelayFlags
	stateDir string // has a default, so only Changed shows whether somebody named one
	tenant   string // "": see the default of the command; over HTTP it must be empty
	out      cli.Output
}

// addFlags adds the flags; byDefault is the text for which tenant a command in a state directory works
// on without --tenant.
func (f *adminFlags) addFlags(c *cobra.Command, byDefault string) {
	f.relay.AddFlags(c)
	cli.AddStateDirFlag(c, &f.stateDir)
	c.Flags().StringVar(&f.tenant, "tenant", "", "with a state directory: the `TENANT` (default: "+byDefault+")")
	f.out.AddFlags(c)
}

// isRemote reports whether the flags name a relay to call. Without any, the commands use the
// state directory: they are typed on the relay's machine. Where there is none, they use the
// context of 'agentctl login'. The first line that applies decides:
//
//	--relay or --token-file                  the relay
//	AGENTCTL_TOKEN_FILE, no --state-dir      the relay
//	--state-dir or AGENTCTL_STATE_DIR        the state directory
//	the default state directory exists       the state directory
//	a context, or an error of reading it     the relay; run returns the error
//	otherwise                                the state directory, whose error says how to name one
//
// AGENTCTL_RELAY alone selects no relay. A directory that cannot be searched counts as one that exists:
// its error is shown, and no other relay is changed.
func (f *adminFlags) isRemote(cmd *cobra.Command) bool {
	changed := cmd.Flags().Changed
	if changed("relay") || changed("token-file") || f.relay.TokenFile != "" && !changed("state-dir") {
		return true
	}
	if changed("state-dir") || os.Getenv("AGENTCTL_STATE_DIR") != "" {
		return false
	}
	if _, err := os.Stat(f.stateDir); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	saved, err := f.relay.Context()
	return saved != nil || err != nil
}

// run calls remote with a client of the relay, or local with its state, as the flags select. Flags of
// the other way are refused, because they would be ignored: a change to the wrong relay or tenant is
// not seen until somebody misses it. A directory without a state is refused.
func (f *adminFlags) run(cmd *cobra.Command, remote func(*client.Client) error, local func(*auth.Store) error) error {
	if f.isRemote(cmd) {
		switch {
		case cmd.Flags().Changed("state-dir"):
			return errTwoWays()
		case f.tenant != "":
			return cli.Errorf(cli.ExitUsage, "--tenant goes with --state-dir; over HTTP the token decides the tenant")
		}
		rc, err := f.relay.Client()
		if err != nil {
			return err
		}
		return remote(rc)
	}
	s, err := openStore(cmd, f.stateDir, true)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	return local(s)
}

// errTwoWays reports the flags of both ways to administer a relay.
func errTwoWays() error {
	return cli.Errorf(cli.ExitUsage, "give either --state-dir, or --relay and --token-file")
}

// stateChanger makes a change in a state directory and records it in the audit log there: localChange
// with the directory that the flags select. change may complete the record with what only the change knows,
// such as the prefix of a new invite; that is in the line with the outcome, not in the one before.
type stateChanger func(r kernel.Record, dryRun bool, change func(*kernel.Record) error) error

// changer returns the stateChanger of the state directory that the flags select.
func (f *adminFlags) changer(cmd *cobra.Command) stateChanger {
	return func(r kernel.Record, dryRun bool, change func(*kernel.Record) error) error {
		return localChange(cmd, f.stateDir, r, dryRun, change)
	}
}

// sameRelay returns the flags that the command was given to find its relay, with a space before them:
// the command that is printed as the next step needs them too.
func sameRelay(cmd *cobra.Command) string {
	return cli.StateDirHint(cmd) + cli.RelayHint(cmd)
}
