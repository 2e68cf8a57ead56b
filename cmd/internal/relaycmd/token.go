package relaycmd

import (
	"cmp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// NewToken returns the command token with its subcommands. These tokens are copied by people and not renewed;
// boards and agents that join with an invite get and renew theirs by themselves. Without a relay's address
// the commands work on the state directory, where no caller's scopes limit what a new token may hold.
func NewToken() *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "Create, list and revoke the relay's tokens",
		Long: `Create, list and revoke tokens in a relay's state directory, whether the relay runs or not. With
--relay and --token-file, create and revoke ask a relay instead.`,
	}
	c.AddCommand(newTokenCreate(), newTokenLs(), newTokenRevoke())
	return c
}

// newTokenLs returns the command token ls. It works on a state directory only, and lists the tokens of all
// tenants, the newest first. Tokens of boards and agents that have joined are in it as well. One that
// expired more than 30 days ago may be missing.
func newTokenLs() *cobra.Command {
	var dir string
	var out cli.Output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the tokens that were created, without the tokens themselves",
		Example: "  agentctl token ls\n  agentctl token ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := openStore(cmd, dir, true)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			rows, err := s.Tokens(cmd.Context())
			if err != nil {
				return err
			}
			return cli.PrintList(&out, cmd, rows, func() error {
				table := term.NewTable(cmd.OutOrStdout(), "JTI", "CLASS", "TENANT", "SUBJECT", "EXPIRES", "STATE", "TOPICS", "SCOPES")
				for _, t := range rows {
					state := "good"
					switch {
					case t.Revoked:
						state = "revoked"
					case t.Expired:
						state = "expired"
					}
					table.Row(t.JTI, t.Class, t.Tenant, t.Subject, t.Expires.Format(time.DateOnly), state, cmp.Or(strings.Join(t.Topics, ","), "-"), t.Scopes)
				}
				return table.Flush()
			})
		},
	}
	cli.AddStateDirFlag(c, &dir)
	out.AddFlags(c)
	return c
}

// expiryText returns the end of a token's or an invite's life: a date, with the time of day in this
// machine's zone if it is past or less than two days ahead, when the hour matters. It is for people: -o has
// the time as the store or the API has it.
func expiryText(t time.Time) string {
	if time.Until(t) < 48*time.Hour {
		return t.Local().Format("2006-01-02 15:04:05 MST")
	}
	return t.Format(time.DateOnly)
}
