package relaycmd

import (
	"cmp"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// tokenFlags select where tokens are created and revoked: in a state directory, or by a relay
// where --relay or --token-file is given. The environment and a context do not select a
// relay here, as they do for nodes and invites: these commands are older, and a script that
// creates tokens of the machine's own relay must not create them elsewhere.
type tokenFlags struct {
	relay    cli.RelayFlags
	stateDir string
}

// addFlags adds the flags to c. --tenant is not among them: it means a part of the new token in create, and
// selects tokens in revoke.
func (f *tokenFlags) addFlags(c *cobra.Command) {
	f.relay.AddFlags(c)
	cli.AddStateDirFlag(c, &f.stateDir)
}

// isRemote reports whether a relay is to be asked.
func (f *tokenFlags) isRemote(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("relay") || cmd.Flags().Changed("token-file")
}

// create creates tokens, in a state directory or by asking a relay. In the state directory the change is
// recorded in the audit log before it is made (localChange). Errors of the request itself are usage errors
// either way. The outcome has a line for each token of --count.
//
// The first token makes the state directory of a new relay; a dry run does not, and fails without one.
//
// create and revoke have no interface as nodeAdmin is one, because the two ways accept different things: the
// store takes --count, any tenant and four selectors, a relay one token of the caller's tenant, by its jti.
func (f *tokenFlags) create(cmd *cobra.Command, req auth.MintRequest) ([]auth.Minted, error) {
	if f.isRemote(cmd) {
		return f.createRemote(cmd, req)
	}
	s, err := openStore(cmd, f.stateDir, req.DryRun)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	var dir pluginScopes
	if dir, err = scopesOfPlugins(s, f.stateDir, req.Scopes, req.AddScopes); err != nil {
		return nil, err
	}
	req.PluginScopes = dir.scopes
	var created []auth.Minted
	err = localChanges(cmd, f.stateDir, kernel.Record{Tenant: req.Tenant, Tool: "tokens.create"}, req.DryRun, func(*kernel.Record) (list []changed, err error) {
		created, err = s.Mint(cmd.Context(), req)
		for _, m := range created {
			list = append(list, changed{NodeID: m.NodeID, Target: m.JTI})
		}
		return list, err
	})
	if errors.Is(err, auth.ErrRequest) || errors.Is(err, auth.ErrNoNode) {
		err = cli.Errorf(cli.ExitUsage, "%w", dir.explain(err))
	}
	return created, err
}

// createRemote asks a relay for a token. Except device:connect it can hold no scope that the caller's token
// lacks. Flags that cannot be used over HTTP are refused and not ignored. The default of --tenant is for a state directory, so
// --tenant is sent only if it was typed; the relay refuses any but the caller's.
func (f *tokenFlags) createRemote(cmd *cobra.Command, req auth.MintRequest) ([]auth.Minted, error) {
	switch {
	case cmd.Flags().Changed("state-dir"):
		return nil, errTwoWays()
	case req.Count > 1:
		return nil, cli.Errorf(cli.ExitUsage, "--count goes with --state-dir; a relay makes one token at a time")
	case !cmd.Flags().Changed("tenant"):
		req.Tenant = "" // of the caller's token
	}
	rc, err := f.relay.Client()
	if err != nil {
		return nil, err
	}
	t, err := rc.CreateToken(cmd.Context(), client.TokenRequest{Class: req.Class, Tenant: req.Tenant, Subject: req.Subject,
		Scopes: req.Scopes, Add: req.AddScopes, Topics: req.Topics, Node: req.NodeID, TTLMS: req.TTL.Milliseconds()}, req.DryRun)
	if err != nil {
		return nil, err
	}
	scopes, _ := auth.ParseScopes(strings.Fields(t.Scopes)...) // for people: none if a newer relay has others
	return []auth.Minted{{Token: t.Token, JTI: t.JTI, Class: t.Class, Tenant: t.Tenant, Subject: t.Subject, NodeID: t.NodeID, Scopes: scopes, Topics: t.Topics, Expires: t.Expires}}, nil
}

// revoke revokes tokens and returns how many were valid before. A relay revokes one at a time, by its jti,
// and only one of the caller's tenant. Any other selector is refused before a request is sent.
func (f *tokenFlags) revoke(cmd *cobra.Command, req auth.RevokeRequest) (int, error) {
	if !f.isRemote(cmd) {
		s, err := openStore(cmd, f.stateDir, true)
		if err != nil {
			return 0, err
		}
		defer func() { _ = s.Close() }()
		n := 0
		r := kernel.Record{Tenant: req.Tenant, Tool: "tokens.revoke", Target: cmp.Or(req.JTI, req.Subject, req.Node, req.Tenant)}
		if jti, ok := manifest.ParseULID(req.JTI); ok {
			r.Target = jti
			if r.Tenant, err = s.TokenTenant(cmd.Context(), jti); err != nil {
				return 0, err
			}
		}
		err = localChange(cmd, f.stateDir, r, req.DryRun, func(*kernel.Record) (err error) {
			n, err = s.Revoke(cmd.Context(), req)
			return err
		})
		return n, err
	}
	switch _, ok := manifest.ParseULID(req.JTI); {
	case cmd.Flags().Changed("state-dir"):
		return 0, errTwoWays()
	case !ok:
		return 0, cli.Errorf(cli.ExitUsage, "a relay revokes a token by its --jti; for a board: agentctl node revoke NODE")
	}
	rc, err := f.relay.Client()
	if err != nil {
		return 0, err
	}
	return rc.RevokeToken(cmd.Context(), req.JTI, req.DryRun)
}
