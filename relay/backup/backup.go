// Package backup copies the state directory of a relay while the relay runs, checks such copies,
// and restores one.
//
//	r, err := backup.Create(ctx, backup.Options{StateDir: dir, Dir: "/var/backups/agentctl"})
//	m, err := backup.Verify(ctx, r.Path)
//	done, err := backup.Restore(ctx, backup.RestoreOptions{StateDir: dir, Backup: r.Path})
//
// AcceptLoss is for a relay that lost a store and has no backup.
//
// A backup is a directory with the files of a state directory and a manifest, which is written
// last. Without the manifest, or if a file differs from it, the directory is no backup.
//
// # Consistency
//
// The relay writes while it is copied. Two snapshots are taken before anything is copied, that of the
// event log first: an event is appended after what it refers to is in relay.db, so whatever an
// event of the backup refers to is in the backup too. The files of the keys are copied next.
// relay.json is not copied but made from the copies of the databases. A copy of it could be
// ahead of them, and a relay refuses databases that are behind relay.json.
//
// # Locks
//
//	relay.lock, shared      Create, like the relay and its commands: no restore begins meanwhile
//	relay.lock, exclusive   Restore and AcceptLoss, while they examine the stores and exchange them
//	events.db.lock          the same two, against a relay of an earlier agentctl (lockState)
//	the partial directory   Create, so that another Create does not delete it (removePartial)
//
// # Interruptions
//
// A Create that is killed leaves a directory whose name ends in .partial, which the next Create deletes.
// After a Restore that is killed, the next process that opens the state directory completes the exchange
// of files if Swap had recorded it, and deletes the staging directory if not.
//
// # Files
//
//	backup.go   the manifest, and which files belong to a backup
//	create.go   Create
//	restore.go  Verify and Restore
//	loss.go     AcceptLoss
//	records.go  whether the stores of a state directory are those that it records
//	copy.go     copying files and databases at a bounded speed
//	files.go    locks, owners and syncing of files
package backup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentctl/lazyregexp"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/strictjson"
)

// manifestFile is the name of the manifest in a backup.
const manifestFile = "manifest.json"

// Format is the version of a backup's layout.
const Format = 1

// Bounds of a backup. One that exceeds them is refused.
const (
	maxManifest = 4 << 20 // bytes of the manifest
	maxFiles    = 10_000  // that it names
)

// Manifest describes a backup. Verify compares the backup with it.
type Manifest struct {
	Format      int    `json:"format"`
	Version     string `json:"agentctl_version"`
	CreatedAtMS int64  `json:"created_at_ms"`
	RelayID     string `json:"relay_id"`
	Epoch       int64  `json:"epoch"`     // see auth.Record
	EventLogID  string `json:"events_id"` // "": no event log
	LastSeq     uint64 `json:"last_seq"`  // of the event log
	Bytes       int64  `json:"bytes"`     // of all files
	Files       []File `json:"files"`
}

// Created returns when the backup was begun, in UTC.
func (m *Manifest) Created() time.Time { return time.UnixMilli(m.CreatedAtMS).UTC() }

// File is one file of a backup.
type File struct {
	Name   string `json:"name"` // relative to the backup, with slashes
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // hex
}

// DamagedError refuses a backup that is incomplete, or was changed.
type DamagedError struct {
	Path   string // of the backup
	Reason string
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("%s is not a whole backup: %s", e.Path, e.Reason)
}

// plainFiles matches the files at the top of a state directory that are copied as they are:
// certificates, the address of the relay, and the audit log with its older parts. Locks, sockets,
// temporary files (.new) and what was set aside have other endings and are left out.
var plainFiles = lazyregexp.New(`^[a-z][a-z0-9_.-]{0,60}\.(pem|json|jsonl)(\.[0-9]{1,5})?$`)

// auditFiles matches the files of the audit log. A restore keeps those of the state directory: what
// happened since the backup stays on record.
var auditFiles = lazyregexp.New(`\.jsonl(\.[0-9]{1,5})?$`)

// isPlain reports whether a file is copied as it is.
func isPlain(name string) bool {
	return plainFiles.MatchString(name) && name != auth.RelayFile && name != "restore.json" && name != manifestFile
}

// belongsInBackup reports whether a backup may have a file of this name. Restore writes no other name
// into a state directory, whatever a manifest says.
func belongsInBackup(name string) bool {
	dir, base := filepath.Split(filepath.FromSlash(name))
	switch dir {
	case "":
		return name == auth.RelayFile || name == auth.DatabaseFile || name == eventlog.FileName || isPlain(name)
	case auth.KeysDir + string(filepath.Separator):
		return isKeyFile(base)
	}
	return false
}

// isKeyFile reports whether a file of keys/ is copied: signing keys, and the keys of the stage sign.
// Files that are being written (.new) are not.
func isKeyFile(base string) bool {
	return base != "" && len(base) <= 255 && base[0] != '.' && !strings.HasSuffix(base, ".new") && !strings.ContainsAny(base, "/\\\x00")
}

// readManifest reads and checks the manifest of a backup, and no other file.
func readManifest(dir string) (*Manifest, error) {
	damaged := func(reason string) error { return &DamagedError{dir, reason} }
	path := filepath.Join(dir, manifestFile)
	switch info, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
		if _, err := os.Stat(dir); err != nil {
			return nil, err
		}
		if newest := newestIn(dir); newest != "" {
			return nil, damaged("it is a directory of backups; the newest is " + newest)
		}
		return nil, damaged("it has no " + manifestFile + ", like a backup that was interrupted")
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() > maxManifest:
		return nil, damaged(manifestFile + " is not a regular file of at most 4 MiB")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m := new(Manifest)
	// Strict: a member that this agentctl does not know may change what a restore has to do.
	if err := strictjson.Unmarshal(b, m); err != nil {
		return nil, damaged(manifestFile + " cannot be read, or is of a newer agentctl")
	}
	switch {
	case m.Format != Format:
		return nil, damaged(fmt.Sprintf("it has format %d, this agentctl knows %d", m.Format, Format))
	case len(m.Files) > maxFiles:
		return nil, damaged("it has too many files")
	}
	seen := map[string]bool{}
	for _, f := range m.Files {
		if !belongsInBackup(f.Name) || seen[f.Name] {
			return nil, damaged(fmt.Sprintf("%s names a file that does not belong in a backup", manifestFile))
		}
		seen[f.Name] = true
	}
	if !seen[auth.RelayFile] || !seen[auth.DatabaseFile] {
		return nil, damaged("it has no " + auth.RelayFile + " or no " + auth.DatabaseFile)
	}
	return m, nil
}

// newestIn returns the newest backup in a directory of backups, "" for none. The names contain the
// time, and Glob sorts them.
func newestIn(dir string) string {
	list, _ := filepath.Glob(filepath.Join(dir, namePrefix+"*", manifestFile))
	if len(list) == 0 {
		return ""
	}
	return filepath.Dir(list[len(list)-1])
}
