package backup

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// What was taken away after the backup stays away, and what was given since is still there.
func TestRestoreCarriesOver(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	revoked, kept := s.mintAgent(), s.mintAgent()
	removedBoard, keptBoard := s.mintBoard(), s.mintBoard()
	invite, _, err := s.store.CreateInvite(t.Context(), auth.InviteRequest{})
	if err != nil {
		t.Fatal(err)
	}
	backup := s.backup(backups)

	s.revoke(revoked)
	if _, err := s.store.RemoveNode(t.Context(), "acme", removedBoard.NodeID, false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.RevokeInvite(t.Context(), "", invite.Prefix, false); err != nil {
		t.Fatal(err)
	}
	newBoard := s.mintBoard()
	s.appendTicket("after the backup")
	s.stop()

	r, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: backup.Path})
	if err != nil {
		t.Fatal(err)
	}
	// Removing a board revokes its tokens, which is the second revocation.
	if c := r.Carried; c == nil || c.Revocations != 2 || c.Invites != 1 || !slices.Equal(c.NodesRemoved, []string{removedBoard.NodeID}) {
		t.Errorf("carried over: %+v; want 2 revocations, 1 invite, 1 removed node", c)
	}
	if r.Unknown != "" || !r.LostEvents {
		t.Errorf("got %+v; want that the revocations are known, and events are lost", r)
	}
	s = openRelay(t, s.dir)
	s.checkTokens(map[string]auth.Minted{"kept": kept, "of the kept board": keptBoard, "of the new board": newBoard},
		map[string]auth.Minted{"revoked": revoked, "of the removed board": removedBoard})
	s.checkNodes(keptBoard.NodeID, newBoard.NodeID)
	if _, ok := s.store.NodeTenant(removedBoard.NodeID); ok {
		t.Error("the removed board is back")
	}
	if list, err := s.store.Invites(t.Context(), ""); err != nil || len(list) != 1 || list[0].State != "revoked" {
		t.Errorf("the invites are %+v, %v; want one that is revoked", list, err)
	}
}

// The state that is replaced is kept aside. The audit log, and an authority that was made after the
// backup, stay in their place: boards know the relay by its authority.
func TestRestoreKeepsOldState(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	backup := s.backup(backups)
	authority := func(s *relayState) string {
		a, err := s.store.Authority(auth.AuthorityOptions{Names: func() []string { return []string{"localhost"} }})
		if err != nil {
			t.Fatal(err)
		}
		return a.SHA256()
	}
	made := authority(s)
	s.stop()
	r, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: backup.Path})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(r.Aside, auth.DatabaseFile), filepath.Join(r.Aside, eventlog.FileName), s.path("audit.jsonl")} {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	s = openRelay(t, s.dir)
	if got := authority(s); got != made {
		t.Errorf("the authority is %s, want %s", got, made)
	}
	s.stop()

	// From now on the old database counts as a foreign one.
	if err := os.Rename(filepath.Join(r.Aside, auth.DatabaseFile), s.path(auth.DatabaseFile)); err != nil {
		t.Fatal(err)
	}
	var refused *auth.StateError
	if _, err := auth.Open(auth.Options{StateDir: s.dir}); !errors.As(err, &refused) || refused.Problem != auth.StoreForeign {
		t.Errorf("with the old database: got %v, want a StateError %s", err, auth.StoreForeign)
	}
}

// Keys that were dropped after the backup stay dropped, and the key that signs since then still does.
func TestRestoreCarriesKeysOver(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	old := s.mintAgent()
	backup := s.backup(backups)
	if _, err := s.store.RotateKeys(t.Context(), auth.RotateRequest{DropOld: true}); err != nil {
		t.Fatal(err)
	}
	fresh := s.mintAgent()
	s.stop()
	r, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: backup.Path})
	if err != nil || len(r.Carried.KeysDropped) != 1 {
		t.Fatalf("got %+v, %v; want one dropped key", r, err)
	}
	s = openRelay(t, s.dir)
	s.checkTokens(map[string]auth.Minted{"of the new key": fresh}, map[string]auth.Minted{"of the dropped key": old})
	if keys, err := s.store.Keys(t.Context()); err != nil || len(keys) != 1 || keys[0].State != auth.KeySigns {
		t.Errorf("the keys are %+v, %v; want one that signs", keys, err)
	}
}

// Where the old state does not show what was revoked, a restore is refused and changes nothing, unless
// the caller accepts that.
func TestRestoreWithUnknownRevocations(t *testing.T) {
	t.Parallel()
	tests := map[string]func(s *relayState) error{
		"new machine": func(s *relayState) error { return os.RemoveAll(s.dir) },
	}
	for name, spoil := range spoilDatabase {
		tests[name+" relay.db"] = func(s *relayState) error { return spoil(s.path(auth.DatabaseFile)) }
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, backups := newRelay(t)
			revoked := s.mintAgent()
			backup := s.backup(backups)
			s.revoke(revoked)
			s.stop()
			if err := spoil(s); err != nil {
				t.Fatal(err)
			}
			before := describeFiles(t, s.dir)
			o := RestoreOptions{StateDir: s.dir, Backup: backup.Path}
			if _, err := Restore(t.Context(), o); !errors.As(err, new(*UnknownError)) {
				t.Fatalf("got %v, want an *UnknownError", err)
			}
			if after := describeFiles(t, s.dir); after != before {
				t.Errorf("the state was\n%s\nand is\n%s", before, after)
			}
			o.AcceptUnknown = true
			r, err := Restore(t.Context(), o)
			if err != nil || r.Unknown == "" {
				t.Fatalf("accepted: got %+v, %v; want why it is unknown", r, err)
			}
			openRelay(t, s.dir).checkTokens(map[string]auth.Minted{"whose revocation is lost": revoked}, nil)
		})
	}
}

