package cli

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/config"
)

// EnvOr returns the value of an environment variable, or def if it is unset or empty. Flags use it as
// their default, so that a flag takes precedence over its variable. In the environment file of a service,
// NAME= therefore means the default.
func EnvOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// GivenFlags returns those of the named flags that the command was given, as one types them, with a
// space before each. The command that is printed as the next step needs the same flags. It does not work for
// repeatable flags, whose value pflag prints in brackets.
func GivenFlags(cmd *cobra.Command, names ...string) string {
	words := ""
	for _, name := range names {
		if fl := cmd.Flags().Lookup(name); fl != nil && fl.Changed {
			words += " --" + name + " " + ShellQuote(fl.Value.String())
		}
	}
	return words
}

// ShellQuote quotes a word for a POSIX shell. A word that needs no quotes stays as it is, which is easier to
// read; others get single quotes, in which a shell expands nothing.
func ShellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:@%+,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// AddStateDirFlag adds --state-dir for the commands that work on a relay's state directory.
func AddStateDirFlag(c *cobra.Command, dir *string) {
	c.Flags().StringVar(dir, "state-dir", EnvOr("AGENTCTL_STATE_DIR", config.DefaultStateDir("relay")), "`DIR` of the relay's state [AGENTCTL_STATE_DIR]")
}

// AddDryRunFlag adds --dry-run for a command that says what it would do, and does nothing.
func AddDryRunFlag(c *cobra.Command, dryRun *bool) {
	c.Flags().BoolVar(dryRun, "dry-run", false, "print what would be done, and do nothing")
}

// StateDirHint is the --state-dir that the next command needs to find the same relay, with a space
// before it; empty if the command was given none.
func StateDirHint(cmd *cobra.Command) string { return GivenFlags(cmd, "state-dir") }

// RelayHint is StateDirHint for the flags of RelayFlags. Without them the next command would go to the
// relay of a context, or be refused there.
func RelayHint(cmd *cobra.Command) string {
	return GivenFlags(cmd, "relay", "token-file", "ca-file", "ca-sha256")
}
