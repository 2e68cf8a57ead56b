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
	Backup   string // a directory that Create made
	// AcceptUnknown goes on when it is not known what was revoked after the backup.
	AcceptUnknown bool
	// OtherRelay replaces the state of another relay.
	OtherRelay bool
	Now        func() time.Time // default time.Now
}

// Restored says what Restore did.
type Restored struct {
	StateDir string `json:"state_dir"`
	Backup   string `json:"backup"`
	RelayID  string `json:"relay_id"`
	Created  int64  `json:"backup_created_at_ms"`
	Aside    string `json:"replaced"` // directory with the state that was there; "": none was
	// Unknown says why it is not known what was revoked after the backup; "": it is known, and was
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

// Verify checks that every file of a backup is there, with the content that the manifest describes. It
// ignores other files in the directory, and so does Restore.
func Verify(ctx context.Context, dir string) (*Manifest, error) {
	m, err := readManifest(dir)
	if err != nil {
		return nil, err
	}
	c := newCopier(fullRate)
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

// Restore puts a backup into a state directory that no process has open. It checks the backup before it
// locks or writes anything. What was there is moved into a directory aside and not deleted, and what was
// revoked there since the backup stays revoked. All files are exchanged, or none: a process that is killed
// leaves the old state, or one that the next start completes (auth.Exclusive.Swap).
//
// The errors are *DamagedError, *UnknownError, *OtherRelayError or auth.ErrInUse. After one of these
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
	r := &restoration{opts: &o, manifest: m, staging: staging,
		result: &Restored{StateDir: o.StateDir, Backup: o.Backup, RelayID: m.RelayID, Created: m.CreatedAtMS, LastSeq: m.LastSeq}}
	if err := r.prepare(ctx); err != nil {
		return nil, err
	}
	replaced, err := r.replacedNames()
	if err != nil {
		return nil, err
	}
	aside := auth.AsideName(o.Now())
	if err := x.Swap(aside, replaced); err != nil {
		return nil, err
	}
	swapped = true
	if len(replaced) > 0 {
		r.result.Aside = filepath.Join(o.StateDir, aside)
	}
	return r.result, nil
}

// lockState opens a state directory that no relay uses. A relay of an earlier agentctl locks its event
// log only, so that is locked as well, if it has a lock file. unlock releases both.
func lockState(dir string) (x *auth.Exclusive, unlock func() error, err error) {
	if x, err = auth.LockStateDir(dir); err != nil {
		return nil, nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, eventlog.FileName+".lock"), os.O_RDWR|openFlags, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return x, x.Close, nil
	case err == nil && !lock(f):
		err = errors.Join(fmt.Errorf("%w: a relay; find it with: fuser -v %s", auth.ErrInUse, f.Name()), f.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(err, x.Close())
	}
	return x, func() error { return errors.Join(f.Close(), x.Close()) }, nil
}

// restoration is a restore that is being made. The new state is built in the staging directory, so that
// an error leaves the state directory as it was.
type restoration struct {
	opts      *RestoreOptions
	result    *Restored
	manifest  *Manifest
	staging   string
	keepAudit bool // the state directory has an audit log, which stays
}

// prepare builds the new state in the staging directory. The copy of relay.db gets a new database id, and
// an epoch above that of the state that it replaces. If somebody later mixes files of the two states, the
// relay therefore refuses them as foreign or older. At the end all files are durable, as
// auth.Exclusive.Swap requires.
func (r *restoration) prepare(ctx context.Context) error {
	logs, _ := filepath.Glob(filepath.Join(r.opts.StateDir, "*.jsonl"))
	r.keepAudit = len(logs) > 0
	if err := r.copyFiles(ctx); err != nil {
		return err
	}
	log, err := r.checkDatabases(ctx)
	if err != nil {
		return err
	}
	minEpoch, err := r.carryOver(ctx)
	if err != nil {
		return err
	}
	record, err := auth.FinishCopy(ctx, r.staging, log, true, minEpoch)
	if err != nil {
		return err
	}
	r.result.Epoch = record.Epoch
	for _, name := range []string{auth.DatabaseFile, eventlog.FileName} {
		if err := syncFile(filepath.Join(r.staging, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return errors.Join(atomicfile.SyncDir(filepath.Join(r.staging, auth.KeysDir)), atomicfile.SyncDir(r.staging))
}

// copyFiles copies the backup into the staging directory, and compares it with the manifest once more:
// the backup may be in a directory where somebody else can change it after Verify.
func (r *restoration) copyFiles(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Join(r.staging, auth.KeysDir), 0o700); err != nil {
		return err
	}
	c := newCopier(fullRate)
	for _, f := range r.manifest.Files {
		if f.Name == auth.RelayFile || r.keepAudit && auditFiles.MatchString(f.Name) { // prepare writes relay.json
			continue
		}
		name := filepath.FromSlash(f.Name)
		is, err := c.file(ctx, filepath.Join(r.opts.Backup, name), filepath.Join(r.staging, name))
		if err != nil {
			return err
		}
		if is.Bytes != f.Bytes || is.SHA256 != f.SHA256 {
			return r.damaged(f.Name + " has changed")
		}
	}
	return nil
}

// checkDatabases checks that the databases are sound and those of the manifest. It returns the record
// of the event log, the zero value if there is none.
func (r *restoration) checkDatabases(ctx context.Context) (log auth.EventLogRecord, err error) {
	db, err := auth.ReadDatabase(ctx, r.staging)
	if err != nil {
		return log, err
	}
	if r.inBackup(eventlog.FileName) {
		path := filepath.Join(r.staging, eventlog.FileName)
		if err := checkCopy(ctx, path); err != nil {
			return log, r.damaged(eventlog.FileName + ": " + err.Error())
		}
		if log, err = readEventLog(ctx, path); err != nil {
			return log, err
		}
	}
	m := r.manifest
	if db.RelayID != m.RelayID || db.Epoch != m.Epoch || log.ID != m.EventLogID || log.LastSeq != m.LastSeq {
		return log, r.damaged(manifestFile + " does not describe its databases")
	}
	return log, nil
}

func (r *restoration) damaged(reason string) error { return &DamagedError{r.opts.Backup, reason} }

// inBackup reports whether the backup has a file.
func (r *restoration) inBackup(name string) bool {
	return slices.ContainsFunc(r.manifest.Files, func(f File) bool { return f.Name == name })
}

// carryOver takes what was revoked since the backup from the state that is there. If that is not
// known, the caller must have accepted it (RestoreOptions). It returns the least epoch that the new
// state must have, so that the state that is replaced counts as older from then on.
//
//	state of another relay              OtherRelayError, or unknown with OtherRelay
//	relay.db can be read                its revocations are carried over; it is unknown whether they are
//	                                    all if both it and the backup are older than relay.json
//	relay.db is missing or unreadable   nothing was revoked if relay.json has the epoch of the backup,
//	                                    otherwise unknown
func (r *restoration) carryOver(ctx context.Context) (minEpoch int64, err error) {
	dir := r.opts.StateDir
	file, fileErr := auth.ReadRecord(dir)
	db, dbErr := auth.ReadDatabase(ctx, dir)
	relayID := file.RelayID
	if fileErr != nil {
		relayID = db.RelayID
	}
	if relayID != "" && relayID != r.manifest.RelayID {
		if !r.opts.OtherRelay {
			return 0, &OtherRelayError{relayID, r.manifest.RelayID}
		}
		return 0, r.unknown("the state directory is another relay's")
	}
	minEpoch = max(file.Epoch, db.Epoch) + 1
	r.result.LostEvents = max(file.EventLog.LastSeq, db.EventLog.LastSeq) > r.manifest.LastSeq
	// The epoch counts revocations: if relay.json has that of the backup, there was none since.
	isUnchanged := fileErr == nil && file.DatabaseID != "" && file.Epoch == r.manifest.Epoch
	switch _, err := os.Lstat(filepath.Join(dir, auth.DatabaseFile)); {
	case errors.Is(err, fs.ErrNotExist) && isUnchanged:
		return minEpoch, nil
	case errors.Is(err, fs.ErrNotExist):
		return minEpoch, r.unknown("the state directory has no " + auth.DatabaseFile + " that could show it")
	case err != nil:
		return minEpoch, err
	}
	// If this directory stayed in the staging directory, Swap would make it part of the new state. So
	// its errors end the restore, even if the caller accepts that revocations are unknown.
	old := filepath.Join(r.staging, "old")
	if err := os.Mkdir(old, 0o700); err != nil {
		return minEpoch, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(old)) }()
	err = dbErr
	if err == nil && db.RelayID != "" && db.RelayID != r.manifest.RelayID {
		err = errors.New(auth.DatabaseFile + " is another relay's")
	}
	if err == nil {
		err = r.carryDatabaseOver(ctx, old)
	}
	switch {
	case ctx.Err() != nil:
		return minEpoch, ctx.Err()
	case err != nil && isUnchanged:
		return minEpoch, nil
	case err != nil:
		return minEpoch, r.unknown(err.Error())
	case fileErr == nil && db.Epoch < file.Epoch && r.manifest.Epoch < file.Epoch:
		if err := r.unknown(auth.DatabaseFile + " in the state directory is itself older than it was"); err != nil {
			return minEpoch, err
		}
	}
	return minEpoch, r.carryKeysOver(ctx)
}

// unknown notes why it is not known what was revoked. It returns an error unless the caller has
// accepted that.
func (r *restoration) unknown(why string) error {
	if r.result.Unknown = why; r.opts.AcceptUnknown {
		return nil
	}
	return &UnknownError{r.manifest.Created(), why}
}

// carryDatabaseOver carries over from relay.db of the state directory. It reads a copy in dir, because
// auth.CarryOver migrates a database of an older schema.
func (r *restoration) carryDatabaseOver(ctx context.Context, dir string) error {
	old, err := openSnapshot(ctx, filepath.Join(r.opts.StateDir, auth.DatabaseFile))
	if err != nil {
		return err
	}
	defer old.close()
	if err := old.copyTo(ctx, newCopier(fullRate), filepath.Join(dir, auth.DatabaseFile)); err != nil {
		return err
	}
	r.result.Carried, err = auth.CarryOver(ctx, r.staging, dir)
	return err
}

// carryKeysOver makes the files of keys/ those that the new relay.db names: it adds keys that are newer
// than the backup, and removes those that were dropped since.
func (r *restoration) carryKeysOver(ctx context.Context) error {
	path := func(dir, kid string) string { return filepath.Join(dir, auth.KeysDir, kid+".pem") }
	for _, kid := range r.result.Carried.KeysDropped {
		if err := os.Remove(path(r.staging, kid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, kid := range r.result.Carried.Keys {
		if _, err := os.Lstat(path(r.staging, kid)); err == nil {
			continue
		}
		// A key whose file is gone verifies nothing. If it is the one that signs, the next start
		// makes a new one.
		_, err := newCopier(fullRate).file(ctx, path(r.opts.StateDir, kid), path(r.staging, kid))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// replacedNames lists what is moved aside: everything of the old state that the new one has, or must
// not have beside it. What the backup does not have stays, such as an authority that was made since:
// boards that joined know the relay by it.
func (r *restoration) replacedNames() (names []string, err error) {
	entries, err := os.ReadDir(r.opts.StateDir)
	if err != nil {
		return nil, err
	}
	// SQLite would apply a write-ahead log of the old state to the new database beside it.
	always := slices.Concat(databaseFiles(auth.DatabaseFile), databaseFiles(eventlog.FileName), []string{auth.RelayFile, auth.KeysDir})
	for _, e := range entries {
		name := e.Name()
		isKept := r.keepAudit && auditFiles.MatchString(name)
		if slices.Contains(always, name) || isPlain(name) && r.inBackup(name) && !isKept {
			names = append(names, name)
		}
	}
	return names, nil
}
