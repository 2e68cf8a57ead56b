package backup

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile"
)

// relayState is a state directory as a relay has it, with both stores open.
type relayState struct {
	t      *testing.T
	dir    string
	store  *auth.Store
	events *eventlog.Store
	stop   func()
}

func openRelay(t *testing.T, dir string) *relayState {
	t.Helper()
	s := &relayState{t: t, dir: dir}
	var err error
	if s.store, err = auth.Open(auth.Options{StateDir: dir}); err != nil {
		t.Fatal(err)
	}
	if s.events, err = eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName)}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.events.Run(ctx) })
	<-s.events.Started()
	if err := s.store.FollowEventLog(func() auth.EventLogRecord {
		r, err := readEventLog(context.Background(), filepath.Join(dir, eventlog.FileName))
		if err != nil {
			t.Error(err)
		}
		return r
	}); err != nil {
		t.Fatal(err)
	}
	s.stop = func() {
		if s.store == nil {
			return
		}
		cancel()
		wg.Wait()
		if err := errors.Join(s.store.Close(), s.events.Close()); err != nil {
			t.Error(err)
		}
		s.store = nil
	}
	t.Cleanup(s.stop)
	return s
}

func (s *relayState) mint(req auth.MintRequest) auth.Minted {
	s.t.Helper()
	list, err := s.store.Mint(s.t.Context(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return list[0]
}

func (s *relayState) ticket(id string) {
	s.t.Helper()
	if _, err := s.events.Append(s.t.Context(), eventlog.Event{Tenant: "acme", Type: "ticket.created", Aggregate: id, Payload: []byte("{}")}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *relayState) backup(to string) *Result {
	s.t.Helper()
	r, err := Create(s.t.Context(), Options{StateDir: s.dir, Dir: to})
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// accepted reports whether the relay accepts a token.
func (s *relayState) accepted(m auth.Minted) bool {
	_, err := s.store.Verify(m.Token)
	return err == nil
}

// newState makes a state directory with a few things in it.
func newState(t *testing.T) (s *relayState, dir, backups string) {
	t.Helper()
	dir, backups = filepath.Join(t.TempDir(), "state"), filepath.Join(t.TempDir(), "backups")
	s = openRelay(t, dir)
	s.ticket("1")
	if err := os.WriteFile(filepath.Join(dir, "audit.jsonl"), []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return s, dir, backups
}

// tree describes every file of a directory.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, "-shm") || strings.HasSuffix(path, ".lock") {
			return err
		}
		data, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s %x\n", strings.TrimPrefix(path, dir), sha256.Sum256(data))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A backup that is made while the relay writes is one moment: every event in it is about a node
// that is in it, and a relay starts from it in an empty directory.
func TestBackupOfRunningRelay(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var nodes int
	wg.Go(func() {
		for ctx.Err() == nil { // a node, and then an event about it
			m := s.mint(auth.MintRequest{Class: "device", Tenant: "acme"})
			if _, err := s.events.Append(context.Background(), eventlog.Event{Tenant: "acme", Type: "presence.online", Aggregate: m.NodeID, Payload: []byte("{}")}); err != nil {
				t.Error(err)
			}
			nodes++
		}
	})
	var list []*Result
	for range 3 {
		list = append(list, s.backup(backups))
	}
	cancel()
	wg.Wait()
	if nodes == 0 {
		t.Fatal("nothing was written meanwhile")
	}
	for i, r := range list {
		for _, path := range []string{backups, r.Path, filepath.Join(r.Path, auth.KeysDir)} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("%s: %v, %v", path, info.Mode(), err)
			}
		}
		for _, f := range r.Files {
			if info, err := os.Stat(filepath.Join(r.Path, f.Name)); err != nil || info.Mode().Perm() != 0o600 || info.Size() != f.Bytes {
				t.Errorf("%s: %v, %v", f.Name, info, err)
			}
		}
		to := filepath.Join(t.TempDir(), "restored")
		if _, err := Restore(t.Context(), RestoreOptions{StateDir: to, Backup: r.Path, AcceptUnknown: true}); err != nil {
			t.Fatal(err)
		}
		if problems := checkRecords(t.Context(), to); len(problems) > 0 {
			t.Errorf("backup %d: %v", i, problems)
		}
		restored := openRelay(t, to)
		err := restored.events.Replay(t.Context(), 0, func(e eventlog.Event) error {
			if e.Type == "presence.online" {
				if _, ok := restored.store.NodeTenant(e.Aggregate); !ok {
					t.Errorf("backup %d: an event is about %s, which is not known", i, e.Aggregate)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		restored.stop()
	}
	s.stop()
	offline, err := Create(t.Context(), Options{StateDir: dir, Dir: backups})
	if err != nil || offline.LastSeq < list[2].LastSeq {
		t.Errorf("without a relay: %+v, %v", offline, err)
	}
}

// What was taken away after the backup stays away, and what was given is still there.
func TestRestoreCarriesOver(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	ctx := t.Context()
	token, node, kept := s.mint(auth.MintRequest{Class: "agent"}), s.mint(auth.MintRequest{Class: "device", Tenant: "acme"}), s.mint(auth.MintRequest{Class: "agent"})
	stays := s.mint(auth.MintRequest{Class: "device", Tenant: "acme"})
	invite, _, err := s.store.CreateInvite(ctx, auth.InviteRequest{})
	if err != nil {
		t.Fatal(err)
	}
	before := s.backup(backups)
	made, err := s.store.Authority(auth.AuthorityOptions{Names: func() []string { return []string{"localhost"} }})
	if err != nil {
		t.Fatal(err)
	}
	s.ticket("2")
	if _, err := s.store.Revoke(ctx, auth.RevokeRequest{JTI: token.JTI}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.RemoveNode(ctx, "acme", node.NodeID, false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.RevokeInvite(ctx, "", invite.Prefix, false); err != nil {
		t.Fatal(err)
	}
	later := s.mint(auth.MintRequest{Class: "device", Tenant: "acme"})
	s.stop()

	r, err := Restore(ctx, RestoreOptions{StateDir: dir, Backup: before.Path})
	if err != nil {
		t.Fatal(err)
	}
	if r.Carried == nil || r.Carried.Revocations != 2 || r.Carried.Invites != 1 || !slices.Equal(r.Carried.NodesRemoved, []string{node.NodeID}) || r.Unknown != "" || !r.LostEvents {
		t.Errorf("got %+v, carried %+v", r, r.Carried)
	}
	if _, err := os.Lstat(filepath.Join(r.Aside, auth.DatabaseFile)); err != nil {
		t.Error("the old state was deleted:", err)
	}
	s = openRelay(t, dir)
	if s.accepted(token) || s.accepted(node) || !s.accepted(kept) || !s.accepted(later) || !s.accepted(stays) {
		t.Errorf("token %v, node %v, kept %v, later %v, stays %v", s.accepted(token), s.accepted(node), s.accepted(kept), s.accepted(later), s.accepted(stays))
	}
	if _, ok := s.store.NodeTenant(node.NodeID); ok {
		t.Error("the removed node is back")
	}
	for _, id := range []string{stays.NodeID, later.NodeID} {
		if _, ok := s.store.NodeTenant(id); !ok {
			t.Errorf("node %s is gone", id)
		}
	}
	if list, err := s.store.Invites(ctx, ""); err != nil || len(list) != 1 || list[0].State != "revoked" {
		t.Errorf("invites %+v, %v", list, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "audit.jsonl")); err != nil {
		t.Error("the audit log was moved away:", err)
	}

	// Boards know the relay by its authority, which the backup does not have.
	if a, err := s.store.Authority(auth.AuthorityOptions{Names: func() []string { return []string{"localhost"} }}); err != nil || a.SHA256() != made.SHA256() {
		t.Errorf("the authority is another one, %v", err)
	}

	// An older copy of the database is another one from now on.
	s.stop()
	if err := os.Rename(filepath.Join(r.Aside, auth.DatabaseFile), filepath.Join(dir, auth.DatabaseFile)); err != nil {
		t.Fatal(err)
	}
	var bad *auth.StateError
	if _, err := auth.Open(auth.Options{StateDir: dir}); !errors.As(err, &bad) || bad.Problem != auth.StoreForeign {
		t.Errorf("got %v", err)
	}
}

// Keys that were dropped after the backup stay dropped, and the key that signs since goes on.
func TestRestoreCarriesKeysOver(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	old := s.mint(auth.MintRequest{Class: "agent"})
	before := s.backup(backups)
	if _, err := s.store.RotateKeys(t.Context(), auth.RotateRequest{DropOld: true}); err != nil {
		t.Fatal(err)
	}
	fresh := s.mint(auth.MintRequest{Class: "agent"})
	s.stop()
	r, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: before.Path})
	if err != nil || len(r.Carried.KeysDropped) != 1 {
		t.Fatalf("got %+v, %v", r, err)
	}
	s = openRelay(t, dir)
	if s.accepted(old) || !s.accepted(fresh) {
		t.Errorf("old %v, fresh %v", s.accepted(old), s.accepted(fresh))
	}
	if keys, err := s.store.Keys(t.Context()); err != nil || len(keys) != 1 || keys[0].State != auth.KeySigns {
		t.Errorf("got %+v, %v", keys, err)
	}
}

// Where the old state does not show what was revoked, a restore goes on only if that is accepted.
func TestRestoreAsksWhenRevocationsAreUnknown(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(dir string) error{
		"new machine": os.RemoveAll,
		"lost":        func(dir string) error { return os.Remove(filepath.Join(dir, auth.DatabaseFile)) },
		"empty":       func(dir string) error { return os.Truncate(filepath.Join(dir, auth.DatabaseFile), 0) },
		"damaged": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, auth.DatabaseFile), []byte(strings.Repeat("no database ", 4096)), 0o600)
		},
	} {
		s, dir, backups := newState(t)
		m := s.mint(auth.MintRequest{Class: "agent"})
		before := s.backup(backups)
		if _, err := s.store.Revoke(t.Context(), auth.RevokeRequest{JTI: m.JTI}); err != nil {
			t.Fatal(err)
		}
		s.stop()
		if err := spoil(dir); err != nil {
			t.Fatal(err)
		}
		was := ""
		if name != "new machine" {
			was = tree(t, dir)
		}
		var unknown *UnknownError
		if _, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: before.Path}); !errors.As(err, &unknown) {
			t.Fatalf("%s: got %v", name, err)
		}
		if is := tree(t, dir); is != was {
			t.Errorf("%s: the state has changed: %s, was %s", name, is, was)
		}
		r, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: before.Path, AcceptUnknown: true})
		if err != nil || r.Unknown == "" {
			t.Fatalf("%s: %+v, %v", name, r, err)
		}
		s = openRelay(t, dir)
		if !s.accepted(m) {
			t.Errorf("%s: the backup has no such token", name)
		}
		s.stop()
	}
}

