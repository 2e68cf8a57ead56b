package auth

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// Bounds of what is read from the state directory.
const (
	maxRelayFile = 4 << 10
	maxKeyFile   = 4 << 10
	maxKeys      = 16
)

// relayInfo is relay.json.
type relayInfo struct {
	RelayID  string    `json:"relay_id"` // upper case ULID, made once
	Audience string    `json:"audience"` // claim aud of every token, compared exactly
	Issuer   string    `json:"issuer"`   // claim iss; equals the audience, as the relay mints its own tokens
	Created  time.Time `json:"created"`
}

// audienceRE keeps the audience to printable characters that need no escape in JSON, in
// an HTTP header or in a shell's double quotes.
var audienceRE = regexp.MustCompile(`^[!#-\[\]-~]{1,256}$`)

// loadRelayInfo reads relay.json, or makes it. A wanted audience that differs from the
// file's is written back. before is the audience that the file had, empty when there was
// no file. The caller holds the database's write lock.
func loadRelayInfo(d *stateDir, audience string, now time.Time) (info relayInfo, before string, err error) {
	if audience != "" && !audienceRE.MatchString(audience) {
		return info, "", fmt.Errorf("not a usable audience: %q (give 1 to 256 printable ASCII characters without spaces, quotes or backslashes)", audience)
	}
	b, err := d.read(relayFile, maxRelayFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		info = relayInfo{RelayID: manifest.NewULID(), Created: now.UTC().Truncate(time.Second)}
		info.Audience = "agentctl:" + info.RelayID
	case err != nil:
		return info, "", err
	default:
		err := json.Unmarshal(b, &info, json.RejectUnknownMembers(true))
		if _, ok := manifest.ParseULID(info.RelayID); err != nil || !ok || !audienceRE.MatchString(info.Audience) {
			return info, "", fmt.Errorf("%s is not the JSON object that agentctl writes; restore it from a backup, or remove it and mint every token again", relayFile)
		}
		before = info.Audience
	}
	if audience != "" {
		info.Audience = audience
	}
	info.Issuer = info.Audience
	if info.Audience == before {
		return info, before, nil
	}
	out, err := json.Marshal(info, jsontext.WithIndent("  "))
	if err != nil {
		return info, before, err
	}
	return info, before, d.replace(relayFile, append(out, '\n'))
}

// keyID identifies a verification key. It is only a key of keyring.public: a kid comes
// from an unverified token, so it is not made part of a path or a URL.
type keyID struct{ issuer, kid string }

var kidRE = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// keyring holds the signing keys of one issuer. Old keys stay in keys/ and verify until
// the operator removes them.
type keyring struct {
	public  map[keyID]ed25519.PublicKey
	signKID string // the greatest kid: a kid made here is a ULID, so kids sort by age
	signKey ed25519.PrivateKey
}

// loadKeys reads keys/*.pem, and makes a key when there is none (made). To rotate keys, an
// operator adds one with a greater kid, and removes the old one when its last token has
// expired. The caller
// holds the database's write lock.
func loadKeys(d *stateDir, issuer string) (ring *keyring, made bool, err error) {
	if err := d.mkdir(keysDir); err != nil {
		return nil, false, err
	}
	kids, err := listKIDs(d)
	if err != nil {
		return nil, false, err
	}
	if made = len(kids) == 0; made {
		kid, err := makeKey(d)
		if err != nil {
			return nil, false, err
		}
		kids = []string{kid}
	}
	ring = &keyring{public: make(map[keyID]ed25519.PublicKey, len(kids))}
	for _, kid := range kids {
		key, err := readKey(d, keyFile(kid))
		if err != nil {
			return nil, false, err
		}
		ring.public[keyID{issuer, kid}] = key.Public().(ed25519.PublicKey)
		if kid > ring.signKID {
			ring.signKID, ring.signKey = kid, key
		}
	}
	return ring, made, nil
}

// keyFile returns the name of a key's file. The kid was matched against kidRE.
func keyFile(kid string) string { return filepath.Join(keysDir, kid+".pem") }

// listKIDs returns the key ids that keys/ has files of; it ignores other files.
func listKIDs(d *stateDir) (kids []string, err error) {
	entries, err := fs.ReadDir(d.root.FS(), keysDir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if kid, ok := strings.CutSuffix(e.Name(), ".pem"); ok && kidRE.MatchString(kid) {
			kids = append(kids, kid)
		}
	}
	if len(kids) > maxKeys {
		return nil, fmt.Errorf("%s holds %d keys, at most %d are used; move the old ones away", keysDir, len(kids), maxKeys)
	}
	return kids, nil
}

// makeKey makes a signing key and its file.
func makeKey(d *stateDir) (kid string, err error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", err
	}
	kid = strings.ToLower(manifest.NewULID())
	return kid, d.replace(keyFile(kid), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// readKey reads the file of one key, and narrows its mode.
func readKey(d *stateDir, name string) (ed25519.PrivateKey, error) {
	b, err := d.read(name, maxKeyFile)
	if err == nil {
		err = d.restrictMode(name)
	}
	if err != nil {
		return nil, err
	}
	if block, rest := pem.Decode(b); block != nil && block.Type == "PRIVATE KEY" && len(strings.TrimSpace(string(rest))) == 0 {
		if k, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
			if key, ok := k.(ed25519.PrivateKey); ok {
				return key, nil
			}
		}
	}
	return nil, fmt.Errorf("%s is not an Ed25519 private key in PKCS #8 PEM; restore it from a backup or move it away (its tokens then stop working)", name)
}
