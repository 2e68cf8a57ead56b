package backup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"agentctl/atomicfile"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// RestoreOptions of Restore. StateDir and Backup are required.
type RestoreOptions struct {
	StateDir string // empty, missing, or of the relay of the backup
	Backup   string // a directory of Create
	// AcceptUnknown goes on when it is not known what was revoked after the backup.
	AcceptUnknown bool
	// OtherRelay replaces the state of another relay.
	OtherRelay bool
	Now        func() time.Time
}

// Restored says what Restore did.
type Restored struct {
	StateDir string `json:"state_dir"`
	Backup   string `json:"backup"`
	RelayID  string `json:"relay_id"`
	Created  int64  `json:"backup_created_at_ms"`
	Aside    string `json:"replaced"` // directory with the state that was there; "": none was
	// Unknown says why it is not known what was revoked after the backup; "": it is, and was
	// carried over.
	Unknown string        `json:"unknown_revocations,omitempty"`
	Carried *auth.Carried `json:"carried_over,omitempty"`
	Epoch   int64         `json:"epoch"`
	LastSeq uint64        `json:"last_seq"`
	// LostEvents reports that the event log that was replaced is newer than that of the backup.
	LostEvents bool `json:"events_lost"`
}

// UnknownError refuses to restore a backup without knowing what was revoked after it.
type UnknownError struct {
	Created time.Time // of the backup
	Why     string
}

func (e *UnknownError) Error() string {
	return fmt.Sprintf("what was revoked after the backup of %s is not known: %s", e.Created.Format(time.RFC3339), e.Why)
}

// OtherRelayError refuses to replace the state of another relay.
type OtherRelayError struct{ Is, Backup string } // relay ids

func (e *OtherRelayError) Error() string {
	return fmt.Sprintf("the state directory is of relay %s, the backup is of relay %s", e.Is, e.Backup)
}

// Verify checks a backup: that every file is there and as it was, that both databases are sound,
// and that they are those of the manifest.
func Verify(ctx context.Context, dir string) (*Manifest, error) {
	m, err := readManifest(dir)
	if err != nil {
		return nil, err
	}
	// Not slowed down: no relay is served from here.
	c := newCopier(1 << 30)
	for _, f := range m.Files {
		is, err := c.describe(ctx, filepath.Join(dir, filepath.FromSlash(f.Name)))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, &DamagedError{dir, f.Name + " is missing"}
		case err != nil:
			return nil, err
		case is.Bytes != f.Bytes || is.SHA256 != f.SHA256:
			return nil, &DamagedError{dir, f.Name + " is not as it was when the backup was made"}
		}
	}
	return m, nil
}

