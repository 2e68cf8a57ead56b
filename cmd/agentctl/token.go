//go:build !agentctl_omit_relay

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/duration"
	"agentctl/relay/auth"
	"agentctl/term"
)

func newToken() *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "Create, list and revoke the relay's tokens",
		Long:  "Create, list and revoke tokens in a relay's state directory, whether the relay runs or not.",
	}
	c.AddCommand(newTokenCreate(), newTokenLs(), newTokenRevoke())
	return c
}

// tokenStore opens a relay's state; only token create sets one up.
//
// Several processes may have the store open at a time: a relay that runs sees a new token at
// once, and a revocation within seconds.
func tokenStore(cmd *cobra.Command, dir string, existing bool) (*auth.Store, error) {
	s, err := auth.Open(auth.Options{StateDir: dir, Existing: true})
	if errors.Is(err, auth.ErrNoState) && !existing {
		fmt.Fprintf(cmd.ErrOrStderr(), "a new relay's keys are made in %s; it is started with: agentctl relay%s\n", dir, stateDirHint(cmd))
		s, err = auth.Open(auth.Options{StateDir: dir})
	}
	if errors.Is(err, auth.ErrNoState) {
		err = fmt.Errorf("%w; name the relay's with --state-dir", err)
	}
	return s, err
}

// stateDirHint is what the next command needs to find the same relay.
func stateDirHint(cmd *cobra.Command) string {
	if f := cmd.Flags().Lookup("state-dir"); f.Changed {
		return " --state-dir " + f.Value.String()
	}
	return ""
}

func stateDirFlag(c *cobra.Command, dir *string) {
	c.Flags().StringVar(dir, "state-dir", env("AGENTCTL_STATE_DIR", config.DefaultStateDir("relay")), "`DIR` of the relay's state [AGENTCTL_STATE_DIR]")
}

// newTokenCreate prints tokens to stdout, once, and everything else to stderr, so that a
// redirection keeps a token alone. The relay stores no token, only its description.
func newTokenCreate() *cobra.Command {
	var dir string
	var req auth.MintRequest
	var out output
	var ttl string
	c := &cobra.Command{
		Use:   "create",
		Short: "Create a token and print it on stdout, once",
		Long: `Create a token. Classes:

  device        for one board (agentctl run --token-file); a new node, or --node
  agent         for people, programs and LLM agents; read-only tools unless --scope says more
  tenant-admin  an agent token that also changes nodes, tokens, invites and tickets of its tenant
  operator      an agent token for the control plane and its events (kernel:admin); it applies to
                the whole relay, not to a tenant: give it to the relay's operators only
  admin         an agent token with every scope, those of tenant-admin and operator together
  enroll        for a board without an identity`,
		Example: `  agentctl token create --class device > board.token
  agentctl token create --class agent --tenant greenhouse --ttl 720h > agent.token
  agentctl token create --class tenant-admin --tenant greenhouse > ann.token
  agentctl token create --class device --count 100 > mock.tokens`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("ttl") {
				var err error
				if req.TTL, err = duration.Parse(ttl); err != nil || req.TTL <= 0 {
					return exit(exitUsage, "--ttl: %w", &duration.Error{Text: ttl})
				}
			}
			if req.Count < 1 {
				return exit(exitUsage, "--count %d is out of range 1..%d", req.Count, auth.MaxMintCount)
			}
			s, err := tokenStore(cmd, dir, req.DryRun)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			if req.Class == auth.PresetAdmin && len(req.Scopes) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: class admin can do everything in its tenant and on the whole relay; use --class tenant-admin or --class operator where one role is enough")
			}
			minted, err := s.Mint(cmd.Context(), req)
			if err != nil {
				return exit(exitUsage, "%w", err)
			}
			if req.DryRun {
				m := minted[0]
				fmt.Fprintf(cmd.OutOrStdout(), "would mint %d %s token(s) of tenant %s, until %s, with the scopes %s\n", len(minted), m.Class, m.Tenant, until(m.Expires), m.Scopes)
				return nil
			}
			if out.format != "" {
				return printList(&out, cmd, minted, nil)
			}
			for _, m := range minted {
				fmt.Fprintln(cmd.OutOrStdout(), m.Token)
			}
			m, hint := minted[0], stateDirHint(cmd)
			if len(minted) == 1 {
				fmt.Fprintf(cmd.ErrOrStderr(), "1 %s token for %s of tenant %s, until %s; take back with: agentctl token revoke --jti %s%s\n",
					m.Class, m.Subject, m.Tenant, until(m.Expires), m.JTI, hint)
			} else {
				fmt.Fprintf(cmd.ErrOrStderr(), "%d %s tokens of tenant %s, until %s; see them with: agentctl token ls%s; take one back with: agentctl token revoke --jti JTI%s\n",
					len(minted), m.Class, m.Tenant, until(m.Expires), hint, hint)
			}
			return nil
		},
	}
	stateDirFlag(c, &dir)
	f := c.Flags()
	f.StringVar(&req.Class, "class", "agent", "`CLASS`: agent, device, enroll, tenant-admin, operator or admin")
	f.StringVar(&req.Tenant, "tenant", auth.DefaultTenant, "`TENANT` of the token")
	f.StringArrayVar(&req.Scopes, "scope", nil, "`SCOPE` in place of the class's default scopes (repeatable)")
	f.StringVar(&ttl, "ttl", "", "lifetime as a `DURATION`, such as 12h or 30d (default: agent 90d, device 365d, enroll 1h)")
	f.StringVar(&req.NodeID, "node", "", "the `NODE` of a device token (default: a new one)")
	f.StringVar(&req.Subject, "subject", "", "`NAME` of the agent, shown in the audit log (default: a new one)")
	f.IntVar(&req.Count, "count", 1, "create `N` tokens, one per line")
	f.BoolVar(&req.DryRun, "dry-run", false, "print what would be created, and create nothing")
	out.flags(c)
	return c
}

