package relaycmd

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/enrollment"
	"agentctl/term"
)

// newInviteLs returns the command invite ls. Of codes only hashes are stored, so the list has prefixes.
// An invite whose creator's token was revoked is listed as revoked, since nothing joins with it. One that
// has ended may be missing: each new invite deletes those that ended 30 days ago, and if its tenant has
// 1,000 invites, all that have ended.
func newInviteLs() *cobra.Command {
	var f inviteFlags
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List invites, without their codes",
		Example: "  agentctl invite ls\n  agentctl invite ls -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd, func(admin inviteAdmin) error {
				list, err := admin.Invites(cmd.Context())
				if err != nil {
					return err
				}
				return cli.PrintList(&f.out, cmd, list, func() error { return printInvites(cmd, list) })
			})
		},
	}
	f.addFlags(c)
	return c
}

// printInvites prints a table of invites. If there are none it prints the next step, on stderr: a pipe gets
// invites only.
func printInvites(cmd *cobra.Command, list []client.Invite) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no invites; make one with: agentctl invite")
		return err
	}
	t := term.NewTable(cmd.OutOrStdout(), "PREFIX", "CLASS", "TENANT", "USED", "STATE", "EXPIRES", "NAME", "TAGS")
	for _, i := range list {
		t.Row(i.Prefix, i.Class, i.Tenant, fmt.Sprintf("%d/%d", i.Used, i.Uses), i.State, expiryText(time.UnixMilli(i.ExpiresAtMS)), i.Name, strings.Join(i.Tags, " "))
	}
	return t.Flush()
}

// newInviteRevoke returns the command invite revoke. It takes the whole code too, because that is what a
// person has at hand, and sends its prefix only: the path of a request is in the logs of proxies.
func newInviteRevoke() *cobra.Command {
	var f inviteFlags
	var dryRun bool
	c := &cobra.Command{
		Use:   "revoke PREFIX",
		Short: "Revoke an invite; what has joined with it stays",
		Long: `Revoke an invite: nothing joins with it any more. PREFIX is the first four characters of its
code, as 'agentctl invite ls' shows them, or the whole code. Boards that have joined stay; revoke
those with 'agentctl node revoke'.`,
		Example: "  agentctl invite revoke 7K3M",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix, err := enrollment.CodePrefix(args[0])
			if err != nil {
				return cli.Errorf(cli.ExitUsage, "%w; see: agentctl invite ls", err)
			}
			return f.run(cmd, func(admin inviteAdmin) error {
				inv, err := admin.RevokeInvite(cmd.Context(), prefix, dryRun)
				if err != nil {
					return err
				}
				return f.out.Print(cmd, inv, func() error {
					did := "revoked"
					if dryRun {
						did = "would revoke"
					}
					_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s the invite %s for %s, of which %d joined; a revocation is not undone: make a new one with: agentctl invite%s\n",
						did, inv.Prefix, describeInvite(inv), inv.Used, sameRelay(cmd))
					return err
				})
			})
		},
	}
	f.addFlags(c)
	cli.AddDryRunFlag(c, &dryRun)
	return c
}
