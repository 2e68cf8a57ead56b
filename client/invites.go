package client

import (
	"context"
	"net/http"
	"net/url"
)

// Invite is a code that boards or agents join with, without the code itself.
type Invite struct {
	Prefix      string   `json:"prefix"` // first group of the code, which names the invite
	Class       string   `json:"class"`  // board or agent
	Tenant      string   `json:"tenant_id"`
	Name        string   `json:"name,omitempty"`   // of the board or agent
	Tags        []string `json:"tags"`             // set on the boards
	Scopes      string   `json:"scopes"`           // of the agents, separated by spaces
	Topics      []string `json:"topics,omitempty"` // of the agents; none: all
	Uses        int      `json:"uses"`
	Used        int      `json:"used"`
	Creator     string   `json:"creator,omitempty"`
	CreatedAtMS int64    `json:"created_at_ms"`
	ExpiresAtMS int64    `json:"expires_at_ms"`
	State       string   `json:"state"` // open, used, expired or revoked
}

// NewInvite is an invite with what its holder needs. Code is a secret, and is in no other
// answer.
type NewInvite struct {
	Code     string  `json:"code"`      // "" in a dry run
	URL      string  `json:"url"`       // of the relay; "": not known
	CASHA256 *string `json:"ca_sha256"` // hash of the relay's own authority; nil: it has none
	Invite
}

// InviteRequest describes an invite to make. Empty fields have the relay's defaults.
type InviteRequest struct {
	Class  string   `json:"class,omitempty"`
	Name   string   `json:"name,omitempty"`
	Tags   []string `json:"tags,omitempty"`
	Scopes []string `json:"scopes,omitempty"`     // in place of those of an agent
	Add    []string `json:"add_scopes,omitempty"` // besides them
	Topics []string `json:"topics,omitempty"`     // that the scopes for events are limited to
	Uses   int      `json:"uses,omitempty"`
	TTLMS  int64    `json:"ttl_ms,omitempty"`
	Tenant string   `json:"tenant_id,omitempty"`
}

// CreateInvite makes an invite. It needs the scope invites:write, as the other two do. With
// dryRun the relay checks and answers, and changes nothing.
func (c *Client) CreateInvite(ctx context.Context, req InviteRequest, dryRun bool) (*NewInvite, error) {
	v := new(NewInvite)
	return v, c.inviteRequest(ctx, http.MethodPost, "", req, dryRun, v)
}

// Invites lists the tenant's invites, newest first.
func (c *Client) Invites(ctx context.Context) ([]Invite, error) {
	var v struct {
		Invites []Invite `json:"invites"`
	}
	err := c.inviteRequest(ctx, http.MethodGet, "", nil, false, &v)
	return v.Invites, err
}

// RevokeInvite stops an invite, by its prefix (enrollment.CodePrefix).
func (c *Client) RevokeInvite(ctx context.Context, prefix string, dryRun bool) (*Invite, error) {
	v := new(Invite)
	return v, c.inviteRequest(ctx, http.MethodDelete, "/"+url.PathEscape(prefix), nil, dryRun, v)
}

func (c *Client) inviteRequest(ctx context.Context, method, suffix string, body any, dryRun bool, v any) error {
	return c.adminRequest(ctx, method, "/v1/invites"+suffix, body, dryRun, v)
}
