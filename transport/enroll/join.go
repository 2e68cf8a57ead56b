package enroll

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentctl/atomicfile"
	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/transport/link"
	"agentctl/transport/pin"
)

// JoinOptions describe a board that joins a relay.
type JoinOptions struct {
	StateDir string
	Relay    string      // URL, as people write it
	CASHA256 string      // pin of the relay's own authority; "": none
	Code     string      // as people write it
	Name     string      // wanted name; "": none
	Version  string      // of this binary
	Token    string      // an existing device token, whose node is kept; "": a new node
	TLS      *tls.Config // used without a pin; nil: the system's authorities
}

// JoinedError reports a board that has joined another relay, or the same one with another
// authority.
type JoinedError struct {
	Credential *Credential
	Pin        bool // the relay is the same, the authority is not
}

func (e *JoinedError) Error() string {
	if e.Pin {
		return fmt.Sprintf("this board has joined %s, with another authority of the relay, as node %s", e.Credential.Relay, e.Credential.NodeID)
	}
	return fmt.Sprintf("this board has joined another relay, %s, as node %s", e.Credential.Relay, e.Credential.NodeID)
}

// StorageError reports a state directory in which something could not be stored. No file in it is half
// written.
type StorageError struct {
	Dir string
	Err error
}

// Error leaves out the path of the temporary file, which nobody can look for.
func (e *StorageError) Error() string {
	err := e.Err
	path, rename := (*fs.PathError)(nil), (*os.LinkError)(nil)
	switch {
	case errors.As(err, &path):
		err = path.Err
	case errors.As(err, &rename):
		err = rename.Err
	}
	return "store the identity in " + e.Dir + ": " + err.Error()
}

// Unwrap returns the cause.
func (e *StorageError) Unwrap() error { return e.Err }

// pending is the key of a Join that may have been sent. A repeat with the same code must send the same
// key: the relay may have counted the use of the code although its answer was lost.
type pending struct {
	Relay      string `json:"relay"`
	CodeSHA256 string `json:"code_sha256"`
	PrivateKey string `json:"private_key"`
}

// Join makes this board a node of a relay and stores its credential. already reports that it
// was one before; the code is not sent then. Join may be repeated after any error, which
// leaves nothing half written. Its errors are JoinedError, StorageError, DamagedError, Error,
// those of the URL, the pin and the code, and ctx's.
//
//	joining.json      the new key is stored before it is sent
//	POST /v1/enroll   the relay answers with the identity
//	credential.json   the identity is stored; then joining.json is removed
func Join(ctx context.Context, o JoinOptions) (_ *Credential, already bool, err error) {
	code, err := enrollment.ParseCode(o.Code)
	if err != nil {
		return nil, false, err
	}
	client := &Client{TLS: o.TLS}
	if client.URL, err = BaseURL(o.Relay); err != nil {
		return nil, false, err
	}
	if o.CASHA256 != "" {
		o.CASHA256 = strings.ToLower(o.CASHA256)
		if client.TLS, err = pin.ClientConfig(o.CASHA256); err != nil {
			return nil, false, err
		}
	}
	id, err := Load(o.StateDir) // creates the directory
	if errors.Is(err, ErrNotSaved) {
		err = id.Save() // an identity in memory is of no use here: the plain error
	}
	if err != nil {
		return nil, false, &StorageError{o.StateDir, err}
	}
	release, err := lockCredential(ctx, o.StateDir)
	if err != nil {
		return nil, false, &StorageError{o.StateDir, err}
	}
	defer release()
	c, damaged, err := o.joinedBefore(client.URL)
	if c != nil || err != nil {
		return c, c != nil, err
	}
	if c, err = o.enroll(ctx, client, code, id.InstanceID()); err != nil {
		return nil, false, err
	}
	if damaged != nil {
		_, err = atomicfile.SetAside(damaged.Path)
	}
	if err == nil {
		err = c.save(o.StateDir)
	}
	if err != nil {
		return nil, false, &StorageError{o.StateDir, err} // the key is stored: a repeat gets the same node
	}
	// The board has joined whatever becomes of these: a leftover is replaced or ignored.
	_ = atomicfile.Remove(filepath.Join(o.StateDir, pendingFile))
	_ = atomicfile.Remove(filepath.Join(o.StateDir, leftFile))
	return c, false, nil
}

// joinedBefore returns the stored credential, if it is of the same relay and authority; another one
// is a JoinedError. The key in a damaged file is lost, so a new credential may take its place. A line
// without a pin fits a credential with one: the board keeps checking the pin.
func (o *JoinOptions) joinedBefore(base string) (c *Credential, damaged *DamagedError, err error) {
	c, err = LoadCredential(o.StateDir)
	switch {
	case err == nil && c.Relay == base && (o.CASHA256 == "" || o.CASHA256 == c.CASHA256):
		return c, nil, nil
	case err == nil:
		return nil, nil, &JoinedError{c, c.Relay == base}
	case errors.As(err, &damaged):
		return nil, damaged, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, nil
	}
	return nil, nil, err
}

