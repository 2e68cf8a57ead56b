// Package enrollment is what a board, an agent and a relay agree on when an identity is made
// or refreshed: the messages of POST /v1/enroll and POST /v1/token, what is signed, and the
// form of an invite code.
//
// A client proves that it holds an Ed25519 key by signing a text that contains a nonce of the
// relay. Each text begins with its purpose, so that a signature for one cannot be used for
// another:
//
//	enroll   agentctl-enroll-v1|nonce|sha256hex(code)|instance_id
//	refresh  agentctl-token-v1|nonce|node_id or agent_id|gen|request_id
//	link     agentctl-auth-v1|nonce|node_id|sha256hex(token)
//
// Signatures, public keys and nonces are base64url without padding.
package enrollment

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
)

// Paths on the relay. GET EnrollPath answers a Nonce, which both POSTs need.
const (
	EnrollPath = "/v1/enroll"
	TokenPath  = "/v1/token"
)

// Nonce is the answer to GET EnrollPath. It is good for 60 s and needs no state on the relay.
type Nonce struct {
	Nonce string `json:"nonce"`
}

// EnrollRequest is the body of POST EnrollPath.
type EnrollRequest struct {
	Nonce        string `json:"nonce"`
	Code         string `json:"code"`
	PublicKey    string `json:"public_key"`  // Ed25519, 32 bytes
	InstanceID   string `json:"instance_id"` // 32 hex digits
	Name         string `json:"name,omitempty"`
	AgentVersion string `json:"agent_version"`
	Proof        string `json:"proof"`           // of EnrollMessage
	Token        string `json:"token,omitempty"` // an existing device token, whose node is kept
}

// EnrollAnswer is the identity of a new board or agent: NodeID and DeviceToken for a board,
// AgentID and Token for an agent.
type EnrollAnswer struct {
	NodeID      string `json:"node_id,omitempty"`
	AgentID     string `json:"agent_id,omitempty"`
	TenantID    string `json:"tenant_id"`
	Name        string `json:"name,omitempty"`
	DeviceToken string `json:"device_token,omitempty"`
	Token       string `json:"token,omitempty"`
	Gen         int    `json:"gen"`
	ExpiresAtMS int64  `json:"expires_at_ms"`
	CA          string `json:"ca,omitempty"` // PEM of the relay's own authority, if it has one
}

// TokenRequest is the body of POST TokenPath. The client stores RequestID before it sends, so
// that a repeat after a lost answer is recognized.
type TokenRequest struct {
	NodeID    string `json:"node_id,omitempty"`
	AgentID   string `json:"agent_id,omitempty"`
	Gen       int    `json:"gen"`
	RequestID string `json:"request_id"` // ULID
	Nonce     string `json:"nonce"`
	Proof     string `json:"proof"`                // of TokenMessage
	SessionID string `json:"session_id,omitempty"` // of the board's link, while it has one
}

// TokenAnswer is a refreshed token.
type TokenAnswer struct {
	Token       string `json:"token"`
	Gen         int    `json:"gen"`
	ExpiresAtMS int64  `json:"expires_at_ms"`
	CA          string `json:"ca,omitempty"`
}

// Reasons of a refusal, in the `reason` of the error envelope. A closed set.
const (
	ReasonUsed           = "used"            // the code has no uses left
	ReasonExpired        = "expired"         // the code
	ReasonRevoked        = "revoked"         // the code, or the node on a repeat
	ReasonCodeUnknown    = "code_unknown"    // not a code of this relay
	ReasonKeyInUse       = "key_in_use"      // the key is registered under another code
	ReasonGenerationUsed = "generation_used" // the credential was copied, or restored from an old backup
	ReasonNonce          = "nonce"           // too old, or of another relay: get a new one
	ReasonProof          = "proof"           // the signature does not fit the key
	ReasonTokenInvalid   = "token_invalid"   // EnrollRequest.Token
	ReasonSession        = "session"         // the node is linked with another session
)

// EnrollMessage is what EnrollRequest.Proof signs.
func EnrollMessage(nonce, code, instanceID string) []byte {
	return []byte("agentctl-enroll-v1|" + nonce + "|" + HashCode(code) + "|" + instanceID)
}

// TokenMessage is what TokenRequest.Proof signs; subject is the node id or agent id.
func TokenMessage(nonce, subject string, gen int, requestID string) []byte {
	return []byte("agentctl-token-v1|" + nonce + "|" + subject + "|" + strconv.Itoa(gen) + "|" + requestID)
}

