package auth

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// closedState makes a state directory with a token, a revoked token and a recorded event log,
// and closes it. spoiled opens it again and returns the error.
func closedState(t *testing.T) (dir string, good, revoked Minted) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "state")
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	good, revoked = mint(t, s, MintRequest{Class: "agent"}), mint(t, s, MintRequest{Class: "agent"})
	if err := s.FollowEventLog(func() EventLogRecord { return EventLogRecord{"log", 1 << 50} }); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: revoked.JTI}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, good, revoked
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A database that was lost, emptied, exchanged or put back from before a revocation is refused,
// by the relay and by the commands, and nothing is made in its place.
func TestOpenRefusesAnotherDatabase(t *testing.T) {
	t.Parallel()
	other, _, _ := closedState(t)
	for _, tt := range []struct {
		name, problem string
		spoil         func(t *testing.T, dir string)
	}{
		{"missing", StoreMissing, func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, dbFile)) }},
		{"empty", StoreEmpty, func(t *testing.T, dir string) { os.Truncate(filepath.Join(dir, dbFile), 0) }},
		{"missing with relay.json", StoreMissing, func(t *testing.T, dir string) {
			os.Remove(filepath.Join(dir, dbFile))
			os.Remove(filepath.Join(dir, relayFile))
		}},
		{"missing beside the authority", StoreMissing, func(t *testing.T, dir string) {
			for _, name := range []string{dbFile, relayFile} {
				os.Remove(filepath.Join(dir, name))
			}
			os.RemoveAll(filepath.Join(dir, keysDir))
			os.WriteFile(filepath.Join(dir, authorityFile), []byte("x"), 0o600)
		}},
		{"missing, of an agentctl without records", StoreMissing, func(t *testing.T, dir string) {
			os.Remove(filepath.Join(dir, dbFile))
			os.WriteFile(filepath.Join(dir, relayFile), []byte(`{"relay_id":"01HZX9K3M4P7Q8R9S0T1V2W3XY","audience":"a","issuer":"a","created":"2026-01-01T00:00:00Z"}`), 0o600)
		}},
		{"of another relay", StoreForeign, func(t *testing.T, dir string) { copyFile(t, filepath.Join(other, dbFile), filepath.Join(dir, dbFile)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, _, _ := closedState(t)
			tt.spoil(t, dir)
			for _, existing := range []bool{true, false} {
				s, err := Open(Options{StateDir: dir, Existing: existing})
				var bad *StateError
				if err == nil {
					s.Close()
				}
				if !errors.As(err, &bad) || bad.Store != dbFile || bad.Problem != tt.problem || !strings.Contains(err.Error(), "revoked token would work again") {
					t.Fatalf("got %v, want %s", err, tt.problem)
				}
			}
			if _, err := os.Lstat(filepath.Join(dir, dbFile)); tt.problem == StoreMissing && err == nil {
				t.Error("a database was made")
			}
		})
	}
}

