package backup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/atomicfile"
	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/storage"
	"agentctl/sqlitefile"
)

// A backup is a directory such as agentctl-20260102T030405Z, with -02 and so on for the next ones
// of one second. While it is being made it is agentctl-20260102T030405Z-RANDOM.partial, and its maker
// holds a lock on that directory.
const (
	namePrefix    = "agentctl-"
	nameTime      = "20060102T150405Z"
	partialSuffix = ".partial"
)

// Options of Create. StateDir and Dir are required.
type Options struct {
	StateDir string
	Dir      string           // the directory of backups, in which a new one is made
	Keep     int              // the newest backups of this relay that are kept; 0: all
	Version  string           // of agentctl, for the manifest
	Now      func() time.Time // default time.Now
}

// Result is what Create made.
type Result struct {
	Path string `json:"path"`
	*Manifest
	Deleted []string `json:"deleted"` // older backups, because of Options.Keep
}

// errOpenDir refuses a directory in which others could read the keys.
var errOpenDir = errors.New("others can read it, and a backup holds the relay's signing keys")

// Create makes a backup in a new directory below Options.Dir: it checks the target and the state, copies
// into a partial directory, gives that its name, and deletes older backups only then. The relay may run
// and write meanwhile. A state directory that is damaged is refused: a backup of it would replace sound
// ones (Keep). After a failure nothing is left that Restore accepts as a backup.
func Create(ctx context.Context, o Options) (_ *Result, err error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Dir, err = checkTarget(o.Dir, o.StateDir); err != nil {
		return nil, err
	}
	if err := checkWALs(o.StateDir); err != nil {
		return nil, err
	}
	store, err := auth.Open(auth.Options{StateDir: o.StateDir, Existing: true}) // locks the directory
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if problems := checkRecords(ctx, o.StateDir); len(problems) > 0 {
		return nil, fmt.Errorf("a damaged state is not backed up: %w", errors.Join(problems...))
	}
	if err := removePartial(o.Dir); err != nil {
		return nil, err
	}
	began := o.Now().UTC()
	name := filepath.Join(o.Dir, namePrefix+began.Format(nameTime))
	// With random characters, since two may begin in the same second.
	partial := name + "-" + manifest.NewULID()[16:] + partialSuffix
	unlock, err := makePartial(partial)
	if err != nil {
		return nil, err
	}
	// Deferred before the removal below, and so run after it: the directory is locked until it is gone.
	defer unlock()
	defer func() {
		if err != nil {
			_ = os.RemoveAll(partial)
		}
	}()
	b := &creation{stateDir: o.StateDir, dir: partial, copier: newCopier(backupRate),
		manifest: &Manifest{Format: Format, Version: o.Version, CreatedAtMS: began.UnixMilli(), Files: []File{}}}
	if err := b.run(ctx); err != nil {
		// SQLite reports a full disk as an I/O error where it cannot enlarge the index of a log.
		if storage.Classify(err) == storage.Full || sqlitefile.Code(err) == sqlite3.SQLITE_IOERR {
			err = fmt.Errorf("%w; see whether there is free space: df -h %s", err, o.Dir)
		}
		return nil, fmt.Errorf("back up %s: %w", o.StateDir, err)
	}
	r := &Result{Manifest: b.manifest, Deleted: []string{}}
	if r.Path, err = publish(partial, name); err != nil {
		return nil, err
	}
	if o.Keep > 0 {
		r.Deleted, err = prune(o.Dir, b.manifest.RelayID, o.Keep)
	}
	return r, err
}

