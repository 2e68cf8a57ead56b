// Package backup copies the state directory of a relay while the relay runs, checks such copies,
// and puts one back.
//
//	r, err := backup.Create(ctx, backup.Options{StateDir: dir, Dir: "/var/backups/agentctl"})
//	err = backup.Restore(ctx, backup.RestoreOptions{StateDir: dir, Backup: r.Path})
//
// A backup is a directory with the files of a state directory and a manifest, which is written
// last: without it, or if a file differs from it, the directory is no backup.
//
// # Consistency
//
// The snapshots of both databases begin at one moment, that of the event log first: what an event
// refers to was in relay.db before it. The files of the keys are copied right after it, and
// relay.json is made from the two copies instead of being copied, so that a restored backup
// never looks like one with an older or a foreign store.
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

// Bounds of a backup.
const (
	maxManifest = 4 << 20 // bytes
	maxFiles    = 10_000
)

// Manifest describes a backup. Restore checks all of it.
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

// Created is when the backup was begun.
func (m *Manifest) Created() time.Time { return time.UnixMilli(m.CreatedAtMS).UTC() }

// File is one file of a backup.
type File struct {
	Name   string `json:"name"` // with slashes
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // hex
}

// DamagedError refuses a backup that is not whole.
type DamagedError struct {
	Path   string // of the backup
	Reason string
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("%s is not a whole backup: %s", e.Path, e.Reason)
}

// plainFiles matches the files at the top of a state directory that are copied as they are:
// certificates, the address of the relay, consents, and the audit log with its older parts.
var plainFiles = lazyregexp.New(`^[a-z][a-z0-9_.-]{0,60}\.(pem|json|jsonl)(\.[0-9]{1,5})?$`)

// audits matches the files of the audit log, which a restore leaves alone if there are any.
var audits = lazyregexp.New(`\.jsonl(\.[0-9]{1,5})?$`)

// isPlain reports whether a file is copied as it is.
func isPlain(name string) bool {
	return plainFiles.MatchString(name) && name != auth.RelayFile && name != "restore.json" && name != manifestFile
}

// isPart reports whether a file may be in a backup: nothing else is put into a state directory.
func isPart(name string) bool {
	dir, base := filepath.Split(filepath.FromSlash(name))
	switch dir {
	case "":
		return name == auth.RelayFile || name == auth.DatabaseFile || name == eventlog.FileName || isPlain(name)
	case auth.KeysDir + string(filepath.Separator):
		return isKeyFile(base)
	}
	return false
}

// isKeyFile reports whether a file of keys/ is copied: signing keys, and what the stage sign uses.
func isKeyFile(base string) bool {
	return base != "" && len(base) <= 255 && base[0] != '.' && !strings.HasSuffix(base, ".new") && !strings.ContainsAny(base, "/\\\x00")
}

// readManifest reads the manifest of a backup.
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
		return nil, damaged("it has no " + manifestFile + ", which a backup that was cut short does not have")
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
		if !isPart(f.Name) || seen[f.Name] {
			return nil, damaged(fmt.Sprintf("%s names a file that does not belong into a backup", manifestFile))
		}
		seen[f.Name] = true
	}
	if !seen[auth.RelayFile] || !seen[auth.DatabaseFile] {
		return nil, damaged("it has no " + auth.RelayFile + " or no " + auth.DatabaseFile)
	}
	return m, nil
}

// newestIn returns the newest backup in a directory of backups, "" for none.
func newestIn(dir string) string {
	list, _ := filepath.Glob(filepath.Join(dir, namePrefix+"*", manifestFile)) // sorted, as the names are by time
	if len(list) == 0 {
		return ""
	}
	return filepath.Dir(list[len(list)-1])
}
