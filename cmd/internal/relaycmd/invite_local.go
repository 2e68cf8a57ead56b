package relaycmd

import (
	"cmp"
	"context"
	"errors"
	"time"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// localInvites is inviteAdmin on a relay's state directory. A relay that runs there sees the
// changes at once. Its answers have the types of the HTTP API, so that a command prints the same
// whichever way it was used.
//
// An *auth.Error has its text for people in Message, without the name of the package: commands print that.
type localInvites struct {
	store    *auth.Store
	stateDir string       // for the plugin directory, whose manifests declare scopes
	tenant   string       // for lists and revocations; "": any
	change   stateChanger // records each change in the audit log of the state directory
}

// CreateInvite implements inviteAdmin. The address and the pin are those with which the relay last
// started, "" and nil before its first start. The invite has no creator: only its own revocation, or
// that of its tenant, ends it early.
func (l *localInvites) CreateInvite(ctx context.Context, req client.InviteRequest, dryRun bool) (*client.NewInvite, error) {
	at, err := l.store.Endpoint()
	if err != nil {
		return nil, err
	}
	dir, err := scopesOfPlugins(l.store, l.stateDir, req.Scopes, req.Add)
	if err != nil {
		return nil, err
	}
	var inv *auth.Invite
	var code string
	err = l.change(kernel.Record{Tenant: cmp.Or(req.Tenant, auth.DefaultTenant), Tool: "invites.create"}, dryRun, func(r *kernel.Record) (err error) {
		inv, code, err = l.store.CreateInvite(ctx, auth.InviteRequest{Class: req.Class, Tenant: req.Tenant, Name: req.Name, Tags: req.Tags,
			Scopes: req.Scopes, AddScopes: req.Add, Topics: req.Topics, PluginScopes: dir.scopes, Uses: req.Uses, TTL: time.Duration(req.TTLMS) * time.Millisecond, DryRun: dryRun})
		if err == nil {
			r.Target = inv.Prefix
		}
		return err
	})
	if bad, ok := errors.AsType[*auth.Error](err); ok { // over HTTP it is a bad request, which exits with 2 too
		return nil, cli.Errorf(cli.ExitUsage, "%s", bad.Message)
	}
	if errors.Is(err, auth.ErrRequest) {
		return nil, cli.Errorf(cli.ExitUsage, "%w", dir.explain(err))
	}
	if err != nil {
		return nil, err
	}
	v := &client.NewInvite{Code: code, URL: at.URL, Invite: clientInvite(inv)}
	if at.CASHA256 != "" {
		v.CASHA256 = &at.CASHA256
	}
	return v, nil
}

// Invites implements inviteAdmin. The order is that of the store, the newest first.
func (l *localInvites) Invites(ctx context.Context) ([]client.Invite, error) {
	list, err := l.store.Invites(ctx, l.tenant)
	rows := make([]client.Invite, 0, len(list)) // in JSON an empty list is [] and not null
	for i := range list {
		rows = append(rows, clientInvite(&list[i]))
	}
	return rows, err
}

// RevokeInvite implements inviteAdmin. Revoking twice is no error. A prefix that no invite has is one, with
// exit code 1: it is a word that was mistyped, or an invite that was deleted some time after its end.
func (l *localInvites) RevokeInvite(ctx context.Context, prefix string, dryRun bool) (*client.Invite, error) {
	var inv *auth.Invite
	err := l.change(kernel.Record{Tenant: l.tenant, Tool: "invites.revoke", Target: prefix}, dryRun, func(r *kernel.Record) (err error) {
		if inv, err = l.store.RevokeInvite(ctx, l.tenant, prefix, dryRun); err == nil {
			r.Tenant = inv.Tenant
		}
		return err
	})
	if bad, ok := errors.AsType[*auth.Error](err); ok {
		return nil, cli.Errorf(cli.ExitFailure, "%s", bad.Message)
	}
	if err != nil {
		return nil, err
	}
	v := clientInvite(inv)
	return &v, nil
}

// clientInvite is an invite as commands print it, which is as the relay's API has it. What the store keeps
// beside that, such as the jti of the creator's token, is not for output.
func clientInvite(i *auth.Invite) client.Invite {
	return client.Invite{Prefix: i.Prefix, Class: i.Class, Tenant: i.Tenant, Name: i.Name, Tags: i.Tags, Scopes: i.Scopes.String(), Topics: i.Topics, Uses: i.Uses, Used: i.Used,
		Creator: i.Creator, CreatedAtMS: i.CreatedAtMS, ExpiresAtMS: i.ExpiresAtMS, State: i.State}
}
