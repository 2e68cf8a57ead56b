package auth

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/relay/storage"
	"agentctl/sqlitefile"
)

// Names inside the state directory.
const (
	relayFile = "relay.json"
	keysDir   = "keys"
	dbFile    = "relay.db"
)

// stateDir is the state directory. Everything in it except the database is reached
// through os.Root: when root works in a directory that a service owns, a symbolic link
// planted there must not lead root elsewhere.
//
// Its methods return plain errors with names relative to the directory; Open adds the
// path and the next step (explain).
type stateDir struct {
	path       string // absolute
	root       *os.Root
	lock       *os.File // shared by all who have the directory open, see lockStateDir
	uid, gid   int      // the directory's owner
	chownFiles bool     // this process is root and the owner is not: new files are given to the owner
}

// openStateDir opens a state directory, or makes it with mode 0700. It narrows the mode
// of a relay's own or empty directory to 0700, and refuses one that everyone may write
// to: anyone could put a signing key into it.
func openStateDir(path string) (*stateDir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	d := &stateDir{path: path, root: root}
	err = d.checkOwnerAndMode()
	if err == nil {
		err = d.acquireShared()
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

// readOnlyDir opens a directory in which nothing is made, without its lock: to look at it, or at
// a copy of a state directory that nobody else knows.
func readOnlyDir(path string) (*stateDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	return &stateDir{path: path, root: root}, nil
}

// checkOwnerAndMode looks at the directory through the open root, so that it cannot be
// exchanged between the check and the use.
func (d *stateDir) checkOwnerAndMode() error {
	info, err := d.root.Stat(".")
	if err != nil {
		return err
	}
	perm := info.Mode().Perm()
	if perm&0o002 != 0 {
		return fmt.Errorf("everyone may write to it, so anyone could place signing keys in it; run: chmod 0700 %s, or choose another directory", d.path)
	}
	uid, gid, known := ownerOf(info)
	d.uid, d.gid = uid, gid
	d.chownFiles = known && os.Geteuid() == 0 && uid != 0
	if perm&0o077 != 0 && d.isRelayDirOrEmpty() && (os.Geteuid() == 0 || uid == os.Geteuid()) {
		return d.root.Chmod(".", perm&0o700) // a read-only directory stays read-only
	}
	return nil
}

// isRelayDirOrEmpty guards the chmod: a relay with /var/lib as its state directory must not
// lock everyone else out of /var/lib.
func (d *stateDir) isRelayDirOrEmpty() bool {
	if _, err := d.root.Lstat(relayFile); err == nil {
		return true
	}
	entries, err := fs.ReadDir(d.root.FS(), ".")
	return err == nil && len(entries) == 0
}

func (d *stateDir) close() (err error) {
	if d.lock != nil {
		err = d.lock.Close() // which releases it
	}
	return errors.Join(err, d.root.Close())
}

// chownToOwner gives a file that root made to the owner of the directory.
func (d *stateDir) chownToOwner(name string) error {
	if !d.chownFiles {
		return nil
	}
	return d.root.Lchown(name, d.uid, d.gid)
}

// restrictMode takes the permissions of group and others away from a file or directory
// that a restore or a copy left too open.
func (d *stateDir) restrictMode(name string) error {
	info, err := d.root.Lstat(name)
	if err != nil || info.Mode().Perm()&0o077 == 0 || info.Mode()&fs.ModeSymlink != 0 {
		return err
	}
	return d.root.Chmod(name, info.Mode().Perm()&0o700)
}

// mkdir makes a directory with mode 0700, if it does not exist.
func (d *stateDir) mkdir(name string) error {
	return d.finishCreate(name, d.root.Mkdir(name, 0o700))
}

// create makes an empty file with mode 0600, if it does not exist.
func (d *stateDir) create(name string) error {
	f, err := d.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		err = f.Close()
	}
	return d.finishCreate(name, err)
}

// finishCreate gives a new file its owner, and narrows the mode of one that existed.
func (d *stateDir) finishCreate(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		return d.restrictMode(name)
	case err != nil:
		return err
	}
	return d.chownToOwner(name)
}

// read returns a regular file of at most limit bytes.
func (d *stateDir) read(name string, limit int64) ([]byte, error) {
	info, err := d.root.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes; move it away", name, limit)
	}
	return d.root.ReadFile(name)
}

// replace writes a file with mode 0600 so that a power cut leaves the old one or the
// new one. The caller holds the database's write lock, so no other process uses the
// temporary name.
func (d *stateDir) replace(name string, data []byte) error {
	tmp := name + ".new"
	if err := d.root.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	// The owner is set before the rename, so that a service can read the file as soon as it is there.
	if err = errors.Join(err, f.Close(), d.chownToOwner(tmp)); err == nil {
		err = d.root.Rename(tmp, name)
	}
	if err != nil {
		d.root.Remove(tmp)
		return err
	}
	return d.syncDir(filepath.Dir(name))
}

// syncDir makes a rename durable.
func (d *stateDir) syncDir(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); !errors.Is(err, syscall.EINVAL) { // some file systems do not sync directories
		return err
	}
	return nil
}

// explain adds the path and the next step to an error of the state directory.
func explain(path string, err error) error {
	if err == nil {
		return nil
	}
	err = sqlitefile.ReadError(filepath.Join(path, dbFile), err)
	return storage.Wrap(path, dbFile, explainText(path, err))
}

// explainText adds what to do next to an error of the disk.
func explainText(path string, err error) error {
	db, code := filepath.Join(path, dbFile), sqlitefile.Code(err)
	_, walDamaged := errors.AsType[*sqlitefile.WALDamage](err)
	switch {
	case errors.As(err, new(*StateError)):
		return err // names the directory
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), code == sqlite3.SQLITE_READONLY, code == sqlite3.SQLITE_CANTOPEN:
		return fmt.Errorf("state directory %s cannot be written by this user (uid %d)%s: %w; run this as its owner (sudo), or choose another directory",
			path, os.Geteuid(), ownerHint(path), err)
	case storage.Classify(err) == storage.Full:
		return fmt.Errorf("state directory %s is on a full disk: %w; free some space (df -h %s)", path, err, path)
	case code == sqlite3.SQLITE_CORRUPT, code == sqlite3.SQLITE_NOTADB, walDamaged:
		return fmt.Errorf("%s is damaged: %w", db, err)
	case code == sqlite3.SQLITE_BUSY:
		return fmt.Errorf("%s is locked by another process: %w; find it with: fuser -v %s", db, err, db)
	}
	return fmt.Errorf("state directory %s: %w", path, err)
}

// ownerHint says whom the directory belongs to, if to another user.
func ownerHint(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	uid, _, known := ownerOf(info)
	if !known || uid == os.Geteuid() {
		return ""
	}
	return fmt.Sprintf(", it belongs to uid %d", uid)
}
