package gateway

import (
	"cmp"
	"errors"
)

// Access is who may use a gateway, as in Options. It can change while the gateway serves.
type Access struct {
	SubscribeToken string
	IngestToken    string // default SubscribeToken
	AllowOrigins   []string
}

var errOpenness = errors.New("a gateway that needs a token cannot become open while it serves, nor the other way round; restart it")

// SetAccess replaces the configured tokens and origins. Streams that were opened with a token
// that is no longer configured end within a second. It changes nothing if it returns an error.
func (g *Gateway) SetAccess(a Access) error {
	// Where the gateway listens was decided by whether it needs a token.
	if g.opts.Identities == nil && (a.SubscribeToken == "") != (g.opts.SubscribeToken == "") {
		return errOpenness
	}
	a.IngestToken = cmp.Or(a.IngestToken, a.SubscribeToken)
	if g.opts.Identities == nil && (a.IngestToken == "") != (g.opts.IngestToken == "") {
		return errOpenness
	}
	g.access.Store(&a)
	for _, guard := range g.guards {
		guard.SetOrigins(a.AllowOrigins)
	}
	return nil
}

// checkShared returns an error when a token that was accepted is no longer configured.
func (g *Gateway) checkShared(scope, token string) error {
	access := g.access.Load()
	if token == access.SubscribeToken && scope != ScopeIngest || token == access.IngestToken && scope == ScopeIngest {
		return nil
	}
	return errInvalidToken
}
