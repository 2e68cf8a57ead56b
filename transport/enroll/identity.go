// Package enroll keeps a device's identity on disk and exchanges it with a relay: the instance
// id of this installation, the node id, and for a board that joined a relay its key and token.
// Agents use its Client too.
//
// The daemon calls Lock and Load once at its start, SetNode after each handshake, and RetrySave
// from time to time while the first write has failed:
//
//	id, err := enroll.Load(stateDir)   // errors.Is(err, enroll.ErrNotSaved): id is usable
//	changed, err := id.SetNode(nodeID, tenant)
//
// `agentctl join` calls Join, `agentctl leave` Leave. While a Credential is there, the daemon
// runs a Keeper, which refreshes its token.
package enroll

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// FileName is the identity's name in the state directory.
const FileName = "identity.json"

// maxFileBytes bounds the size of an identity file.
const maxFileBytes = 64 << 10

// Identity is the identity of this installation. Make one with Load; it is safe for
// concurrent use.
type Identity struct {
	path string

	mu      sync.Mutex // protects the fields below, and the file
	d       data
	unsaved bool // created by Load, and the first write failed
}

// ErrNotSaved reports a new identity that could not be written because the disk is full,
// read-only or broken. The identity is usable; a restart creates another one unless
// RetrySave succeeds first.
var ErrNotSaved = errors.New("the new identity could not be saved and will change at the next start")

// ErrStateDir reports a state directory that cannot be made; another one has to be
// configured.
var ErrStateDir = errors.New("make the state directory")

// data is the content of the identity file.
type data struct {
	InstanceID string `json:"instance_id"` // 32 hex digits, created once per installation
	NodeID     string `json:"node_id"`     // assigned by the relay; random until the first handshake
	TenantID   string `json:"tenant_id,omitempty"`
}

// Load reads the identity from stateDir, or creates it (mode 0600, the directory 0700)
// with a new instance id and a random node id. A damaged file is an error: a board must
// not change its identity by accident. Where only the disk fails, Load returns a new
// identity together with ErrNotSaved.
func Load(stateDir string) (*Identity, error) {
	id := &Identity{path: filepath.Join(stateDir, FileName)}
	if err := os.MkdirAll(stateDir, 0o700); err != nil && !isDiskFault(err) {
		return nil, fmt.Errorf("%w %s: %w", ErrStateDir, stateDir, err)
	}
	var err error
	id.d, err = read(id.path)
	if errors.Is(err, fs.ErrNotExist) {
		id.d = data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}
		if err = id.save(); isDiskFault(err) {
			id.unsaved, err = true, fmt.Errorf("%w: %w", ErrNotSaved, err)
		}
		return id, err
	}
	if err != nil {
		return nil, err
	}
	return id, nil
}

// read reads and checks an identity file.
func read(path string) (d data, err error) {
	b, err := readFile(path)
	if err != nil {
		return d, fmt.Errorf("read the identity: %w", err)
	}
	if len(b) > maxFileBytes || strictjson.Unmarshal(b, &d) != nil || len(d.InstanceID) != 32 || !manifest.ValidNodeID(d.NodeID) {
		return data{}, fmt.Errorf("identity file %s is damaged; restore it, or remove it to become a new node", path)
	}
	return d, nil
}

// readFile reads a regular file, at most one byte over maxFileBytes. It opens without
// blocking: to open a named pipe would block the daemon where no signal can end it.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; move it away", path)
	}
	return io.ReadAll(io.LimitReader(f, maxFileBytes+1))
}

// RetrySave tries again to write an identity that Load could not write. It does not
// replace a file that appeared in the meantime, for instance because the state directory
// was mounted late. done reports that no more attempts are needed.
func (id *Identity) RetrySave() (done bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if !id.unsaved {
		return true
	}
	if _, err := os.Lstat(id.path); err != nil {
		if os.MkdirAll(filepath.Dir(id.path), 0o700) != nil || id.save() != nil {
			return false
		}
	}
	id.unsaved = false
	return true
}

// isDiskFault reports whether a write failed for a reason that can pass while the daemon
// runs. A wrong path and a missing permission need the operator and are not among them.
func isDiskFault(err error) bool {
	transient := []error{syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EIO}
	return slices.ContainsFunc(transient, func(e error) bool { return errors.Is(err, e) })
}

// NewInstanceID makes 128 random bits in hex.
func NewInstanceID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// InstanceID is 32 hex digits, the same for the life of the installation. Leave makes another.
func (id *Identity) InstanceID() string {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.d.InstanceID
}

// NodeID returns the current node id.
func (id *Identity) NodeID() string {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.d.NodeID
}

// SetNode stores the node and the tenant that the relay assigned. changed reports whether
// the node id differs from the one before. On an error the new values are in force until
// the daemon restarts.
func (id *Identity) SetNode(nodeID, tenant string) (changed bool, err error) {
	id.mu.Lock()
	defer id.mu.Unlock()
	changed = id.d.NodeID != nodeID
	if !changed && id.d.TenantID == tenant {
		return false, nil
	}
	id.d.NodeID, id.d.TenantID = nodeID, tenant
	return changed, id.save()
}

// Reload reads the file again, which Leave replaced. An error leaves the identity as it was.
func (id *Identity) Reload() error {
	id.mu.Lock()
	defer id.mu.Unlock()
	d, err := read(id.path)
	if err == nil {
		id.d, id.unsaved = d, false
	}
	return err
}

// save replaces the file atomically, so that a power cut leaves the old or the new one.
func (id *Identity) save() error {
	if err := saveJSON(id.path, id.d); err != nil {
		return fmt.Errorf("write the identity %s: %w", id.path, err)
	}
	return nil
}