// Nothing was revoked after the backup: relay.json shows it, and nobody is asked.
func TestRestoreOfLostDatabaseWithoutRevocations(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	before := s.backup(backups)
	s.stop()
	if err := os.Remove(filepath.Join(dir, auth.DatabaseFile)); err != nil {
		t.Fatal(err)
	}
	if r, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: before.Path}); err != nil || r.Unknown != "" {
		t.Errorf("got %+v, %v", r, err)
	}
	openRelay(t, dir)
}

// A damaged backup is refused, and changes nothing.
func TestRestoreRefusesDamagedBackups(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	good := s.backup(backups).Path
	s.stop()
	was := tree(t, dir)
	list, err := os.ReadDir(filepath.Join(good, auth.KeysDir))
	if err != nil {
		t.Fatal(err)
	}
	names := []string{auth.DatabaseFile, eventlog.FileName, auth.RelayFile, "audit.jsonl", filepath.Join(auth.KeysDir, list[0].Name())}
	tests := map[string]func(b string) error{
		"no manifest":      func(b string) error { return os.Remove(filepath.Join(b, manifestFile)) },
		"half a manifest":  func(b string) error { return os.Truncate(filepath.Join(b, manifestFile), 100) },
		"another epoch":    func(b string) error { return edit(filepath.Join(b, manifestFile), `"epoch": `, `"epoch": 9`) },
		"a newer format":   func(b string) error { return edit(filepath.Join(b, manifestFile), `"format": 1`, `"format": 2`) },
		"a file elsewhere": func(b string) error { return edit(filepath.Join(b, manifestFile), `"audit.jsonl"`, `"../audit.jsonl"`) },
		"a file twice":     func(b string) error { return edit(filepath.Join(b, manifestFile), `"audit.jsonl"`, `"relay.db"`) },
		"an unknown member": func(b string) error {
			return edit(filepath.Join(b, manifestFile), `"format": 1`, `"format": 1, "x": 1`)
		},
	}
	for _, name := range names {
		tests["without "+name] = func(b string) error { return os.Remove(filepath.Join(b, name)) }
		tests["a bit of "+name] = func(b string) error {
			path := filepath.Join(b, name)
			data, err := os.ReadFile(path)
			if err == nil {
				data[len(data)/2] ^= 1
				err = os.WriteFile(path, data, 0o600)
			}
			return err
		}
		tests["the end of "+name] = func(b string) error {
			info, err := os.Stat(filepath.Join(b, name))
			if err == nil {
				err = os.Truncate(filepath.Join(b, name), info.Size()-1)
			}
			return err
		}
	}
	for name, spoil := range tests {
		b := filepath.Join(t.TempDir(), "backup")
		if err := os.CopyFS(b, os.DirFS(good)); err != nil {
			t.Fatal(err)
		}
		if err := spoil(b); err != nil {
			t.Fatal(name, err)
		}
		var bad *DamagedError
		if _, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: b, AcceptUnknown: true}); !errors.As(err, &bad) {
			t.Errorf("%s: got %v", name, err)
		}
		if is := tree(t, dir); is != was {
			t.Fatalf("%s: the state has changed: %s, was %s", name, is, was)
		}
	}
	if _, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: backups}); err == nil || !strings.Contains(err.Error(), good) {
		t.Errorf("a directory of backups: got %v", err)
	}
}