// checkWALs refuses damaged write-ahead logs. SQLite would leave out the transactions behind the damage,
// without an error. It runs before this process opens a store, because closing a file drops a process's
// locks on it (package sqlitefile).
func checkWALs(stateDir string) error {
	for _, name := range []string{auth.DatabaseFile, eventlog.FileName} {
		err := sqlitefile.ScanWAL(filepath.Join(stateDir, name))
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("a damaged state is not backed up: %w; see: agentctl relay check", err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkTarget makes the directory of backups if it is missing, and returns its absolute path. It
// refuses a directory that others can read, and one inside the state directory, which would be lost
// together with it.
func checkTarget(dir, stateDir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	state, err := filepath.Abs(stateDir)
	if err != nil {
		return "", err
	}
	if rel, err := filepath.Rel(state, dir); err == nil && filepath.IsLocal(rel) {
		return "", fmt.Errorf("%s is in the state directory; name a directory elsewhere, best on another disk", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return "", err
	case !info.IsDir():
		return "", fmt.Errorf("%s is not a directory", dir)
	case info.Mode().Perm()&0o077 != 0:
		return "", fmt.Errorf("%s has mode %04o: %w; run: chmod 0700 %s", dir, info.Mode().Perm(), errOpenDir, dir)
	case !ownedBySelfOrRoot(info):
		return "", fmt.Errorf("%s belongs to another user: %w; choose a directory of this user", dir, errOpenDir)
	}
	return dir, nil
}

// makePartial makes the directory of a backup that is being made. The lock on it shows other
// processes that this one is alive (removePartial).
func makePartial(path string) (unlock func(), err error) {
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	lock(f)
	return func() { _ = f.Close() }, nil
}

// removePartial deletes the partial backups of processes that were killed.
func removePartial(dir string) error {
	list, err := filepath.Glob(filepath.Join(dir, namePrefix+"*"+partialSuffix))
	if err != nil {
		return err
	}
	for _, path := range list {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if lock(f) {
			err = os.RemoveAll(path)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// publish gives a complete backup its name, with a number if the name is taken. If two processes choose
// the same name, the rename of one fails, since it cannot replace a directory that has files.
func publish(partial, name string) (path string, err error) {
	for i := 1; i < 100; i++ {
		if path = name; i > 1 { // several backups in one second
			path = fmt.Sprintf("%s-%02d", name, i)
		}
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			if err := os.Rename(partial, path); err != nil {
				return "", err
			}
			return path, atomicfile.SyncDir(filepath.Dir(path))
		}
	}
	return "", fmt.Errorf("%s exists", name)
}

// prune deletes the complete backups of a relay except for the newest keep. It leaves backups of other
// relays, and anything else in the directory.
func prune(dir, relayID string, keep int) (deleted []string, err error) {
	deleted = []string{}
	list, err := filepath.Glob(filepath.Join(dir, namePrefix+"*")) // sorted by time
	if err != nil {
		return deleted, err
	}
	var own []string
	for _, path := range list {
		if strings.HasSuffix(path, partialSuffix) {
			continue
		}
		if m, err := readManifest(path); err == nil && m.RelayID == relayID {
			own = append(own, path)
		}
	}
	for _, path := range own[:max(0, len(own)-keep)] {
		// The manifest goes first: what a failure leaves is no backup.
		if err := errors.Join(os.Remove(filepath.Join(path, manifestFile)), os.RemoveAll(path)); err != nil {
			return deleted, err
		}
		deleted = append(deleted, path)
	}
	return deleted, nil
}

// creation is a backup that is being made.
type creation struct {
	stateDir string
	dir      string // of the backup, partial
	copier   *copier
	manifest *Manifest
}

// run makes all files of the backup, the manifest last.
func (b *creation) run(ctx context.Context) error {
	if err := b.copyDatabases(ctx); err != nil {
		return err
	}
	if err := b.makeRelayFile(ctx); err != nil {
		return err
	}
	if err := b.copyFiles(ctx, ".", isPlain); err != nil {
		return err
	}
	if err := b.describeFiles(ctx); err != nil {
		return err
	}
	out, err := json.MarshalIndent(b.manifest, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Replace(filepath.Join(b.dir, manifestFile), append(out, '\n'))
}

// copyDatabases copies both databases as they were at one moment, and the keys that relay.db names.
// See the package comment for the order.
//
// The relay writes the file of a key before its row. The keys that are copied after the snapshot therefore
// include those of its rows, except for keys that a rotation has dropped in between. If one of these was
// the one that signed, a relay that is restored from the backup makes a new key.
func (b *creation) copyDatabases(ctx context.Context) error {
	var events *snapshot // nil: there is no event log
	path := filepath.Join(b.stateDir, eventlog.FileName)
	if info, err := os.Lstat(path); err == nil && info.Size() > 0 {
		if events, err = openSnapshot(ctx, path); err != nil {
			return err
		}
		defer events.close()
	}
	identities, err := openSnapshot(ctx, filepath.Join(b.stateDir, auth.DatabaseFile))
	if err != nil {
		return err
	}
	defer identities.close()
	if err := os.Mkdir(filepath.Join(b.dir, auth.KeysDir), 0o700); err != nil {
		return err
	}
	if err := b.copyFiles(ctx, auth.KeysDir, isKeyFile); err != nil {
		return err
	}
	err = identities.copyTo(ctx, b.copier, filepath.Join(b.dir, auth.DatabaseFile))
	if err == nil && events != nil {
		err = events.copyTo(ctx, b.copier, filepath.Join(b.dir, eventlog.FileName))
	}
	return err
}

// makeRelayFile makes relay.json from the copies of the databases, and notes in the manifest which
// state it is.
func (b *creation) makeRelayFile(ctx context.Context) error {
	var log auth.EventLogRecord
	path := filepath.Join(b.dir, eventlog.FileName)
	if _, err := os.Lstat(path); err == nil {
		if log, err = readEventLog(ctx, path); err != nil {
			return err
		}
	}
	record, err := auth.FinishCopy(ctx, b.dir, log, false, 0)
	if err != nil {
		return err
	}
	m := b.manifest
	m.RelayID, m.Epoch, m.EventLogID, m.LastSeq = record.RelayID, record.Epoch, log.ID, log.LastSeq
	return nil
}

// copyFiles copies the regular files of a directory whose names are accepted. One that is deleted in
// the meantime was not needed: a rotation has dropped the key, or the audit log was rotated.
func (b *creation) copyFiles(ctx context.Context, dir string, accept func(name string) bool) error {
	from, to := filepath.Join(b.stateDir, dir), filepath.Join(b.dir, dir)
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !accept(e.Name()) {
			continue
		}
		_, err := b.copier.file(ctx, filepath.Join(from, e.Name()), filepath.Join(to, e.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return atomicfile.SyncDir(to)
}

// describeFiles lists the files in the manifest, and makes them and their names durable. It reads them
// again, because makeRelayFile has changed the copy of relay.db.
func (b *creation) describeFiles(ctx context.Context) error {
	err := filepath.WalkDir(b.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f, err := b.copier.describe(ctx, path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(b.dir, path)
		f.Name = filepath.ToSlash(name)
		b.manifest.Files = append(b.manifest.Files, f)
		b.manifest.Bytes += f.Bytes
		return err
	})
	if err != nil {
		return err
	}
	for _, name := range []string{auth.DatabaseFile, auth.RelayFile} { // makeRelayFile has written them
		if err := syncFile(filepath.Join(b.dir, name)); err != nil {
			return err
		}
	}
	return atomicfile.SyncDir(b.dir)
}
