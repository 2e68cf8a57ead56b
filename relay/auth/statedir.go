package auth

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"modernc.org/sqlite"
)

// Names inside the state directory.
const (
	relayFile = "relay.json"
	keysDir   = "keys"
	dbFile    = "relay.db"
)

// stateDir is the state directory. All of it but the database is reached through
// os.Root: when root works in a directory that a service owns, a symbolic link planted
// there must not lead root elsewhere.
type stateDir struct {
	path       string // absolute
	root       *os.Root
	uid, gid   int  // the directory's owner
	chownFiles bool // what is made here is given to that owner
}

// openStateDir opens a state directory, or makes it with mode 0700. One that is ours
// already, or empty, is narrowed to 0700. One that everybody may write to is refused:
// anyone could put a signing key of theirs into it.
func openStateDir(path string) (*stateDir, error) {
	if path == "" {
		return nil, errors.New("no state directory given; name one with --state-dir DIR")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(abs, 0o700); err != nil {
		return nil, explain(abs, err)
	}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, explain(abs, err)
	}
	d := &stateDir{path: abs, root: root}
	if err := d.checkOwnerAndMode(); err != nil {
		root.Close()
		return nil, err
	}
	return d, nil
}

func (d *stateDir) checkOwnerAndMode() error {
	info, err := d.root.Stat(".")
	if err != nil {
		return explain(d.path, err)
	}
	if info.Mode().Perm()&0o002 != 0 {
		return fmt.Errorf("state directory %s may be written by everyone, so anyone could place signing keys in it; run: chmod 0700 %s, or choose another with --state-dir DIR", d.path, d.path)
	}
	uid, gid, known := ownerOf(info)
	d.uid, d.gid = uid, gid
	d.chownFiles = known && os.Geteuid() == 0 && uid != 0
	if perm := info.Mode().Perm(); perm&0o077 != 0 && d.isRelayDirOrEmpty() && (os.Geteuid() == 0 || uid == os.Geteuid()) {
		if err := d.root.Chmod(".", perm&0o700); err != nil { // read-only stays read-only
			return explain(d.path, err)
		}
	}
	return nil
}

// isRelayDirOrEmpty guards the chmod: `--state-dir /var/lib` must not lock everyone out of
// /var/lib.
func (d *stateDir) isRelayDirOrEmpty() bool {
	if _, err := d.root.Lstat(relayFile); err == nil {
		return true
	}
	f, err := d.root.Open(".")
	if err != nil {
		return false
	}
	defer f.Close()
	_, err = f.ReadDir(1)
	return err == io.EOF
}

func (d *stateDir) close() error { return d.root.Close() }

// chownToOwner hands a file that root made to the owner of the directory.
func (d *stateDir) chownToOwner(name string) error {
	if !d.chownFiles {
		return nil
	}
	return d.root.Lchown(name, d.uid, d.gid)
}

// restrictMode takes the permissions of group and others away from a file or directory that
// a restore or a copy left too open.
func (d *stateDir) restrictMode(name string) error {
	info, err := d.root.Lstat(name)
	if err != nil {
		return explain(d.path, err)
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 && info.Mode()&fs.ModeSymlink == 0 {
		if err := d.root.Chmod(name, perm&0o700); err != nil {
			return explain(d.path, err)
		}
	}
	return nil
}

// mkdir makes a directory with mode 0700, if it is not there.
func (d *stateDir) mkdir(name string) error {
	err := d.root.Mkdir(name, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return d.restrictMode(name)
	}
	if err != nil {
		return explain(d.path, err)
	}
	return d.chownToOwner(name)
}

// create makes an empty file with mode 0600, if it is not there.
func (d *stateDir) create(name string) error {
	f, err := d.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return d.restrictMode(name)
	}
	if err != nil {
		return explain(d.path, err)
	}
	return errors.Join(f.Close(), d.chownToOwner(name))
}

// read returns a regular file of at most limit bytes; fs.ErrNotExist when it is not there.
func (d *stateDir) read(name string, limit int64) ([]byte, error) {
	info, err := d.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, explain(d.path, err)
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes; move it away", filepath.Join(d.path, name), limit)
	}
	b, err := d.root.ReadFile(name)
	if err != nil {
		return nil, explain(d.path, err)
	}
	return b, nil
}

// replace writes a file with mode 0600 so that a power cut leaves the old one or the
// new one. The caller holds the database's write lock, so the temporary name is ours.
func (d *stateDir) replace(name string, data []byte) error {
	tmp := name + ".new"
	if err := d.root.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return explain(d.path, err)
	}
	f, err := d.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return explain(d.path, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close(), d.chownToOwner(tmp)); err != nil {
		d.root.Remove(tmp)
		return explain(d.path, err)
	}
	if err := d.root.Rename(tmp, name); err != nil {
		return explain(d.path, err)
	}
	return d.syncDir(filepath.Dir(name))
}

func (d *stateDir) syncDir(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return explain(d.path, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) { // not every file system syncs directories
		return explain(d.path, err)
	}
	return nil
}

// SQLite's primary result codes that say something about the state directory.
const (
	sqliteBusy     = 5
	sqliteReadOnly = 8
	sqliteCorrupt  = 11
	sqliteFull     = 13
	sqliteCantOpen = 14
	sqliteNotADB   = 26
)

func sqliteCode(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code() & 0xff
	}
	return 0
}

// explain adds to an error of the state directory what to do about it.
func explain(path string, err error) error {
	code := sqliteCode(err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS), code == sqliteReadOnly, code == sqliteCantOpen:
		return fmt.Errorf("state directory %s cannot be written by this user (uid %d)%s: %w; run this as its owner (sudo), or choose another with --state-dir DIR",
			path, os.Geteuid(), ownerHint(path), err)
	case errors.Is(err, syscall.ENOSPC), code == sqliteFull:
		return fmt.Errorf("state directory %s is on a full disk: %w; free some space (df -h %s)", path, err, path)
	case code == sqliteCorrupt, code == sqliteNotADB:
		return fmt.Errorf("%s is damaged: %w; restore it from a backup, or move it away together with %s and mint every token anew (without the keys' removal revoked tokens would work again)",
			filepath.Join(path, dbFile), err, filepath.Join(path, keysDir))
	case code == sqliteBusy:
		return fmt.Errorf("%s is locked by another process: %w; see which: fuser -v %s", filepath.Join(path, dbFile), err, filepath.Join(path, dbFile))
	}
	return fmt.Errorf("state directory %s: %w", path, err)
}

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