func edit(path, old, text string) error {
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(strings.Replace(string(b), old, text, 1)), 0o600)
	}
	return err
}

// A state directory in use, and one of another relay, are refused.
func TestRestoreRefusesAnotherPlace(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	b := s.backup(backups)
	if _, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: b.Path}); !errors.Is(err, auth.ErrInUse) {
		t.Errorf("in use: got %v", err)
	}
	s.stop()
	other, otherDir, _ := newState(t)
	other.stop()
	o := RestoreOptions{StateDir: otherDir, Backup: b.Path, AcceptUnknown: true}
	var wrong *OtherRelayError
	if _, err := Restore(t.Context(), o); !errors.As(err, &wrong) || wrong.Backup != b.RelayID {
		t.Errorf("another relay's: got %v", err)
	}
	o.OtherRelay = true
	if r, err := Restore(t.Context(), o); err != nil || r.RelayID != b.RelayID {
		t.Errorf("got %+v, %v", r, err)
	}
	if got := openRelay(t, otherDir).store.Audience(); !strings.HasSuffix(got, b.RelayID) {
		t.Errorf("audience %s", got)
	}
}

// Backups go only where nobody else can read them, and not where they are lost with the state.
func TestBackupRefusesOpenDirectories(t *testing.T) {
	t.Parallel()
	s, dir, _ := newState(t)
	for _, mode := range []os.FileMode{0o755, 0o750, 0o701} {
		to := filepath.Join(t.TempDir(), "open")
		os.Mkdir(to, mode)
		os.Chmod(to, mode)
		if _, err := Create(t.Context(), Options{StateDir: dir, Dir: to}); !errors.Is(err, errOpenDir) || !strings.Contains(err.Error(), "chmod 0700") {
			t.Errorf("%v: got %v", mode, err)
		}
		if list, _ := os.ReadDir(to); len(list) > 0 {
			t.Errorf("%v: something was written", mode)
		}
	}
	for _, to := range []string{dir, filepath.Join(dir, "backups")} {
		if _, err := Create(t.Context(), Options{StateDir: dir, Dir: to}); err == nil || !strings.Contains(err.Error(), "in the state directory") {
			t.Errorf("%s: got %v", to, err)
		}
	}
	s.stop()
	if _, err := Create(t.Context(), Options{StateDir: t.TempDir(), Dir: filepath.Join(t.TempDir(), "b")}); !errors.Is(err, auth.ErrNoState) {
		t.Errorf("no relay: got %v", err)
	}
}

