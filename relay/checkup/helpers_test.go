package checkup

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile/sqlitefiletest"
)

func TestMain(m *testing.M) { sqlitefiletest.Main(m) }

// slow reports whether AGENTCTL_SLOW=1 asks for the tests in full.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// soundFiles are the files of a sound state directory, by name. The first test that needs them makes
// them.
var soundFiles map[string][]byte

// newStateDir returns a new copy of the state directory of a relay that was stopped, with tokens,
// revocations, an authority, events of both classes and an audit log.
func newStateDir(t testing.TB) string {
	t.Helper()
	if soundFiles == nil {
		soundFiles = readFiles(t, runRelay(t))
	}
	dir := filepath.Join(t.TempDir(), "state")
	for _, name := range slices.Sorted(maps.Keys(soundFiles)) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, soundFiles[name])
	}
	return dir
}

// runRelay does what a relay does in its state directory, and returns the directory.
func runRelay(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	store, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	issueTokens(t, store)
	if _, err := store.Authority(auth.AuthorityOptions{Names: func() []string { return []string{"relay.example"} }}); err != nil {
		t.Fatal(err)
	}
	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName)})
	if err != nil {
		t.Fatal(err)
	}
	appendEvents(t, log)
	if err := store.FollowEventLog(func() auth.EventLogRecord { return auth.EventLogRecord{ID: log.ID(), LastSeq: log.Last()} }); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(store.Close(), log.Close()); err != nil {
		t.Fatal(err)
	}
	var audit strings.Builder
	for i := range 100 {
		fmt.Fprintf(&audit, `{"ts":"2026-11-20T00:00:%02d.000Z","tenant":"default","actor":"ci-%d","tool":"sys.read","decision":"allowed"}`+"\n", i%60, i)
	}
	writeFile(t, filepath.Join(dir, "audit.jsonl"), []byte(audit.String()))
	return dir
}

// issueTokens mints 40 tokens in three tenants, and revokes every fourth.
func issueTokens(t testing.TB, store *auth.Store) {
	t.Helper()
	for i := range 40 {
		tokens, err := store.Mint(t.Context(), auth.MintRequest{Class: "agent", Tenant: fmt.Sprintf("tenant-%d", i%3), Subject: fmt.Sprintf("agent-%d", i)})
		if err == nil && i%4 == 0 {
			_, err = store.Revoke(t.Context(), auth.RevokeRequest{JTI: tokens[0].JTI})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// appendEvents appends 150 events in three tenants, every third of them about a call.
func appendEvents(t testing.TB, log *eventlog.Store) {
	t.Helper()
	var events []eventlog.Event
	for i := range 150 {
		e := eventlog.Event{Tenant: fmt.Sprintf("tenant-%d", i%3), Type: "ticket.created", Aggregate: fmt.Sprint(i),
			Payload: json.RawMessage(fmt.Sprintf(`{"n":%d,"text":"%s"}`, i, strings.Repeat("x", i*37%500)))}
		if i%3 == 0 {
			e.Type, e.Payload = "call", json.RawMessage(fmt.Sprintf(`{"tool":"sys.read","actor":"ci-%d","trace_id":"%032x"}`, i%5, i))
		}
		events = append(events, e)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- log.Run(ctx) }()
	<-log.Started()
	_, err := log.Append(ctx, events...)
	stop()
	<-ended
	if err != nil {
		t.Fatal(err)
	}
}

// run is Run, which must succeed.
func run(t testing.TB, dir string) *Report {
	t.Helper()
	r, err := Run(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// readFiles returns the content of every file below a directory, by relative name.
func readFiles(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files[name], err = os.ReadFile(filepath.Join(dir, name))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// describeFiles says name, mode, time and content of every file and directory below a directory.
func describeFiles(t testing.TB, dir string) (s string) {
	t.Helper()
	files := readFiles(t, dir)
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		s += fmt.Sprintf("%s %s %d %x\n", name, info.Mode(), info.ModTime().UnixNano(), sha256.Sum256(files[name]))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFile(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}
