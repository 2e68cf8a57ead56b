package enroll

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"agentctl/atomicfile"
	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/strictjson"
)

// Files in the state directory. Each one is 0600 and replaced atomically.
const (
	CredentialFile = "credential.json" // what Join stored: the board belongs to a relay
	pendingFile    = "joining.json"    // the key of a Join whose answer has not been stored
	leftFile       = "left.json"       // the code of the last Leave
)

// Credential is how a board that joined a relay identifies itself: the key is its identity,
// the token is renewed with it.
type Credential struct {
	Relay       string // base URL, see BaseURL
	CASHA256    string // pin of the relay's own authority; "": its certificate is checked as others are
	NodeID      string
	TenantID    string
	Name        string // as the relay answered it
	CodeSHA256  string // enrollment.HashCode of the code that was used
	Key         ed25519.PrivateKey
	Token       string
	Gen         int    // of the token
	ExpiresAtMS int64  // of the token, by the relay's clock
	RequestID   string // of the refresh that follows
	InstanceID  string // of this installation, to which the token is bound; "": the file is an older one
}

// credentialFile is the JSON of a Credential.
//
// RequestID is stored together with the token and not before each refresh. So a refresh needs
// no write before it is sent, and a board whose disk is full or read-only goes on: it repeats
// the same request, which the relay recognizes.
type credentialFile struct {
	Relay       string `json:"relay"`
	CASHA256    string `json:"ca_sha256,omitempty"`
	NodeID      string `json:"node_id"`
	TenantID    string `json:"tenant_id"`
	Name        string `json:"name,omitempty"`
	CodeSHA256  string `json:"code_sha256"`
	PrivateKey  string `json:"private_key"` // seed of the Ed25519 key, base64url
	Token       string `json:"token"`
	Gen         int    `json:"gen"`
	ExpiresAtMS int64  `json:"expires_at_ms"`
	RequestID   string `json:"request_id"`
	InstanceID  string `json:"instance_id,omitempty"` // also in the identity, which may be lost
}

// DamagedError reports a file of the state directory that cannot be used.
type DamagedError struct{ Path string }

func (e *DamagedError) Error() string { return "the file " + e.Path + " is damaged" }

// LoadCredential reads the credential of a board. The error is fs.ErrNotExist for a board that
// has not joined, and a *DamagedError for a file that makes no sense. It takes no lock: the file is
// replaced atomically.
func LoadCredential(stateDir string) (*Credential, error) {
	var f credentialFile
	path := filepath.Join(stateDir, CredentialFile)
	if err := loadJSON(path, &f); err != nil {
		return nil, err
	}
	key, err := enrollment.ParsePrivateKey(f.PrivateKey)
	base, urlErr := BaseURL(f.Relay)
	if err != nil || urlErr != nil || !manifest.ValidNodeID(f.NodeID) || !validToken(f.Token) || f.Gen < 1 || f.RequestID == "" ||
		f.InstanceID != "" && !validInstanceID(f.InstanceID) {
		return nil, &DamagedError{path}
	}
	return &Credential{
		Relay: base, CASHA256: f.CASHA256, NodeID: f.NodeID, TenantID: f.TenantID, Name: f.Name, CodeSHA256: f.CodeSHA256,
		Key: key, Token: f.Token, Gen: f.Gen, ExpiresAtMS: f.ExpiresAtMS, RequestID: f.RequestID, InstanceID: f.InstanceID,
	}, nil
}

// save stores the credential. The caller holds the lock of the directory.
func (c *Credential) save(stateDir string) error {
	return saveJSON(filepath.Join(stateDir, CredentialFile), &credentialFile{
		Relay: c.Relay, CASHA256: c.CASHA256, NodeID: c.NodeID, TenantID: c.TenantID, Name: c.Name, CodeSHA256: c.CodeSHA256,
		PrivateKey: enrollment.EncodePrivateKey(c.Key), Token: c.Token, Gen: c.Gen, ExpiresAtMS: c.ExpiresAtMS, RequestID: c.RequestID, InstanceID: c.InstanceID,
	})
}

// TokenLife is how long a token is valid from its issue on, by its claims: both are of the relay's
// clock, so that the clock of this machine plays no part. 0: not known.
func TokenLife(token string) time.Duration {
	var claims struct {
		IssuedAt int64 `json:"iat"` // Unix seconds
		Expires  int64 `json:"exp"`
	}
	if !decodeClaims(token, &claims) || claims.Expires <= claims.IssuedAt {
		return 0
	}
	return time.Duration(claims.Expires-claims.IssuedAt) * time.Second
}

// keepInstance stores the instance id in the credential of an older version, if its token is bound
// to it. One that is not bound is of an identity that replaced a lost one.
func (c *Credential) keepInstance(id string) {
	var claims struct {
		Instance string `json:"iid"` // hex SHA-256
	}
	sum := sha256.Sum256([]byte(id))
	if c.InstanceID == "" && decodeClaims(c.Token, &claims) && claims.Instance == hex.EncodeToString(sum[:]) {
		c.InstanceID = id
	}
}

// loadJSON reads a file that saveJSON wrote.
func loadJSON(path string, v any) error {
	b, err := readFile(path)
	if errors.Is(err, errNotRegular) {
		return &DamagedError{path}
	}
	if err != nil {
		return err
	}
	if len(b) > maxFileBytes || strictjson.Unmarshal(b, v) != nil {
		return &DamagedError{path}
	}
	return nil
}

func saveJSON(path string, v any) error {
	b, _ := json.MarshalIndent(v, "", "  ") // strings and numbers always encode
	return atomicfile.Replace(path, append(b, '\n'))
}

// lockPoll is how often a busy lock is tried again. flock cannot be interrupted by a context.
const lockPoll = 50 * time.Millisecond

// lockCredential keeps other processes, and other callers in this one, from changing the
// credential in a state directory until release is called. The lock is on the directory: it
// needs no file, and works where nothing can be written. It is held while the relay is asked, so that
// `agentctl leave` and a refresh of the daemon do not overwrite each other's file.
func lockCredential(ctx context.Context, stateDir string) (release func(), err error) {
	d, err := os.Open(stateDir)
	if err != nil {
		return nil, err
	}
	for {
		isBusy, err := tryLock(d)
		if err == nil && !isBusy {
			return func() { _ = d.Close() }, nil // which releases the lock
		}
		if err != nil && !errors.Is(err, syscall.EINTR) {
			_ = d.Close()
			return nil, fmt.Errorf("lock %s: %w", stateDir, err)
		}
		select {
		case <-ctx.Done():
			_ = d.Close()
			return nil, fmt.Errorf("another process is changing the credential in %s: %w", stateDir, ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}

// exists reports whether a file of the state directory is there.
func exists(stateDir, name string) bool {
	_, err := os.Lstat(filepath.Join(stateDir, name))
	return !errors.Is(err, fs.ErrNotExist)
}
