package login

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"agentctl/atomicfile"
	"agentctl/enrollment"
	"agentctl/lazyregexp"
	"agentctl/strictjson"
	"agentctl/transport/enroll"
	"agentctl/transport/pin"
)

// maxFile bounds a file of this package, bytes. A token has at most 4 KiB; a larger file is another program's.
const maxFile = 16 << 10

// credential is the content of a context's file.
//
// RequestID is that of the next refresh. It is stored together with the token, and so before
// the refresh is sent: a repeat after a lost answer is recognized by the relay.
type credential struct {
	Relay       string `json:"relay"` // base URL
	CASHA256    string `json:"ca_sha256,omitempty"`
	CAFile      string `json:"ca_file,omitempty"` // absolute; in place of a pin
	AgentID     string `json:"agent_id"`
	TenantID    string `json:"tenant_id"`
	PrivateKey  string `json:"private_key"` // seed of the Ed25519 key, base64url
	Token       string `json:"token"`
	Gen         int    `json:"gen"`
	ExpiresAtMS int64  `json:"expires_at_ms"`  // of the token, by the relay's clock
	ReceivedMS  int64  `json:"received_at_ms"` // of the token, by this machine's clock
	RequestID   string `json:"request_id"`
	CodeSHA256  string `json:"code_sha256,omitempty"` // of the login: the same line again is a repeat
}

// Store is a directory of contexts. Its methods may be called by several processes at once. It has no state
// in memory: each method reads the files again.
type Store struct{ Dir string }

// Info describes a context to a person. It holds no secret.
type Info struct {
	Name        string `json:"name"`
	Current     bool   `json:"current"`
	Relay       string `json:"relay"`
	CASHA256    string `json:"ca_sha256,omitempty"`
	AgentID     string `json:"agent_id"`
	TenantID    string `json:"tenant_id"`
	ExpiresAtMS int64  `json:"expires_at_ms"` // of the present token, by the relay's clock
	Error       string `json:"error,omitempty"`
}

var nameRE = lazyregexp.New(`^[a-z0-9][a-z0-9._-]{0,63}$`)

// CheckName checks the name of a context, which becomes a file name: no separator, no leading dot, and no
// capital letters, which some file systems do not distinguish.
func CheckName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("not a name of a context: %.70q (1 to 64 lower case letters, digits, hyphens, dots and underscores)", name)
	}
	return nil
}

func (s Store) path(name string) string { return filepath.Join(s.Dir, name+suffix) }

// Names returns the contexts, sorted.
func (s Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && nameRE.MatchString(name) {
			names = append(names, name)
		}
	}
	return names, err
}

// Current returns the name of the current context, "" for none. A name whose context was removed, by hand or
// by a Remove that was interrupted, counts as none.
func (s Store) Current() (string, error) {
	b, err := os.ReadFile(filepath.Join(s.Dir, currentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	name := strings.TrimSpace(string(b))
	if err != nil || !nameRE.MatchString(name) {
		return "", err // a damaged file is none: `use` writes it anew
	}
	if _, err := os.Lstat(s.path(name)); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return name, nil
}

// Use makes a context the current one.
func (s Store) Use(name string) error {
	if err := s.Check(name); err != nil {
		return err
	}
	path := filepath.Join(s.Dir, currentFile)
	if err := atomicfile.Replace(path, []byte(name+"\n")); err != nil {
		return &FileError{path, err}
	}
	return nil
}

// Check returns an error for a name that is not one of a context; ErrNoContext if it could be.
func (s Store) Check(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if _, err := os.Lstat(s.path(name)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s", ErrNoContext, name)
	}
	return nil
}

// Remove removes a context and its key. The identity at the relay remains until it is revoked
// there. The choice of the current context is removed first: what an interruption leaves is a context that
// is not current, and not a current one that does not exist. A pending key of the name stays.
func (s Store) Remove(name string) error {
	if err := s.Check(name); err != nil {
		return err
	}
	release, err := lockFile(context.Background(), s.path(name))
	if err != nil {
		return err
	}
	defer release()
	current, err := s.Current()
	if err == nil && current == name {
		err = atomicfile.Remove(filepath.Join(s.Dir, currentFile))
	}
	if err == nil {
		err = atomicfile.Remove(s.path(name))
	}
	if err != nil {
		return &FileError{s.path(name), err}
	}
	return nil
}

// List describes all contexts, also those that cannot be used.
func (s Store) List() ([]Info, error) {
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	current, err := s.Current()
	list := make([]Info, 0, len(names))
	for _, name := range names {
		i := Info{Name: name, Current: name == current}
		if c, err := s.load(name); err != nil {
			i.Error = err.Error()
		} else {
			i.Relay, i.CASHA256, i.AgentID, i.TenantID, i.ExpiresAtMS = c.Relay, c.CASHA256, c.AgentID, c.TenantID, c.ExpiresAtMS
		}
		list = append(list, i)
	}
	return list, err
}

// load reads and checks the file of a context.
func (s Store) load(name string) (*credential, error) {
	path := s.path(name)
	b, err := readPrivate(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", ErrNoContext, name)
	}
	if err != nil {
		return nil, &FileError{path, err}
	}
	var c credential
	if strictjson.Unmarshal(b, &c) != nil {
		return nil, &FileError{path, ErrDamaged}
	}
	_, keyErr := enrollment.ParsePrivateKey(c.PrivateKey)
	_, urlErr := enroll.BaseURL(c.Relay)
	if keyErr != nil || urlErr != nil || c.AgentID == "" || c.Token == "" || c.Gen < 1 || c.RequestID == "" {
		return nil, &FileError{path, ErrDamaged}
	}
	if c.CASHA256 != "" {
		if _, err := pin.Parse(c.CASHA256); err != nil {
			return nil, &FileError{path, ErrDamaged}
		}
	}
	return &c, nil
}

// readPrivate reads a file that only its owner may read. Lstat refuses a symbolic link, which could lead to
// a file of another user in a directory that others may write.
func readPrivate(path string) ([]byte, error) {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return nil, errors.Unwrap(err) // without the path, which callers add
	case !info.Mode().IsRegular() || info.Size() > maxFile:
		return nil, ErrDamaged
	case info.Mode().Perm()&0o077 != 0 && runtime.GOOS != "windows": // where modes mean nothing
		return nil, ErrOpen
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	return b, nil
}

// save writes a file of this package.
func save(path string, v any) error {
	b, _ := json.MarshalIndent(v, "", "  ") // strings and numbers always encode
	if err := atomicfile.Replace(path, append(b, '\n')); err != nil {
		return &FileError{path, err}
	}
	return nil
}

// Complete returns the names that begin with a word, for shells.
func (s Store) Complete(word string) []string {
	names, _ := s.Names()
	return slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, word) })
}
