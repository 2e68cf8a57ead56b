package auth

import (
	"encoding/base64"
	"errors"
	"slices"
	"strings"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/zap"
)

// Verify authenticates the holder of a token. The token must be of one of the given
// classes; with none given, any class passes. The error is an *Error of kind
// ErrMissing, ErrInvalid, ErrRevoked, ErrClass or ErrScope and holds nothing of the
// token.
//
// A cached token costs one SHA-256 (0.6 us), any other an Ed25519 check (70 us).
func (s *Store) Verify(token string, class ...string) (*Identity, error) {
	id, err := s.verify(token)
	if err == nil && len(class) > 0 && !slices.Contains(class, id.Class) {
		err = errClass
	}
	if err != nil {
		return nil, err
	}
	return id, nil
}

// verify is Verify without the check of the class. The class is not part of the cached
// result: the same token may be valid for one route and not for another.
func (s *Store) verify(token string) (*Identity, error) {
	switch {
	case token == "":
		return nil, errMissing
	case len(token) > MaxTokenLen: // before it is hashed
		return nil, errMalformed
	}
	key := tokenHash(token)
	if id := s.cache.get(key); id != nil {
		return id, s.Active(id)
	}
	id, err := s.checkToken(token)
	if err != nil {
		return nil, err
	}
	s.cache.add(key, id)
	return id, s.Active(id)
}

// checkToken makes all checks of a token that is not cached, except the deny list.
func (s *Store) checkToken(token string) (*Identity, error) {
	if !wellFormed(token) {
		return nil, errMalformed
	}
	signed, encoded := token[:strings.LastIndexByte(token, '.')], token[strings.LastIndexByte(token, '.')+1:]
	headPart, claimsPart, _ := strings.Cut(signed, ".")
	// Until the signature is verified, only alg, typ, kid and iss are used of the token: to find
	// the key.
	var head header
	var c claims
	if !decodePart(headPart, &head) || !head.ok() {
		return nil, errHeader
	}
	signature, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if err != nil || !decodePart(claimsPart, &c) {
		return nil, errMalformed
	}
	key := s.lookupKey(c.Iss.value, head.Kid.value)
	switch {
	case key == nil && c.Iss.value != s.relay.Issuer:
		return nil, errIssuer
	case key == nil || key.expired(s.now().Unix()):
		return nil, errKey
	case jwt.SigningMethodEdDSA.Verify(signed, signature, key.public) != nil:
		return nil, errSignature
	}
	validator := s.validator
	if c.Cnf.present {
		validator = s.boundValidator
	}
	if err := validator.Validate(c.registered()); err != nil {
		return nil, refusalOf(err)
	}
	id, ok := c.identity()
	if !ok {
		return nil, errClaims
	}
	id.key = key
	return id, s.checkScope(id)
}

// checkScope denies a token that grants nothing. Until Options.ScopelessUntil an agent
// token without a scope claim counts as tools:call:read_only (RFC-0006 §4.1).
func (s *Store) checkScope(id *Identity) error {
	end := s.scopelessUntil
	if id.hasNoScopeClaim && id.Class == ClassAgent && !end.IsZero() {
		if !s.now().Before(end) {
			return errScopelessEnded
		}
		id.Scopes, id.validUntil = Scopes{relay: bitCallReadOnly}, min(id.validUntil, end.Unix())
		s.scopelessWarning.Do(func() {
			s.log.Warn("a token without a scope was accepted as tools:call:read_only; create new ones (agentctl token create) before the tolerance ends",
				zap.Time("until", end))
		})
	}
	if id.Scopes.IsZero() {
		return errNoScope
	}
	return nil
}

// jwtRefusals translates errors of the jwt library. The order matters: an error may
// match several, and the first one counts.
var jwtRefusals = []struct {
	is      error
	refusal *Error
}{
	{jwt.ErrTokenInvalidIssuer, errIssuer},
	{jwt.ErrTokenInvalidAudience, errAudience},
	{jwt.ErrTokenExpired, errExpired},
	{jwt.ErrTokenNotValidYet, errNotYet},
}

// refusalOf turns an error of the jwt library into one of ours. It drops the library's
// text, which may quote a claim.
func refusalOf(err error) error {
	for _, r := range jwtRefusals {
		if errors.Is(err, r.is) {
			return r.refusal
		}
	}
	return errClaims
}
