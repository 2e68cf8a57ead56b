package clientcmd

import (
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/login"
	"agentctl/term"
)

// NewContext returns the commands context, which list, choose and remove what login makes. They read and
// change files of this user (package login) and call no relay. No format of their output has a token or a key.
func NewContext() *cobra.Command {
	c := &cobra.Command{
		Use:   "context",
		Short: "List, choose and remove the relays that you are logged in to",
		Long: `A context is a relay and your identity there, made by 'agentctl login'. Commands use the current one,
or that of AGENTCTL_CONTEXT.`,
	}
	c.AddCommand(newContextLs(), newContextUse(), newContextRm())
	return c
}

// newContextLs returns the command context ls. A context that cannot be used is listed with the reason, so
// that it can be removed.
func newContextLs() *cobra.Command {
	var out cli.Output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the contexts",
		Example: "  agentctl context ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := cli.ContextStore().List()
			if err != nil {
				return err
			}
			return cli.PrintList(&out, cmd, list, func() error {
				if len(list) == 0 {
					_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no contexts yet; on the relay's machine type: agentctl invite --agent NAME, and paste its line here")
					return err
				}
				return printContexts(cmd, list)
			})
		},
	}
	out.AddFlags(c)
	return c
}

// printContexts prints a table. A context whose file cannot be read has the reason in place of its relay.
func printContexts(cmd *cobra.Command, list []login.Info) error {
	t := term.NewTable(cmd.OutOrStdout(), "CONTEXT", "CURRENT", "RELAY", "AGENT", "TENANT")
	for _, i := range list {
		current := ""
		if i.Current {
			current = "yes"
		}
		if i.Error != "" {
			i.Relay = i.Error
		}
		t.Row(i.Name, current, i.Relay, i.AgentID, i.TenantID)
	}
	return t.Flush()
}

// newContextUse returns the command context use. It needs no relay: a context may be chosen while its
// relay is away.
func newContextUse() *cobra.Command {
	return &cobra.Command{
		Use:               "use NAME",
		Short:             "Make a context the current one",
		Example:           "  agentctl context use lab",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cli.CompleteContexts,
		RunE: func(cmd *cobra.Command, args []string) error {
			s := cli.ContextStore()
			before, _ := s.Current() // without one there is nothing to return to
			if err := s.Use(args[0]); err != nil {
				return cli.ExplainContext(err)
			}
			undo := ""
			if before != "" && before != args[0] {
				undo = "; undo it with: agentctl context use " + before
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "context %s is now the current one%s\n", args[0], undo)
			return err
		},
	}
}

// newContextRm returns the command context rm. The relay keeps the identity: to revoke it takes an
// operator, so the command prints what that one types.
func newContextRm() *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a context and its key",
		Long: `Remove a context and its key from this machine. The relay keeps the identity until its operator
revokes it; the way back is a new invite.`,
		Example:           "  agentctl context rm lab",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cli.CompleteContexts,
		RunE: func(cmd *cobra.Command, args []string) error {
			s := cli.ContextStore()
			agent := "" // for the hint; it is lost with the file
			// A damaged file has no agent id to show, and can be removed all the same.
			if list, err := s.List(); err == nil {
				for _, i := range list {
					if i.Name == args[0] {
						agent = i.AgentID
					}
				}
			}
			// A dry run fails for a name that does not exist, like the command itself.
			if err := s.Check(args[0]); err != nil {
				return cli.ExplainContext(err)
			}
			if dryRun {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "would remove context %s\n", args[0])
				return err
			}
			if err := s.Remove(args[0]); err != nil {
				return cli.ExplainContext(err)
			}
			hint := ""
			if agent != "" {
				hint = "; on the relay its identity can be revoked with: agentctl token revoke --sub " + agent
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "removed context %s%s\n", args[0], hint)
			return err
		},
	}
	cli.AddDryRunFlag(c, &dryRun)
	return c
}