// Nothing was revoked after the backup: relay.json shows it although relay.db is lost.
func TestRestoreWithoutRevocations(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	backup := s.backup(backups)
	s.stop()
	if err := os.Remove(s.path(auth.DatabaseFile)); err != nil {
		t.Fatal(err)
	}
	if r, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: backup.Path}); err != nil || r.Unknown != "" {
		t.Errorf("got %+v, %v; want that the revocations are known", r, err)
	}
	openRelay(t, s.dir)
}

// The directory for the copy of the old database is inside the new state, so one that cannot be made or
// removed is an error of the restore, and not one of the old database, which the caller may accept.
func TestRestoreWithFileInTheWay(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	backup := s.backup(backups)
	s.revoke(s.mintAgent())
	s.stop()
	staging := t.TempDir()
	if err := os.WriteFile(filepath.Join(staging, "old"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := &restoration{opts: &RestoreOptions{StateDir: s.dir, Backup: backup.Path, AcceptUnknown: true}, manifest: backup.Manifest, staging: staging, result: &Restored{}}
	if _, err := r.carryOver(t.Context()); !errors.Is(err, os.ErrExist) || r.result.Unknown != "" {
		t.Errorf("got %v and unknown revocations %q; want %v and none", err, r.result.Unknown, os.ErrExist)
	}
}

// A backup that differs from its manifest is refused, and changes nothing.
func TestRestoreRefusesDamagedBackups(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	good := s.backup(backups)
	s.stop()
	before := describeFiles(t, s.dir)

	tests := map[string]func(dir string) error{
		"no manifest":       func(dir string) error { return os.Remove(filepath.Join(dir, manifestFile)) },
		"half a manifest":   func(dir string) error { return os.Truncate(filepath.Join(dir, manifestFile), 100) },
		"another epoch":     editManifest(`"epoch": `, `"epoch": 9`),
		"a newer format":    editManifest(`"format": 1`, `"format": 2`),
		"an unknown member": editManifest(`"format": 1`, `"format": 1, "x": 1`),
		"a file elsewhere":  editManifest(`"audit.jsonl"`, `"../audit.jsonl"`),
		"a file twice":      editManifest(`"audit.jsonl"`, `"relay.db"`),
	}
	for _, f := range good.Files {
		name := filepath.FromSlash(f.Name)
		tests["without "+f.Name] = func(dir string) error { return os.Remove(filepath.Join(dir, name)) }
		tests["a cut "+f.Name] = func(dir string) error { return os.Truncate(filepath.Join(dir, name), f.Bytes-1) }
		tests["a changed "+f.Name] = editFile(name, func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	}
	for name, spoil := range tests {
		dir := filepath.Join(t.TempDir(), "backup")
		if err := errors.Join(os.CopyFS(dir, os.DirFS(good.Path)), spoil(dir)); err != nil {
			t.Fatal(name, err)
		}
		if _, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: dir, AcceptUnknown: true}); !errors.As(err, new(*DamagedError)) {
			t.Errorf("%s: got %v, want a *DamagedError", name, err)
		}
		if after := describeFiles(t, s.dir); after != before {
			t.Fatalf("%s: the state was\n%s\nand is\n%s", name, before, after)
		}
	}
}

// The error for a directory of backups names the newest of them.
func TestRestoreOfDirectoryOfBackups(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	s.backup(backups)
	newest := s.backup(backups)
	if _, err := Verify(t.Context(), backups); err == nil || !strings.Contains(err.Error(), newest.Path) {
		t.Errorf("got %v, want an error with %s", err, newest.Path)
	}
}

// editFile returns a function that changes a file of a backup.
func editFile(name string, edit func([]byte) []byte) func(dir string) error {
	return func(dir string) error {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), edit(b), 0o600)
		}
		return err
	}
}

func editManifest(old, text string) func(dir string) error {
	return editFile(manifestFile, func(b []byte) []byte { return []byte(strings.Replace(string(b), old, text, 1)) })
}

// A state directory that a relay uses is refused.
func TestRestoreWhileRelayRuns(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	backup := s.backup(backups)
	if _, err := Restore(t.Context(), RestoreOptions{StateDir: s.dir, Backup: backup.Path}); !errors.Is(err, auth.ErrInUse) {
		t.Errorf("got %v, want ErrInUse", err)
	}
}

// The state of another relay is replaced only if the caller says so.
func TestRestoreOverAnotherRelay(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	backup := s.backup(backups)
	other, _ := newRelay(t)
	other.stop()
	o := RestoreOptions{StateDir: other.dir, Backup: backup.Path, AcceptUnknown: true}
	var refused *OtherRelayError
	if _, err := Restore(t.Context(), o); !errors.As(err, &refused) || refused.Backup != backup.RelayID {
		t.Errorf("got %v, want an *OtherRelayError of %s", err, backup.RelayID)
	}
	o.OtherRelay = true
	if r, err := Restore(t.Context(), o); err != nil || r.RelayID != backup.RelayID {
		t.Errorf("got %+v, %v; want relay %s", r, err, backup.RelayID)
	}
	if got := openRelay(t, other.dir).store.Audience(); !strings.HasSuffix(got, backup.RelayID) {
		t.Errorf("the audience is %s, want that of relay %s", got, backup.RelayID)
	}
}
