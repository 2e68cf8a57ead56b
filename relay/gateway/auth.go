package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"agentctl/relay/topic"
	"agentctl/transport/edge"
)

// Scopes that the gateway requires.
const (
	ScopeSubscribe = "events:subscribe"
	ScopeIngest    = "events:ingest"
	ScopeAdmin     = "kernel:admin"
)

// Identity is the authenticated sender of a request. It decides what a request sees and
// what it may cost.
type Identity struct {
	Tenant  string
	Subject string // quotas and rates are counted by tenant and subject
	Scopes  interface{ Has(scope string) bool }
	Topics  topic.Patterns // that the token is limited to; nil: all
	Active  func() error   // fails once the identity has ended; called once a second; nil: it cannot end

	isShared bool // by all holders of a configured token, or by all callers
}

// key identifies the identity in quotas and rates.
func (id *Identity) key() string { return id.Tenant + "\n" + id.Subject }

// Authenticator checks bearer tokens that are not the configured ones.
type Authenticator interface {
	// Authenticate reads the token of a request; the gateway checks the scope that the
	// endpoint needs. It returns ErrNoToken when the request has none, an error that wraps
	// ErrForbidden for a valid token that may not do this, and any other error for an
	// invalid one.
	Authenticate(r *http.Request) (Identity, error)
}

// Errors of an Authenticator.
var (
	ErrNoToken   = errors.New("a bearer token is needed")
	ErrForbidden = errors.New("this token may not do that")
)

var errInvalidToken = errors.New("the token is not valid on this gateway")

// A configured token does not prove an identity. All holders of it share one identity, as do
// all callers of a gateway without one. A shared identity has a higher rate and no quota,
// since its users would block each other.

// sharedScopes are the scopes of a shared identity: subscribe and ingest.
type sharedScopes struct{}

func (sharedScopes) Has(scope string) bool { return scope == ScopeSubscribe || scope == ScopeIngest }

func sharedIdentity(subject string) Identity {
	return Identity{Tenant: DefaultTenant, Subject: subject, Scopes: sharedScopes{}, isShared: true}
}

// identify returns the identity of a request, which must have the scope, and counts the
// connection as the identity's.
func (g *Gateway) identify(r *http.Request, scope string) (Identity, error) {
	id, err := g.checkToken(r, scope)
	switch {
	case err != nil:
		return Identity{}, err
	case id.isShared:
		edge.ConnOf(r).MarkKnown() // its users would block each other
		return id, nil
	}
	return id, edge.ConnOf(r).Authenticate(edge.Identity{Tenant: id.Tenant, Subject: id.Subject})
}

// checkToken returns the identity of a request, which must have the scope. It accepts, in this
// order: a ticket, no token if none is configured, the configured token, a token that the
// Authenticator knows.
func (g *Gateway) checkToken(r *http.Request, scope string) (Identity, error) {
	access := g.access.Load()
	configured := access.SubscribeToken
	if scope == ScopeIngest {
		configured = access.IngestToken
	}
	if ticket := r.URL.Query().Get("ticket"); ticket != "" && scope == ScopeSubscribe {
		return g.tickets.identity(ticket, time.Now())
	}
	if configured == "" && g.opts.Identities == nil {
		return sharedIdentity("anonymous"), nil
	}
	token, _ := edge.Bearer(r)
	switch {
	case token == "":
		return Identity{}, ErrNoToken
	case configured != "" && equalTokens(token, configured):
		id := sharedIdentity("token")
		id.Active = func() error { return g.checkShared(scope, configured) }
		return id, nil
	case g.opts.Identities == nil:
		return Identity{}, errInvalidToken
	}
	id, err := g.opts.Identities.Authenticate(r)
	if err != nil {
		return Identity{}, err
	}
	if id.Scopes == nil || !id.Scopes.Has(scope) {
		return Identity{}, fmt.Errorf("%w: it lacks the scope %s", ErrForbidden, scope)
	}
	return id, nil
}

// equalTokens compares hashes in constant time, so that timing reveals nothing about the
// token, not even its length.
func equalTokens(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// maxLimited bounds the identities whose rate is tracked; further ones are refused until some
// have been idle long enough to be dropped.
const maxLimited = 4096

// burst returns the size of a token bucket: two seconds' worth of tokens.
func burst(rate float64) int { return max(1, int(math.Ceil(2*rate))) }
