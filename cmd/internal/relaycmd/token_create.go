package relaycmd

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/duration"
	"agentctl/relay/auth"
)

// newTokenCreate returns the command token create. It writes tokens to a file or to stdout, once, and
// everything else to stderr, so that a redirection keeps a token alone. The relay stores no token, only
// its description.
//
// All flags and the file of --out are checked before a token is made, since one that nobody has is valid all
// the same. If writing then fails, as on a full disk, the error has the command that revokes the token; with
// --count that of the first one, and token ls has the others.
func newTokenCreate() *cobra.Command {
	var f tokenFlags
	var req auth.MintRequest
	var out cli.Output
	var file tokenOut
	var ttl string
	c := &cobra.Command{
		Use:   "create",
		Short: "Create a token, once, into a file or on stdout",
		Long: `Create a token. Classes:

  device        for one board (agentctl run --token-file); a new node, or --node
  agent         for people, programs and LLM agents; read-only tools unless --scope says more
  tenant-admin  an agent token that also changes nodes, tokens, invites and tickets of its tenant
  operator      an agent token for the control plane and its events (kernel:admin); it applies to
                the whole relay, not to a tenant: give it to the relay's operators only
  admin         an agent token with every scope, those of tenant-admin and operator together
  enroll        for a board without an identity

With --relay and --token-file the relay creates the token, in the tenant of a token that has
tokens:write (class tenant-admin). It cannot hold a scope that this token lacks.

A plugin can define scopes, such as notes:read. No class has them: name each one with
--add-scope, or with --scope. --topic limits a token to topics of events, for programs that publish
or follow only some.

--out writes a file that only its owner can read. A redirection of the shell makes one that others
can often read too, which commands refuse to use.`,
		Example: `  agentctl token create --class device --out board.token
  agentctl token create --class agent --tenant greenhouse --ttl 720h --out agent.token
  agentctl token create --class tenant-admin --tenant greenhouse --out ann.token
  agentctl token create --class agent --add-scope notes:read --add-scope notes:write --out notes.token
  agentctl token create --class agent --scope events:ingest --topic 'build/*' --out ci.token
  agentctl token create --class device --count 100 --out mock.tokens
  agentctl token create --class device --relay https://relay.example:8460 --token-file ann.token --out board.token`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("ttl") {
				var err error
				if req.TTL, err = duration.Parse(ttl); err != nil || req.TTL <= 0 {
					return cli.Errorf(cli.ExitUsage, "--ttl: %w", &duration.Error{Text: ttl})
				}
			}
			if req.Count < 1 {
				return cli.Errorf(cli.ExitUsage, "--count %d is out of range 1..%d", req.Count, auth.MaxMintCount)
			}
			// With --scope the token has these scopes only, whatever the class.
			if req.Class == auth.PresetAdmin && len(req.Scopes) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: class admin can do everything in its tenant and on the whole relay; use --class tenant-admin or --class operator where one role is enough")
			}
			if err := file.check(); err != nil { // a token that cannot be written must not be made
				return err
			}
			created, err := f.create(cmd, req)
			if err != nil {
				return err
			}
			if req.DryRun {
				if out.Format != "" {
					return cli.PrintList(&out, cmd, created, nil)
				}
				m := created[0]
				fmt.Fprintf(cmd.OutOrStdout(), "would create %d %s token(s) of tenant %s, until %s, with the scopes %s%s\n", len(created), m.Class, m.Tenant, expiryText(m.Expires), m.Scopes, topicLimit(m.Topics))
				return nil
			}
			m, hint := created[0], sameRelay(cmd)
			if err := file.write(cmd, created); err != nil {
				return fmt.Errorf("%w; nobody has what was made: take it back with: agentctl token revoke --jti %s%s", err, m.JTI, hint)
			}
			if out.Format != "" {
				return cli.PrintList(&out, cmd, file.described(created), nil)
			}
			printCreated(cmd.ErrOrStderr(), created, hint)
			return nil
		},
	}
	f.addFlags(c)
	set := c.Flags()
	set.StringVar(&req.Class, "class", "agent", "`CLASS`: agent, device, enroll, tenant-admin, operator or admin")
	set.StringVar(&req.Tenant, "tenant", auth.DefaultTenant, "`TENANT` of the token; over HTTP the caller's")
	grantFlags(c, "", "the class's default scopes", &req.Scopes, &req.AddScopes, &req.Topics)
	set.StringVar(&ttl, "ttl", "", "lifetime as a `DURATION`, such as 12h or 30d (default: agent 90d, device 365d, enroll 1h)")
	set.StringVar(&req.NodeID, "node", "", "the `NODE` of a device token (default: a new one)")
	set.StringVar(&req.Subject, "subject", "", "`NAME` of the agent, shown in the audit log (default: a new one)")
	set.IntVar(&req.Count, "count", 1, "create `N` tokens, one per line")
	cli.AddDryRunFlag(c, &req.DryRun)
	file.addFlags(c)
	out.AddFlags(c)
	return c
}

// printCreated describes the tokens that were made, without the tokens themselves, and prints how to revoke
// them. hint has the flags that those commands need to find the same relay. Tokens of one command have the
// same class and tenant, so the first one describes all.
func printCreated(w io.Writer, created []auth.Minted, hint string) {
	m := created[0]
	if len(created) == 1 {
		fmt.Fprintf(w, "1 %s token for %s of tenant %s, until %s; take back with: agentctl token revoke --jti %s%s\n",
			m.Class, m.Subject, m.Tenant, expiryText(m.Expires), m.JTI, hint)
		return
	}
	fmt.Fprintf(w, "%d %s tokens of tenant %s, until %s; see them with: agentctl token ls%s; take one back with: agentctl token revoke --jti JTI%s\n",
		len(created), m.Class, m.Tenant, expiryText(m.Expires), hint, hint)
}
