package relaycmd

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/duration"
	"agentctl/relay/auth"
	"agentctl/term"
	"agentctl/transport/edge"
	"agentctl/transport/enroll"
)

// inviteAdmin makes, lists and revokes invites: over HTTP, or in a relay's state directory. A dry run makes
// all checks and answers with what would be made, without a code.
type inviteAdmin interface {
	CreateInvite(ctx context.Context, req client.InviteRequest, dryRun bool) (*client.NewInvite, error)
	Invites(ctx context.Context) ([]client.Invite, error)
	RevokeInvite(ctx context.Context, prefix string, dryRun bool) (*client.Invite, error)
}

// Over HTTP the client of a relay is an inviteAdmin as it is; localInvites is the other one.
var _ inviteAdmin = (*client.Client)(nil)

// inviteFlags are the flags that all commands of the group have. With a state directory --tenant is the
// tenant of a new invite, or the one that a list or a revocation is limited to.
type inviteFlags struct{ adminFlags }

func (f *inviteFlags) addFlags(c *cobra.Command) {
	f.adminFlags.addFlags(c, "\""+auth.DefaultTenant+"\" for a new invite, else any")
}

// run calls fn with the administration of the relay, or of the state directory, that the flags select.
func (f *inviteFlags) run(cmd *cobra.Command, fn func(inviteAdmin) error) error {
	return f.adminFlags.run(cmd, func(rc *client.Client) error { return fn(rc) },
		func(s *auth.Store) error { return fn(&localInvites{s, f.stateDir, f.tenant, f.changer(cmd)}) })
}

// NewInvite returns the command invite, which makes an invite, with its subcommands.
//
// An invite is made in two requests. The first is a dry run, whose answer has the relay's address: without
// an address the line cannot be printed, and a code that nobody has seen would stay valid until it expires.
//
// The code is on stdout only, in the line or in -o json. The relay stores its hash, and the audit log has the
// prefix.
func NewInvite() *cobra.Command {
	var f inviteFlags
	var req client.InviteRequest
	var agent, relayURL string
	var ttl time.Duration
	var dryRun bool
	c := &cobra.Command{
		Use:   "invite",
		Short: "Print a line to paste on a board or an agent's machine, which then joins this relay",
		Long: `Make an invite code and print the command that joins with it. On the relay's machine the
command uses the state directory, whether the relay runs or not; elsewhere it calls the relay of
'agentctl login', or of --relay and --token-file, with a token that has the scope invites:write
(agentctl token create --class tenant-admin).

A code is for one board, unless --uses says more: then every board that has it joins as another
board, which is how a golden image with one code works (docs/install.md). Whoever has the
code can join: send it as you would send a password.`,
		Example: `  agentctl invite --name attic --tag roof
  agentctl invite --uses 20 --ttl 30d --tag greenhouse
  agentctl invite --agent claude
  agentctl invite --agent claude --add-scope notes:read
  agentctl invite ls
  agentctl invite revoke 7K3M`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req.Class, req.Tenant, req.TTLMS = auth.InviteBoard, f.tenant, ttl.Milliseconds()
			if cmd.Flags().Changed("agent") {
				if req.Name != "" {
					return cli.Errorf(cli.ExitUsage, "--agent gives the name of an agent, --name that of a board; give one of them")
				}
				req.Class, req.Name = auth.InviteAgent, agent
			}
			if req.Uses < 1 {
				return cli.Errorf(cli.ExitUsage, "--uses %d is out of range 1..%d", req.Uses, auth.MaxInviteUses)
			}
			if ttl <= 0 { // 0 asks the relay for its default
				return cli.Errorf(cli.ExitUsage, "--ttl: an invite is good for 1 minute to 365 days")
			}
			return f.run(cmd, func(admin inviteAdmin) error {
				plan, err := admin.CreateInvite(cmd.Context(), req, true)
				if err != nil {
					return err
				}
				base, err := joinURL(relayURL, plan.URL, admin)
				if err != nil {
					return err
				}
				// The plan is the answer of the dry run, with the address that the line would have.
				if plan.URL = base; dryRun {
					return f.out.Print(cmd, plan, func() error {
						_, err := fmt.Fprintf(cmd.OutOrStdout(), "would make an invite for %s to %s\n", describeInvite(&plan.Invite), base)
						return err
					})
				}
				inv, err := admin.CreateInvite(cmd.Context(), req, false)
				if err != nil {
					return err
				}
				inv.URL = base
				return f.printInvite(cmd, inv)
			})
		},
	}
	f.addFlags(c)
	fl := c.Flags()
	fl.StringVar(&agent, "agent", "", "invite an agent or a person, by `NAME`, instead of a board")
	fl.StringVar(&req.Name, "name", "", "`NAME` of the board (default: the one that it proposes)")
	fl.StringArrayVar(&req.Tags, "tag", nil, "`TAG` of the board (repeatable)")
	grantFlags(c, "with --agent: ", "the default scopes", &req.Scopes, &req.Add, &req.Topics)
	fl.IntVar(&req.Uses, "uses", 1, "`N` boards may join with the code")
	fl.Var(duration.NewValue(&ttl, auth.DefaultInviteTTL), "ttl", "`DURATION` for which the code is good")
	fl.StringVar(&relayURL, "url", "", "`URL` of the relay in the line to paste (default: the relay's own, see relay --public)")
	cli.AddDryRunFlag(c, &dryRun)
	c.AddCommand(newInviteLs(), newInviteRevoke())
	return c
}

