package mcp

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"slices"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// A session id says enough to make the session again after a restart of the relay, and only the
// relay that issued it can make one:
//
//	format 1 | start 8 | issued 8 | random 10 | version 1 | capabilities ≤ 300 | MAC 16
//
// start is when the process that issued it began, in Unix nanoseconds; issued is in Unix seconds;
// version is an index of idVersions; capabilities are those of the client, as JSON. All of it is
// base64url: visible ASCII, as the protocol wants. The MAC, half of an HMAC-SHA256, covers the
// owner of the session too, which is not part of the id.
const (
	idFormat          = 1
	idRandomLen       = 10
	idMACLen          = 16
	idFixedLen        = 1 + 8 + 8 + idRandomLen + 1
	maxIDCapabilities = 300 // beyond it, experimental ones and extensions are left out
	maxSessionID      = 512 // characters; pipeline.MaxScopeName admits them

	// maxSessionAge bounds how long after its initialize a session can be made again. A session
	// that stays open may be older.
	maxSessionAge = 7 * 24 * time.Hour
)

// idVersions are the protocol versions that a session can have. A client that asked for another
// one has the newest of them.
var idVersions = []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}

// sessionClaims are the parts of a session id.
type sessionClaims struct {
	start        int64
	issued       int64
	random       [idRandomLen]byte
	version      string
	capabilities []byte // JSON
}

// newSessionID makes the id of a session that a client has just opened.
func (h *Handler) newSessionID(owner string, p *sdk.InitializeParams) string {
	b := append(make([]byte, 0, 160), idFormat)
	b = binary.BigEndian.AppendUint64(b, uint64(h.start))
	b = binary.BigEndian.AppendUint64(b, uint64(time.Now().Unix()))
	b = b[:len(b)+idRandomLen]
	_, _ = rand.Read(b[len(b)-idRandomLen:]) // never fails (crypto/rand)
	b = append(b, byte(max(0, slices.Index(idVersions, p.ProtocolVersion))))
	b = append(b, idCapabilities(p.Capabilities)...)
	b = append(b, sessionMAC(h.opts.SessionKeys()[0], b, owner)...)
	return base64.RawURLEncoding.EncodeToString(b)
}

// idCapabilities returns a client's capabilities as they fit into an id.
func idCapabilities(c *sdk.ClientCapabilities) []byte {
	if c == nil {
		return []byte("{}")
	}
	if b, err := marshalCapabilities(c); err == nil && len(b) <= maxIDCapabilities {
		return b
	}
	known := *c
	known.Experimental, known.Extensions = nil, nil
	b, err := marshalCapabilities(&known)
	if err != nil || len(b) > maxIDCapabilities {
		return []byte("{}")
	}
	return b
}

// marshalCapabilities encodes capabilities as the client sent them: the SDK's own field for roots
// is never omitted. Roots are deprecated since 2026-07-28, and belong to the versions with sessions.
func marshalCapabilities(c *sdk.ClientCapabilities) ([]byte, error) {
	all := struct {
		*sdk.ClientCapabilities
		Roots any `json:"roots,omitempty"`
	}{ClientCapabilities: c}
	//lint:ignore SA1019 roots belong to the versions with sessions
	if roots := c.RootsV2; roots != nil {
		all.Roots = roots
	}
	return json.Marshal(all)
}

// sessionMAC authenticates the bytes of an id before its MAC, and binds them to an owner.
func sessionMAC(key, b []byte, owner string) []byte {
	m := hmac.New(sha256.New, key)
	m.Write(binary.BigEndian.AppendUint32(nil, uint32(len(b))))
	m.Write(b)
	m.Write([]byte(owner))
	return m.Sum(nil)[:idMACLen]
}

// parseSessionID reads an id that this relay, in this process or an earlier one, issued to an
// owner. ok is false for every other string, and for an id that is too old. An id of the future is
// bounded too: it was issued while the clock was wrong.
func (h *Handler) parseSessionID(id, owner string) (c sessionClaims, ok bool) {
	if len(id) > maxSessionID {
		return c, false
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(id)
	if err != nil || len(b) < idFixedLen+idMACLen || b[0] != idFormat {
		return c, false
	}
	body, mac := b[:len(b)-idMACLen], b[len(b)-idMACLen:]
	if !slices.ContainsFunc(h.opts.SessionKeys(), func(key []byte) bool { return hmac.Equal(sessionMAC(key, body, owner), mac) }) {
		return c, false
	}
	c.start = int64(binary.BigEndian.Uint64(body[1:]))
	c.issued = int64(binary.BigEndian.Uint64(body[9:]))
	copy(c.random[:], body[17:])
	version := int(body[17+idRandomLen])
	c.capabilities = bytes.Clone(body[idFixedLen:])
	if version >= len(idVersions) || time.Since(time.Unix(c.issued, 0)).Abs() > maxSessionAge {
		return c, false
	}
	c.version = idVersions[version]
	return c, true
}

// randomSessionKeys makes the key of a handler that has no state: its sessions end with it.
func randomSessionKeys() func() [][]byte {
	key := make([]byte, sha256.Size)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	return func() [][]byte { return [][]byte{key} }
}
