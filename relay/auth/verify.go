package auth

import (
	"encoding/base64"
	"errors"
	"regexp"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"

	"agentctl/manifest"
)

// Bounds of a token.
const (
	MaxTokenLen = 4 << 10
	Leeway      = 60 * time.Second          // on nbf and exp, for clocks that differ
	MaxTTL      = 10 * 365 * 24 * time.Hour // a token that claims a longer life is refused
	tokenType   = "at+jwt"

	leewaySeconds = int64(Leeway / time.Second)
	maxUnix       = 253402300799 // end of the year 9999
)

// wellFormed is asked before anything is split, decoded or hashed: at most 4 KiB, two
// dots, no empty part, and base64url characters alone (the decoder would skip line
// breaks).
func wellFormed(token string) bool {
	if len(token) > MaxTokenLen {
		return false
	}
	dots, part := 0, 0
	for i := 0; i < len(token); i++ {
		c := token[i]
		switch {
		case c >= 'A' && c <= 'Z', c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_':
			part++
		case c == '.' && part > 0:
			dots, part = dots+1, 0
		default:
			return false
		}
	}
	return dots == 2 && part > 0
}

// jsonString and number are JSON values of exactly that kind; null is neither.
type (
	jsonString struct {
		present bool
		value   string
	}
	jsonNumber struct {
		present bool
		value   int64
	}
)

var errClaimType = errors.New("wrong kind of value")

func (t *jsonString) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	tok, err := dec.ReadToken()
	if err != nil {
		return err
	}
	if tok.Kind() != '"' {
		return errClaimType
	}
	t.present, t.value = true, tok.String()
	return nil
}

func (n *jsonNumber) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	val, err := dec.ReadValue()
	if err != nil {
		return err
	}
	if val.Kind() != '0' {
		return errClaimType
	}
	n.present = true
	return json.Unmarshal(val, &n.value) // an integer in range, or an error
}

// header is the protected header of a token. Unknown members are refused: jku, jwk,
// x5u, x5c and crit among them.
type header struct {
	Alg jsonString `json:"alg"`
	Typ jsonString `json:"typ"`
	Kid jsonString `json:"kid"`
}

func parseHeader(token string) (header, bool) {
	var h header
	seg, _, _ := strings.Cut(token, ".")
	b, err := base64.RawURLEncoding.Strict().DecodeString(seg)
	if err != nil || json.Unmarshal(b, &h, json.RejectUnknownMembers(true)) != nil {
		return h, false
	}
	return h, h.Alg.value == jwt.SigningMethodEdDSA.Alg() && h.Typ.value == tokenType && kidRE.MatchString(h.Kid.value)
}

// claims is the closed set of claims, decoded strictly: exact names, no duplicates, no
// other members. A claim that this relay does not know may be a restriction that a
// newer one put there; to ignore it would be to lift it.
type claims struct {
	Iss   jsonString `json:"iss"`
	Aud   jsonString `json:"aud"`
	Sub   jsonString `json:"sub"`
	Tid   jsonString `json:"tid"`
	Cls   jsonString `json:"cls"`
	Scope jsonString `json:"scope"`
	JTI   jsonString `json:"jti"`
	Iat   jsonNumber `json:"iat"`
	Nbf   jsonNumber `json:"nbf"`
	Exp   jsonNumber `json:"exp"`
	Gen   jsonNumber `json:"gen"`
	Iid   jsonString `json:"iid"`
}

// UnmarshalJSON is what the jwt library's decoder calls.
func (c *claims) UnmarshalJSON(b []byte) error {
	type plain claims // without this method
	*c = claims{}
	return json.Unmarshal(b, (*plain)(c), json.RejectUnknownMembers(true))
}

var _ jwt.Claims = (*claims)(nil)

// GetExpirationTime and its siblings give the jwt library what it validates.
func (c *claims) GetExpirationTime() (*jwt.NumericDate, error) { return c.Exp.numericDate() }

// GetIssuedAt returns the iat claim.
func (c *claims) GetIssuedAt() (*jwt.NumericDate, error) { return c.Iat.numericDate() }

// GetNotBefore returns the nbf claim.
func (c *claims) GetNotBefore() (*jwt.NumericDate, error) { return c.Nbf.numericDate() }

// GetIssuer returns the iss claim.
func (c *claims) GetIssuer() (string, error) { return c.Iss.value, nil }

// GetSubject returns the sub claim.
func (c *claims) GetSubject() (string, error) { return c.Sub.value, nil }

// GetAudience returns the aud claim, one string.
func (c *claims) GetAudience() (jwt.ClaimStrings, error) { return jwt.ClaimStrings{c.Aud.value}, nil }

func (n jsonNumber) numericDate() (*jwt.NumericDate, error) {
	if !n.present || n.value < 0 || n.value > maxUnix {
		return nil, errClaimType
	}
	return jwt.NewNumericDate(time.Unix(n.value, 0)), nil
}