// What a killed backup leaves is no backup, and the next one deletes it; one that still runs is
// left alone. A backup that is canceled leaves nothing.
func TestInterruptedBackup(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	good := s.backup(backups)
	killed, running := filepath.Join(backups, namePrefix+"1"+partialSuffix), filepath.Join(backups, namePrefix+"2"+partialSuffix)
	if err := os.CopyFS(killed, os.DirFS(good.Path)); err != nil {
		t.Fatal(err)
	}
	os.Remove(filepath.Join(killed, manifestFile))
	unlock, err := makePartial(running)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	var bad *DamagedError
	if _, err := Verify(t.Context(), killed); !errors.As(err, &bad) {
		t.Errorf("got %v", err)
	}
	s.backup(backups)
	if _, err := os.Lstat(killed); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a killed backup is still there: %v", err)
	}
	if _, err := os.Lstat(running); err != nil {
		t.Error("a backup that runs was deleted")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	was := tree(t, backups)
	if _, err := Create(ctx, Options{StateDir: dir, Dir: backups}); !errors.Is(err, context.Canceled) || tree(t, backups) != was {
		t.Errorf("canceled: got %v", err)
	}
}

// Keep deletes the oldest backups of this relay, and nothing else.
func TestKeep(t *testing.T) {
	t.Parallel()
	s, dir, backups := newState(t)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range 4 {
		if _, err := Create(t.Context(), Options{StateDir: dir, Dir: backups, Keep: 2, Now: func() time.Time { return at.Add(time.Duration(i) * time.Hour) }}); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			os.Mkdir(filepath.Join(backups, namePrefix+"notes"), 0o700)
		}
	}
	var names []string
	list, _ := os.ReadDir(backups)
	for _, e := range list {
		names = append(names, e.Name())
	}
	if want := []string{"agentctl-20260102T050405Z", "agentctl-20260102T060405Z", "agentctl-notes"}; !slices.Equal(names, want) {
		t.Errorf("got %v, want %v", names, want)
	}
	s.stop()
}

