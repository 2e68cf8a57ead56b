package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"agentctl/manifest"
)

// NodeAttributes are what people know a node by.
type NodeAttributes struct {
	Name        string   `json:"name"`
	NameSet     bool     `json:"name_set"` // by an operator or an invite; false: the board proposed it
	Tags        []string `json:"tags"`     // sorted
	Description string   `json:"description"`
}

// NodePatch is a change of a node's attributes. What is nil or empty stays as it is.
type NodePatch struct {
	Name        *string  `json:"name,omitempty"` // "" returns to the name that the board proposes
	AddTags     []string `json:"add_tags,omitempty"`
	RemoveTags  []string `json:"remove_tags,omitempty"`
	Description *string  `json:"description,omitempty"` // "" removes it
}

// NodeChange is what a NodePatch did.
type NodeChange struct {
	NodeID string         `json:"node_id"`
	Before NodeAttributes `json:"before"`
	After  NodeAttributes `json:"after"`
	// Displaced is the node that had proposed the name, and DisplacedName what it is called
	// now; both are empty if there was none.
	Displaced     string `json:"displaced,omitempty"`
	DisplacedName string `json:"displaced_name,omitempty"`
}

// NodeStopped is a node whose tokens were revoked, or that was removed.
type NodeStopped struct {
	NodeID        string `json:"node_id"`
	Name          string `json:"name"`
	NameSet       bool   `json:"name_set"`
	RevokedTokens int    `json:"revoked_tokens"`
}

// PatchNode changes the attributes of a node. ref is its id, its name or a unique prefix of
// its id. With dryRun the relay checks and answers, and changes nothing. It needs the scope
// nodes:write.
func (c *Client) PatchNode(ctx context.Context, ref string, p NodePatch, dryRun bool) (*NodeChange, error) {
	return nodeRequest[NodeChange](ctx, c, http.MethodPatch, ref, "", p, dryRun)
}

// RevokeNode revokes the tokens of a node, which stays registered. See PatchNode.
func (c *Client) RevokeNode(ctx context.Context, ref string, dryRun bool) (*NodeStopped, error) {
	return nodeRequest[NodeStopped](ctx, c, http.MethodPost, ref, "/revoke", nil, dryRun)
}

// RemoveNode makes the relay forget a node and revokes its tokens. See PatchNode.
func (c *Client) RemoveNode(ctx context.Context, ref string, dryRun bool) (*NodeStopped, error) {
	return nodeRequest[NodeStopped](ctx, c, http.MethodDelete, ref, "", nil, dryRun)
}

// nodeRequest sends a request about one node. A text that cannot name a node is not sent: it
// could be a path by itself.
func nodeRequest[T any](ctx context.Context, c *Client, method, ref, suffix string, body any, dryRun bool) (*T, error) {
	if !manifest.ValidNodeName(ref) {
		return nil, refError(ErrNotFound, "node", "no node has the id, the name or the id prefix %q", ref)
	}
	v := new(T)
	return v, c.adminRequest(ctx, method, "/v1/nodes/"+url.PathEscape(ref)+suffix, body, dryRun, v)
}

// adminRequest sends an administrative request and decodes its answer into v.
func (c *Client) adminRequest(ctx context.Context, method, path string, body any, dryRun bool, v any) error {
	if dryRun {
		path += "?dry_run=true"
	}
	return c.request(ctx, method, path, body, v)
}

// TokenRequest describes a token to make. Empty fields have the relay's defaults.
type TokenRequest struct {
	Class   string   `json:"class,omitempty"`
	Tenant  string   `json:"tenant,omitempty"`
	Subject string   `json:"subject,omitempty"`
	Scopes  []string `json:"scopes,omitempty"`     // in place of those of the class
	Add     []string `json:"add_scopes,omitempty"` // besides them
	Topics  []string `json:"topics,omitempty"`     // that the scopes for events are limited to; default: those of the caller
	Node    string   `json:"node,omitempty"`       // devices: a registered node; default: a new one
	TTLMS   int64    `json:"ttl_ms,omitempty"`
}

// NewToken is a token that the relay has made. Token is a secret, and is in no other answer.
type NewToken struct {
	Token   string    `json:"token,omitempty"` // "" in a dry run
	JTI     string    `json:"jti"`
	Class   string    `json:"class"`
	Tenant  string    `json:"tenant"`
	Subject string    `json:"subject"`
	NodeID  string    `json:"node_id,omitempty"`
	Scopes  string    `json:"scopes"`           // separated by spaces
	Topics  []string  `json:"topics,omitempty"` // that the scopes for events are limited to; none: all
	Expires time.Time `json:"expires"`
}

// Self is what the relay knows of the holder of a token.
type Self struct {
	Tenant string   `json:"tenant"`
	Agent  string   `json:"agent_id"`
	Scopes []string `json:"scopes"`
	Topics []string `json:"topics,omitempty"` // that the scopes for events are limited to; none: all
}

// Self asks the relay whose token this is and what it may do.
func (c *Client) Self(ctx context.Context) (*Self, error) {
	v := new(Self)
	return v, c.request(ctx, http.MethodGet, "/v1/self", nil, v)
}

// CreateToken makes a token in the caller's tenant. It needs the scope tokens:write; the new
// token holds no scope that the caller's lacks, except device:connect.
func (c *Client) CreateToken(ctx context.Context, req TokenRequest, dryRun bool) (*NewToken, error) {
	v := new(NewToken)
	return v, c.adminRequest(ctx, http.MethodPost, "/v1/tokens", req, dryRun, v)
}

// RevokeToken revokes a token of the caller's tenant, and returns how many live ones that
// stopped. It needs the scope tokens:write.
func (c *Client) RevokeToken(ctx context.Context, jti string, dryRun bool) (revoked int, err error) {
	if _, ok := manifest.ParseULID(jti); !ok {
		return 0, refError(ErrMalformed, "token", "not the jti of a token: %q", jti)
	}
	var v struct {
		RevokedTokens int `json:"revoked_tokens"`
	}
	err = c.adminRequest(ctx, http.MethodDelete, "/v1/tokens/"+url.PathEscape(jti), nil, dryRun, &v)
	return v.RevokedTokens, err
}
