package relaycmd

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
)

// newTokenRevoke returns the command token revoke. It takes one selector: with two it would not be
// clear whether both or either must fit, and a revocation is not undone.
//
// A revocation by subject, node or tenant stops all tokens that were issued until now, recorded here or not;
// a token that is made afterwards works. The exit code is 0 also if none of them was valid: the tokens are
// void, as the script wanted.
func newTokenRevoke() *cobra.Command {
	var f tokenFlags
	var req auth.RevokeRequest
	c := &cobra.Command{
		Use:     "revoke",
		Short:   "Revoke tokens; open links and streams end within 5 s",
		Example: "  agentctl token revoke --jti 01HZX9K3M4P7Q8R9S0T1V2W3XY\n  agentctl token revoke --node attic",
		RunE: func(cmd *cobra.Command, _ []string) error {
			selectors := []string{req.JTI, req.Subject, req.Node, req.Tenant}
			if given := slices.DeleteFunc(selectors, func(s string) bool { return s == "" }); len(given) != 1 {
				return cli.Errorf(cli.ExitUsage, "give one of --jti, --sub, --node and --tenant")
			}
			n, err := f.revoke(cmd, req)
			if err != nil {
				return err
			}
			switch { // none is no error: what should not work does not work
			case req.DryRun:
				fmt.Fprintf(cmd.OutOrStdout(), "would revoke %d token(s)\n", n)
			case n == 0:
				see := "see: agentctl token ls" + cli.StateDirHint(cmd)
				if f.isRemote(cmd) { // token ls works on a state directory only
					see = "see, on the relay's machine: agentctl token ls"
				}
				fmt.Fprintf(cmd.OutOrStdout(), "revoked 0 token(s): no valid token was created here for it; %s\n", see)
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "revoked %d token(s); a revocation is not undone: create a new one with: agentctl token create%s\n", n, sameRelay(cmd))
			}
			return nil
		},
	}
	f.addFlags(c)
	set := c.Flags()
	set.StringVar(&req.JTI, "jti", "", "one token, by its `JTI`")
	set.StringVar(&req.Subject, "sub", "", "all tokens of a `SUBJECT`")
	set.StringVar(&req.Node, "node", "", "all tokens of a `NODE`, by id or name")
	set.StringVar(&req.Tenant, "tenant", "", "all tokens of a `TENANT`")
	set.BoolVar(&req.DryRun, "dry-run", false, "print how many tokens would be revoked, and revoke none")
	return c
}
