// Package enroll keeps a board's identity on disk, and makes and refreshes it at a relay: the instance
// id of this installation, the node id, and for a board that joined a relay its key and token. Agents
// use its Client too.
//
//	identity.go    identity.json: instance id and node id, which every board has
//	credential.go  credential.json: key and token of a board that joined; the lock for changing it
//	join.go        Join and Leave, which make and remove a credential
//	keeper.go      Keeper, which refreshes the token while the daemon runs
//	client.go      Client: the requests to the relay, for boards and agents
//	errors.go      how a request can fail, and hint.go what a person can do about it
//	joinline.go    the line of a join file
//	lock.go        the lock by which one daemon at a time uses a state directory
//
// The daemon calls Lock and Load once at its start, SetNode after each handshake, and RetrySave
// from time to time while the first write has failed:
//
//	id, err := enroll.Load(stateDir)   // errors.Is(err, enroll.ErrNotSaved): id is usable
//	changed, err := id.SetNode(nodeID, tenant)
//
// `agentctl join` calls Join, `agentctl leave` Leave. While a Credential is there, the daemon
// runs a Keeper, which refreshes its token.
//
// # States of a board
//
//	credential.json  joining.json
//	missing          missing        new, or it has left; it may have a device token in its configuration
//	missing          there          a Join has stored a key and has no answer yet; a repeat sends the key again
//	there            any            joined
//	damaged          any            the key is lost; Join sets the file aside, Leave removes it
//
// # Locks
//
// The lock of the credential (lockCredential), which other processes take too, then Identity.file, then
// Identity.mu. Keeper.mu may be taken under the first. Identity.mu and Keeper.mu are leaves and are not
// held across accesses to the disk or the network; the other two are.
package enroll

import (
	"cmp"
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

	"agentctl/atomicfile"
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

	// file is held by whoever uses the file, which may take long on a disk that hangs. It comes
	// before mu, which is held for memory work only.
	file sync.Mutex

	mu      sync.Mutex // protects the fields below
	d       data
	unsaved bool               // created by Load, and the first write failed
	damage  *atomicfile.Damage // of the file that Load found; nil: there was none
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

// Load reads the identity from stateDir, or creates it (mode 0600, the directory 0700) with the
// instance id and the node of the credential, or else random ones.
//
// A file that cannot be used does not keep a board from starting: it is set aside, see Damage, and
// a new identity takes its place. One that cannot be read, because of its owner or of the disk, is
// left where it is, and the new identity is not saved. Where only the disk fails, Load returns a
// new identity together with ErrNotSaved. Other errors need the operator.
func Load(stateDir string) (*Identity, error) {
	id := &Identity{path: filepath.Join(stateDir, FileName)}
	if err := atomicfile.MkdirAll(stateDir, 0o700); err != nil && !isDiskFault(err) {
		return nil, fmt.Errorf("%w %s: %w", ErrStateDir, stateDir, err)
	}
	d, err := read(id.path)
	if err == nil {
		id.d = d
		return id, nil
	}
	if err := id.setAsideDamaged(err); err != nil {
		return nil, err
	}
	id.d = data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}
	if c, err := LoadCredential(stateDir); err == nil {
		id.d.NodeID, id.d.TenantID = c.NodeID, c.TenantID
		id.d.InstanceID = cmp.Or(c.InstanceID, id.d.InstanceID)
	}
	if err = id.Save(); err != nil && (id.damage != nil || isDiskFault(err)) {
		id.unsaved, err = true, fmt.Errorf("%w: %w", ErrNotSaved, err)
	}
	return id, err
}

// Unread returns a new identity for a directory whose disk does not answer. Reload reads the right
// one later; this one is not saved.
func Unread(stateDir string, err error) *Identity {
	path := filepath.Join(stateDir, FileName)
	return &Identity{path: path, d: data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}, unsaved: true,
		damage: &atomicfile.Damage{Path: path, Problem: err.Error()}}
}

// setAsideDamaged sets the file aside that read returned err for, unless it must stay where it is.
func (id *Identity) setAsideDamaged(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, fs.ErrPermission):
		if !isWritable(filepath.Dir(id.path)) {
			return err // the whole directory is not this user's
		}
		id.damage = &atomicfile.Damage{Path: id.path, Problem: "permission denied"}
		return nil
	case isDiskFault(err):
		id.damage = &atomicfile.Damage{Path: id.path, Problem: reasonOf(err)}
		return nil
	}
	aside, asideErr := atomicfile.SetAside(id.path)
	id.damage = &atomicfile.Damage{Path: id.path, Aside: aside, Problem: reasonOf(err)}
	if aside == "" {
		id.damage.Problem += "; it could not be set aside: " + reasonOf(asideErr)
	}
	return nil
}

