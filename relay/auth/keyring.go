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
	maxAudience  = 256
)

// relayInfo is relay.json.
type relayInfo struct {
	RelayID  string    `json:"relay_id"` // upper case ULID, made once
	Audience string    `json:"audience"` // claim aud of every token, compared exactly
	Issuer   string    `json:"issuer"`   // claim iss; the audience, while the relay mints its own tokens
	Created  time.Time `json:"created"`
}

// loadRelayInfo reads relay.json, or makes it. A wanted audience that differs is written
// back; before is the audience that the file had, empty when there was no file. The
// caller holds the database's write lock.
func loadRelayInfo(d *stateDir, audience string, now time.Time) (info relayInfo, before string, err error) {
	if audience != "" && !validAudience(audience) {
		return info, "", fmt.Errorf("audience %q is not usable; give 1 to %d printable ASCII characters without spaces, quotes or backslashes", audience, maxAudience)
	}
	b, err := d.read(relayFile, maxRelayFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		info = relayInfo{RelayID: manifest.NewULID(), Created: now.UTC().Truncate(time.Second)}
		info.Audience = "agentctl:" + info.RelayID
	case err != nil:
		return info, "", err
	default:
		if info, err = parseRelayInfo(b); err != nil {
			return info, "", fmt.Errorf("%s: %w; restore it from a backup, or remove it and mint every token anew", filepath.Join(d.path, relayFile), err)
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

func parseRelayInfo(b []byte) (info relayInfo, err error) {
	if err := json.Unmarshal(b, &info, json.RejectUnknownMembers(true)); err != nil {
		return info, errors.New("not the JSON object that agentctl writes")
	}
	if _, ok := manifest.ParseULID(info.RelayID); !ok || !validAudience(info.Audience) {
		return info, errors.New("relay_id or audience is missing or malformed")
	}
	return info, nil
}

// validAudience keeps the audience to characters that need no escape in JSON, in a
// header or in a shell's double quotes.
func validAudience(s string) bool {
	if s == "" || len(s) > maxAudience {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; c <= ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// keyID names a key in the local table. A key is only ever looked up there: kid is
// never part of a path or an address.
type keyID struct{ issuer, kid string }

var kidRE = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// keyring holds the signing keys of one issuer.
type keyring struct {
	public  map[keyID]ed25519.PublicKey
	signKID string // the greatest kid: kids made here sort by age
	signKey ed25519.PrivateKey
}

// loadKeys reads keys/*.pem, and makes a key when there is none (made). The caller
// holds the database's write lock.
func loadKeys(d *stateDir, iss string) (ring *keyring, made bool, err error) {
	if err := d.mkdir(keysDir); err != nil {
		return nil, false, err
	}
	names, err := keyFiles(d)
	if err != nil {
		return nil, false, err
	}
	if len(names) == 0 {
		name, err := makeKey(d)
		if err != nil {
			return nil, false, err
		}
		names, made = []string{name}, true
	}
	ring = &keyring{public: make(map[keyID]ed25519.PublicKey, len(names))}
	for _, name := range names {
		key, err := readKey(d, filepath.Join(keysDir, name))
		if err != nil {
			return nil, false, err
		}
		kid := strings.TrimSuffix(name, ".pem")
		ring.public[keyID{iss, kid}] = key.Public().(ed25519.PublicKey)
		if kid > ring.signKID {
			ring.signKID, ring.signKey = kid, key
		}
	}
	return ring, made, nil
}

// keyFiles lists the names in keys/ that are key ids.
func keyFiles(d *stateDir) ([]string, error) {
	dir, err := d.root.Open(keysDir)
	if err != nil {
		return nil, explain(d.path, err)
	}
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, explain(d.path, err)
	}
	var names []string
	for _, e := range entries {
		if kid, ok := strings.CutSuffix(e.Name(), ".pem"); ok && kidRE.MatchString(kid) {
			names = append(names, e.Name())
		}
	}
	if len(names) > maxKeys {
		return nil, fmt.Errorf("%s holds %d keys, at most %d are used; move the old ones away", filepath.Join(d.path, keysDir), len(names), maxKeys)
	}
	return names, nil
}

func makeKey(d *stateDir) (name string, err error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", err
	}
	name = strings.ToLower(manifest.NewULID()) + ".pem"
	return name, d.replace(filepath.Join(keysDir, name), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

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
	return nil, fmt.Errorf("%s is not an Ed25519 private key in PKCS #8 PEM; restore it from a backup or move it away (its tokens then stop working)", filepath.Join(d.path, name))
}
