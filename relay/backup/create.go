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

// Names in a directory of backups: agentctl-20260102T030405Z, and the same with partialSuffix
// while it is being made.
const (
	namePrefix    = "agentctl-"
	nameTime      = "20060102T150405Z"
	partialSuffix = ".partial"
)

// backupRate bounds the speed of a backup, bytes per second: half of what a cheap card reads.
const backupRate = 16 << 20

// Options of Create. StateDir and Dir are required.
type Options struct {
	StateDir string
	Dir      string // the backup is made in a new directory in it
	Keep     int    // delete the oldest complete backups of this relay beyond so many; 0: none
	Version  string // of agentctl, for the manifest
	Now      func() time.Time
}

// Result of Create.
type Result struct {
	Path string `json:"path"`
	*Manifest
	Deleted []string `json:"deleted"` // backups that Options.Keep has deleted
}

// errOpenDir refuses a directory in which others could read the keys.
var errOpenDir = errors.New("others can read it, and a backup holds the relay's signing keys")

// Create makes a backup in a new directory below Options.Dir. The relay may run and write.
// After a failure nothing is left that Restore takes for a backup.
func Create(ctx context.Context, o Options) (_ *Result, err error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Dir, err = checkTarget(o.Dir, o.StateDir); err != nil {
		return nil, err
	}
	// SQLite would drop what is behind a damaged frame, without a word.
	for _, name := range []string{auth.DatabaseFile, eventlog.FileName} {
		if err := sqlitefile.ScanWAL(filepath.Join(o.StateDir, name)); errors.Is(err, fs.ErrPermission) {
			return nil, err
		} else if err != nil {
			return nil, fmt.Errorf("a damaged state is not backed up: %w; see: agentctl relay check", err)
		}
	}
	store, err := auth.Open(auth.Options{StateDir: o.StateDir, Existing: true})
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
	partial := filepath.Join(o.Dir, namePrefix+began.Format(nameTime)+"-"+manifest.NewULID()[16:]+partialSuffix)
	unlock, err := makePartial(partial)
	if err != nil {
		return nil, err
	}
	defer unlock()
	defer func() {
		if err != nil {
			_ = os.RemoveAll(partial)
		}
	}()
	b := &creation{Options: &o, copier: newCopier(backupRate), dir: partial,
		manifest: &Manifest{Format: Format, Version: o.Version, CreatedAtMS: began.UnixMilli(), Files: []File{}}}
	if err := b.run(ctx); err != nil {
		if storage.Classify(err) == storage.Full || sqlitefile.Code(err) == sqlite3.SQLITE_IOERR { // of the copy's index, on a full disk
			err = fmt.Errorf("%w; see whether there is free space: df -h %s", err, o.Dir)
		}
		return nil, fmt.Errorf("back up %s: %w", o.StateDir, err)
	}
	path, err := publish(partial, filepath.Join(o.Dir, namePrefix+began.Format(nameTime)))
	if err != nil {
		return nil, err
	}
	r := &Result{Path: path, Manifest: b.manifest, Deleted: []string{}}
	if o.Keep > 0 {
		r.Deleted, err = prune(o.Dir, b.manifest.RelayID, o.Keep)
	}
	return r, err
}

// checkTarget makes the directory for backups if it is missing, and refuses one that others can
// read, or that is lost together with the state.
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

// makePartial makes the directory of a backup in the making. The lock on it shows others that
// its maker is alive.
func makePartial(path string) (unlock func(), err error) {
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	lockDir(f)
	return func() { _ = f.Close() }, nil
}

// removePartial deletes what backups that were killed have left.
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
		if lockDir(f) {
			err = os.RemoveAll(path)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// publish gives a complete backup its name.
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

// prune deletes the oldest complete backups of a relay beyond the newest keep.
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
		// Without its manifest the rest is no backup.
		if err := errors.Join(os.Remove(filepath.Join(path, manifestFile)), os.RemoveAll(path)); err != nil {
			return deleted, err
		}
		deleted = append(deleted, path)
	}
	return deleted, nil
}

// creation is a backup in the making.
type creation struct {
	*Options
	*copier
	dir      string // partial
	manifest *Manifest
}

// run makes all files, the manifest last.
func (b *creation) run(ctx context.Context) error {
	if err := b.copyDatabases(ctx); err != nil {
		return err
	}
	var log auth.EventLogRecord
	if _, err := os.Lstat(filepath.Join(b.dir, eventlog.FileName)); err == nil {
		if log, err = readEventLog(ctx, filepath.Join(b.dir, eventlog.FileName)); err != nil {
			return err
		}
	}
	record, err := auth.FinishCopy(ctx, b.dir, log, false, 0)
	if err != nil {
		return err
	}
	b.manifest.RelayID, b.manifest.Epoch, b.manifest.EventLogID, b.manifest.LastSeq = record.RelayID, record.Epoch, log.ID, log.LastSeq
	if err := b.copyPlain(ctx); err != nil {
		return err
	}
	if err := b.describeAll(ctx); err != nil {
		return err
	}
	out, err := json.MarshalIndent(b.manifest, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Replace(filepath.Join(b.dir, manifestFile), append(out, '\n'))
}

// copyDatabases copies both databases as they are at one moment, and the keys that relay.db
// names. The snapshot of the event log begins first.
func (b *creation) copyDatabases(ctx context.Context) error {
	var events *snapshot
	path := filepath.Join(b.StateDir, eventlog.FileName)
	if info, err := os.Lstat(path); err == nil && info.Size() > 0 {
		if events, err = openSnapshot(ctx, path); err != nil {
			return err
		}
		defer events.close()
	}
	identities, err := openSnapshot(ctx, filepath.Join(b.StateDir, auth.DatabaseFile))
	if err != nil {
		return err
	}
	defer identities.close()
	if err := b.copyKeys(ctx); err != nil {
		return err
	}
	err = identities.copyTo(ctx, b.copier, filepath.Join(b.dir, auth.DatabaseFile))
	if err == nil && events != nil {
		err = events.copyTo(ctx, b.copier, filepath.Join(b.dir, eventlog.FileName))
	}
	return err
}

// copyKeys copies the files of keys/. One that a rotation has deleted in the meantime was
// dropped, and is not needed.
func (b *creation) copyKeys(ctx context.Context) error {
	if err := os.Mkdir(filepath.Join(b.dir, auth.KeysDir), 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(filepath.Join(b.StateDir, auth.KeysDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !isKeyFile(e.Name()) {
			continue
		}
		if _, err := b.file(ctx, filepath.Join(b.StateDir, auth.KeysDir, e.Name()), filepath.Join(b.dir, auth.KeysDir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return atomicfile.SyncDir(filepath.Join(b.dir, auth.KeysDir))
}

// copyPlain copies the other files.
func (b *creation) copyPlain(ctx context.Context) error {
	entries, err := os.ReadDir(b.StateDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !isPlain(e.Name()) {
			continue
		}
		if _, err := b.file(ctx, filepath.Join(b.StateDir, e.Name()), filepath.Join(b.dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// describeAll lists the files in the manifest, and makes them and their names durable.
func (b *creation) describeAll(ctx context.Context) error {
	err := filepath.WalkDir(b.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f, err := b.describe(ctx, path)
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
	for _, name := range []string{auth.DatabaseFile, auth.RelayFile} { // changed after they were copied
		if err := syncFile(filepath.Join(b.dir, name)); err != nil {
			return err
		}
	}
	return atomicfile.SyncDir(b.dir)
}

func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