var (
	subjectRE  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$`)
	instanceRE = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
)

func validSubject(s string) bool { return subjectRE.MatchString(s) }

// identity checks the meaning of verified claims.
func (c *claims) identity() (*Identity, bool) {
	jti, ok := manifest.ParseULID(c.JTI.value)
	id := &Identity{
		Tenant: c.Tid.value, Subject: c.Sub.value, Class: c.Cls.value, JTI: jti, Instance: c.Iid.value, Gen: int(c.Gen.value),
		Expires: time.Unix(c.Exp.value, 0), issuedAt: c.Iat.value, validUntil: c.Exp.value + leewaySeconds,
		Scopes: knownScopes(c.Scope.value) & classScopes(c.Cls.value), hasNoScopeClaim: !c.Scope.present,
	}
	device := id.Class == ClassDevice
	if device {
		id.NodeID = id.Subject
	}
	return id, ok && classScopes(id.Class) != 0 && manifest.ValidTenant(id.Tenant) &&
		c.Iat.present && c.Iat.value <= c.Exp.value && c.Exp.value-c.Iat.value <= int64(MaxTTL/time.Second) &&
		validSubject(id.Subject) && (!device || manifest.ValidNodeID(id.NodeID)) &&
		(device || !c.Gen.present && !c.Iid.present) && c.Gen.value >= 0 && c.Gen.value <= 1<<30 &&
		(!c.Iid.present || instanceRE.MatchString(id.Instance))
}

// newParser is the library's part of the checks: signature by one algorithm, aud, iss,
// exp and nbf.
func newParser(info relayInfo, now func() time.Time) *jwt.Parser {
	return jwt.NewParser(
		jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}),
		jwt.WithAudience(info.Audience), jwt.WithIssuer(info.Issuer),
		jwt.WithExpirationRequired(), jwt.WithNotBeforeRequired(), jwt.WithLeeway(Leeway),
		jwt.WithTimeFunc(now), jwt.WithStrictDecoding(),
	)
}

// Verify tells whose token it is. The token must be one of the given classes; with
// none given, of any. The error is an *Error of kind ErrMissing, ErrInvalid,
// ErrRevoked, ErrClass or ErrScope and holds nothing of the token.
//
// A token that was verified before costs a hash (0.6 us), any other an Ed25519 check
// (70 us).
func (s *Store) Verify(token string, class ...string) (*Identity, error) {
	id, err := s.verify(token)
	if err == nil && !classMatches(id.Class, class) {
		err = errClass
	}
	if err != nil {
		s.refused.Add(1)
		return nil, err
	}
	return id, nil
}

func (s *Store) verify(token string) (*Identity, error) {
	switch {
	case token == "":
		return nil, errMissing
	case len(token) > MaxTokenLen:
		return nil, errMalformed
	}
	key := tokenHash(token)
	id := s.cache.get(key)
	if id != nil {
		s.cacheHits.Add(1)
		return id, s.Active(id)
	}
	id, err := s.checkToken(token)
	if err != nil {
		return nil, err
	}
	s.cache.add(key, id)
	return id, s.Active(id)
}

// checkToken is the whole examination of a token that was not seen before, but for the
// deny list.
func (s *Store) checkToken(token string) (*Identity, error) {
	if !wellFormed(token) {
		return nil, errMalformed
	}
	head, ok := parseHeader(token)
	if !ok {
		return nil, errHeader
	}
	s.signatureChecks.Add(1)
	var c claims
	_, err := s.parser.ParseWithClaims(token, &c, func(*jwt.Token) (any, error) {
		key, ok := s.keyring.public[keyID{c.Iss.value, head.Kid.value}]
		if !ok && c.Iss.value != s.relay.Issuer {
			return nil, errIssuer
		}
		if !ok {
			return nil, errKey
		}
		return key, nil
	})
	if err != nil {
		return nil, refusalOf(err)
	}
	id, ok := c.identity()
	if !ok {
		return nil, errClaims
	}
	return id, s.checkScope(id)
}

// checkScope denies a token that grants nothing. An agent's token without any scope
// claim counts as tools:call:read_only while the tolerance of RFC-0006 §4.1 is on.
func (s *Store) checkScope(id *Identity) error {
	end := s.scopelessUntil
	if id.hasNoScopeClaim && id.Class == ClassAgent && !end.IsZero() {
		if !s.now().Before(end) {
			return errScopelessEnded
		}
		id.Scopes, id.validUntil = bitCallReadOnly, min(id.validUntil, end.Unix())
		s.warnScopeless(end)
	}
	if id.Scopes == 0 {
		return errNoScope
	}
	return nil
}

// refusalOf turns an error of the jwt library into one of ours. Its text is dropped: it
// may quote the token.
func refusalOf(err error) error {
	var own *Error
	switch {
	case errors.As(err, &own):
		return own
	case errors.Is(err, jwt.ErrTokenSignatureInvalid):
		return errSignature
	case errors.Is(err, jwt.ErrTokenMalformed):
		return errMalformed
	case errors.Is(err, jwt.ErrTokenInvalidIssuer):
		return errIssuer
	case errors.Is(err, jwt.ErrTokenInvalidAudience):
		return errAudience
	case errors.Is(err, jwt.ErrTokenExpired):
		return errExpired
	case errors.Is(err, jwt.ErrTokenNotValidYet):
		return errNotYet
	}
	return errClaims
}