// LinkMessage is what the proof in auth signs (RFC-0002 §5.2); nonce is that of hello. The
// node id and the hash of the token bind the proof to both.
func LinkMessage(nonce, nodeID, token string) []byte {
	return []byte("agentctl-auth-v1|" + nonce + "|" + nodeID + "|" + hexSHA256(token))
}

// Sign makes a proof.
func Sign(key ed25519.PrivateKey, message []byte) string {
	return base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, message))
}

// Verify reports whether a proof fits.
func Verify(key ed25519.PublicKey, message []byte, proof string) bool {
	sig, err := base64.RawURLEncoding.Strict().DecodeString(proof)
	return err == nil && len(key) == ed25519.PublicKeySize && ed25519.Verify(key, message, sig)
}

// EncodeKey encodes a public key as EnrollRequest has it.
func EncodeKey(key ed25519.PublicKey) string { return base64.RawURLEncoding.EncodeToString(key) }

// ParseKey is the inverse of EncodeKey.
func ParseKey(s string) (ed25519.PublicKey, error) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(s)
	if err != nil || len(b) != ed25519.PublicKeySize {
		return nil, errors.New("not an Ed25519 public key of 32 bytes in base64url")
	}
	return b, nil
}

// EncodePrivateKey encodes a private key, by its seed, for a file of its owner.
func EncodePrivateKey(key ed25519.PrivateKey) string {
	return base64.RawURLEncoding.EncodeToString(key.Seed())
}

// ParsePrivateKey is the inverse of EncodePrivateKey. Its error has no part of the text.
func ParsePrivateKey(s string) (ed25519.PrivateKey, error) {
	seed, err := base64.RawURLEncoding.Strict().DecodeString(s)
	if err != nil || len(seed) != ed25519.SeedSize {
		return nil, errors.New("not the seed of an Ed25519 key")
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// Thumbprint is the JWK thumbprint of a key (RFC 7638, RFC 8037 appendix A.3), which tokens
// carry as cnf.jkt.
func Thumbprint(key ed25519.PublicKey) string {
	sum := sha256.Sum256([]byte(`{"crv":"Ed25519","kty":"OKP","x":"` + EncodeKey(key) + `"}`))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// crockford is the alphabet of codes (Crockford's base32): no I, L, O, U.
const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// codeLen is the number of characters of a code, hyphens not counted: 80 bits.
const codeLen = 16

// codeGroup is the number of characters of a group.
const codeGroup = 4

// NewCode makes a random code in its canonical form: four groups of four characters, as in
// 7K3M-9QTR-2HXW-DB5N.
func NewCode() string {
	b := make([]byte, codeLen)
	_, _ = rand.Read(b)
	for i := range b {
		b[i] = crockford[b[i]%32]
	}
	return groupCode(string(b))
}

// ParseCode brings a code that a person typed to its canonical form: case, spaces and hyphens
// do not matter, and O, I and L are read as 0, 1 and 1.
func ParseCode(s string) (string, error) {
	s = strings.ToUpper(strings.NewReplacer("-", "", " ", "", "\t", "").Replace(strings.TrimSpace(s)))
	s = strings.NewReplacer("O", "0", "I", "1", "L", "1").Replace(s)
	if len(s) != codeLen || strings.Trim(s, crockford) != "" {
		return "", errors.New("not an invite code: it has 16 letters and digits in four groups, such as 7K3M-9QTR-2HXW-DB5N")
	}
	return groupCode(s), nil
}

// CodePrefix returns the first group of a code, which names the invite where the code itself
// must not be seen. It takes the group alone or the whole code, as people type them.
func CodePrefix(s string) (string, error) {
	if code, err := ParseCode(s); err == nil {
		return code[:codeGroup], nil
	}
	if code, err := ParseCode(s + strings.Repeat("0", codeLen-codeGroup)); err == nil {
		return code[:codeGroup], nil
	}
	return "", errors.New("not the first four characters of an invite code, nor a whole one")
}

func groupCode(s string) string {
	return s[:4] + "-" + s[4:8] + "-" + s[8:12] + "-" + s[12:]
}

// HashCode is the hex SHA-256 of a canonical code. The relay stores it and not the code.
func HashCode(code string) string { return hexSHA256(code) }

func hexSHA256(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}