func newTokenLs() *cobra.Command {
	var dir string
	var out output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the tokens that were created, without the tokens themselves",
		Example: "  agentctl token ls\n  agentctl token ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := tokenStore(cmd, dir, true)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			rows, err := s.Tokens(cmd.Context())
			if err != nil {
				return err
			}
			return printList(&out, cmd, rows, func() error {
				table := term.NewTable(cmd.OutOrStdout(), "JTI", "CLASS", "TENANT", "SUBJECT", "EXPIRES", "STATE", "SCOPES")
				for _, t := range rows {
					state := "good"
					switch {
					case t.Revoked:
						state = "revoked"
					case t.Expired:
						state = "expired"
					}
					table.Row(t.JTI, t.Class, t.Tenant, t.Subject, t.Expires.Format(time.DateOnly), state, t.Scopes)
				}
				return table.Flush()
			})
		},
	}
	stateDirFlag(c, &dir)
	out.flags(c)
	return c
}

func newTokenRevoke() *cobra.Command {
	var dir string
	var req auth.RevokeRequest
	c := &cobra.Command{
		Use:     "revoke",
		Short:   "Revoke tokens; open links and streams end within 5 s",
		Example: "  agentctl token revoke --jti 01HZX9K3M4P7Q8R9S0T1V2W3XY\n  agentctl token revoke --node attic",
		RunE: func(cmd *cobra.Command, _ []string) error {
			selectors := []string{req.JTI, req.Subject, req.Node, req.Tenant}
			if given := slices.DeleteFunc(selectors, func(s string) bool { return s == "" }); len(given) != 1 {
				return exit(exitUsage, "give one of --jti, --sub, --node and --tenant")
			}
			s, err := tokenStore(cmd, dir, true)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			n, err := s.Revoke(cmd.Context(), req)
			if err != nil {
				return err
			}
			switch {
			case req.DryRun:
				fmt.Fprintf(cmd.OutOrStdout(), "would revoke %d token(s)\n", n)
			case n == 0:
				fmt.Fprintf(cmd.OutOrStdout(), "revoked 0 token(s): none that is good was minted here for it; see: agentctl token ls%s\n", stateDirHint(cmd))
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "revoked %d token(s); a revocation is not undone: mint a new token with: agentctl token create%s\n", n, stateDirHint(cmd))
			}
			return nil
		},
	}
	stateDirFlag(c, &dir)
	f := c.Flags()
	f.StringVar(&req.JTI, "jti", "", "one token, by its `JTI`")
	f.StringVar(&req.Subject, "sub", "", "all tokens of a `SUBJECT`")
	f.StringVar(&req.Node, "node", "", "all tokens of a `NODE`, by id or name")
	f.StringVar(&req.Tenant, "tenant", "", "all tokens of a `TENANT`")
	f.BoolVar(&req.DryRun, "dry-run", false, "print how many tokens would be revoked, and revoke none")
	return c
}

// until is the end of a token's life, with the time of day when that matters.
func until(t time.Time) string {
	if time.Until(t) < 48*time.Hour {
		return t.Local().Format("2006-01-02 15:04:05 MST")
	}
	return t.Format(time.DateOnly)
}