// A store that is lost is given up by name, and one that is sound is not.
func TestAcceptLoss(t *testing.T) {
	t.Parallel()
	accept := func(dir, store string) (*Loss, error) { return AcceptLoss(t.Context(), dir, store, time.Now()) }
	for _, store := range []string{auth.DatabaseFile, eventlog.FileName} {
		for name, spoil := range map[string]func(path string) error{
			"lost":  os.Remove,
			"empty": func(path string) error { return os.Truncate(path, 0) },
			"damaged": func(path string) error {
				return os.WriteFile(path, []byte(strings.Repeat("no database ", 4096)), 0o600)
			},
		} {
			s, dir, _ := newState(t)
			m := s.mint(auth.MintRequest{Class: "agent"})
			audience := s.store.Audience()
			s.stop()
			if _, err := accept(dir, store); !errors.Is(err, ErrSound) {
				t.Fatalf("%s is sound: got %v", store, err)
			}
			if err := spoil(filepath.Join(dir, store)); err != nil {
				t.Fatal(err)
			}
			l, err := accept(dir, store)
			if err != nil || len(l.Lost) == 0 {
				t.Fatalf("%s %s: %+v, %v", store, name, l, err)
			}
			if problems := checkRecords(t.Context(), dir); len(problems) > 0 {
				t.Errorf("%s %s: %v", store, name, problems)
			}
			s = openRelay(t, dir)
			if s.accepted(m) == (store == auth.DatabaseFile) || s.store.Audience() != audience {
				t.Errorf("%s %s: the token is accepted: %v, audience %s", store, name, s.accepted(m), s.store.Audience())
			}
			s.stop()
		}
	}
	// A database of an earlier agentctl has no copy of relay.json.
	s, dir, _ := newState(t)
	m := s.mint(auth.MintRequest{Class: "agent"})
	s.stop()
	if _, err := accept(dir, auth.RelayFile); !errors.Is(err, ErrSound) {
		t.Fatalf("got %v", err)
	}
	os.Remove(filepath.Join(dir, auth.RelayFile))
	os.Remove(filepath.Join(dir, auth.KeysDir, auth.RelayFile))
	db, err := sql.Open("sqlite", sqlitefile.DSN(filepath.Join(dir, auth.DatabaseFile), ""))
	if err == nil {
		_, err = db.Exec("DELETE FROM relay")
		err = errors.Join(err, db.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	var bad *auth.StateError
	if _, err := auth.Open(auth.Options{StateDir: dir}); !errors.As(err, &bad) || bad.Store != auth.RelayFile {
		t.Fatalf("got %v", err)
	}
	if _, err := accept(dir, auth.RelayFile); err != nil {
		t.Fatal(err)
	}
	if openRelay(t, dir).accepted(m) {
		t.Error("a token of the lost relay id is accepted")
	}
	if _, err := accept(t.TempDir(), "keys"); err == nil {
		t.Error("an unknown store")
	}
}