// joinURL is the URL that a board is given: the flag's, the relay's own, or the one by which
// this command reached the relay, if the relay's own is good on its machine only. A URL that a
// board would refuse is refused here, before somebody carries the line to the board.
//
// own is "" for a state directory whose relay has not run yet: the relay stores its address when it starts.
// A flag that is malformed has exit code 2, a missing address 1.
func joinURL(flag, own string, admin inviteAdmin) (string, error) {
	if flag != "" {
		u, err := url.Parse(flag)
		if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
			return "", cli.Errorf(cli.ExitUsage, "--url is not of the form https://HOST[:PORT]: %q", flag)
		}
		if u.Scheme == "http" && !isLoopbackURL(flag) {
			return "", cli.Errorf(cli.ExitUsage, "--url: boards and agents refuse http:// beyond their own machine; use https://")
		}
		if _, err := enroll.BaseURL(flag); err != nil { // nothing could join with the line
			return "", cli.Errorf(cli.ExitUsage, "--url: %w", err)
		}
		return strings.TrimRight(flag, "/"), nil
	}
	if c, ok := admin.(*client.Client); ok && (own == "" || isLoopbackURL(own) && !isLoopbackURL(c.URL())) {
		own = c.URL()
	}
	if own == "" {
		return "", cli.Errorf(cli.ExitFailure, "it is not known where this relay is reached, because it has not run yet; start it (agentctl relay), or give its address with --url https://HOST:PORT")
	}
	return own, nil
}

// isLoopbackURL reports whether a URL reaches its own machine only; false for one that cannot be parsed.
func isLoopbackURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && edge.IsLoopback(u.Hostname())
}

// printedInvite is what -o json prints: the relay's answer, and the line to paste as the member command.
// Members of the two must not have the same name: encoding/json would leave the embedded one out.
type printedInvite struct {
	*client.NewInvite
	Command string `json:"command"`
}

// printInvite prints the line to paste on stdout, and everything else on stderr, so that a script can
// pass the line on. An address that boards cannot use is a warning only: the invite works as soon as the
// relay serves another one. An error of stdout is returned at the end: the command that revokes the invite is
// needed most if nobody has got the code.
func (f *inviteFlags) printInvite(cmd *cobra.Command, inv *client.NewInvite) error {
	p := printedInvite{inv, joinCommand(inv)}
	err := f.out.Print(cmd, p, func() error {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(p.Command))
		return err
	})
	fmt.Fprintf(cmd.ErrOrStderr(), "good for %s, until %s; take back with: agentctl invite revoke%s %s\n",
		term.SafeLine(describeInvite(&inv.Invite)), expiryText(time.UnixMilli(inv.ExpiresAtMS)), sameRelay(cmd), term.SafeLine(inv.Prefix))
	switch u, _ := url.Parse(inv.URL); {
	case isLoopbackURL(inv.URL):
		fmt.Fprintln(cmd.ErrOrStderr(), "this address reaches the relay from its own machine only; for others start it with --listen :8460, or give its address with --url")
	case u != nil && u.Scheme == "http":
		fmt.Fprintln(cmd.ErrOrStderr(), "boards refuse http:// beyond their own machine; give the address of the TLS proxy with --url, or start the relay with --public")
	}
	return err
}

// joinCommand is the command to paste. A code for many is not an argument, which other users
// of a machine could read while it runs: printf passes it on, which is built into shells and no process. A
// code for one board is used up by the command that shows it.
//
// A board joins with sudo, because its identity is in the state directory of the service; an agent's
// context belongs to the user who types the line.
func joinCommand(inv *client.NewInvite) string {
	verb := "sudo agentctl join "
	if inv.Class == auth.InviteAgent {
		verb = "agentctl login "
	}
	before, code := "", inv.Code
	if inv.Uses > 1 {
		before, code = "printf %s "+inv.Code+" | ", "-"
	}
	line := before + verb + cli.ShellQuote(inv.URL) + " " + code
	if inv.CASHA256 != nil {
		line += " --ca-sha256 " + *inv.CASHA256
	}
	return line
}

// describeInvite describes whom an invite is for, as a part of a sentence: "20 boards with the tags roof of
// tenant default".
func describeInvite(i *client.Invite) string {
	s := "1 " + i.Class
	if i.Uses > 1 {
		s = strconv.Itoa(i.Uses) + " " + i.Class + "s"
	}
	if i.Name != "" {
		s += " named " + i.Name
	}
	if len(i.Tags) > 0 {
		s += " with the tags " + strings.Join(i.Tags, " ")
	}
	return s + " of tenant " + i.Tenant + topicLimit(i.Topics)
}