// enroll exchanges the code for a credential, which it does not store. It removes the pending key if
// the relay did not accept it for this board.
func (o *JoinOptions) enroll(ctx context.Context, client *Client, code, instanceID string) (*Credential, error) {
	var key ed25519.PrivateKey
	answer, err := client.EnrollRepeatedly(ctx, EnrollOptions{
		Code: code, InstanceID: instanceID, Name: o.Name, Version: o.Version, Token: o.Token,
		Key: func() (_ ed25519.PrivateKey, err error) {
			if key == nil {
				key, err = keyFor(o.StateDir, client.URL, enrollment.HashCode(code))
			}
			return key, err
		},
	})
	var e *Error
	switch {
	case errors.As(err, &e) && e.Kind == Refused && e.Reason != enrollment.ReasonNonce:
		_ = atomicfile.Remove(filepath.Join(o.StateDir, pendingFile))
		return nil, err
	case err != nil: // the relay may have accepted the key: a repeat sends it again
		return nil, err
	case answer.NodeID == "":
		_ = atomicfile.Remove(filepath.Join(o.StateDir, pendingFile)) // the key is an agent's now
		return nil, client.fail(ForAgent, errors.New("the code was for an agent and not for a board, and is used up now"))
	}
	return &Credential{
		Relay: client.URL, CASHA256: o.CASHA256, NodeID: answer.NodeID, TenantID: answer.TenantID, Name: answer.Name,
		CodeSHA256: enrollment.HashCode(code), Key: key, Token: answer.DeviceToken, Gen: answer.Gen,
		ExpiresAtMS: answer.ExpiresAtMS, RequestID: link.NewID(), InstanceID: instanceID,
	}, nil
}

// Attempts of an Enroll whose connection breaks. A repeat costs no use of the code, since the relay
// recognizes the code with the same key. Other failures would be the same a second later.
const (
	enrollAttempts = 3
	enrollPause    = time.Second
)

// EnrollRepeatedly is Enroll with a few attempts when the connection breaks.
func (c *Client) EnrollRepeatedly(ctx context.Context, o EnrollOptions) (a *enrollment.EnrollAnswer, err error) {
	for attempt := 1; ; attempt++ {
		var e *Error
		if a, err = c.Enroll(ctx, o); attempt == enrollAttempts || !errors.As(err, &e) || e.Kind != Broken {
			return a, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(enrollPause):
		}
	}
}

// keyFor returns the key for a code: the stored one of an earlier attempt, or a new one, which
// it stores first.
func keyFor(stateDir, relay, codeSHA256 string) (ed25519.PrivateKey, error) {
	path := filepath.Join(stateDir, pendingFile)
	var p pending
	var damaged *DamagedError
	err := loadJSON(path, &p)
	if err == nil && p.Relay == relay && p.CodeSHA256 == codeSHA256 {
		if key, err := enrollment.ParsePrivateKey(p.PrivateKey); err == nil {
			return key, nil
		}
	}
	// The key is of another code, or lost: an answer to it cannot be used any more.
	if errors.As(err, &damaged) {
		if _, err := atomicfile.SetAside(path); err != nil {
			return nil, &StorageError{stateDir, err}
		}
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	if err := saveJSON(path, &pending{relay, codeSHA256, enrollment.EncodePrivateKey(key)}); err != nil {
		return nil, &StorageError{stateDir, err}
	}
	return key, nil
}

// left is the code with which a board had joined before it left. The code may still be in a join file,
// which must not make the board join again.
type left struct {
	CodeSHA256 string `json:"code_sha256"` // "": not known, since the credential was damaged
}

// Leave undoes Join: it removes the credential and makes a new identity of this installation,
// so that also two copies of one state directory become two boards. It changes nothing at the
// relay. Its error is fs.ErrNotExist for a board that has not joined, a StorageError, or ctx's.
// The credential is returned as far as it was readable, and may be nil.
func Leave(ctx context.Context, stateDir string) (*Credential, error) {
	release, err := lockCredential(ctx, stateDir)
	if err != nil {
		return nil, err
	}
	defer release()
	c, err := LoadCredential(stateDir)
	var damaged *DamagedError
	if err != nil && !errors.As(err, &damaged) {
		return nil, err
	}
	var l left
	if c != nil {
		l.CodeSHA256 = c.CodeSHA256
	}
	err = saveJSON(filepath.Join(stateDir, leftFile), &l)
	id := &Identity{path: filepath.Join(stateDir, FileName), d: data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}}
	// The credential goes last: until then a Leave that failed can be repeated, and once it is gone the
	// daemon reads the new identity.
	for _, step := range []func() error{
		id.Save,
		func() error { return atomicfile.Remove(filepath.Join(stateDir, pendingFile)) },
		func() error { return atomicfile.Remove(filepath.Join(stateDir, CredentialFile)) },
	} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return c, &StorageError{stateDir, err}
	}
	return c, nil
}

// decodeClaims reads the claims of a token without verifying it, which only the relay can.
func decodeClaims(token string, v any) bool {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return false
	}
	b, err := base64.RawURLEncoding.DecodeString(parts[1])
	return err == nil && json.Unmarshal(b, v) == nil
}