// A copy of the database from before a revocation, a rotation, or the use of an invite.
func TestOpenRefusesAnOlderDatabase(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(s *Store) error{
		"revocation": func(s *Store) error {
			_, err := s.Revoke(t.Context(), RevokeRequest{Tenant: "acme"})
			return err
		},
		"rotation": func(s *Store) error {
			_, err := s.RotateKeys(t.Context(), RotateRequest{DropOld: true})
			return err
		},
		"invite": func(s *Store) error {
			inv, _, err := s.CreateInvite(t.Context(), InviteRequest{})
			if err == nil {
				_, err = s.RevokeInvite(t.Context(), "", inv.Prefix, false)
			}
			return err
		},
	} {
		dir, _, _ := closedState(t)
		old := filepath.Join(t.TempDir(), dbFile)
		copyFile(t, filepath.Join(dir, dbFile), old)
		s, err := Open(Options{StateDir: dir})
		if err == nil {
			err = change(s)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		copyFile(t, old, filepath.Join(dir, dbFile))
		var bad *StateError
		if _, err := Open(Options{StateDir: dir}); !errors.As(err, &bad) || bad.Problem != StoreOlder {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// A revocation is noted in relay.json before it is answered: kill -9 right after it does not let
// an older database pass.
func TestRevocationIsRecordedAtOnce(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent"})
	before, err := readRelayInfo(s.dir, relayFile)
	if err == nil {
		_, err = s.Revoke(t.Context(), RevokeRequest{JTI: m.JTI})
	}
	if err != nil {
		t.Fatal(err)
	}
	after, err := readRelayInfo(s.dir, relayFile)
	if err != nil || after.Stores.RelayDB.Epoch <= before.Stores.RelayDB.Epoch {
		t.Errorf("epoch %d, before %d, %v", after.Stores.RelayDB.Epoch, before.Stores.RelayDB.Epoch, err)
	}
}

// relay.json is made anew from relay.db: tokens hold, the revoked one does not, and the event log
// is still known.
func TestRelayFileIsRepaired(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string) error{
		"missing": os.Remove,
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"cut off": func(path string) error { return os.Truncate(path, 30) },
	} {
		dir, good, revoked := closedState(t)
		path := filepath.Join(dir, relayFile)
		want, _ := os.ReadFile(path)
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		s := openStore(t, Options{StateDir: dir, Existing: true})
		if _, err := s.Verify(good.Token); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_, err := s.Verify(revoked.Token)
		refused(t, err, revoked.Token, ErrRevoked, "revoked")
		if got, err := os.ReadFile(path); err != nil || string(got) != string(want) {
			t.Errorf("%s: got %s, want %s, %v", name, got, want, err)
		}
		if s.EventLog() != (EventLogRecord{"log", 1 << 50}) {
			t.Errorf("%s: event log %+v", name, s.EventLog())
		}
	}
}

// What a first start leaves when it is cut short after any of its steps is no damage.
func TestHalfMadeStateDir(t *testing.T) {
	t.Parallel()
	steps := []struct {
		name string
		undo func(t *testing.T, dir string, s *Store)
	}{
		{"nothing", func(t *testing.T, dir string, _ *Store) { os.RemoveAll(dir) }},
		{"an empty directory", func(t *testing.T, dir string, _ *Store) { os.RemoveAll(dir); os.Mkdir(dir, 0o700) }},
		{"the lock", func(t *testing.T, dir string, _ *Store) { onlyFiles(t, dir, lockFile) }},
		{"an empty database", func(t *testing.T, dir string, _ *Store) {
			onlyFiles(t, dir, lockFile, dbFile)
			os.Truncate(filepath.Join(dir, dbFile), 0)
		}},
		{"the tables", func(t *testing.T, dir string, s *Store) {
			onlyFiles(t, dir, lockFile, dbFile)
		}},
		{"the tables and a key", func(t *testing.T, dir string, s *Store) { onlyFiles(t, dir, lockFile, dbFile, keysDir) }},
		{"half a relay.json", func(t *testing.T, dir string, s *Store) {
			os.Rename(filepath.Join(dir, relayFile), filepath.Join(dir, relayFile+".new"))
			os.Truncate(filepath.Join(dir, relayFile+".new"), 10)
		}},
	}
	for _, tt := range steps {
		dir := filepath.Join(t.TempDir(), "state")
		s, err := Open(Options{StateDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(tt.name, "the tables") { // the first key is recorded in a separate transaction
			if _, err := s.db.writeDB.Exec("DELETE FROM keys"); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.closeFiles(); err != nil {
			t.Fatal(err)
		}
		tt.undo(t, dir, s)
		s = openStore(t, Options{StateDir: dir})
		m := mint(t, s, MintRequest{Class: "agent"})
		if _, err := s.Verify(m.Token); err != nil {
			t.Errorf("after %s: %v", tt.name, err)
		}
		if kids, _ := listKIDs(s.dir); len(kids) != 1 {
			t.Errorf("after %s: %d keys", tt.name, len(kids))
		}
	}
}

// onlyFiles removes everything else from a directory.
func onlyFiles(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.Contains(" "+strings.Join(names, " ")+" ", " "+e.Name()+" ") {
			os.RemoveAll(filepath.Join(dir, e.Name()))
		}
	}
}

// StartOver makes the database anew for the same relay, with a new key and an epoch above the
// old one, and not while the old keys are there.
func TestStartOver(t *testing.T) {
	t.Parallel()
	dir, good, _ := closedState(t)
	os.Remove(filepath.Join(dir, dbFile))
	if s, err := Open(Options{StateDir: dir, StartOver: true}); err == nil {
		s.Close()
		t.Fatal("the keys of the lost database were adopted")
	}
	os.Remove(filepath.Join(dir, dbFile))
	if err := os.Rename(filepath.Join(dir, keysDir), filepath.Join(dir, "aside")); err != nil {
		t.Fatal(err)
	}
	before := relayInfo{}
	if d, err := openStateDir(dir); err == nil {
		before, _ = readRelayInfo(d, relayFile)
		d.close()
	}
	s := openStore(t, Options{StateDir: dir, StartOver: true})
	_, err := s.Verify(good.Token)
	refused(t, err, good.Token, ErrInvalid, "key")
	if s.relay.RelayID != before.RelayID || s.relay.Audience != before.Audience || s.EventLog() != before.Stores.EventsDB {
		t.Errorf("got %+v, before %+v", s.relay, before)
	}
	after, err := readRelayInfo(s.dir, relayFile)
	if err != nil || after.Stores.RelayDB.Epoch <= before.Stores.RelayDB.Epoch || after.Stores.RelayDB.ID == before.Stores.RelayDB.ID {
		t.Errorf("got %+v, before %+v, %v", after.Stores, before.Stores, err)
	}
}

// While nothing happens nothing is written, and the record of the event log follows it.
func TestRecordIsWrittenSeldom(t *testing.T) {
	t.Parallel()
	s := openStore(t, Options{})
	seq := uint64(7)
	if err := s.FollowEventLog(func() EventLogRecord { return EventLogRecord{"log", seq} }); err != nil {
		t.Fatal(err)
	}
	stat := func() time.Time {
		info, err := os.Stat(filepath.Join(s.dir.path, relayFile))
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime()
	}
	was := stat()
	mint(t, s, MintRequest{Class: "device", Count: 3})
	if err := s.saveRecord(t.Context()); err != nil || stat() != was {
		t.Errorf("relay.json was written without a change, %v", err)
	}
	seq = 9
	if err := s.saveRecord(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info, err := readRelayInfo(s.dir, relayFile); err != nil || info.Stores.EventsDB != (EventLogRecord{"log", 9}) {
		t.Errorf("got %+v, %v", info, err)
	}
	if err := s.ForgetEventLog(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info, err := readRelayInfo(s.dir, relayFile); err != nil || info.Stores.EventsDB != (EventLogRecord{}) {
		t.Errorf("got %+v, %v", info, err)
	}
}

// Processes that revoke are killed at any moment: each start comes up, and every revocation that
// was answered is there.
func TestKilledWhileRevoking(t *testing.T) {
	t.Parallel()
	kills := 6
	if n, err := strconv.Atoi(os.Getenv("AGENTCTL_SEEDS")); err == nil {
		kills = max(kills, 5*n)
	}
	dir := filepath.Join(t.TempDir(), "state")
	var answered []string
	for i := range kills {
		answered = append(answered, strings.Fields(killedJob(t, "revoke-many", dir, time.Duration(i*7%40)*time.Millisecond))...)
		s, err := Open(Options{StateDir: dir})
		if err != nil {
			t.Fatalf("after kill %d: %v", i, err)
		}
		if i == kills-1 {
			for _, jti := range answered {
				if _, ok := s.deny.Load().jti[jti]; !ok {
					t.Errorf("the revocation of %s is lost", jti)
				}
			}
		}
		s.Close()
	}
}

// A revocation holds although relay.json cannot be written, and the next write catches up. The
// relay and the commands start with a relay.json that is behind.
func TestRevocationWithoutRecord(t *testing.T) {
	t.Parallel()
	dir, good, _ := closedState(t)
	obstacle := filepath.Join(dir, relayFile+".new", "x") // replace cannot remove it
	if err := os.MkdirAll(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, Options{StateDir: dir})
	before, err := readRelayInfo(s.dir, relayFile)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: good.JTI}); err != nil {
		t.Fatal(err)
	}
	_, err = s.Verify(good.Token)
	refused(t, err, good.Token, ErrRevoked, "revoked")
	if after, err := readRelayInfo(s.dir, relayFile); err != nil || after != before {
		t.Fatalf("the obstacle is none: %+v, %v", after, err)
	}
	other, err := Open(Options{StateDir: dir, Existing: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(obstacle)); err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if after, err := readRelayInfo(s.dir, relayFile); err != nil || after.Stores.RelayDB.Epoch <= before.Stores.RelayDB.Epoch {
		t.Errorf("got %+v, %v", after, err)
	}
}

// relay.json and relay.db put back together, or relay.db while relay.json is lost, are noticed by the
// copy of relay.json beside the keys. One of three that is another relay's is outvoted.
func TestCopyOfRelayFile(t *testing.T) {
	t.Parallel()
	other, _, _ := closedState(t)
	for _, tt := range []struct {
		name, store, problem string // store "": it opens
		spoil                func(dir, old string)
	}{
		{"both older", dbFile, StoreOlder, func(dir, old string) {
			copyFile(t, filepath.Join(old, dbFile), filepath.Join(dir, dbFile))
			copyFile(t, filepath.Join(old, relayFile), filepath.Join(dir, relayFile))
		}},
		{"older, and relay.json lost", dbFile, StoreOlder, func(dir, old string) {
			copyFile(t, filepath.Join(old, dbFile), filepath.Join(dir, dbFile))
			os.Remove(filepath.Join(dir, relayFile))
		}},
		{"of another relay, and relay.json cut off", dbFile, StoreForeign, func(dir, _ string) {
			copyFile(t, filepath.Join(other, dbFile), filepath.Join(dir, dbFile))
			os.Truncate(filepath.Join(dir, relayFile), 9)
		}},
		{"relay.json of another relay", relayFile, StoreForeign, func(dir, _ string) {
			copyFile(t, filepath.Join(other, relayFile), filepath.Join(dir, relayFile))
		}},
		{"an older copy", "", "", func(dir, old string) {
			copyFile(t, filepath.Join(old, recordCopy), filepath.Join(dir, recordCopy))
		}},
		{"the copy of another relay", "", "", func(dir, _ string) {
			copyFile(t, filepath.Join(other, recordCopy), filepath.Join(dir, recordCopy))
		}},
		{"a damaged copy", "", "", func(dir, _ string) { os.Truncate(filepath.Join(dir, recordCopy), 9) }},
		{"no copy", "", "", func(dir, _ string) { os.Remove(filepath.Join(dir, recordCopy)) }},
		{"relay.json lost", "", "", func(dir, _ string) { os.Remove(filepath.Join(dir, relayFile)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, _, _ := closedState(t)
			old := t.TempDir()
			if err := os.CopyFS(old, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			s, err := Open(Options{StateDir: dir})
			if err == nil {
				_, err = s.Revoke(t.Context(), RevokeRequest{Tenant: "acme"})
			}
			if err != nil {
				t.Fatal(err)
			}
			s.Close()
			tt.spoil(dir, old)
			s, err = Open(Options{StateDir: dir})
			if err == nil {
				defer s.Close()
			}
			var bad *StateError
			switch {
			case tt.store == "" && err != nil:
				t.Fatal(err)
			case tt.store == "":
				file, fileErr := readRelayInfo(s.dir, relayFile)
				kept, err := readRelayInfo(s.dir, recordCopy)
				if file.Stores.EventsDB = kept.Stores.EventsDB; fileErr != nil || err != nil || file != kept {
					t.Errorf("relay.json %+v, %v; its copy %+v, %v", file, fileErr, kept, err)
				}
			case !errors.As(err, &bad) || bad.Store != tt.store || bad.Problem != tt.problem:
				t.Errorf("got %v, want %s %s", err, tt.store, tt.problem)
			}
		})
	}
}

// The log of a relay that was killed, beside the database of another: nothing is written into it.
func TestOpenRefusesLogOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	other, _, _ := closedState(t)
	from, dir := openStore(t, Options{}), filepath.Join(t.TempDir(), "state")
	mint(t, from, MintRequest{Class: "agent"})
	if err := os.CopyFS(dir, os.DirFS(from.dir.path)); err != nil { // as a kill leaves it
		t.Fatal(err)
	}
	right := filepath.Join(t.TempDir(), dbFile)
	copyFile(t, filepath.Join(dir, dbFile), right)
	copyFile(t, filepath.Join(other, dbFile), filepath.Join(dir, dbFile))
	if s, err := Open(Options{StateDir: dir}); err == nil {
		s.Close()
		t.Fatal("opened")
	} else if bad := (*StateError)(nil); !errors.As(err, &bad) || bad.Problem != StoreForeign {
		t.Fatal(err)
	}
	is, err := ReadDatabase(t.Context(), dir)
	if bad := (*StateError)(nil); err != nil || !errors.As(CheckRecord(dir, is), &bad) || bad.Problem != StoreForeign {
		t.Errorf("got %+v, %v", is, err)
	}
	copyFile(t, right, filepath.Join(dir, dbFile))
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal("with the right one back:", err)
	}
	defer s.Close()
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("got %d tokens, %v", len(list), err)
	}
}
