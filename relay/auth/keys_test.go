package auth

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
)

// foreignPEM is the signing key of another relay.
func foreignPEM(t testing.TB) []byte {
	t.Helper()
	other := openStore(t, Options{})
	b, err := os.ReadFile(filepath.Join(other.dir.path, keyFile(other.keyring.Load().signKID)))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func rotate(t testing.TB, s *Store, req RotateRequest) []KeyInfo {
	t.Helper()
	list, err := s.RotateKeys(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// states are the states of the keys, in the order of Keys.
func states(list []KeyInfo) string {
	var words []string
	for _, k := range list {
		words = append(words, k.State)
	}
	return strings.Join(words, " ")
}

func verifies(t testing.TB, s *Store, token string) {
	t.Helper()
	if _, err := s.Verify(token); err != nil {
		t.Errorf("got %v", err)
	}
}

// A key that was replaced verifies until its last token has expired, here and in another
// process, which uses the new key after its next Refresh or when it meets a token of it.
func TestRotateKeys(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	relay := openStore(t, Options{StateDir: s.dir.path, Now: ck.now}) // another process
	before := mint(t, s, MintRequest{Class: "agent", TTL: 10 * day})
	verifies(t, relay, before.Token)
	oldKID := s.keyring.Load().signKID

	if list := rotate(t, s, RotateRequest{DryRun: true}); states(list) != "signs" || s.keyring.Load().signKID != oldKID {
		t.Errorf("after a dry run: %+v", list)
	}
	list := rotate(t, s, RotateRequest{})
	if states(list) != "verifies signs" || list[0].KID != oldKID || !list[0].VerifiesUntil.Equal(testTime.Add(10*day+Leeway)) {
		t.Errorf("got %+v", list)
	}
	after := mint(t, s, MintRequest{Class: "agent", TTL: 100 * day})
	if s.keyring.Load().signKID == oldKID {
		t.Error("the old key signs")
	}
	for _, s := range []*Store{s, relay} {
		verifies(t, s, before.Token)
		verifies(t, s, after.Token)
	}
	// What the other process signs before its Refresh is signed by the new key, too.
	third := openStore(t, Options{StateDir: s.dir.path, Now: ck.now})
	rotate(t, s, RotateRequest{})
	token := mint(t, third, MintRequest{Class: "agent"}).Token
	if third.keyring.Load().signKID != s.keyring.Load().signKID {
		t.Error("a process signed with a key that was replaced")
	}
	if err := relay.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	verifies(t, relay, token)

	// Nothing that it signed is left: it verifies no more, although a forged token claims to live.
	forged := forge(t, s, map[string]any{"exp": ck.t.Unix() + 1000*86400})
	ck.t = testTime.Add(101 * day)
	_, err := relay.Verify(after.Token)
	refused(t, err, after.Token, ErrInvalid, "expired")
	verifies(t, s, forged)
	list, err = s.Keys(t.Context())
	if err != nil || states(list) != "expired expired signs" {
		t.Errorf("%+v, %v", list, err)
	}
	ck.t = ck.t.Add(31 * day)
	if list := rotate(t, s, RotateRequest{}); states(list) != "verifies signs" {
		t.Errorf("long expired keys: %+v", list)
	}
	if files, _ := os.ReadDir(filepath.Join(s.dir.path, keysDir)); len(files) != 2+1 {
		t.Errorf("%d files", len(files))
	}
}

// The keys of MCP sessions are those of the signing keys: they are the same after a restart, verify
// after a rotation, and end with a key that is dropped.
func TestSessionKeys(t *testing.T) {
	s := openStore(t, Options{})
	first := s.SessionKeys()
	if len(first) != 1 || len(first[0]) != 32 || bytes.Contains(s.keyring.Load().signKey, first[0]) {
		t.Fatalf("%d keys", len(first))
	}
	if again := openStore(t, Options{StateDir: s.dir.path}).SessionKeys(); !bytes.Equal(again[0], first[0]) {
		t.Error("another process has other keys")
	}
	if other := openStore(t, Options{}).SessionKeys(); bytes.Equal(other[0], first[0]) {
		t.Error("another relay has the same key")
	}
	for range 3 {
		before := s.SessionKeys()
		rotate(t, s, RotateRequest{})
		after := s.SessionKeys()
		if len(after) != len(before)+1 || bytes.Equal(after[0], before[0]) || !slices.ContainsFunc(after, func(k []byte) bool { return bytes.Equal(k, before[0]) }) {
			t.Errorf("%d keys after a rotation, %d before", len(after), len(before))
		}
	}
	rotate(t, s, RotateRequest{DropOld: true})
	if last := s.SessionKeys(); len(last) != 1 || bytes.Equal(last[0], first[0]) {
		t.Errorf("%d keys after one that drops the old ones", len(last))
	}
}

// Tokens with a kid that does not exist do not delay tokens of a new key, which another process
// made: each is accepted at once, and by all callers that come together.
func TestNewKeyAmongUnknownKIDs(t *testing.T) {
	s := openStore(t, Options{})
	relay := openStore(t, Options{StateDir: s.dir.path})
	for range 5 {
		unknown := s.lookupKey(s.Issuer(), "01unknown")
		if unknown != nil || relay.lookupKey(s.Issuer(), "01unknown") != nil {
			t.Fatal("an unknown kid has a key")
		}
		rotate(t, s, RotateRequest{})
		token := mint(t, s, MintRequest{Class: "agent"}).Token
		var wg sync.WaitGroup
		for i := range 32 {
			wg.Go(func() {
				if i%2 == 0 {
					relay.lookupKey(s.Issuer(), "01unknown")
				}
				verifies(t, relay, token)
			})
		}
		wg.Wait()
	}
}

// A key that leaked is dropped at once: for tokens, for cached identities and for links, in
// every process, whatever the tokens claim.
func TestDropKeys(t *testing.T) {
	s := openStore(t, Options{})
	relay := openStore(t, Options{StateDir: s.dir.path})
	forged := forge(t, s, map[string]any{"exp": time.Now().Unix() + 9*365*86400})
	id, err := relay.Verify(forged)
	if err != nil {
		t.Fatal(err)
	}
	revision := relay.Revision()
	if list := rotate(t, s, RotateRequest{DropOld: true}); states(list) != "signs" {
		t.Errorf("got %+v", list)
	}
	if err := relay.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if relay.Revision() == revision {
		t.Error("nobody is told to look at links and streams")
	}
	refused(t, relay.Active(id), forged, ErrInvalid, "key")
	refused(t, relay.CheckRevoked(id), forged, ErrInvalid, "key")
	for _, s := range []*Store{s, relay} {
		_, err = s.Verify(forged)
		refused(t, err, forged, ErrInvalid, "key")
		verifies(t, s, mint(t, s, MintRequest{Class: "agent"}).Token)
	}
}

// A joined board whose token was signed by a dropped key gets another one by its own key.
func TestDropKeysOfJoinedBoard(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{})
	b := newHolder(t, s, code)
	out := b.mustEnroll()
	rotate(t, s, RotateRequest{DropOld: true})
	_, err := s.Verify(out.Token)
	refused(t, err, out.Token, ErrInvalid, "key")
	out, err = b.refresh(1, manifest.NewULID())
	if err != nil {
		t.Fatal(err)
	}
	verifies(t, s, out.Token)
}

// A PEM file that somebody puts into keys/ does not sign and does not verify, in a relay that
// runs and after a restart, whatever its name.
func TestForeignKeyFile(t *testing.T) {
	s := openStore(t, Options{})
	token := mint(t, s, MintRequest{Class: "agent"}).Token
	other := openStore(t, Options{})
	foreign, err := os.ReadFile(filepath.Join(other.dir.path, keyFile(other.keyring.Load().signKID)))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"zz-next.pem", "00-first.pem", "no key.pem", "README", "broken.pem", other.keyring.Load().signKID + ".pem"} {
		b := foreign
		if name == "broken.pem" {
			b = []byte("nothing")
		}
		if err := os.WriteFile(filepath.Join(s.dir.path, keysDir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	forged := signRaw(goodHeader(other), `{"iss":"`+s.Issuer()+`","aud":"`+s.Audience()+`","sub":"x","tid":"default","cls":"agent_runtime","scope":"kernel:admin",`+
		`"jti":"`+manifest.NewULID()+fmt.Sprintf(`","iat":%d,"nbf":%[1]d,"exp":%d}`, time.Now().Unix(), time.Now().Unix()+3600), other.keyring.Load().signKey)
	fresh := openStore(t, Options{StateDir: s.dir.path})
	for _, s := range []*Store{s, fresh} {
		if err := s.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		verifies(t, s, token)
		verifies(t, s, mint(t, fresh, MintRequest{Class: "agent"}).Token)
		_, err := s.Verify(forged)
		refused(t, err, forged, ErrInvalid, "key")
		list, err := s.Keys(t.Context())
		if err != nil || states(list) != "signs unrecorded unrecorded unrecorded unrecorded" {
			t.Errorf("%+v, %v", list, err)
		}
	}
	rotate(t, fresh, RotateRequest{})
	_, err = fresh.Verify(forged)
	refused(t, err, forged, ErrInvalid, "key")
}

// A state directory of an agentctl that recorded no keys: the greatest kid goes on signing,
// and the others verify.
func TestAdoptKeys(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	token := mint(t, s, MintRequest{Class: "agent"}).Token
	if err := os.WriteFile(filepath.Join(s.dir.path, keysDir, "zz-next.pem"), foreignPEM(t), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.db.writeDB.Exec("DELETE FROM keys"); err != nil {
		t.Fatal(err)
	}
	both := openStore(t, Options{StateDir: s.dir.path, Now: ck.now})
	if both.keyring.Load().signKID != "zz-next" {
		t.Errorf("%s signs", both.keyring.Load().signKID)
	}
	verifies(t, both, token)
	verifies(t, both, mint(t, both, MintRequest{Class: "agent"}).Token)
	list, err := both.Keys(t.Context())
	if err != nil || states(list) != "verifies signs" || !list[0].VerifiesUntil.Equal(testTime.Add(90*day+Leeway)) {
		t.Errorf("%+v, %v", list, err)
	}
}

// Without the file of the signing key a new key is made. The file alone does not bring the old
// one back, because it is recorded as replaced; it verifies again.
func TestMissingKeyFile(t *testing.T) {
	s := openStore(t, Options{})
	token := mint(t, s, MintRequest{Class: "agent"}).Token
	path := filepath.Join(s.dir.path, keyFile(s.keyring.Load().signKID))
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	fresh := openStore(t, Options{StateDir: s.dir.path})
	_, err := fresh.Verify(token)
	refused(t, err, token, ErrInvalid, "key")
	verifies(t, fresh, mint(t, fresh, MintRequest{Class: "agent"}).Token)
	if list, err := fresh.Keys(t.Context()); err != nil || states(list) != "missing signs" {
		t.Errorf("%+v, %v", list, err)
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	restored := openStore(t, Options{StateDir: s.dir.path})
	verifies(t, restored, token)
	if list, err := restored.Keys(t.Context()); err != nil || states(list) != "verifies signs" {
		t.Errorf("%+v, %v", list, err)
	}
}

func TestTooManyKeys(t *testing.T) {
	s := openStore(t, Options{})
	for range maxKeys - 1 {
		rotate(t, s, RotateRequest{})
	}
	if _, err := s.RotateKeys(t.Context(), RotateRequest{}); !errors.Is(err, ErrFull) {
		t.Errorf("got %v", err)
	}
	if files, _ := os.ReadDir(filepath.Join(s.dir.path, keysDir)); len(files) != maxKeys+1 { // and the copy of relay.json
		t.Errorf("%d files", len(files))
	}
	if list := rotate(t, s, RotateRequest{DropOld: true}); states(list) != "signs" {
		t.Errorf("got %+v", list)
	}
}

// Each state in which a rotation can be cut short is one that works: a relay that runs and one
// that starts sign with the recorded key, and another rotation completes.
func TestRotationCutShort(t *testing.T) {
	for _, tt := range []struct {
		point string
		cut   func(t *testing.T, s *Store)
		want  string // states at the start
		drops bool   // the old key is gone
	}{
		{"nothing happened", func(*testing.T, *Store) {}, "signs", false},
		{"while the new file was written", func(t *testing.T, s *Store) {
			if err := os.WriteFile(filepath.Join(s.dir.path, keysDir, "01x.pem.new"), []byte("-----BEGIN PRIV"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "signs", false},
		{"before the new key was recorded", func(t *testing.T, s *Store) {
			if _, _, err := makeKey(s.dir); err != nil {
				t.Fatal(err)
			}
		}, "signs unrecorded", false},
		{"before this process used the new key", func(t *testing.T, s *Store) { rotateInDatabase(t, s, false) }, "verifies signs", false},
		{"before the files of dropped keys were deleted", func(t *testing.T, s *Store) { rotateInDatabase(t, s, true) }, "signs unrecorded", true},
	} {
		t.Run(tt.point, func(t *testing.T) {
			running := openStore(t, Options{})
			old := mint(t, running, MintRequest{Class: "agent"}).Token
			tt.cut(t, running)
			started := openStore(t, Options{StateDir: running.dir.path})
			if err := running.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			if list, err := started.Keys(t.Context()); err != nil || states(list) != tt.want {
				t.Errorf("%s, %v", states(list), err)
			}
			a, b := mint(t, running, MintRequest{Class: "agent"}).Token, mint(t, started, MintRequest{Class: "agent"}).Token
			for _, s := range []*Store{running, started} {
				verifies(t, s, a)
				verifies(t, s, b)
				if tt.drops {
					_, err := s.Verify(old)
					refused(t, err, old, ErrInvalid, "key")
				} else {
					verifies(t, s, old)
				}
			}
			rotate(t, started, RotateRequest{})
			if err := running.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, s := range []*Store{running, started} {
				verifies(t, s, a)
				verifies(t, s, mint(t, s, MintRequest{Class: "agent"}).Token)
			}
		})
	}
}

// rotateInDatabase is RotateKeys as far as its transaction.
func rotateInDatabase(t *testing.T, s *Store, dropOld bool) {
	t.Helper()
	tx, err := s.db.writeDB.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err = deleteKeyRows(tx, dropOld, s.now()); err != nil {
		t.Fatal(err)
	}
	kid, public, err := makeKey(s.dir)
	if err == nil {
		err = replaceSigningKey(tx, kid, public, s.now())
	}
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A process that rotates keys is killed at any moment. Each time the directory opens, and tokens of both
// processes verify.
func TestRotationKilled(t *testing.T) {
	t.Parallel()
	s := openStore(t, Options{})
	token := mint(t, s, MintRequest{Class: "agent"}).Token
	for i := range 6 {
		killedJob(t, "rotate", s.dir.path, time.Duration(i*7%40)*time.Millisecond)
		if err := s.Refresh(t.Context()); err != nil {
			t.Fatalf("killed %d times: %v", i+1, err)
		}
		fresh := openStore(t, Options{StateDir: s.dir.path})
		verifies(t, s, mint(t, fresh, MintRequest{Class: "agent"}).Token)
		verifies(t, fresh, mint(t, s, MintRequest{Class: "agent"}).Token)
	}
	rotate(t, s, RotateRequest{DropOld: true})
	_, err := s.Verify(token)
	refused(t, err, token, ErrInvalid, "key")
}
