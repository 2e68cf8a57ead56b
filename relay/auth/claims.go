package auth

import (
	"encoding/base64"
	"errors"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/topic"
)

// Bounds of a token.
const (
	MaxTokenLen = 4 << 10                   // bytes
	Leeway      = 60 * time.Second          // on nbf and exp, for clocks that differ
	MaxTTL      = 10 * 365 * 24 * time.Hour // a token that claims a longer life is refused
	tokenType   = "at+jwt"                  // RFC 9068

	leewaySeconds = int64(Leeway / time.Second)
	maxUnix       = 253402300799 // end of the year 9999
	maxTokenGen   = 1 << 30
)

// base64URLAlphabet is that of RFC 4648 §5.
const base64URLAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

// wellFormed reports whether a token has at most 4 KiB and three non-empty parts of
// base64url characters. It runs before the token is split, decoded or hashed, and
// rejects the line breaks that Go's base64 decoder would skip.
func wellFormed(token string) bool {
	if len(token) > MaxTokenLen || strings.Count(token, ".") != 2 {
		return false
	}
	for part := range strings.SplitSeq(token, ".") {
		if part == "" || strings.Trim(part, base64URLAlphabet) != "" {
			return false
		}
	}
	return true
}

var errClaimType = errors.New("wrong type of value")

// claim is a JSON value of exactly the type T. JSON null is an error and not an absent
// value, a number must be an integer in range.
type claim[T string | int64] struct {
	present bool
	value   T
}

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (c *claim[T]) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() == 'n' {
		return errClaimType
	}
	c.present = true
	return json.UnmarshalDecode(dec, &c.value)
}

// header is the protected header of a token. Unknown members are refused: jku, jwk,
// x5u, x5c and crit, with which a token could bring its own key, are among them.
type header struct {
	Alg claim[string] `json:"alg"`
	Typ claim[string] `json:"typ"`
	Kid claim[string] `json:"kid"`
}

// ok reports whether the header is one that this relay writes.
func (h *header) ok() bool {
	return h.Alg.value == jwt.SigningMethodEdDSA.Alg() && h.Typ.value == tokenType && kidRE.MatchString(h.Kid.value)
}

// claims is the closed set of claims. It is decoded strictly: exact names, no
// duplicates, no other members. A claim that this relay does not know may be a
// restriction that a newer relay added; ignoring it would lift the restriction.
type claims struct {
	Iss   claim[string] `json:"iss"`
	Aud   claim[string] `json:"aud"`
	Sub   claim[string] `json:"sub"`
	Tid   claim[string] `json:"tid"`
	Cls   claim[string] `json:"cls"`
	Scope claim[string] `json:"scope"`
	JTI   claim[string] `json:"jti"`
	Iat   claim[int64]  `json:"iat"`
	Nbf   claim[int64]  `json:"nbf"`
	Exp   claim[int64]  `json:"exp"`
	Gen   claim[int64]  `json:"gen"`
	Iid   claim[string] `json:"iid"`
	Cnf   confirmation  `json:"cnf"`
	// Topics is private to this product: patterns with a comma between, see package topic.
	Topics claim[string] `json:"topics"`
}

// confirmation is claim cnf (RFC 7800 §3.1): the key whose holder may use the token, by its
// thumbprint (RFC 9449 §6.1). As in claim, null is an error and not an absent value.
type confirmation struct {
	present bool
	jkt     string
}

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (c *confirmation) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() != '{' {
		return errClaimType
	}
	var v struct {
		JKT claim[string] `json:"jkt"`
	}
	err := json.UnmarshalDecode(dec, &v)
	c.present, c.jkt = true, v.JKT.value
	return err
}

// decodePart decodes one part of a token strictly. Unused trailing bits, which would
// give one token several spellings, are an error.
func decodePart(part string, to any) bool {
	b, err := base64.RawURLEncoding.Strict().DecodeString(part)
	return err == nil && json.Unmarshal(b, to, json.RejectUnknownMembers(true)) == nil
}

// registered returns the claims that the jwt library validates. A date that is missing or
// outside the calendar is nil, which the library refuses. The nbf of a token that is bound to
// a key is left out and not checked: a relay whose clock was set back must not lock out the
// boards that joined it.
func (c *claims) registered() jwt.RegisteredClaims {
	date := func(c claim[int64]) *jwt.NumericDate {
		if !c.present || c.value < 0 || c.value > maxUnix {
			return nil
		}
		return jwt.NewNumericDate(time.Unix(c.value, 0))
	}
	r := jwt.RegisteredClaims{Issuer: c.Iss.value, Audience: jwt.ClaimStrings{c.Aud.value}, ExpiresAt: date(c.Exp)}
	if !c.Cnf.present {
		r.NotBefore = date(c.Nbf)
	}
	return r
}

// pluginSubject begins the identities of plugins (kernel.PluginActor), which no token may have: it
// could act for one in the audit log and on its tickets.
const pluginSubject = "plugin:"

// subjectRE admits what can be written in a log line, a URL path and a shell word unquoted;
// instanceRE a hash in hex or base64url.
var (
	subjectRE  = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$`)
	instanceRE = lazyregexp.New(`^[A-Za-z0-9_-]{1,128}$`)
	jktRE      = lazyregexp.New(`^[A-Za-z0-9_-]{43}$`) // a SHA-256 in base64url
)

// identity checks the claims that the jwt library knows nothing of, and makes the
// identity they describe. The signature, aud, iss, exp and nbf have been verified.
func (c *claims) identity() (*Identity, bool) {
	jti, ok := manifest.ParseULID(c.JTI.value)
	_, known := classes[c.Cls.value]
	id := &Identity{
		Tenant: c.Tid.value, Subject: c.Sub.value, Class: c.Cls.value, JTI: jti, Instance: c.Iid.value, Gen: int(c.Gen.value), KeyThumbprint: c.Cnf.jkt,
		expires: c.Exp.value, issuedAt: c.Iat.value, validUntil: c.Exp.value + leewaySeconds,
		Scopes: knownScopes(c.Scope.value).ofClass(c.Cls.value), hasNoScopeClaim: !c.Scope.present,
	}
	topicsOK := true
	if c.Topics.present { // also one that is empty: it must not mean all topics
		topics, err := topic.Parse(c.Topics.value)
		id.topics, topicsOK = &topics, err == nil && topics != nil && id.Class == ClassAgent
	}
	isDevice := id.Class == ClassDevice
	if isDevice {
		id.NodeID = id.Subject
	}
	return id, ok && known && topicsOK && manifest.ValidTenant(id.Tenant) &&
		c.Iat.present && c.Iat.value <= c.Exp.value && c.Exp.value-c.Iat.value <= int64(MaxTTL/time.Second) &&
		subjectRE.MatchString(id.Subject) && (!isDevice || manifest.ValidNodeID(id.NodeID)) &&
		(isDevice || !c.Gen.present && !c.Iid.present) && c.Gen.value >= 0 && c.Gen.value <= maxTokenGen &&
		(!c.Iid.present || instanceRE.MatchString(id.Instance)) &&
		(!c.Cnf.present || jktRE.MatchString(id.KeyThumbprint) && id.Class != ClassEnroll)
}
