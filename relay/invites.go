package relay

import (
	"errors"
	"strings"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/strictjson"
)

// Invites over HTTP, with a token that has invites:write. All of them are the tenant's.
//
//	POST   /v1/invites          createInvite
//	GET    /v1/invites          listInvites
//	DELETE /v1/invites/PREFIX   revokeInvite
const invitesPath = "/v1/invites"

// inviteBody is the body of POST /v1/invites; every member is optional.
type inviteBody struct {
	Class  string   `json:"class"`
	Name   string   `json:"name"`
	Tags   []string `json:"tags"`
	Scopes []string `json:"scopes"`     // in place of those of an agent
	Add    []string `json:"add_scopes"` // besides them
	Topics []string `json:"topics"`     // default: those of the caller
	Uses   int      `json:"uses"`
	TTLMS  int64    `json:"ttl_ms"`
	Tenant string   `json:"tenant_id"`
}

// createdInvite is the answer: the invite, its code, and where to join with it. The code is
// in no other answer, and is not stored.
type createdInvite struct {
	Code     string  `json:"code,omitempty"` // none in a dry run
	URL      string  `json:"url"`
	CASHA256 *string `json:"ca_sha256"`
	*auth.Invite
}

// createInvite serves POST /v1/invites. What a caller may give away is bounded by its token (creator); the
// invite is void once that token is revoked.
func (r *Relay) createInvite(a *adminCall) (adminChange, error) {
	var body inviteBody
	if len(a.body) > 0 && strictjson.Unmarshal(a.body, &body) != nil {
		return nil, badRequest("body", "the body is one strict JSON object with class, name, tags, scopes, add_scopes, topics, uses, ttl_ms and tenant_id, all optional")
	}
	if body.TTLMS < 0 || body.TTLMS > auth.MaxInviteTTL.Milliseconds() {
		return nil, badRequest("body", "ttl_ms is at most 365 days")
	}
	return func() (any, error) {
		inv, code, err := r.store.CreateInvite(a.req.Context(), auth.InviteRequest{
			Class: body.Class, Tenant: body.Tenant, Name: body.Name, Tags: body.Tags, Scopes: body.Scopes, Uses: body.Uses,
			AddScopes: body.Add, Topics: body.Topics, PluginScopes: r.processes.Scopes(),
			TTL: time.Duration(body.TTLMS) * time.Millisecond, DryRun: a.dryRun,
			Creator: a.creator(),
		})
		if err != nil {
			return nil, inviteError(err)
		}
		a.record.Reason = inv.Prefix // "" in a dry run
		answer := createdInvite{Code: code, URL: r.URL(), Invite: inv}
		if sum := r.CASHA256(); sum != "" {
			answer.CASHA256 = &sum
		}
		return answer, nil
	}, nil
}

// inviteError gives a full table its own message: the tenant can do something about it. A scope
// that there is not is named, other mistakes of an agent's scopes and topics are in constant words.
func inviteError(err error) error {
	switch scope, denied := new(auth.ScopeError), new(auth.Error); {
	case errors.Is(err, auth.ErrFull):
		return &manifest.Error{Code: manifest.Internal, Reason: "storage", Message: "too many invites are open; revoke some, or make one with more uses"}
	case errors.As(err, &scope):
		return badRequest("scope", scope.Error())
	case errors.Is(err, auth.ErrRequest) && !errors.As(err, &denied):
		return badRequest("request", "scopes are those of an agent; topics, with a scope for events, are names such as log/level or prefixes such as log/*")
	}
	return err
}

// listInvites serves GET /v1/invites. A tenant has at most 1000 invites.
func (r *Relay) listInvites(a *adminCall) (any, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	list, err := r.store.Invites(a.req.Context(), a.caller.Tenant)
	return map[string]any{"invites": list}, err
}

// revokeInvite serves DELETE /v1/invites/PREFIX. It refuses a whole code, which would end up
// in the logs of proxies.
func (r *Relay) revokeInvite(a *adminCall) (adminChange, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	ref := strings.TrimPrefix(a.req.URL.Path, invitesPath+"/")
	prefix, err := enrollment.CodePrefix(ref)
	if err != nil || len(ref) > len(prefix) {
		return nil, badRequest("invite", "give the first four characters of the code, as GET /v1/invites lists them")
	}
	a.record.Reason = prefix
	return func() (any, error) { return r.store.RevokeInvite(a.req.Context(), a.caller.Tenant, prefix, a.dryRun) }, nil
}