// Restore puts a backup into a state directory that nobody has open. The backup is checked first.
// What was there is moved into a directory aside, never deleted, and what it has revoked since
// the backup stays revoked. The exchange happens as a whole, or not at all: a process that is
// killed leaves the old state, or one that the next start completes.
//
// The errors are *DamagedError, *UnknownError, *OtherRelayError or auth.ErrInUse, before which
// nothing has changed.
func Restore(ctx context.Context, o RestoreOptions) (_ *Restored, err error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Backup, err = filepath.Abs(o.Backup); err != nil {
		return nil, err
	}
	m, err := Verify(ctx, o.Backup)
	if err != nil {
		return nil, err
	}
	x, unlock, err := lockState(o.StateDir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	staging, err := x.Staging()
	if err != nil {
		return nil, err
	}
	swapped := false
	defer func() {
		if !swapped {
			_ = os.RemoveAll(staging)
		}
	}()
	r := &restoration{RestoreOptions: &o, manifest: m, staging: staging,
		Restored: &Restored{StateDir: o.StateDir, Backup: o.Backup, RelayID: m.RelayID, Created: m.CreatedAtMS, LastSeq: m.LastSeq}}
	if err := r.prepare(ctx); err != nil {
		return nil, err
	}
	old, err := r.replaced()
	if err != nil {
		return nil, err
	}
	aside := auth.AsideName(o.Now())
	if err := x.Swap(aside, old); err != nil {
		return nil, err
	}
	swapped = true
	if len(old) > 0 {
		r.Aside = filepath.Join(o.StateDir, aside)
	}
	return r.Restored, nil
}

// lockState opens a state directory that no relay uses, one of an earlier agentctl included, which
// only locks its event log.
func lockState(dir string) (x *auth.Exclusive, unlock func() error, err error) {
	if x, err = auth.LockStateDir(dir); err != nil {
		return nil, nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, eventlog.FileName+".lock"), os.O_RDWR|openFlags, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return x, x.Close, nil
	case err == nil && !lockDir(f):
		err = errors.Join(fmt.Errorf("%w: a relay; find it with: fuser -v %s", auth.ErrInUse, f.Name()), f.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(err, x.Close())
	}
	return x, func() error { return errors.Join(f.Close(), x.Close()) }, nil
}

// restoration is a restore in the making.
type restoration struct {
	*RestoreOptions
	*Restored
	manifest *Manifest
	staging  string
	keepLogs bool // the state directory has an audit log, which stays
}

// prepare makes the new state in the staging directory.
func (r *restoration) prepare(ctx context.Context) error {
	if logs, _ := filepath.Glob(filepath.Join(r.RestoreOptions.StateDir, "*.jsonl")); len(logs) > 0 {
		r.keepLogs = true
	}
	if err := r.copyFiles(ctx); err != nil {
		return err
	}
	record, err := auth.ReadDatabase(ctx, r.staging)
	if err != nil {
		return err
	}
	log := auth.EventLogRecord{}
	if r.has(eventlog.FileName) {
		path := filepath.Join(r.staging, eventlog.FileName)
		if err := checkDatabase(ctx, path); err != nil {
			return &DamagedError{r.RestoreOptions.Backup, eventlog.FileName + ": " + err.Error()}
		}
		if log, err = readEventLog(ctx, path); err != nil {
			return err
		}
	}
	if record.RelayID != r.manifest.RelayID || record.Epoch != r.manifest.Epoch || log.ID != r.manifest.EventLogID || log.LastSeq != r.manifest.LastSeq {
		return &DamagedError{r.RestoreOptions.Backup, manifestFile + " does not describe its databases"}
	}
	minEpoch, err := r.carryOver(ctx)
	if err != nil {
		return err
	}
	if record, err = auth.FinishCopy(ctx, r.staging, log, true, minEpoch); err != nil {
		return err
	}
	r.Epoch = record.Epoch
	for _, name := range []string{auth.DatabaseFile, eventlog.FileName} {
		if err := syncFile(filepath.Join(r.staging, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return errors.Join(atomicfile.SyncDir(filepath.Join(r.staging, auth.KeysDir)), atomicfile.SyncDir(r.staging))
}

func (r *restoration) has(name string) bool {
	return slices.ContainsFunc(r.manifest.Files, func(f File) bool { return f.Name == name })
}

// copyFiles copies the backup, and makes sure that it copies what was verified.
func (r *restoration) copyFiles(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Join(r.staging, auth.KeysDir), 0o700); err != nil {
		return err
	}
	c := newCopier(1 << 30)
	for _, f := range r.manifest.Files {
		if r.keepLogs && audits.MatchString(f.Name) || f.Name == auth.RelayFile {
			continue
		}
		name := filepath.FromSlash(f.Name)
		is, err := c.file(ctx, filepath.Join(r.RestoreOptions.Backup, name), filepath.Join(r.staging, name))
		if err != nil {
			return err
		}
		if is.Bytes != f.Bytes || is.SHA256 != f.SHA256 {
			return &DamagedError{r.RestoreOptions.Backup, f.Name + " has changed"}
		}
	}
	return nil
}

// carryOver takes what was revoked since the backup from the state that is there. It returns the
// least epoch of the new state. If what was revoked is not known, the caller must have accepted
// that.
func (r *restoration) carryOver(ctx context.Context) (minEpoch int64, err error) {
	dir := r.RestoreOptions.StateDir
	file, fileErr := auth.ReadRecord(dir)
	db, dbErr := auth.ReadDatabase(ctx, dir)
	known := file
	if fileErr != nil {
		known = db
	}
	if known.RelayID != "" && known.RelayID != r.manifest.RelayID {
		if !r.OtherRelay {
			return 0, &OtherRelayError{known.RelayID, r.manifest.RelayID}
		}
		return 0, r.unknown("the state directory is another relay's")
	}
	minEpoch = max(file.Epoch, db.Epoch) + 1
	if max(file.EventLog.LastSeq, db.EventLog.LastSeq) > r.manifest.LastSeq {
		r.LostEvents = true
	}
	switch _, err := os.Lstat(filepath.Join(dir, auth.DatabaseFile)); {
	case errors.Is(err, fs.ErrNotExist) && fileErr == nil && file.DatabaseID != "" && file.Epoch == r.manifest.Epoch:
		return minEpoch, nil // relay.json shows that nothing was
	case errors.Is(err, fs.ErrNotExist):
		return minEpoch, r.unknown("the state directory has no " + auth.DatabaseFile + " that could show it")
	case err != nil:
		return minEpoch, err
	}
	from := filepath.Join(r.staging, "old")
	if err := os.Mkdir(from, 0o700); err != nil {
		return minEpoch, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(from)) }()
	err = dbErr
	if err == nil {
		err = copyOld(ctx, filepath.Join(dir, auth.DatabaseFile), filepath.Join(from, auth.DatabaseFile))
	}
	if err == nil && db.RelayID != "" && db.RelayID != r.manifest.RelayID {
		err = errors.New(auth.DatabaseFile + " is another relay's")
	}
	if err == nil {
		r.Carried, err = auth.CarryOver(ctx, r.staging, from)
	}
	switch {
	case ctx.Err() != nil:
		return minEpoch, ctx.Err()
	case err != nil && fileErr == nil && file.Epoch == r.manifest.Epoch && file.DatabaseID != "":
		return minEpoch, nil
	case err != nil:
		return minEpoch, r.unknown(err.Error())
	case fileErr == nil && db.Epoch < file.Epoch && r.manifest.Epoch < file.Epoch:
		if err := r.unknown(auth.DatabaseFile + " in the state directory is itself older than it was"); err != nil {
			return minEpoch, err
		}
	}
	return minEpoch, r.carryKeys(ctx)
}

// copyOld copies a database that nobody has open, without changing it.
func copyOld(ctx context.Context, from, to string) error {
	s, err := openSnapshot(ctx, from)
	if err != nil {
		return err
	}
	defer s.close()
	return s.copyTo(ctx, newCopier(1<<30), to)
}

func (r *restoration) unknown(why string) error {
	if r.Unknown = why; r.AcceptUnknown {
		return nil
	}
	return &UnknownError{r.manifest.Created(), why}
}

// carryKeys makes the files of keys/ those that relay.db names: it adds keys that are newer than
// the backup, and drops those that were dropped since.
func (r *restoration) carryKeys(ctx context.Context) error {
	keys := func(dir, kid string) string { return filepath.Join(dir, auth.KeysDir, kid+".pem") }
	for _, kid := range r.Carried.KeysDropped {
		if err := os.Remove(keys(r.staging, kid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, kid := range r.Carried.Keys {
		if _, err := os.Lstat(keys(r.staging, kid)); err == nil {
			continue
		}
		// A key whose file is gone verifies nothing; if it is the one that signs, the next start
		// makes a new one.
		if _, err := newCopier(1<<30).file(ctx, keys(r.RestoreOptions.StateDir, kid), keys(r.staging, kid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// replaced lists what is moved aside: everything of the old state that the new one has, or must
// not have beside it. What the backup does not have stays, such as an authority that was made
// since: boards that joined know the relay by it.
func (r *restoration) replaced() ([]string, error) {
	names := append(databaseFiles(auth.DatabaseFile), databaseFiles(eventlog.FileName)...)
	names = append(names, auth.RelayFile, auth.KeysDir)
	entries, err := os.ReadDir(r.RestoreOptions.StateDir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if isPlain(e.Name()) && r.has(e.Name()) && !(r.keepLogs && audits.MatchString(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return slices.DeleteFunc(names, func(name string) bool {
		return !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name })
	}), nil
}

// databaseFiles are the files of an SQLite database.
func databaseFiles(name string) []string {
	return []string{name, name + "-wal", name + "-shm", name + "-journal"}
}