// reasonOf is the text of an error without the path, which the reader knows.
func reasonOf(err error) string {
	path, link := (*fs.PathError)(nil), (*os.LinkError)(nil)
	switch {
	case errors.As(err, &path):
		err = path.Err
	case errors.As(err, &link):
		err = link.Err
	}
	return err.Error()
}

// Damage reports the file that Load could not use, nil when it could or there was none.
func (id *Identity) Damage() *atomicfile.Damage {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.damage
}

// read reads and checks an identity file.
func read(path string) (d data, err error) {
	b, err := readFile(path)
	if err != nil {
		return d, fmt.Errorf("read the identity: %w", err)
	}
	switch {
	case len(b) == 0:
		return d, errEmpty
	case len(b) > maxFileBytes || strictjson.Unmarshal(b, &d) != nil || !validInstanceID(d.InstanceID) || !manifest.ValidNodeID(d.NodeID):
		return data{}, errDamaged
	}
	return d, nil
}

// Reasons of a Damage whose file can be read.
var (
	errDamaged    = errors.New("it is damaged")
	errEmpty      = errors.New("it is empty")
	errNotRegular = errors.New("it is not a regular file")
)

// readFile reads a regular file, at most one byte over maxFileBytes. It opens without
// blocking: to open a named pipe would block the daemon where no signal can end it.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ELOOP) { // a socket, a circle of links
			err = errNotRegular
		}
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, errNotRegular)
	}
	return io.ReadAll(io.LimitReader(f, maxFileBytes+1))
}

// RetrySave tries again to write an identity that Load could not write. It does not
// replace a file that appeared in the meantime, for instance because the state directory
// was mounted late: if Load found damage, RetrySave takes over what that file says. done reports that no
// more attempts are needed.
func (id *Identity) RetrySave() (done bool) {
	id.mu.Lock()
	unsaved := id.unsaved
	id.mu.Unlock()
	if !unsaved {
		return true
	}
	if _, err := os.Lstat(id.path); err != nil {
		if atomicfile.MkdirAll(filepath.Dir(id.path), 0o700) != nil || id.Save() != nil {
			return false
		}
	} else if damage := id.Damage(); damage != nil && id.Reload() != nil {
		return damage.Aside != "" // else the disk works again, or a person sees to it, later
	}
	id.mu.Lock()
	id.unsaved = false
	id.mu.Unlock()
	return true
}

// isDiskFault reports whether an access failed for a reason that can pass while the daemon
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

func validInstanceID(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 16
}

// InstanceID is 32 hex digits, the same for the life of the installation. Leave makes another.
func (id *Identity) InstanceID() string { return id.data().InstanceID }

// NodeID returns the current node id.
func (id *Identity) NodeID() string { return id.data().NodeID }

// TenantID returns the tenant of the relay that this board was linked to last, "" for none.
func (id *Identity) TenantID() string { return id.data().TenantID }

func (id *Identity) data() data {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.d
}

// SetNode stores the node and the tenant that the relay assigned. changed reports whether
// the node id differs from the one before. On an error the new values are in force until
// the daemon restarts.
func (id *Identity) SetNode(nodeID, tenant string) (changed bool, err error) {
	changed, isSame := id.Assign(nodeID, tenant)
	if isSame {
		return false, nil
	}
	return changed, id.Save()
}

// Assign is SetNode without Save: it does not wait for the disk. isSame reports that there is
// nothing to save.
func (id *Identity) Assign(nodeID, tenant string) (changed, isSame bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	changed = id.d.NodeID != nodeID
	isSame = !changed && id.d.TenantID == tenant
	id.d.NodeID, id.d.TenantID = nodeID, tenant
	return changed, isSame
}

// Reload reads the file again, which Leave replaced. An error leaves the identity as it was.
func (id *Identity) Reload() error {
	id.file.Lock()
	defer id.file.Unlock()
	d, err := read(id.path)
	if err != nil {
		return err
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	id.d, id.unsaved = d, false
	if id.damage != nil && id.damage.Aside == "" {
		id.damage = nil // it was the disk, or its owner
	}
	return nil
}

// Save replaces the file atomically, so that a power cut leaves the old or the new one. A file
// that Load could neither use nor set aside is not replaced.
func (id *Identity) Save() error {
	id.file.Lock()
	defer id.file.Unlock()
	if damage := id.Damage(); damage != nil && damage.Aside == "" && exists(filepath.Dir(id.path), FileName) {
		return damage
	}
	if err := saveJSON(id.path, id.data()); err != nil {
		return fmt.Errorf("write the identity %s: %w", id.path, err)
	}
	return nil
}
