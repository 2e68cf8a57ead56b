package relay

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/topic"
	"agentctl/strictjson"
)

// Tokens over HTTP, with a token that has tokens:write. All of them are the tenant's.
//
//	GET    /v1/self          self, with any token of an agent
//	POST   /v1/tokens        createToken
//	GET    /v1/tokens        listTokens
//	DELETE /v1/tokens/JTI    revokeToken

// Rows of one page of GET /v1/tokens.
const (
	defaultTokensPage = 1000
	maxTokensPage     = 5000
)

// tokenBody is the body of POST /v1/tokens; every member is optional.
type tokenBody struct {
	Class   string   `json:"class"` // default agent
	Tenant  string   `json:"tenant"`
	Subject string   `json:"subject"`
	Scopes  []string `json:"scopes"`     // in place of those of the class
	Add     []string `json:"add_scopes"` // besides them
	Topics  []string `json:"topics"`     // default: those of the caller
	Node    string   `json:"node"`       // devices: id, name or id prefix of a registered board; default: a new one
	TTLMS   int64    `json:"ttl_ms"`
}

// createToken serves POST /v1/tokens. The answer has the token, which is in no other answer
// and is not stored. What a caller may give away is bounded by its token (creator).
func (r *Relay) createToken(a *adminCall) (adminChange, error) {
	var b tokenBody
	if len(a.body) > 0 && strictjson.Unmarshal(a.body, &b) != nil {
		return nil, badRequest("body", "the body is one strict JSON object with class, tenant, subject, scopes, add_scopes, topics, node and ttl_ms, all optional")
	}
	if b.Class == "" {
		b.Class = "agent"
	}
	if b.TTLMS < 0 || b.TTLMS > auth.MaxTTL.Milliseconds() {
		return nil, badRequest("body", "ttl_ms is at most 10 years")
	}
	return func() (any, error) {
		minted, err := r.store.Mint(a.req.Context(), auth.MintRequest{
			Class: b.Class, Tenant: b.Tenant, Subject: b.Subject, Scopes: b.Scopes, NodeID: b.Node,
			AddScopes: b.Add, Topics: b.Topics, PluginScopes: r.processes.Scopes(),
			TTL: time.Duration(b.TTLMS) * time.Millisecond, DryRun: a.dryRun, Creator: a.creator(),
		})
		if err != nil {
			return nil, mintError(err)
		}
		a.record.NodeID, a.record.Target = minted[0].NodeID, minted[0].JTI
		return minted[0], nil
	}, nil
}

// self serves GET /v1/self: whose token this is, and what it may do. Any agent token may ask.
func (r *Relay) self(w http.ResponseWriter, req *http.Request) {
	c, err := r.httpCaller(req)
	if err != nil {
		r.writeDenied(w, req, err)
		return
	}
	body := struct {
		Tenant string         `json:"tenant"`
		Agent  string         `json:"agent_id"`
		Scopes []string       `json:"scopes"`
		Topics topic.Patterns `json:"topics,omitempty"`
	}{Tenant: c.Tenant, Agent: c.Actor, Scopes: []string{}}
	switch scopes := c.Scopes.(type) {
	case *auth.Identity:
		body.Scopes, body.Topics = scopes.Scopes.Words(), scopes.Topics()
	case auth.Scopes: // Options.Anonymous
		body.Scopes = scopes.Words()
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, body)
}

// mintError is the answer to a failed Mint. It quotes nothing of the request but names of scopes,
// and does not say whether a node of another tenant exists.
func mintError(err error) error {
	switch scope := new(auth.ScopeError); {
	case errors.As(err, &scope):
		return badRequest("scope", scope.Error())
	case errors.Is(err, auth.ErrNoNode), errors.Is(err, auth.ErrForeignNode):
		return kernel.NodeDenied()
	case errors.Is(err, auth.ErrAmbiguous):
		return badRequest("ambiguous", "more than one node id begins with this; give more of it")
	case errors.Is(err, auth.ErrFull):
		return &manifest.Error{Code: manifest.Internal, Reason: "storage", Message: "the relay has recorded as many tokens as it can"}
	case errors.Is(err, auth.ErrRequest):
		return badRequest("token", "class is agent, tenant-admin, operator, admin or device; scopes are those of the class; topics, for agents with a scope for events, are names such as log/level or prefixes such as log/*; "+
			"subject, for agents, is 1 to 64 letters, digits and ._:@-; node is for class device; ttl_ms is 1000 to 315360000000")
	}
	return err // an *auth.Error, or one that AsError makes neutral
}

// listTokens serves GET /v1/tokens?before=JTI&limit=N, newest first: a jti is a ULID, which begins with
// its time. `next` is the before of the next page, absent on the last one.
func (r *Relay) listTokens(a *adminCall) (any, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	before, limit, err := tokenPage(a.req.URL.Query())
	if err != nil {
		return nil, err
	}
	list, more, err := r.store.TenantTokens(a.req.Context(), a.caller.Tenant, before, limit)
	if err != nil {
		return nil, err
	}
	body := struct {
		Tokens []auth.TokenInfo `json:"tokens"`
		Next   string           `json:"next,omitempty"`
	}{Tokens: list}
	if more {
		body.Next = list[len(list)-1].JTI
	}
	return body, nil
}

// tokenPage reads the parameters of GET /v1/tokens.
func tokenPage(v url.Values) (before string, limit int, err error) {
	limit = defaultTokensPage
	if s := v.Get("limit"); s != "" {
		if limit, err = strconv.Atoi(s); err != nil || limit < 1 || limit > maxTokensPage {
			return "", 0, badRequest("limit", "limit is a number from 1 to 5000")
		}
	}
	if s := v.Get("before"); s != "" {
		var ok bool
		if before, ok = manifest.ParseULID(s); !ok {
			return "", 0, badRequest("before", "before is a jti")
		}
	}
	return before, limit, nil
}

// revokeToken serves DELETE /v1/tokens/JTI. A token of another tenant gets the answer of one
// that does not exist.
func (r *Relay) revokeToken(a *adminCall) (adminChange, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	jti, ok := manifest.ParseULID(strings.TrimPrefix(a.req.URL.Path, tokensPath))
	noToken := badRequest("unknown_token", "your tenant has no token with this jti; GET /v1/tokens lists them")
	if !ok {
		return nil, noToken
	}
	a.record.Target = jti
	return func() (any, error) {
		count, err := r.store.Revoke(a.req.Context(), auth.RevokeRequest{JTI: jti, InTenant: a.caller.Tenant, DryRun: a.dryRun})
		if errors.Is(err, auth.ErrNoToken) {
			return nil, noToken
		}
		return struct {
			JTI           string `json:"jti"`
			RevokedTokens int    `json:"revoked_tokens"`
		}{jti, count}, err
	}, nil
}
