// Package enroll keeps a device's identity on disk: the install's instance id and the
// node id that its relay gave it.
package enroll

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// FileName is the identity's name in the state directory.
const FileName = "identity.json"

// maxFile bounds what is read of it, bytes.
const maxFile = 64 << 10

// Identity is who this install is. Make one with Load; it is safe for concurrent use.
type Identity struct {
	path string

	mu      sync.Mutex // protects the fields below
	d       data
	unsaved bool // made here, and not yet on the disk
}

// ErrNotSaved is of a new identity that the disk did not take: it is full, read-only or
// broken. The identity is good, and another one after a restart unless Keep succeeds.
var ErrNotSaved = errors.New("the new identity could not be kept, it is another one after a restart")

type data struct {
	InstanceID string `json:"instance_id"` // 32 hex digits, made once an install
	NodeID     string `json:"node_id"`     // the relay's word, or minted here before there is one
	TenantID   string `json:"tenant_id,omitempty"`
}

// Load reads STATE/identity.json, or makes it (0600, in a directory of 0700) with a new
// instance id and a node id of its own. A damaged file is an error: a board must not
// change who it is by accident. Where only the disk is at fault a new identity comes with
// ErrNotSaved.
func Load(stateDir string) (*Identity, error) {
	id := &Identity{path: filepath.Join(stateDir, FileName)}
	if err := os.MkdirAll(stateDir, 0o700); err != nil && !diskFault(err) {
		return nil, fmt.Errorf("make the state directory %s: %w; choose another with --state-dir", stateDir, err)
	}
	b, err := read(id.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		id.d = data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}
		err := id.save()
		if id.unsaved = diskFault(err); id.unsaved {
			err = fmt.Errorf("%w: %w", ErrNotSaved, err)
		}
		return id, err
	case err != nil:
		return nil, fmt.Errorf("read the identity: %w", err)
	case len(b) > maxFile:
		return nil, fmt.Errorf("identity file %s is damaged (more than %d bytes); restore it, or remove it to become a new node", id.path, maxFile)
	}
	if err := strictjson.Unmarshal(b, &id.d); err != nil || len(id.d.InstanceID) != 32 || !manifest.ValidNodeID(id.d.NodeID) {
		return nil, fmt.Errorf("identity file %s is damaged; restore it, or remove it to become a new node", id.path)
	}
	return id, nil
}

// read reads a regular file, and no more than is needed to see that it is too large. A pipe
// in its place would hold the daemon up where no signal ends it.
func read(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; move it away", path)
	}
	return io.ReadAll(io.LimitReader(f, maxFile+1))
}

// RetrySave tries again to write an identity that Load could not; one that is there by now is
// left alone. done tells that there is no more to try.
func (id *Identity) RetrySave() (done bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if !id.unsaved {
		return true
	}
	if _, err := os.Lstat(id.path); err == nil {
		id.unsaved = false // of a directory that was mounted late
		return true
	}
	if os.MkdirAll(filepath.Dir(id.path), 0o700) != nil || id.save() != nil {
		return false
	}
	id.unsaved = false
	return true
}

// diskFault tells whether a write failed for what may pass by itself or be mended while
// the board goes on, unlike a wrong path or missing permission.
func diskFault(err error) bool {
	for _, e := range []error{syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EIO} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// NewInstanceID makes 128 random bits in hex.
func NewInstanceID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// InstanceID is 32 hex digits, the same for the life of the install.
func (id *Identity) InstanceID() string {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.d.InstanceID
}

// NodeID is the node id in force.
func (id *Identity) NodeID() string {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.d.NodeID
}

// SetNode takes the node and tenant that the relay told, and keeps them on disk. changed
// tells whether the node id is another one than before.
func (id *Identity) SetNode(nodeID, tenant string) (changed bool, err error) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.d.NodeID == nodeID && id.d.TenantID == tenant {
		return false, nil
	}
	changed = id.d.NodeID != nodeID
	id.d.NodeID, id.d.TenantID = nodeID, tenant
	return changed, id.save()
}

// save replaces the file in one step, so that a power cut leaves the old or the new one.
func (id *Identity) save() error {
	b, err := json.MarshalIndent(id.d, "", "  ")
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(id.path), FileName+".*")
	if err != nil {
		return fmt.Errorf("write the identity: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.Write(append(b, '\n'))
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), id.path)
	}
	if err != nil {
		return fmt.Errorf("write the identity %s: %w", id.path, err)
	}
	return nil
}
