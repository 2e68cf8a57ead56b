package auth

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/go-json-experiment/json"

	"agentctl/manifest"
)

// Every process that has a state directory open holds a shared lock on lockFile: the relay and the
// commands beside it. A restore holds an exclusive one (LockStateDir).
const lockFile = "relay.lock"

// A restore exchanges several files at once. It puts the new ones into swapDir, and writes what is to
// be done into swapFile. From then on the restore counts as done: the next process that opens the
// directory completes it.
const (
	swapFile = "restore.json"
	swapDir  = "restore.new"

	maxSwapFile = 64 << 10 // bytes
	lockTimeout = 2 * time.Second
)

// ErrInUse refuses a state directory that is being restored, or to restore one that is in use.
var ErrInUse = errors.New("another agentctl process uses the state directory")

// swap is swapFile.
type swap struct {
	Aside string   `json:"aside"` // directory for the files that are replaced
	Old   []string `json:"old"`   // names that existed, which go there
	New   []string `json:"new"`   // names in swapDir, which take their places
}

// acquireShared takes the shared lock, and completes a restore that was cut short.
func (d *stateDir) acquireShared() error {
	deadline := time.Now().Add(lockTimeout)
	for {
		if err := d.lockShared(); err != nil {
			return err
		}
		if _, err := d.root.Lstat(swapFile); errors.Is(err, fs.ErrNotExist) {
			// Nobody restores now: what is there is of a restore that was killed before it counted, and
			// has the signing keys. That it cannot be deleted is no reason not to start.
			_ = d.root.RemoveAll(swapDir)
			return nil
		}
		// Two processes may be here at once. Neither gets the exclusive lock while the other has
		// the shared one, so both release it before they try again.
		err := d.flock(true)
		if err == nil {
			err = d.finishSwap()
		}
		d.lock.Close()
		if err != nil && !errors.Is(err, ErrInUse) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(time.Duration(os.Getpid()%16+1) * time.Millisecond)
	}
}

// lockShared opens the lock file and takes the shared lock. It waits a little for a command that
// is about to complete a restore.
func (d *stateDir) lockShared() (err error) {
	if err := d.openLock(); err != nil {
		return err
	}
	deadline := time.Now().Add(lockTimeout)
	for {
		if err = d.flock(false); !errors.Is(err, ErrInUse) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (d *stateDir) openLock() (err error) {
	if err := d.create(lockFile); err != nil {
		return err
	}
	d.lock, err = d.root.OpenFile(lockFile, os.O_RDWR, 0)
	return err
}

// finishSwap completes a restore. It can be cut short anywhere and done again: the names of Old
// go first, each unless it is aside already, and those of New after all of them, each unless it
// is in its place already. The caller holds the exclusive lock.
func (d *stateDir) finishSwap() error {
	b, err := d.read(swapFile, maxSwapFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var s swap
	if err := json.Unmarshal(b, &s, json.RejectUnknownMembers(true)); err != nil {
		return err
	}
	if err := d.mkdir(s.Aside); err != nil {
		return err
	}
	for _, name := range s.Old {
		if err := d.moveUnlessThere(name, filepath.Join(s.Aside, name)); err != nil {
			return err
		}
	}
	if err := errors.Join(d.syncDir(s.Aside), d.syncDir(".")); err != nil {
		return err
	}
	for _, name := range s.New {
		err := d.root.Rename(filepath.Join(swapDir, name), name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := errors.Join(d.syncDir("."), d.root.RemoveAll(swapDir), d.root.Remove(swapFile)); err != nil {
		return err
	}
	return d.syncDir(".")
}

// moveUnlessThere renames a file or directory, if it exists and the new name does not.
func (d *stateDir) moveUnlessThere(from, to string) error {
	if _, err := d.root.Lstat(to); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := d.root.Rename(from, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Exclusive is a state directory that nobody else has open, for a restore.
type Exclusive struct{ dir *stateDir }

// LockStateDir opens a state directory for a restore, and makes it if it is missing. It
// completes a restore that was cut short. The error is ErrInUse while a relay or a command has it
// open. The caller calls Close.
func LockStateDir(path string) (*Exclusive, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	d, err := openStateDir(path)
	if err == nil {
		if err = d.flock(true); err != nil {
			_ = d.close()
		}
	}
	if err != nil {
		return nil, explain(path, err)
	}
	return &Exclusive{d}, nil
}

// Close releases the directory.
func (x *Exclusive) Close() error { return x.dir.close() }

// Staging makes an empty directory inside the state directory for the files of Swap, and returns
// its path.
func (x *Exclusive) Staging() (string, error) {
	if err := x.dir.root.RemoveAll(swapDir); err != nil {
		return "", explain(x.dir.path, err)
	}
	return filepath.Join(x.dir.path, swapDir), explain(x.dir.path, x.dir.mkdir(swapDir))
}

// Swap moves the files and directories named old, those that exist, into a new directory aside, and
// those in the staging directory into their places. All of it happens, or nothing: if the process
// ends in between, the next one that opens the state directory does the rest. old must contain
// every name that the staging directory has. The caller has synced the staged files.
func (x *Exclusive) Swap(aside string, old []string) error {
	return explain(x.dir.path, x.swap(aside, old))
}

func (x *Exclusive) swap(aside string, old []string) error {
	d := x.dir
	s := swap{Aside: aside, Old: []string{}, New: []string{}}
	for _, name := range old {
		if _, err := d.root.Lstat(name); err == nil {
			s.Old = append(s.Old, name)
		}
	}
	switch staged, err := fs.ReadDir(d.root.FS(), swapDir); {
	case errors.Is(err, fs.ErrNotExist): // only to move aside
	case err != nil:
		return err
	default:
		for _, e := range staged {
			if err := d.chownAll(filepath.Join(swapDir, e.Name())); err != nil {
				return err
			}
			s.New = append(s.New, e.Name())
		}
		if err := d.syncDir(swapDir); err != nil {
			return err
		}
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	// This is the commit of a restore: finishSwap completes it, now or after the next start.
	if err := d.replace(swapFile, b); err != nil {
		return err
	}
	return d.finishSwap()
}

// chownAll gives a file or a directory with its files to the owner of the state directory.
func (d *stateDir) chownAll(name string) error {
	if !d.chownFiles {
		return nil
	}
	return fs.WalkDir(d.root.FS(), filepath.ToSlash(name), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return d.chownToOwner(filepath.FromSlash(path))
	})
}

// AsideName is the name of a directory for what a restore or a new start replaces, for Swap.
func AsideName(now time.Time) string {
	return "replaced-" + now.UTC().Format("20060102T150405Z") + "-" + manifest.NewULID()[22:]
}
